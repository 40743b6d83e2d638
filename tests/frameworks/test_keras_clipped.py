"""`gradclip.integrations.keras.clipped`, on the backend that KERAS_BACKEND names."""

import subprocess
import sys
from math import inf, nan

import keras
import numpy as np
import pytest

import gradclip
from gradclip import (
    Both,
    Bounds,
    Clipper,
    EmaRatio,
    Groups,
    MaxNorm,
    MaxRms,
    Median,
    NonFiniteError,
    Quantile,
    Ratio,
    Skip,
    Unit,
    UnitNorm,
    ZScore,
)
from gradclip.integrations.keras import clipped

# Keras 3.15 reads its variables with an __array__ that knows nothing of NumPy 2's copy=
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
BACKEND = keras.backend.backend()
SGD, Adam, LossScaleOptimizer = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.LossScaleOptimizer
HOW = {"tensorflow": [{}, {"run_eagerly": True}, {"jit_compile": False}], "jax": [{}, {"run_eagerly": True}], "torch": [{}]}
X = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
Y = (100 * X.sum(1, keepdims=True)).astype(np.float32)


def fitted(optimizer, epochs=2, **how):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), keras.layers.Dense(8, activation="tanh", name="first"), keras.layers.Dense(1, name="last")]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse", **how)
    model.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model


def weights(model):
    return np.concatenate([keras.ops.convert_to_numpy(w).ravel() for w in model.weights])


def number(variable):
    return keras.ops.convert_to_numpy(variable)


def tensors(grads):
    return [grad if grad is None or not isinstance(grad, np.ndarray) else keras.ops.convert_to_tensor(grad) for grad in grads]


def eager(optimizer, variables):
    return lambda grads: optimizer.apply(tensors(grads), variables)


def graph(optimizer, variables, jit_compile=False):
    import tensorflow as tf

    optimizer.build(variables)
    work = tf.function(lambda grads: optimizer.apply(grads, variables), jit_compile=jit_compile)
    return lambda grads: work(tensors(grads))


def xla(optimizer, variables):
    return graph(optimizer, variables, jit_compile=True)


def stateless(optimizer, variables):
    import jax

    optimizer.build(variables)
    work = jax.jit(optimizer.stateless_apply)

    def step(grads):
        now = [[v.value for v in each] for each in (optimizer.variables, variables)]
        trained, own = work(now[0], tensors(grads), now[1])
        for variable, value in [*zip(variables, trained, strict=True), *zip(optimizer.variables, own, strict=True)]:
            variable.assign(value)

    return step


MODES = {"tensorflow": [eager, graph, xla], "jax": [eager, stateless], "torch": [eager]}[BACKEND]
SHAPES = ((3, 4), (5,), ())
NAMES = ("a", "b", "c")


def variables():
    return [keras.Variable(np.zeros(shape, np.float32), name=name) for name, shape in zip(NAMES, SHAPES, strict=True)]


def flow(scales=(1, 1.2, 0.8, 1, 30, 1.1, 0, 0.9, 20, 22, 25, 24, 1.0)):
    random = np.random.default_rng(1)
    for scale in scales:
        yield [np.asarray(scale * random.standard_normal(shape), np.float32) for shape in SHAPES]


RULES = {
    "max_norm": (MaxNorm(1.0), None),
    "tensor": (MaxNorm(1.0), "tensor"),
    "element": (MaxNorm(0.5), "element"),
    "bounds": (Bounds(-0.1, 0.5), None),
    "unit_norm": (UnitNorm(2.0), None),
    "max_rms": (MaxRms(0.3), None),
    "both": (Both(MaxNorm(0.9), MaxRms(0.3)), "tensor"),
    "like": (MaxNorm(0.7, like="keras"), None),
    "groups": (Groups({"a": Median(window=6, warmup=2), "b*": None, "*": ZScore(warmup=3)}), None),
    "schedule": (MaxNorm(lambda step: 1.0 / (step + 1.0)), None),
    "median": (Median(window=6, warmup=2), None),
    "medians": (Median(window=6, warmup=2), "tensor"),
    "quantile": (Quantile(0.7, window=6, warmup=2, warmup_norm=3.0), None),
    "z_score": (ZScore(1.5, warmup=3, max_consecutive=3), None),
    "ema_ratio": (EmaRatio(warmup=3, max_consecutive=3), None),
}


@pytest.mark.filterwarnings("ignore:.* took a new level for granted:UserWarning")  # says the one in NumPy, of this flow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_as_in_numpy(mode, name):
    """The same steps, limits and counts as a Clipper in NumPy; what a rule remembers is kept between steps."""
    rule, scope = RULES[name]
    trained = variables()
    optimizer = clipped(SGD(1.0), rule, scope=scope)
    step, clipper = mode(optimizer, trained), Clipper(rule, scope, nonfinite="keep")
    for grads in flow():
        before = [number(v) for v in trained]
        step(grads)
        want = clipper(dict(zip(NAMES, grads, strict=True)))
        for now, old, grad in zip(trained, before, want.grads.values(), strict=True):
            np.testing.assert_allclose(number(now), old - grad, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(number(optimizer.clipper.norm), want.norm, rtol=1e-5)
        np.testing.assert_allclose(number(optimizer.clipper.limit), want.limit, rtol=1e-4)
        if want.coef is None:
            assert optimizer.clipper.coef is None
        else:
            np.testing.assert_allclose(number(optimizer.clipper.coef), want.coef, rtol=1e-4)
    assert optimizer.clipper.counts == clipper.counts


@pytest.mark.parametrize("how", HOW[BACKEND])
@pytest.mark.parametrize(
    ("rule", "scope", "theirs"),
    [
        (MaxNorm(1.0), None, {"global_clipnorm": 1.0}),
        (MaxNorm(1.0), "tensor", {"clipnorm": 1.0}),
        (MaxNorm(0.5), "element", {"clipvalue": 0.5}),
    ],
)
def test_fit_as_with_keras_own_clip(how, rule, scope, theirs):
    optimizer = clipped(Adam(0.01), rule, scope=scope)
    model = fitted(optimizer, **how)
    np.testing.assert_allclose(weights(model), weights(fitted(Adam(0.01, **theirs), **how)), rtol=1e-5, atol=1e-6)
    assert model.optimizer is optimizer
    assert optimizer.clipper.counts == (8, 8, 0, 0)
    assert number(optimizer.clipper.norm).max() > 100


def ready():
    """Every optimizer that Keras has, but those that hand their gradients on to others."""
    apart = (keras.optimizers.Optimizer, LossScaleOptimizer, keras.optimizers.MultiOptimizer)
    named = [getattr(keras.optimizers, name) for name in dir(keras.optimizers)]
    return [kind for kind in named if isinstance(kind, type) and issubclass(kind, apart[0]) and kind not in apart]


@pytest.mark.parametrize("kind", ready(), ids=lambda kind: kind.__name__)
def test_every_optimizer(kind):
    """A limit that clips nothing changes no optimizer, and each takes a clipped step as it takes the same small gradient."""
    assert len(ready()) > 10
    for limit, factor in ((1e6, 1.0), (0.5, None)):
        ours, theirs = ([keras.Variable(np.ones((3, 4), np.float32)), keras.Variable(np.ones(4, np.float32))] for _ in range(2))
        a, b = clipped(kind(0.1), MaxNorm(limit)), kind(0.1)
        for grads in (
            [np.ones((3, 4), np.float32), np.ones(4, np.float32)],
            [np.full((3, 4), 2, np.float32), np.ones(4, np.float32)],
        ):
            a.apply(tensors(grads), ours)
            small = grads if factor else list(gradclip.clip(grads, MaxNorm(limit)).grads)
            b.apply(tensors(small), theirs)
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(number(x), number(y), rtol=1e-5)
        assert a.clipper.counts == (2, 0 if factor else 2, 0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_clips_the_mean_once(mode):
    grads = [np.asarray([3.0, 4.0], np.float32), np.asarray([9.0, 12.0], np.float32)]
    variable = keras.Variable([0.0, 0.0])
    optimizer = clipped(SGD(1.0, gradient_accumulation_steps=2), MaxNorm(1.0))
    step = mode(optimizer, [variable])
    for i in range(4):
        step([grads[i % 2]])
        assert optimizer.clipper.counts.steps == (i + 1) // 2
    np.testing.assert_allclose(number(variable), [-1.2, -1.6], rtol=1e-6)
    assert number(optimizer.clipper.norm) == 10


@pytest.mark.parametrize("how", HOW[BACKEND])
def test_scaled_losses_are_clipped_after_they_are_unscaled(how):
    plain = weights(fitted(clipped(SGD(0.01), MaxNorm(1.0)), **how))
    for optimizer in (
        clipped(SGD(0.01, loss_scale_factor=1024.0), MaxNorm(1.0)),
        LossScaleOptimizer(clipped(SGD(0.01), MaxNorm(1.0)), initial_scale=1024.0),
    ):
        np.testing.assert_allclose(weights(fitted(optimizer, **how)), plain, rtol=1e-5, atol=1e-6)


# LossScaleOptimizer.apply itself leaks tracers in an eager loop under JAX (Keras 3.15), clipped or not
@pytest.mark.parametrize("mode", [stateless] if BACKEND == "jax" else MODES)
@pytest.mark.parametrize("bad", [nan, inf])
def test_an_overflow_reaches_neither_state_nor_counts(mode, bad):
    inner = clipped(SGD(1.0, momentum=0.5), Median(window=5, warmup=1))
    variable = keras.Variable([0.0, 0.0])
    optimizer = LossScaleOptimizer(inner, initial_scale=2.0)
    step = mode(optimizer, [variable])
    for scale in (1, 1, 10):
        step([np.asarray([6.0 * scale, 8.0 * scale], np.float32)])
    assert inner.clipper.counts == (3, 1, 0, 0)
    assert number(inner.clipper.limit) == 10
    before = [number(v).copy() for v in inner.variables]
    step([np.asarray([bad, 8.0], np.float32)])
    for now, old in zip(inner.variables, before, strict=True):
        np.testing.assert_array_equal(number(now), old)
    assert number(optimizer.dynamic_scale) == 1
    step([np.asarray([3.0, 4.0], np.float32)])
    assert inner.clipper.counts == (4, 1, 0, 0)


def test_mixed_precision():
    """Keras wraps the optimizer by itself; the clipper is there to be read all the same."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = clipped(SGD(0.01), MaxNorm(1.0))
        model = fitted(optimizer, epochs=3)
        assert model.optimizer.inner_optimizer is optimizer
        counts = optimizer.clipper.counts
        assert 0 < counts.steps <= 12
        assert counts.clipped == counts.steps
        assert counts.nonfinite == 0
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("mode", MODES)
def test_a_threshold_that_is_a_variable_is_never_stale(mode):
    limit, variable = keras.Variable(1.0, trainable=False), keras.Variable([0.0, 0.0])
    optimizer = clipped(SGD(1.0), Both(MaxNorm(limit), MaxNorm(100.0)))
    step = mode(optimizer, [variable])
    for value in (1.0, 2.0, 0.5, 10.0):
        limit.assign(value)
        variable.assign([0.0, 0.0])
        step([np.asarray([3.0, 4.0], np.float32)])
        np.testing.assert_allclose(number(variable), -np.array([3.0, 4.0]) * min(1.0, value / 5), rtol=1e-6)
        assert number(optimizer.clipper.limit) == value


@pytest.mark.parametrize("how", HOW[BACKEND])
def test_a_threshold_that_changes_between_fits(how):
    limit = keras.Variable(1.0, trainable=False)
    optimizer = clipped(SGD(1e-9), MaxNorm(limit))
    model = fitted(optimizer, epochs=1, **how)
    for value in (0.5, 3.0):
        limit.assign(value)
        model.fit(X, Y, verbose=0)
        assert number(optimizer.clipper.limit) == value
        np.testing.assert_allclose(number(optimizer.clipper.coef) * number(optimizer.clipper.norm), value, rtol=1e-5)


@pytest.mark.parametrize("how", HOW[BACKEND])
def test_a_callback_reads_every_step(how):
    class Norms(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.norms = []

        def on_train_batch_end(self, batch, logs=None):
            self.norms.append(float(number(self.model.optimizer.clipper.norm)))

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(clipped(SGD(0.01), MaxNorm(1.0)), "mse", **how)
    kept = Norms()
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0, callbacks=[kept])
    assert len(set(kept.norms)) == 4
    assert all(np.isfinite(kept.norms))


@pytest.mark.parametrize("mode", MODES)
def test_variables_without_a_gradient_keep_their_place(mode):
    trained = variables()
    optimizer = clipped(SGD(1.0), MaxNorm(1.0), scope="tensor")
    step = mode(optimizer, trained)
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        step([None, np.ones(5, np.float32), np.asarray(4.0, np.float32)])
    assert optimizer.clipper.paths == ["a", "b", "c"]
    np.testing.assert_allclose(number(optimizer.clipper.norm), [0, 5**0.5, 4], rtol=1e-6)
    np.testing.assert_allclose(number(optimizer.clipper.coef), [1, 5**-0.5, 0.25], rtol=1e-6)
    assert not number(trained[0]).any()


def test_names_are_told_apart():
    trained = [keras.Variable(np.zeros(2, np.float32), name="w") for _ in range(3)]
    optimizer = clipped(SGD(1.0), MaxNorm(1.0), scope="tensor")
    optimizer.build(trained)
    assert optimizer.clipper.paths == ["w", "w#2", "w#3"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("scope", "axis"), [(None, -1), ("unit", -1), (Unit(0), 0), ("tensor", None)])
def test_ratio_has_the_outputs_last(mode, scope, axis):
    random = np.random.default_rng(3)
    weight, grad = (random.standard_normal((3, 4)).astype(np.float32) for _ in range(2))
    variable = keras.Variable(weight)
    step = mode(clipped(SGD(1.0), Ratio(0.1), scope=scope), [variable])
    step([grad])
    same = "tensor" if axis is None else Unit(axis)
    want = gradclip.clip([grad], Ratio(0.1), scope=same, weights=[weight]).grads[0]
    np.testing.assert_allclose(number(variable), weight - want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("policy", "want"), [("keep", nan), ("zero", 1.0)])
def test_policies(mode, policy, want):
    variable = keras.Variable([1.0])
    optimizer = clipped(SGD(1.0), MaxNorm(1.0), nonfinite=policy)
    mode(optimizer, [variable])([np.asarray([nan], np.float32)])
    np.testing.assert_array_equal(number(variable), [want])
    assert optimizer.clipper.counts.nonfinite == 1


def test_raise_names_the_variable_and_changes_nothing():
    trained = variables()
    optimizer = clipped(SGD(1.0), MaxNorm(1.0), nonfinite="raise")
    grads = next(flow())
    grads[1][2] = nan
    with pytest.raises(NonFiniteError, match="not finite: b "):
        optimizer.apply(tensors(grads), trained)
    assert not any(number(v).any() for v in trained)
    assert optimizer.clipper.counts == (0, 0, 0, 0)
    assert number(optimizer.iterations) == 0


def test_weight_decay_is_not_clipped_and_what_it_leaves_out_stays_left_out():
    plain = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    plain.exclude_from_weight_decay(var_names=["bias"])
    optimizer = clipped(plain, MaxNorm(1e-9))
    kernel, bias = keras.Variable([1.0], name="kernel"), keras.Variable([1.0], name="bias")
    for _ in range(2):
        optimizer.apply(tensors([np.zeros(1, np.float32)] * 2), [kernel, bias])
    np.testing.assert_allclose(number(kernel), [0.95**2], rtol=1e-6)
    assert number(bias) == 1


def test_an_optimizer_that_has_been_used_goes_on():
    grads = [np.asarray([3.0, 4.0], np.float32)]
    one, other = keras.Variable([0.0, 0.0]), keras.Variable([0.0, 0.0])
    plain, whole = Adam(0.1), clipped(Adam(0.1), MaxNorm(100.0))
    plain.apply(tensors(grads), [one])
    whole.apply(tensors(grads), [other])
    later = clipped(plain, MaxNorm(1.0))
    assert number(later.iterations) == 1
    assert later.clipper.counts.steps == 0
    small = list(gradclip.clip(grads, MaxNorm(1.0)).grads)
    later.apply(tensors(grads), [one])
    whole.apply(tensors(small), [other])
    np.testing.assert_allclose(number(one), number(other), rtol=1e-6)


SAVED = {
    "max_norm": (MaxNorm(1.0), None, 2),
    "infinite": (MaxNorm(inf), None, inf),
    "median": (Median(window=5, warmup=2), "tensor", 2),
    "both": (Both(MaxNorm(1.0, min_norm=0.5), ZScore(warmup=2)), None, 1),
    "groups": (Groups({"*kernel": MaxNorm(0.1), "*": None}), None, 2),
    "units": (Ratio(0.1), Unit(0), 2),
    "published": (EmaRatio.published(warmup=3), None, 2),
    "schedule": (MaxNorm(keras.optimizers.schedules.ExponentialDecay(1.0, 10, 0.9)), None, 2),
    "variable": (MaxNorm(keras.Variable(0.75, trainable=False)), None, 2),
    "array": (MaxNorm(np.array(0.75)), None, 2),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", SAVED)
def test_saved_and_loaded_with_the_model(name, scaled, tmp_path):
    rule, scope, p = SAVED[name]
    optimizer = clipped(Adam(0.01), rule, scope=scope, p=p, nonfinite="zero")
    model = fitted(LossScaleOptimizer(optimizer) if scaled else optimizer)
    model.save(tmp_path / "model.keras")
    other = keras.models.load_model(tmp_path / "model.keras")
    loaded = other.optimizer.inner_optimizer if scaled else other.optimizer
    assert loaded.clipper.counts == optimizer.clipper.counts
    assert (loaded.clipper.scope, loaded.clipper.p, loaded.clipper.nonfinite) == (optimizer.clipper.scope, p, "zero")
    if name not in ("schedule", "variable"):
        assert loaded.clipper.rule == rule
    for ours, theirs in zip(loaded.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(number(ours), number(theirs))
    for each in (model, other):
        each.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_array_equal(weights(model), weights(other))
    np.testing.assert_array_equal(number(loaded.clipper.limit), number(optimizer.clipper.limit))


def test_a_threshold_that_was_changed_is_loaded_as_it_was(tmp_path):
    limit = keras.Variable(1.0, trainable=False)
    model = fitted(clipped(SGD(0.01), MaxNorm(limit)))
    limit.assign(0.25)
    model.save(tmp_path / "model.keras")
    other = keras.models.load_model(tmp_path / "model.keras")
    other.fit(X, Y, verbose=0)
    assert number(other.optimizer.clipper.limit) == 0.25


FRESH = """
import sys, numpy as np, keras, gradclip.integrations.keras
model = keras.models.load_model(sys.argv[1])
print(model.optimizer.clipper.rule, model.optimizer.clipper.counts.steps)
model.fit(np.ones((16, 4)), np.ones((16, 1)), verbose=0)
print(model.optimizer.clipper.counts.steps)
"""


def test_loaded_in_a_fresh_process(tmp_path):
    fitted(clipped(Adam(0.01), Median(window=5, warmup=2))).save(tmp_path / "model.keras")
    command = [sys.executable, "-c", FRESH, str(tmp_path / "model.keras")]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert out == ["Median(k=2.0, window=5, warmup=2, warmup_norm=None) 8", "9"]


class Own(SGD):
    """An optimizer that is not Keras's."""


def test_an_optimizer_of_ones_own_is_saved_with_custom_objects(tmp_path):
    fitted(clipped(Own(0.01), MaxNorm(1.0))).save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Own": Own}).optimizer
    assert isinstance(loaded, Own)
    assert loaded.clipper.rule == MaxNorm(1.0)


def test_what_cannot_be_saved_says_so():
    optimizer = clipped(SGD(), MaxNorm(lambda step: 1.0))
    with pytest.raises(ValueError, match="cannot be saved: take a named function"):
        optimizer.get_config()
    config = clipped(SGD(), MaxNorm(1.0)).get_config()
    config["rule"]["rule"]["name"] = "Unheard"
    with pytest.raises(ValueError, match="Unheard, a rule that is not known here"):
        type(optimizer).from_config(config)


def test_what_is_refused():
    for rule, policy in ((Skip(5.0), "keep"), (MaxNorm(1.0), "skip")):
        with pytest.raises(ValueError, match="cannot leave out a step"):
            clipped(SGD(), rule, nonfinite=policy)
    for name in ("clipnorm", "clipvalue", "global_clipnorm"):
        with pytest.raises(ValueError, match=f"clips already, by {name}=1.0"):
            clipped(SGD(**{name: 1.0}), MaxNorm(1.0))
    with pytest.raises(ValueError, match="clips already: take Both"):
        clipped(clipped(SGD(), MaxNorm(1.0)), MaxNorm(1.0))
    with pytest.raises(ValueError, match=r"LossScaleOptimizer\(clipped\(optimizer, rule\)\)"):
        clipped(LossScaleOptimizer(SGD()), MaxNorm(1.0))
    with pytest.raises(ValueError, match=r"has an apply\(\) of its own"):
        clipped(keras.optimizers.MultiOptimizer(SGD()), MaxNorm(1.0))
    for other in ("adam", SGD, None):
        with pytest.raises(TypeError, match="needs an optimizer of Keras"):
            clipped(other, MaxNorm(1.0))
    with pytest.raises(TypeError, match="the rule must be one of gradclip's"):
        clipped(SGD(), 1.0)
    with pytest.raises(ValueError, match="scope must be one of"):
        clipped(SGD(), Bounds(-1.0, 1.0), scope="global")


def test_the_given_optimizer_is_as_it_was():
    plain = SGD(1.0)
    clipped(plain, MaxNorm(1.0))
    variable = keras.Variable([0.0, 0.0])
    plain.apply(tensors([np.asarray([3.0, 4.0], np.float32)]), [variable])
    np.testing.assert_array_equal(number(variable), [-3, -4])
