"""The optax transformations beside optax's own: in chains, around optimizers, in flax's training states, saved and loaded."""

from math import inf, nan

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx, serialization
from flax.core import freeze
from flax.training.train_state import TrainState

import gradclip
from gradclip import Bounds, EmaRatio, Groups, MaxNorm, MaxRms, Median, NonFiniteError, Ratio, Skip, Unit, UnitNorm, ZScore
from gradclip.integrations.optax import ClipState, SkipState, clip, skip

jax.config.update("jax_num_cpu_devices", 4)  # before the first array is made
RULES = {
    "max_norm": (MaxNorm(0.7), None),
    "tensor": (MaxNorm(0.7), "tensor"),
    "min_norm": (MaxNorm(9.0, min_norm=8.0), None),
    "like": (MaxNorm(0.7, like="optax"), None),
    "element": (MaxNorm(0.3), "element"),
    "bounds": (Bounds(-0.25, 0.5), None),
    "unit_norm": (UnitNorm(2.0), None),
    "max_rms": (MaxRms(0.3), None),
    "ratio": (Ratio(0.1), None),
    "ratio of columns": (Ratio(0.1), Unit(0)),
    "median": (Median(window=6, warmup=2), None),
    "z_score": (ZScore(1.5, warmup=2), None),
    "ema_ratio": (EmaRatio(warmup=2), None),
    "schedule": (MaxNorm(lambda step: 1.0 / (step + 1.0)), None),
    "groups": (Groups({"layers.0.*": MaxNorm(0.5), "*": Median(window=6, warmup=2)}), None),
}


def weights():
    random = np.random.default_rng(0)
    shapes = [{"w": (3, 4), "b": (4,)}, {"w": (4, 1), "b": (1,)}]
    return {
        "layers": [{name: jnp.asarray(random.standard_normal(s), jnp.float32) for name, s in each.items()} for each in shapes]
    }


def gradients(scale=1.0):
    return jax.tree.map(lambda x: jnp.cos(7 * x) * scale, weights())


def flow(count=6):
    return [gradients(scale) for scale in (1.0, 1.2, 0.8, 40.0, 0.0, 1.0)[:count]]


def assert_close(ours, theirs, rel=1e-5):
    for mine, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        assert np.asarray(mine) == pytest.approx(np.asarray(other), rel=rel, abs=1e-30)


def assert_alike(before, after):
    """The same structure, shapes and types, as a loop and a checkpoint need it."""
    assert jax.tree.structure(before) == jax.tree.structure(after)
    kinds = [[(x.shape, x.dtype) for x in jax.tree.leaves(state)] for state in (before, after)]
    assert kinds[0] == kinds[1]


class TestClip:
    @pytest.mark.parametrize("jit", [False, True])
    @pytest.mark.parametrize(("rule", "scope"), RULES.values(), ids=RULES)
    def test_updates_and_state_are_those_of_clip(self, rule, scope, jit):
        transformation = clip(rule, scope)
        params = weights()
        state = transformation.init(params)
        update = jax.jit(transformation.update) if jit else transformation.update
        memory = gradclip.init(params, rule, scope)
        clips = 0
        for steps, grads in enumerate(flow(), 1):
            want = gradclip.clip(grads, rule, scope=scope, state=memory, weights=params)
            memory, clips = want.state, clips + bool(want.clipped)
            updates, after = update(grads, state, params)
            assert_alike(state, after)
            state = after
            assert_close(updates, want.grads)
            assert np.asarray(state.norm) == pytest.approx(np.asarray(want.norm), rel=1e-5)
            assert np.asarray(state.limit) == pytest.approx(np.asarray(want.limit), rel=1e-5)
            assert (state.coef is None) == (want.coef is None)
            assert state.coef is None or np.asarray(state.coef) == pytest.approx(np.asarray(want.coef), rel=1e-5)
            assert (state.steps, state.steps_clipped, state.steps_skipped, state.steps_nonfinite) == (steps, clips, 0, 0)

    def test_what_it_did_can_be_read_from_a_whole_optimizer(self):
        optimizer = optax.chain(clip(MaxNorm(1.0)), optax.adamw(1e-2))
        state = optimizer.init(weights())
        _, state = jax.jit(optimizer.update)(gradients(9.0), state, weights())
        norm = float(gradclip.norm(gradients(9.0)))
        assert optax.tree.get(state, "norm") == pytest.approx(norm, rel=1e-6)
        assert optax.tree.get(state, "coef") == pytest.approx(1 / norm, rel=1e-6)
        assert optax.tree.get(state, "limit") == 1
        assert optax.tree.get(state, "steps_clipped") == 1

    def test_it_is_optaxs_own_where_that_is_right(self):
        ours, theirs = (optax.chain(c, optax.adam(1e-2)) for c in (clip(MaxNorm(0.5)), optax.clip_by_global_norm(0.5)))
        a = b = weights()
        states = [ours.init(a), theirs.init(b)]
        for grads in flow(4):
            updates, states[0] = ours.update(grads, states[0], a)
            a = optax.apply_updates(a, updates)
            updates, states[1] = theirs.update(grads, states[1], b)
            b = optax.apply_updates(b, updates)
        assert_close(a, b)

    def test_norms_by_tensor_are_in_the_order_of_the_leaves(self):
        params = {"layers": [jnp.full(2, float(i)) for i in range(12)], "a": jnp.ones(1)}
        transformation = clip(MaxNorm(inf), "tensor")
        _, state = transformation.update(params, transformation.init(params))
        assert np.asarray(state.norm) == pytest.approx(np.array([np.linalg.norm(x) for x in jax.tree.leaves(params)]))

    def test_paths_that_meet_are_told_apart(self):
        params = {"a.b": jnp.ones(1), "a": {"b": jnp.full(1, 2.0)}}
        transformation = clip(MaxNorm(1.0), "tensor")
        updates, _ = transformation.update(params, transformation.init(params))
        assert updates == {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}

    def test_a_single_array_and_none_at_all(self):
        for params in (jnp.ones(2), {}, None):
            transformation = clip(MaxNorm(1.0))
            updates, state = jax.jit(transformation.update)(params, transformation.init(params))
            assert jax.tree.structure(updates) == jax.tree.structure(params)
            assert state.steps == 1

    def test_in_a_loop(self):
        optimizer = optax.chain(clip(ZScore(1.5, warmup=2)), optax.adam(1e-2))
        params = weights()

        def step(carry, scale):
            params, state = carry
            updates, state = optimizer.update(gradients(scale), state, params)
            return (optax.apply_updates(params, updates), state), state[0].norm

        scales = jnp.asarray([1.0, 1.2, 0.8, 40.0, 1.0])
        (after, state), norms = jax.lax.scan(step, (params, optimizer.init(params)), scales)
        carry = params, optimizer.init(params)
        for scale in scales:
            carry, _ = step(carry, scale)
        assert_close(after, carry[0])
        assert norms == pytest.approx(np.asarray(scales) * float(gradclip.norm(gradients())), rel=1e-5)
        assert state[0].steps_clipped == carry[1][0].steps_clipped == 1

    def test_a_threshold_in_the_state_changes_without_compiling(self):
        optimizer = optax.inject_hyperparams(lambda max_norm: clip(MaxNorm(max_norm)))(max_norm=1.0)
        state = optimizer.init(weights())
        update = jax.jit(optimizer.update)
        for limit in (1.0, 0.5, 2.0):
            state.hyperparams["max_norm"] = jnp.asarray(limit)
            updates, state = update(gradients(9.0), state)
            assert float(gradclip.norm(updates)) == pytest.approx(limit, rel=1e-6)
        assert update._cache_size() == 1
        schedule = optax.linear_schedule(1.0, 0.1, 3)
        optimizer = optax.inject_hyperparams(lambda max_norm: clip(MaxNorm(max_norm)))(max_norm=schedule)
        ours = clip(MaxNorm(schedule))
        states = [optimizer.init(weights()), ours.init(weights())]
        for _ in range(4):
            updates, states[0] = optimizer.update(gradients(9.0), states[0])
            others, states[1] = ours.update(gradients(9.0), states[1])
            assert_close(updates, others)

    @pytest.mark.parametrize("jit", [False, True])
    def test_policies(self, jit):
        bad = jax.tree.map(lambda x: x.at[0].set(nan), gradients())
        for policy, check in (("keep", np.isnan), ("zero", lambda x: x == 0)):
            transformation = clip(MaxNorm(1.0), nonfinite=policy)
            update = jax.jit(transformation.update) if jit else transformation.update
            updates, state = update(bad, transformation.init(weights()))
            assert all(check(np.asarray(x)).all() for x in jax.tree.leaves(updates))
            assert state.steps_nonfinite == 1
        transformation = clip(MaxNorm(1.0), nonfinite="raise")
        with pytest.raises((NonFiniteError, ValueError), match="under a tracer" if jit else r"layers\.0\.b \(1 NaN of 4\)"):
            (jax.jit(transformation.update) if jit else transformation.update)(bad, transformation.init(weights()))

    def test_what_would_leave_a_step_out_is_sent_to_skip(self):
        for wrong in (lambda: clip(Skip(1.0)), lambda: clip(MaxNorm(1.0), nonfinite="skip")):
            with pytest.raises(ValueError, match=r"use skip\(optimizer, rule\)"):
                wrong()
        with pytest.raises(ValueError, match="scope must be one of"):
            clip(MaxNorm(1.0), "unit")
        ratio = clip(Ratio())
        state = ratio.init(weights())
        with pytest.raises(ValueError, match="pass weights="):
            ratio.update(gradients(), state)

    def test_half_precision(self):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights())
        optimizer = optax.chain(clip(MaxNorm(0.5)), optax.sgd(1.0))
        updates, state = jax.jit(optimizer.update)(params, optimizer.init(params))
        assert {x.dtype.name for x in jax.tree.leaves(updates)} == {"bfloat16"}
        assert optax.tree.get(state, "norm").dtype == jnp.float32
        assert float(gradclip.norm(updates)) == pytest.approx(0.5, rel=0.01)


class TestSkip:
    @pytest.mark.parametrize("jit", [False, True])
    @pytest.mark.parametrize("bad", [nan, inf])
    def test_a_step_that_is_not_finite_changes_nothing(self, jit, bad):
        optimizer = skip(optax.adam(1e-2), MaxNorm(1.0))
        other = optax.chain(clip(MaxNorm(1.0)), optax.adam(1e-2))
        update = jax.jit(optimizer.update) if jit else optimizer.update
        params = weights()
        state, theirs = optimizer.init(params), other.init(params)
        for scale in (1.0, bad, 3.0, bad, 0.5):
            updates, after = update(gradients(scale), state, params)
            assert_alike(state, after)
            if np.isfinite(scale):
                want, theirs = other.update(gradients(scale), theirs, params)
                assert_close(updates, want)
            else:
                assert not any(np.asarray(x).any() for x in jax.tree.leaves(updates))
                assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), after.inner_state, state.inner_state))
            state = after
        assert_close(state.inner_state, theirs[1])
        assert isinstance(state, SkipState)
        assert isinstance(state.clip, ClipState)
        counts = [int(optax.tree.get(state, name)) for name in ("steps", "steps_skipped", "steps_nonfinite")]
        assert counts == [5, 2, 2]
        assert optax.tree.get(state, "steps_clipped") == theirs[0].steps_clipped

    @pytest.mark.parametrize("jit", [False, True])
    def test_a_rule_that_skips(self, jit):
        optimizer = skip(optax.sgd(1.0, momentum=0.9), Skip(Median(window=8, warmup=2), at_most=2))
        update = jax.jit(optimizer.update) if jit else optimizer.update
        state = optimizer.init(weights())
        skipped = []
        for scale in (1.0, 1.1, 0.9, 50.0, 50.0, 50.0, 1.0):
            updates, state = update(gradients(scale), state)
            skipped.append(not np.asarray(updates["layers"][0]["w"]).any())
        assert skipped == [False, False, False, True, True, False, False]
        assert (state.clip.steps_skipped, state.clip.steps_clipped, state.clip.steps_nonfinite) == (2, 1, 0)

    def test_other_rules_clip(self):
        optimizer = skip(optax.sgd(1.0), MaxNorm(0.5))
        updates, state = optimizer.update(gradients(9.0), optimizer.init(weights()))
        assert float(gradclip.norm(updates)) == pytest.approx(0.5, rel=1e-6)
        assert (state.clip.steps_skipped, state.clip.steps_clipped) == (0, 1)

    def test_an_optimizer_with_keys_and_extra_arguments(self):
        noisy = skip(optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(1.0)), MaxNorm(1.0))
        state = noisy.init(weights())
        _, kept = jax.jit(noisy.update)(gradients(nan), state, weights())
        assert optax.tree.get(kept, "rng_key") == optax.tree.get(state, "rng_key")
        plateau = skip(optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau()), MaxNorm(1.0))
        state = plateau.init(weights())
        updates, _ = plateau.update(gradients(), state, weights(), value=jnp.asarray(1.0))
        assert float(gradclip.norm(updates)) == pytest.approx(1.0, rel=1e-6)


class TestOptax:
    """Inside of what optax offers around a transformation."""

    def test_multi_steps_clips_the_mean(self):
        optimizer = optax.MultiSteps(optax.chain(clip(MaxNorm(1.0)), optax.sgd(1.0)), every_k_schedule=2)
        params = {"w": jnp.zeros(1)}
        state = optimizer.init(params)
        update = jax.jit(optimizer.update)
        for value in (5.0, -3.0, 50.0, -3.0):
            updates, state = update({"w": jnp.asarray([value])}, state, params)
            params = optax.apply_updates(params, updates)
        assert params["w"] == pytest.approx([-2.0], rel=1e-6)
        assert state.inner_opt_state[0].steps == 2
        assert state.inner_opt_state[0].norm == pytest.approx(23.5)

    def test_masked_and_multi_transform(self):
        params = {"head": jnp.full(2, 3.0), "body": jnp.full(2, 3.0)}
        for optimizer in (
            optax.masked(clip(MaxNorm(1.0)), {"head": False, "body": True}),
            optax.multi_transform({"clip": clip(MaxNorm(1.0)), "keep": optax.identity()}, {"head": "keep", "body": "clip"}),
        ):
            updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)
            assert updates["head"].tolist() == [3, 3]
            assert float(gradclip.norm(updates["body"])) == pytest.approx(1.0, rel=1e-6)
            assert optax.tree.get(state, "norm") == pytest.approx(18**0.5, rel=1e-6)

    def test_apply_if_finite(self):
        optimizer = optax.apply_if_finite(optax.chain(clip(MaxNorm(1.0)), optax.sgd(1.0)), max_consecutive_errors=3)
        state = optimizer.init(weights())
        updates, state = jax.jit(optimizer.update)(gradients(nan), state, weights())
        assert not np.asarray(updates["layers"][0]["w"]).any()
        assert state.total_notfinite == 1


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(8)(x)))[..., 0]


def data():
    random = np.random.default_rng(0)
    xs = random.standard_normal((64, 5)).astype(np.float32)
    return xs, (xs[:, 0] * 3 + xs[:, 1]).astype(np.float32)


class TestFlax:
    def test_train_state(self):
        xs, ys = data()
        model = Model()
        params = model.init(jax.random.key(0), xs)["params"]
        optimizer = optax.chain(clip(MaxNorm(0.5)), optax.adam(0.05))
        state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

        @jax.jit
        def step(state):
            loss, grads = jax.value_and_grad(lambda params: jnp.mean((state.apply_fn({"params": params}, xs) - ys) ** 2))(
                state.params
            )
            return state.apply_gradients(grads=grads), loss, grads

        losses = []
        for _ in range(30):
            state, loss, grads = step(state)
            losses.append(float(loss))
        assert losses[-1] < 0.3 * losses[0]
        assert optax.tree.get(state.opt_state, "norm") == pytest.approx(float(gradclip.norm(grads)), rel=1e-5)
        assert optax.tree.get(state.opt_state, "steps") == 30
        assert optax.tree.get(state.opt_state, "steps_clipped") > 0

    def test_frozen_dicts_come_back_as_they_were(self):
        params = freeze({"dense": {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.zeros(2)}})
        rule = Groups({"dense.kernel": MaxNorm(1.0), "*": None})
        optimizer = clip(rule)
        updates, _ = optimizer.update(params, optimizer.init(params))
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert float(gradclip.norm(updates["dense"]["kernel"])) == pytest.approx(1.0, rel=1e-6)

    def test_nnx(self):
        xs, ys = data()

        class Network(nnx.Module):
            def __init__(self, rngs):
                self.inner = nnx.Linear(5, 8, rngs=rngs)
                self.outer = nnx.Linear(8, 1, rngs=rngs)

            def __call__(self, x):
                return self.outer(jnp.tanh(self.inner(x)))[..., 0]

        model = Network(nnx.Rngs(0))
        rule = Groups({"inner.*": MaxNorm(0.5), "outer.*": MaxNorm(0.25)})
        optimizer = nnx.Optimizer(model, skip(optax.adam(0.05), MaxNorm(0.5)), wrt=nnx.Param)
        grouped = clip(rule)
        state = grouped.init(nnx.state(model, nnx.Param))

        @nnx.jit
        def step(model, optimizer, scale):
            loss, grads = nnx.value_and_grad(lambda model: scale * jnp.mean((model(xs) - ys) ** 2))(model)
            optimizer.update(model, grads)
            return loss, grads

        losses = [float(step(model, optimizer, 1.0)[0]) for _ in range(30)]
        assert losses[-1] < 0.3 * losses[0]
        before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
        _, grads = step(model, optimizer, nan)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), before, nnx.state(model, nnx.Param)))
        counts = [int(optax.tree.get(optimizer.opt_state, name)[...]) for name in ("steps", "steps_skipped")]
        assert counts == [31, 1]
        _, grads = step(model, optimizer, 1.0)
        updates, state = grouped.update(grads, state)
        assert jax.tree.structure(updates) == jax.tree.structure(grads)
        assert state.norm.shape == (2,)


class TestSaved:
    def trained(self):
        optimizer = skip(optax.adam(1e-2), ZScore(2.0, warmup=2))
        state = optimizer.init(weights())
        for grads in flow(4):
            _, state = jax.jit(optimizer.update)(grads, state)
        return optimizer, state

    def test_orbax(self, tmp_path):
        optimizer, state = self.trained()
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            loaded = checkpointer.restore(tmp_path / "state", jax.eval_shape(optimizer.init, weights()))
        self.goes_on(optimizer, state, loaded)

    def test_flax_serialization(self):
        optimizer, state = self.trained()
        self.goes_on(optimizer, state, serialization.from_bytes(optimizer.init(weights()), serialization.to_bytes(state)))

    def goes_on(self, optimizer, state, loaded):
        assert jax.tree.structure(loaded) == jax.tree.structure(state)
        assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), loaded, state))
        update = jax.jit(optimizer.update)  # flax hands back NumPy's arrays, whose eager arithmetic rounds otherwise than XLA's
        ours, theirs = (update(gradients(30.0), each) for each in (state, loaded))
        assert_close(ours, theirs, rel=0)


def passes(work, *given):
    """How often XLA says that it reads or writes an array of the gradients' size."""
    cost = jax.jit(work).lower(*given).compile().cost_analysis()
    return cost["bytes accessed"] / given[0]["w"].nbytes


def test_with_adam_the_clip_costs_one_pass_more():
    """One reads the gradients for their norm; that they are scaled costs none. A branch that redoes the norm is not taken."""
    params = {"w": jnp.zeros((512, 512))}

    def step(clipping):
        optimizer = optax.chain(clipping, optax.adam(1e-3))

        def work(grads, state, params):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return passes(work, params, optimizer.init(params), params)

    alone, clipped = step(optax.identity()), step(clip(MaxNorm(1.0)))
    assert alone == pytest.approx(10, rel=1e-3)
    assert clipped - passes(gradclip.norm, params) == pytest.approx(alone, rel=1e-3)
    with jax.enable_x64(True):  # where the norm is float64 there is no such branch
        assert step(optax.identity()) == pytest.approx(10, rel=1e-3)
        assert step(clip(MaxNorm(1.0))) == pytest.approx(11, rel=1e-3)
        assert step(clip(MaxNorm(1.0), "tensor")) == pytest.approx(11, rel=1e-3)
        assert passes(gradclip.norm, params) == pytest.approx(1, rel=1e-3)


def test_what_always_runs_reads_the_gradients_once_for_their_norm():
    text = jax.jit(gradclip.norm).lower({"w": jnp.zeros((512, 512))}).compile().as_text()
    entry = text[text.index("ENTRY") :].splitlines()[1:]
    readers = [line for line in entry if "%g" in line.partition("=")[2] and "parameter(" not in line]
    assert sum("fusion(" in line for line in readers) == 1
    assert sum("conditional(" in line for line in entry) == 1
