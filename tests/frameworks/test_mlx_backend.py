"""MLX: what is on the host and what is not, derivatives, compiled functions, thresholds that change, streams and threads."""

import math
import threading
from itertools import product
from math import inf, nan
from unittest.mock import patch

import ml_dtypes
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

import gradclip
from gradclip import Bounds, Clipper, EmaRatio, MaxNorm, Median, NonFiniteError, Ratio, Unit, UnitNorm, clip, clip_
from gradclip.backends import mlx as backend, on_host, open_gradients

DTYPES = {
    mx.float16: np.float16,
    mx.bfloat16: ml_dtypes.bfloat16,
    mx.float32: np.float32,
    mx.float64: np.float64,
    mx.complex64: np.complex64,
}
ORDERS = [0.5, 1, 2, 3, inf]


def numbers(shape, dtype=np.float32, seed=0):
    x = np.random.default_rng(seed).standard_normal((2, *shape))
    return (x[0] + 1j * x[1]).astype(dtype) if np.dtype(dtype).kind == "c" else x[0].astype(dtype)


def own(x):
    return mx.array(x, mx.float64) if x.dtype == np.float64 else mx.array(x)


def read(x):
    return np.array(x.astype(mx.float32)).astype(ml_dtypes.bfloat16) if x.dtype == mx.bfloat16 else np.array(x)


def kept(grads, rule=None, **options):
    return clip(grads, rule or MaxNorm(1.0), nonfinite="keep", **options)


def traced(grads):
    return not isinstance(open_gradients(grads).arrays(), backend.Arrays)


LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.T,
    "permuted": lambda x: x.reshape(4, 3, -1).transpose(1, 2, 0),
    "strided": lambda x: x[:, ::2],
    "offset": lambda x: x[1:],
    "row": lambda x: x[0],
    "scalar": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [MaxNorm(0.7), MaxNorm(1e6), UnitNorm(3.0)])
def test_bits_are_numpys(dtype, layout, rule):
    """Norm, coefficient and every gradient: eager MLX goes the way that NumPy goes, whatever the layout."""
    plain = numbers((12, 20), DTYPES[dtype])
    ours, theirs = (LAYOUTS[layout](x) for x in (own(plain), plain))
    for scope in ("global", "tensor"):
        got, want = clip([ours], rule, scope=scope), clip([np.array(theirs, order="K")], rule, scope=scope)
        assert got.grads[0].dtype == dtype
        assert read(got.grads[0]).tobytes() == np.asarray(want.grads[0]).tobytes()
        for name in ("norm", "coef", "limit"):
            assert getattr(got, name).dtype == mx.float64
            np.testing.assert_allclose(read(getattr(got, name)), getattr(want, name), rtol=1e-15)
        assert bool(got.clipped) == bool(want.clipped)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [0.3, 100.0])
def test_values_are_clipped_as_numpys_are(dtype, layout, bound):
    plain = numbers((12, 20), DTYPES[dtype])
    ours, theirs = (LAYOUTS[layout](x) for x in (own(plain), plain))
    got, want = gradclip.clip_by_value([ours], bound), gradclip.clip_by_value([np.array(theirs, order="K")], bound)
    np.testing.assert_allclose(
        read(got.grads[0]).astype(np.complex128), np.asarray(want.grads[0]).astype(np.complex128), rtol=3e-7
    )
    if dtype != mx.complex64:
        assert read(got.grads[0]).tobytes() == np.asarray(want.grads[0]).tobytes()
    assert bool(got.clipped) == bool(want.clipped)
    assert (got.grads[0] is ours) == (not got.clipped)


@pytest.mark.parametrize("dtype", DTYPES)
def test_units_are_numpys(dtype):
    plain = numbers((12, 20), DTYPES[dtype])
    for axis in (0, 1):
        got = clip([own(plain)], Ratio(0.5), scope=Unit(axis), weights=[own(plain)])
        want = clip([plain], Ratio(0.5), scope=Unit(axis), weights=[plain])
        assert read(got.grads[0]).tobytes() == want.grads[0].tobytes()
        np.testing.assert_allclose(read(got.norm), want.norm, rtol=1e-12)


def test_the_core_reads_every_real_type_where_it_lies():
    for dtype in set(DTYPES) - {mx.complex64}:
        x = own(numbers((12, 20), DTYPES[dtype]))
        held = open_gradients([x, x.T, x[:, ::2], mx.broadcast_to(x[0], (3, 20))]).arrays().memory.held
        assert held.tolist() == [gradclip.native.available] * 2 + [False] * 2, dtype


def test_an_array_of_one_value_many_times():
    x = mx.broadcast_to(mx.array([3.0, 4.0]), (4, 2))
    done = clip(x, MaxNorm(1.0))
    assert float(done.norm) == 10
    np.testing.assert_allclose(read(done.grads), np.tile(np.float32([0.3, 0.4]), (4, 1)), rtol=1e-7)


def test_what_is_not_changed_is_the_same_array_and_nothing_is_written():
    grads = {"a": mx.array([3.0, 4.0]), "b": [mx.array([0.5]), None]}
    done = clip(grads, MaxNorm(10.0))
    assert done.grads["a"] is grads["a"] and done.grads["b"][0] is grads["b"][0] and done.grads["b"][1] is None
    done = clip(grads, MaxNorm(1.0), scope="tensor")
    assert done.grads["b"][0] is grads["b"][0]
    assert grads["a"].tolist() == [3.0, 4.0]
    again = clip(done.grads, MaxNorm(1e-3))
    assert done.grads["a"].tolist() == pytest.approx([0.6, 0.8])
    assert again.grads["a"].tolist() != done.grads["a"].tolist()


@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
def test_in_place_is_refused_with_the_reason(scope):
    grads = {"layers": [{"weight": mx.array([3.0, 4.0])}]}
    with pytest.raises(TypeError, match=r"'layers\.0\.weight' is an MLX array, a value .*: use clip\(\)"):
        clip_(grads, MaxNorm(1.0), scope=scope)
    assert grads["layers"][0]["weight"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("dtype", [mx.int32, mx.bool_, mx.uint8])
def test_what_is_no_gradient_is_refused_by_its_path(dtype):
    with pytest.raises(TypeError, match=r"'b\.0' is of mlx.core.*: gradients are of .*float16"):
        clip({"a": mx.ones(2), "b": [mx.ones(2).astype(dtype)]}, MaxNorm(1.0))
    with pytest.raises(TypeError, match="got mlx \\(a\\) and numpy \\(b\\)"):
        clip({"a": mx.ones(2), "b": np.ones(2)}, MaxNorm(1.0))


def test_lazy_gradients_are_evaluated():
    x = mx.array([1.5, 2.0])
    done = clip([2 * x, mx.exp(mx.zeros(3)) - 1], MaxNorm(1.0))
    assert float(done.norm) == 5.0
    assert done.grads[0].tolist() == pytest.approx([0.6, 0.8])


def test_numbers_that_float32_cannot_add():
    """Norms where MLX's own sum has stopped growing, and where it leaves its range."""
    for value, count in ((1.0, 1 << 25), (0.1, 1 << 20), (1e20, 100), (1e-25, 4)):
        x = mx.full((count,), value)
        want = float(np.float64(np.float32(value))) * math.sqrt(count)
        assert float(gradclip.norm(x)) == pytest.approx(want, rel=1e-12)
        assert float(mx.compile(gradclip.norm)(x)) == pytest.approx(want, rel=1e-7)
    many = [mx.ones(1, mx.bfloat16) for _ in range(1000)]
    assert float(gradclip.norm(many)) == pytest.approx(math.sqrt(1000), rel=1e-12)
    assert float(optim.clip_grad_norm(many, 1.0)[1]) == 16.0  # what MLX 0.32 says


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)]
        self.scale = mx.ones(1)

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = mx.tanh(layer(x))
        return self.layers[-1](x) * self.scale


def mean_square(model, x, y):
    return mx.mean(mx.square(model(x) - y))


def data():
    x = mx.array(numbers((32, 4)))
    return x, 3 * mx.sum(x, axis=1, keepdims=True)


def test_the_trees_of_a_model():
    """Nested dicts and lists with the empty branches that frozen layers leave; gradients come transposed from a matrix."""
    model = Model()
    model.layers[1].freeze()
    _, grads = nn.value_and_grad(model, mean_square)(model, *data())
    done = clip(grads, MaxNorm(1.0))
    assert done.grads["layers"][1] == {}
    assert [name for name, _ in tree_flatten(done.grads)] == [name for name, _ in tree_flatten(grads)]
    wide = [np.float64(read(x)).ravel() for _, x in tree_flatten(grads)]
    assert float(done.norm) == pytest.approx(np.linalg.norm(np.concatenate(wide)), rel=1e-12)
    assert float(gradclip.norm(done.grads)) == pytest.approx(1.0, rel=1e-6)
    assert set(clip(grads, MaxNorm(1.0), scope="tensor").to_dict()["norm"]) == {name for name, _ in tree_flatten(grads)}
    weights = clip(grads, Ratio(0.01), weights=model.trainable_parameters())
    assert bool(weights.clipped)
    assert done.grads["layers"][0]["weight"].shape == (8, 4)


def trained(clipped, compiled, steps=20):
    mx.random.seed(0)
    model, (x, y) = Model(), data()
    optimizer = optim.SGD(learning_rate=0.3, momentum=0.5)
    gradient = nn.value_and_grad(model, mean_square)

    def step(x, y):
        loss, grads = gradient(model, x, y)
        grads, norm = clipped(grads)
        optimizer.update(model, grads)
        return loss, norm

    mx.eval(model.parameters(), optimizer.init(model.trainable_parameters()))
    state = [model.state, optimizer.state]
    run = mx.compile(step, inputs=state, outputs=state) if compiled else step
    losses = []
    for _ in range(steps):
        loss, norm = run(x, y)
        mx.eval(state, loss, norm)
        losses.append(loss.item())
    return losses, {name: read(x) for name, x in tree_flatten(model.parameters())}


def test_training_is_the_same_eager_and_compiled():
    def clipped(grads):
        done = kept(grads)
        return done.grads, done.norm

    eager, weights = trained(clipped, compiled=False)
    compiled, others = trained(clipped, compiled=True)
    theirs, _ = trained(lambda grads: optim.clip_grad_norm(grads, 1.0), compiled=False)
    np.testing.assert_allclose(eager, compiled, rtol=1e-4)
    np.testing.assert_allclose(eager, theirs, rtol=1e-4)
    assert eager[-1] < 0.5 * eager[0]
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, others[name], rtol=1e-3, atol=1e-4)


def test_a_compiled_function_has_no_values_to_look_at():
    seen = []

    def work(grads):
        seen.append(traced(grads))
        done = kept(grads)
        seen.append(repr(done))
        return done

    done = mx.compile(work)({"a": mx.array([3.0, 4.0])})
    assert seen == [True, "Clipped(1 tensor, traced)"]
    assert repr(done) == "norm 5.0 → 1.0 (×0.2), 1 tensor, clipped"
    assert done.norm.dtype == mx.float64
    assert not traced({"a": mx.array([3.0, 4.0])})


def test_shapes_may_change_without_compiling_again():
    traces = []

    def work(x):
        traces.append(x.shape)
        return kept({"a": x}), kept(x, Bounds(-0.5, 0.5))

    shapeless = mx.compile(work, shapeless=True)
    for shape in ((2, 3), (7, 5), (4, 4)):
        x = numbers(shape)
        by_norm, by_value = shapeless(mx.array(x))
        np.testing.assert_allclose(read(by_norm.grads["a"]), clip(x, MaxNorm(1.0)).grads, rtol=1e-6)
        np.testing.assert_allclose(read(by_value.grads), x.clip(-0.5, 0.5))
    assert len(traces) == 1


def test_an_exported_function_clips(tmp_path):
    path = str(tmp_path / "clip.mlxfn")
    mx.export_function(path, lambda x: kept(x).grads, mx.zeros(2))
    assert mx.import_function(path)(mx.array([3.0, 4.0]))[0].tolist() == pytest.approx([0.6, 0.8])


def test_a_threshold_changes_without_compiling_again():
    traces = []
    limits = {"norm": mx.array(1.0)}

    def by_argument(x, limit):
        traces.append(0)
        return kept(x, MaxNorm(limit)).grads

    def by_state(x):
        traces.append(1)
        return kept(x, MaxNorm(limits["norm"])).grads

    x = mx.array([30.0, 40.0])
    argument, state = mx.compile(by_argument), mx.compile(by_state, inputs=limits)
    for limit in (1.0, 2.0, 0.5):
        limits["norm"] = mx.array(limit)
        for got in (argument(x, mx.array(limit)), state(x)):
            assert got.tolist() == pytest.approx([0.6 * limit, 0.8 * limit])
    limits["norm"][...] = 5.0
    assert state(x).tolist() == pytest.approx([3.0, 4.0])
    assert sorted(traces) == [0, 1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float64, mx.int32])
def test_an_eager_threshold_is_read_when_it_is_used(dtype):
    limit = mx.array(1, dtype)
    rule, x = MaxNorm(limit), mx.array([30.0, 40.0])
    assert clip(x, rule).grads.tolist() == pytest.approx([0.6, 0.8])
    limit[...] = 2
    assert clip(x, rule).grads.tolist() == pytest.approx([1.2, 1.6])
    for bad in (0.0, -1.0, nan):
        with pytest.raises(ValueError, match="max_norm must be a number > 0"):
            clip(x, MaxNorm(mx.array(bad)))
    with pytest.raises(TypeError, match="a 0-d array"):
        MaxNorm(mx.array([1.0]))


def test_bounds_may_be_arrays():
    x, bound = mx.array([3.0, -0.5]), mx.array(1.0)
    assert gradclip.clip_by_value(x, bound).grads.tolist() == [1.0, -0.5]
    assert mx.compile(lambda x, b: kept(x, Bounds(-b, b)).grads)(x, bound).tolist() == [1.0, -0.5]
    half = mx.compile(lambda x, b: kept(x, MaxNorm(b), scope="element").grads)(x.astype(mx.bfloat16), bound)
    assert half.dtype == mx.bfloat16


@pytest.mark.parametrize(("scope", "p"), [*product(("global", "tensor"), ORDERS), ("element", 2)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float64, mx.bfloat16, mx.complex64])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_derivative_at_zero_is_the_identity(scope, p, dtype, on_cpu):
    weights = [mx.array([2.0, 3.0]), mx.array(5.0)]

    def weighed(x, y):
        with patch.object(backend, "_on_cpu", lambda: on_cpu):
            done = kept([x, y, mx.zeros(0)], scope=scope, p=p)
        return sum(mx.sum(mx.real(g) * w) for g, w in zip(done.grads, weights, strict=False)).astype(mx.float32)

    found = mx.grad(weighed, argnums=(0, 1))(mx.zeros(2, dtype), mx.zeros((), dtype))
    for g, w in zip(found, weights, strict=True):
        assert np.complex128(read(g)).tolist() == np.complex128(read(w)).tolist()


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_the_derivative_of_a_norm_at_zero_is_zero(p, scope):
    found = mx.grad(lambda x: mx.sum(gradclip.norm([x, x], p=p, scope=scope)).astype(mx.float32))(mx.zeros(3))
    assert found.tolist() == [0, 0, 0]


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("rule", [MaxNorm(1.0), MaxNorm(1e3), MaxNorm(2e3, min_norm=1e3), UnitNorm(2.0)])
def test_derivatives_are_those_of_differences(p, rule):
    x, weights = numbers((5,), np.float64), numbers((5,), np.float64, seed=1)

    def weighed(x):
        return float(np.sum(clip(x, rule, p=p).grads * weights))

    step = 1e-6 * np.eye(5)
    want = [(weighed(x + d) - weighed(x - d)) / 2e-6 for d in step]

    def ours(x):
        return mx.sum(kept(x, rule, p=p).grads * own(weights))

    np.testing.assert_allclose(read(mx.grad(ours)(own(x))), want, rtol=1e-5, atol=1e-7)
    [_], [along] = mx.jvp(ours, [own(x)], [mx.ones(5, mx.float64)])
    assert float(along) == pytest.approx(sum(want), rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(read(mx.grad(mx.checkpoint(ours))(own(x))), want, rtol=1e-5, atol=1e-7)


def test_a_derivative_goes_through_what_was_evaluated_already():
    """An array whose value was looked at inside mx.grad still has a derivative, and the clip must not cut it off."""
    watched = []

    def loss(x):
        y = 2 * x
        mx.eval(y)
        watched.append(traced(y))
        return mx.sum(kept(y).grads * mx.array([1.0, 2.0]))

    x = mx.array([3.0, 4.0])
    assert mx.grad(loss)(x).tolist() == pytest.approx([-0.064, 0.048], rel=1e-5)
    assert watched == [True]
    assert not traced(2 * x)


def test_gradients_of_an_inner_function_are_clipped_and_differentiated():
    """One step of gradient descent with a clip, and the derivative of what comes of it: learning how to learn."""

    def inner(w):
        return mx.sum(mx.square(w)) * 3

    def outer(w):
        return inner(w - 0.1 * kept(mx.grad(inner)(w)).grads)

    def plain(w):
        grad = 6 * w
        return 3 * np.sum(np.square(w - 0.1 * grad / np.linalg.norm(grad)))

    w = np.array([0.6, 0.8])
    want = [(plain(w + d) - plain(w - d)) / 2e-5 for d in 1e-5 * np.eye(2)]
    np.testing.assert_allclose(read(mx.grad(outer)(own(w))), want, rtol=1e-6)


def test_constants_under_a_derivative_are_looked_at():
    constant = mx.array([3.0, 4.0])
    found = mx.grad(lambda x: mx.sum(clip(constant, MaxNorm(1.0)).grads * x))(mx.ones(2))
    assert found.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
@pytest.mark.parametrize("policy", ["keep", "zero", "skip"])
def test_vmap_clips_every_example_by_itself(scope, policy):
    many = [numbers((6, 3, 2)), numbers((6, 4), seed=1)]
    many[0][2, 1, 1] = nan
    many[1][3] = 0
    got = mx.vmap(lambda x, y: tuple(clip([x, y], MaxNorm(0.7), scope=scope, nonfinite=policy).grads))(*map(mx.array, many))
    for i in range(6):
        grads = [x[i] for x in many]
        broken = not all(np.isfinite(x).all() for x in grads)
        for ours, x, want in zip(got, grads, clip(grads, MaxNorm(0.7), scope=scope, nonfinite="keep").grads, strict=True):
            np.testing.assert_allclose(read(ours)[i], np.zeros_like(x) if broken and policy != "keep" else want, rtol=1e-6)


def test_vmap_of_gradients_example_by_example():
    """With the examples as an argument, and closed over, which MLX marks differently."""
    x, w = numbers((5, 3)), mx.ones(3)

    def loss(w, x):
        return mx.square(mx.sum(w * x) - 1)

    given = mx.vmap(lambda w, x: kept(mx.grad(loss)(w, x)).grads, in_axes=(None, 0))
    closed = mx.vmap(lambda w, x: kept(mx.grad(lambda w: loss(w, x))(w)).grads, in_axes=(None, 0))
    want = [clip(2 * (one.sum() - 1) * one, MaxNorm(1.0)).grads for one in x]
    for work in (given, closed, mx.compile(given), mx.compile(closed)):
        np.testing.assert_allclose(read(work(w, mx.array(x))), want, rtol=1e-5)


REFUSED = 'nonfinite="raise" has to look at the gradients.*pass nonfinite="keep"'


def test_what_cannot_be_looked_at_cannot_raise():
    for work in (mx.compile, mx.vmap):
        with pytest.raises(ValueError, match=REFUSED):
            work(lambda x: clip(x, MaxNorm(1.0)).grads)(mx.ones((2, 2)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_named_and_counted(dtype):
    grads = {"a": mx.ones(2, dtype), "b": [mx.array([nan, inf, 1, -inf]).astype(dtype)], "c": mx.array([[nan]]).astype(dtype).T}
    message = r"b\.0 \(1 NaN, 2 inf of 4\), c \(1 NaN of 1\)\. Nothing was changed"
    with pytest.raises(NonFiniteError, match=message):
        clip(grads, MaxNorm(1.0))
    with pytest.raises(NonFiniteError, match=message):
        mx.grad(lambda one: mx.sum(clip(tree_map(lambda x: x + (0 * one).astype(x.dtype), grads), MaxNorm(1.0)).norm))(
            mx.array(1.0)
        )


@pytest.mark.parametrize("work", [lambda f: f, mx.compile])
def test_policies(work):
    grads = {"a": mx.array([3.0, nan]), "b": mx.ones(1, mx.bfloat16)}
    zero = work(lambda g: clip(g, MaxNorm(1.0), nonfinite="zero"))(grads)
    assert zero.grads["a"].tolist() == [0, 0] and zero.grads["b"].tolist() == [0]
    assert not zero.finite and not zero.skipped and zero.clipped
    skip = work(lambda g: clip(g, MaxNorm(1.0), nonfinite="skip"))(grads)
    assert skip.skipped and not skip.finite
    keep = work(lambda g: clip(g, MaxNorm(1.0), nonfinite="keep"))(grads)
    assert np.isnan(keep.grads["a"].tolist()).all() and np.isnan(keep.grads["b"].tolist()).all()
    assert not keep.skipped and not keep.finite


def test_a_state_goes_to_and_fro_between_eager_and_compiled():
    rule = Median(window=6, warmup=2)

    def work(x, state):
        done = clip(x, rule, state=state, nonfinite="skip")
        return done.limit, done.state

    compiled = mx.compile(work)
    x = mx.array([3.0, 4.0])
    state = want = gradclip.init(x, rule)
    for i, scale in enumerate([1.0, 2.0, 1.5, nan, 30.0, 1.0, 2.0, 5.0]):
        _, want = limit, _ = work(x * scale, want)
        if i % 2:
            state = tuple(map(mx.array, state)) if i == 1 else state
            got, state = compiled(x * scale, tuple(mx.array(entry) for entry in state))
        else:
            got, state = work(x * scale, state)
        assert float(got) == pytest.approx(float(limit), rel=1e-6)
        assert on_host(state[0]) == (i % 2 == 0)


def test_a_clipper_remembers():
    clipper = Clipper(EmaRatio(warmup=2), "tensor")
    for scale in (1.0, 1.0, 1.0, 10.0):
        done = clipper({"a": scale * mx.array([3.0, 4.0]), "b": mx.ones(2)})
    assert done.coef.tolist() == pytest.approx([0.105, 1.0], rel=1e-6)
    assert clipper.counts.clipped == 1
    assert clipper.state_dict()["rule"] == "EmaRatio"


def test_a_norm_that_is_known():
    x = mx.array([3.0, 4.0])
    assert clip(x, MaxNorm(1.0), norm=mx.array(10.0)).grads.tolist() == pytest.approx([0.3, 0.4])
    assert clip(x, MaxNorm(1.0), norm=mx.array(10, mx.bfloat16)).grads.tolist() == pytest.approx([0.3, 0.4])
    by_argument = mx.compile(lambda n: kept(x, norm=n).grads)
    assert by_argument(mx.array(10.0)).tolist() == pytest.approx([0.3, 0.4])
    assert by_argument(mx.array(20.0)).tolist() == pytest.approx([0.15, 0.2])
    for bad in (mx.array(True), mx.array(1j)):
        with pytest.raises(TypeError, match="norm= must be real numbers"):
            clip(x, MaxNorm(1.0), norm=bad)


@pytest.mark.parametrize("work", [lambda f: f, mx.compile])
@pytest.mark.parametrize("p", [2, inf])
def test_reduce_gets_an_mlx_array(work, p):
    group = mx.distributed.init()
    seen = []

    def reduce(power, p):
        seen.append((type(power), power.shape))
        return mx.distributed.all_sum(power, group=group) if p == 2 else mx.distributed.all_max(power, group=group)

    done = work(lambda x: kept(x, p=p, reduce=reduce))(mx.array([3.0, 4.0]))
    assert float(done.norm) == (5.0 if p == 2 else 4.0)
    assert seen[0] == (mx.array, () if p == 2 else (2,))


def test_other_streams_and_threads():
    x = mx.array([3.0, 4.0])
    mx.eval(x)
    stream = mx.new_stream(mx.cpu)
    with mx.stream(stream):
        lazy = 2 * x
        inside = clip(2 * x, MaxNorm(1.0))
    found = [inside.grads, clip(lazy, MaxNorm(1.0)).grads]

    def work():
        found.append(clip(x, MaxNorm(1.0)).grads)
        found.append(clip(2 * x, MaxNorm(1.0)).grads)
        mx.eval(found[-2:])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(found) == 4
    for grads in found:
        assert grads.tolist() == pytest.approx([0.6, 0.8])


def test_what_mlx_cannot_evaluate_here_is_its_own_error():
    """A lazy array belongs to the thread that made it: MLX says so, and the clip must not take it for a tracer."""
    lazy, errors = 2 * mx.ones(2), []

    def work():
        try:
            clip(lazy, MaxNorm(1.0))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "current thread" in errors[0]


def test_a_gpus_norms_stay_in_float32_and_in_range():
    """Simulated: what a GPU would be given, computed by the CPU. MLX has no branch, so that the second measure always runs."""
    with patch.object(backend, "_on_cpu", lambda: False):
        for values in ([1e20] * 100, [1e-25] * 4, [1e-30, 3e-23], [3.0, 4.0]):
            for p in (1, 2, 3, inf):
                x = mx.array(values)
                done = kept(x, p=p)
                assert done.norm.dtype == mx.float32
                want = clip(np.float32(values), MaxNorm(1.0), p=p)
                assert float(done.norm) == pytest.approx(float(want.norm), rel=1e-6)
                np.testing.assert_allclose(read(done.grads), want.grads, rtol=1e-6)
        assert on_host(backend.known(mx.array(5.0)))
        with pytest.raises(NonFiniteError, match="1 NaN of 2"):
            clip(mx.array([1.0, nan]), MaxNorm(1.0))
        assert clip(mx.array([3.0, 4.0]), MaxNorm(1.0)).grads.tolist() == pytest.approx([0.6, 0.8])
        assert clip(mx.array([3.0, 4.0]), MaxNorm(1.0), scope="element").grads.tolist() == [1.0, 1.0]


def test_complex_gradients_go_by_their_modulus():
    x = mx.array([3 + 4j, 12j, 0j])
    for work in (lambda f: f, mx.compile):
        done = work(lambda x: kept(x))(x)
        assert float(done.norm) == pytest.approx(13.0, rel=1e-7)
        np.testing.assert_allclose(read(done.grads), np.array([3 + 4j, 12j, 0]) / 13, rtol=1e-6)
        by_value = work(lambda x: kept(x, scope="element"))(x)
        np.testing.assert_allclose(read(by_value.grads), [0.6 + 0.8j, 1j, 0], rtol=1e-6)
        same = work(lambda x: kept(x, MaxNorm(inf)))(mx.array([complex(inf, 0), 1j]))
        assert np.array_equal(read(same.grads), np.array([complex(inf, 0), 1j]))
    with pytest.raises(TypeError, match="complex, which Bounds cannot order"):
        clip(x, Bounds(-1.0, 1.0))
