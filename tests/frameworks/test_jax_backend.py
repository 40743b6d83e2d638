"""What is JAX's own: memory and devices, transformations and derivatives, compiling, the order of dicts, x64."""

import math
from collections import namedtuple
from math import inf, nan

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gradclip
from gradclip import Bounds, Clipper, Groups, MaxNorm, Median, NonFiniteError, Unit, ZScore, clip, clip_
from gradclip.backends import jax as backend

jax.config.update("jax_num_cpu_devices", 4)  # before the first array is made
Pair = namedtuple("Pair", "left right")
DTYPES = ["float32", "float16", "bfloat16", "complex64"]


def g(*values, dtype=jnp.float32):
    return jnp.asarray(np.array(values), dtype)


def normal(*shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


class TestEager:
    def test_not_clipped_means_the_very_same_arrays(self):
        tree = {"a": g(3, 4), "b": [g(12, dtype=jnp.bfloat16), None], "c": Pair(g(0), ())}
        for rule, scope in ((MaxNorm(13.0), "global"), (MaxNorm(12.0), "tensor"), (Bounds(-1.0, 12.0), "element")):
            clipped = clip(tree, rule, scope=scope)
            assert not clipped.clipped
            assert all(new is old for new, old in zip(*map(jax.tree.leaves, (clipped.grads, tree)), strict=True))
            assert type(clipped.grads["c"]) is Pair

    def test_only_what_is_clipped_is_new(self):
        small, large = g(0.1), g(5)
        out = clip([small, large], MaxNorm(1.0), scope="tensor").grads
        assert out[0] is small
        assert out[1].tolist() == [1]
        assert large.tolist() == [5]

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("scope", "p"), [("global", 2), ("tensor", 1), ("unit", 3), ("global", inf), ("element", 2)])
    def test_numbers_are_those_of_numpy(self, dtype, scope, p):
        """To the bit, since the same core does the work."""
        tree = [normal(30, 7, dtype=dtype), normal(5, dtype=dtype)]
        ours = clip(tree, MaxNorm(0.5) if scope != "unit" else gradclip.Ratio(0.1), scope=scope, p=p, weights=tree)
        plain = [np.array(x) for x in tree]
        rule, scope = (MaxNorm(0.5), scope) if scope != "unit" else (gradclip.Ratio(0.1), Unit(-1))
        want = clip(plain, rule, scope=scope, p=p, weights=plain)
        for mine, theirs in zip(ours.grads, want.grads, strict=True):
            assert isinstance(mine, jax.Array)
            assert mine.dtype == dtype
            assert np.asarray(mine).tobytes() == theirs.tobytes()
        assert np.array_equal(ours.norm, want.norm.astype(np.float32))

    def test_the_norm_is_right(self):
        x = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
        x[0] = 1e4
        want = math.sqrt(math.fsum(x.astype(np.float64) ** 2))
        with jax.enable_x64(True):
            assert float(gradclip.norm(jnp.asarray(x))) == pytest.approx(want, rel=1e-14)
        assert float(gradclip.norm(jnp.asarray(x))) == np.float32(want)

    def test_a_norm_beyond_float32_is_finite(self):
        clipped = clip([g(3e38, 3e38)], MaxNorm(1.0))
        assert clipped.finite
        assert clipped.grads[0] == pytest.approx([0.5**0.5] * 2, rel=1e-6)

    def test_the_fields_are_arrays(self):
        for scope in ("global", "tensor", "element"):
            clipped = clip([g(3), g(4)], MaxNorm(1.0), scope=scope)
            for name in ("norm", "limit") + (("coef",) if scope != "element" else ()):
                assert isinstance(getattr(clipped, name), jax.Array)
                assert getattr(clipped, name).shape == ((2,) if scope == "tensor" else ())
                assert getattr(clipped, name).dtype == jnp.float32
            for name in ("clipped", "finite", "skipped"):
                assert getattr(clipped, name).dtype == bool
        assert repr(clip([g(3), g(4)], MaxNorm(1.0))) == "norm 5.0 → 1.0 (×0.2), 2 tensors, clipped"

    def test_what_is_no_gradient_is_refused_by_path(self):
        for leaf, words in (
            (jnp.array([1]), r"'a\.0' is of int32"),
            (jnp.array([True]), r"'a\.0' is of bool"),
            (jax.random.key(0), r"'a\.0' is of key<fry>"),
            (jnp.zeros(1, jnp.float8_e4m3fn), r"'a\.0' is of float8_e4m3fn"),
            (jax.ShapeDtypeStruct((1,), jnp.float32), r"'a\.0' is a ShapeDtypeStruct"),
            (np.ones(1), r"jax \(b\) and numpy \(a\.0\)|numpy \(a\.0\) and jax \(b\)"),
        ):
            with pytest.raises(TypeError, match=words):
                clip({"b": g(1), "a": [leaf]}, MaxNorm(1.0))

    def test_arrays_are_never_written(self):
        with pytest.raises(TypeError, match=r"'w' is a jax array, which cannot be written: use clip\(\)"):
            clip_({"w": g(1)}, MaxNorm(1.0))

    def test_policies(self):
        tree = {"a": g(3, nan), "b": g(4)}
        with pytest.raises(NonFiniteError, match=r"a \(1 NaN of 2\)"):
            clip(tree, MaxNorm(1.0))
        assert clip(tree, MaxNorm(1.0), nonfinite="zero").grads["a"].tolist() == [0, 0]
        skipped = clip(tree, MaxNorm(1.0), nonfinite="skip")
        assert skipped.skipped
        assert skipped.grads["a"] is tree["a"]

    def test_results_stay_on_their_device_and_may_be_donated(self):
        device = jax.devices()[1]
        placed = jax.device_put(g(3, 4), device)
        clipped = clip({"here": g(12), "there": placed}, MaxNorm(1.0)).grads
        assert clipped["there"].device == device
        assert clipped["there"].committed
        assert not clipped["here"].committed
        assert (clipped["here"] + jax.device_put(g(1), device)).device == device
        want = np.array(clipped["there"])
        assert np.array_equal(jax.jit(lambda x: x + 1, donate_argnums=0)(clipped["there"]), want + 1)
        assert placed.tolist() == [3, 4]

    def test_a_given_gradient_may_be_donated_afterwards(self):
        x = normal(1000)
        before = np.array(x)
        clipped = clip(x, MaxNorm(0.1))
        jax.jit(lambda x: x * 0, donate_argnums=0)(x)
        assert clipped.grads == pytest.approx(before * 0.1 / np.linalg.norm(before), rel=1e-6)

    def test_reduce_gets_the_whole_range(self):
        """JAX's own float32 would lose Σg² of large gradients on the way."""

        def twice(power, p):
            assert power.dtype == np.float64
            return power * 2

        assert clip([g(3e30)], MaxNorm(1.0), reduce=twice).norm == pytest.approx(3e30 * 2**0.5)
        assert clip([g(3)], MaxNorm(1.0), reduce=lambda power, p: jnp.asarray(power) + 16).norm == 5

    def test_a_clipper_remembers(self):
        clipper = Clipper(ZScore(2.0, warmup=2))
        for scale in (1.0, 1.1, 0.9, 50.0):
            clipper({"w": g(scale)})
        assert clipper.counts == (4, 1, 0, 0)
        again = Clipper(ZScore(2.0, warmup=2))
        again.load_state_dict(clipper.state_dict())
        assert again({"w": g(50.0)}).grads["w"] == clipper({"w": g(50.0)}).grads["w"]

    def test_state_from_a_traced_step_goes_on_eagerly(self):
        rule = ZScore(1.5, warmup=2)
        state = gradclip.init([g(1)], rule)
        step = jax.jit(lambda x, state: clip(x, rule, state=state, nonfinite="keep").state)
        for scale in (1.0, 1.2, 0.8):
            state = step([g(scale)], state)
        assert clip([g(40)], rule, state=state).limit == pytest.approx(1 + 1.5 * np.std([1.0, 1.2, 0.8]), rel=0.05)


class TestOrder:
    """JAX returns dicts in the order of their keys; norms come in the order of what comes back."""

    def test_norms_pair_with_the_leaves_as_jax_lists_them(self):
        def work(w, b):
            return clip({"w": w, "b": b}, MaxNorm(1.0), scope="tensor", nonfinite="keep")

        for run in (work, jax.jit(work)):
            clipped = run(g(3), g(4))
            assert clipped.norm.tolist() == [4, 3]
            assert list(clipped.grads) == ["b", "w"]
            assert clipped.to_dict()["norm"] == {"b": 4.0, "w": 3.0}

    def test_every_kind_of_result_passes_through_jit(self):
        tree = {"b": g(3, 4), "a": [g(1)]}
        for rule, scope in ((MaxNorm(1.0), None), (Bounds(-1.0, 1.0), None), (Groups({"*": MaxNorm(1.0)}), None)):
            clipped = jax.jit(lambda tree: clip(tree, rule, scope=scope, nonfinite="keep"))(tree)  # noqa: B023
            assert type(clipped) is type(clip(tree, rule, scope=scope))
            assert clipped.to_dict() == clip(tree, rule, scope=scope).to_dict()


class TestTraced:
    def test_raise_is_refused_while_tracing(self):
        with pytest.raises(ValueError, match=r'nonfinite="raise" has to look .* "zero"'):
            jax.jit(lambda x: clip(x, MaxNorm(1.0)))(g(3))
        with pytest.raises(ValueError, match='pass nonfinite="keep"'):
            jax.jit(lambda: clip(g(3), MaxNorm(1.0)))()

    def test_a_tracer_has_no_value_to_show(self):
        shown = []
        jax.jit(lambda x: shown.append(repr(clip(x, MaxNorm(1.0), nonfinite="keep"))))(g(3))
        assert shown == ["Clipped(1 tensor, traced)"]

    def test_a_changing_threshold_does_not_compile_again(self):
        traced = []

        @jax.jit
        def step(x, high, low):
            traced.append(1)
            both = clip(x, MaxNorm(high, min_norm=low), nonfinite="keep").grads
            by_value = clip(x, MaxNorm(high), scope="element", nonfinite="keep")
            return both, by_value.grads, by_value.limit, clip(x, Bounds(-low, high), nonfinite="keep").grads

        for high, low in ((1.0, 0.5), (2.0, 0.25), (10.0, 7.0)):
            both, by_value, limit, within = step(g(3, 4), jnp.asarray(high), jnp.asarray(low))
            assert float(gradclip.norm(both)) == pytest.approx(min(max(5.0, low), high), rel=1e-6)
            assert by_value.tolist() == [min(3, high), min(4, high)]
            assert limit == high
            assert within.tolist() == [min(3, high), min(4, high)]
        assert len(traced) == 1

    def test_thresholds_of_every_kind_eagerly(self):
        for limit in (1.0, np.float32(1), jnp.asarray(1.0), np.asarray(1.0), jnp.asarray(1, jnp.bfloat16)):
            assert clip(g(3, 4), MaxNorm(limit)).grads == pytest.approx([0.6, 0.8], rel=1e-6)
        with pytest.raises(ValueError, match="max_norm must be a number > 0"):
            clip(g(3), MaxNorm(jnp.asarray(-1.0)))

    def test_a_threshold_is_traced_where_the_gradients_are_not(self):
        x = g(3, 4)
        assert jax.jit(lambda c: clip(x, MaxNorm(c), nonfinite="keep").grads)(2.0) == pytest.approx([1.2, 1.6], rel=1e-6)
        slope = jax.grad(lambda c: clip(x, MaxNorm(c), nonfinite="keep").grads.sum())(2.0)
        assert slope == pytest.approx(7 / 5, rel=1e-6)
        assert clip(x, MaxNorm(1.0)).grads == pytest.approx([0.6, 0.8], rel=1e-6), "at rest again"

    def test_a_norm_that_is_known_already(self):
        x = g(3, 4)
        for given in (10.0, jnp.asarray(10.0), np.float64(10)):
            assert clip(x, MaxNorm(1.0), norm=given).grads == pytest.approx([0.3, 0.4], rel=1e-6)
            work = jax.jit(lambda x: clip(x, MaxNorm(1.0), norm=given, nonfinite="keep").grads)  # noqa: B023
            assert work(x) == pytest.approx([0.3, 0.4], rel=1e-6)
        traced = jax.jit(lambda n: clip(x, MaxNorm(1.0), norm=n, nonfinite="keep").grads)
        assert traced(10.0) == pytest.approx([0.3, 0.4], rel=1e-6)
        tiny = jax.jit(lambda x: clip(x, MaxNorm(1e-5), norm=1e35, nonfinite="keep").grads)
        assert tiny(g(1e35)) == pytest.approx([1e-5], rel=1e-6)
        with pytest.raises(TypeError, match="norm= must be real numbers"):
            jax.jit(lambda n: clip(x, MaxNorm(1.0), norm=n, nonfinite="keep").grads)(1j)

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_subnormals_keep_their_bits(self, dtype):
        """XLA takes them for 0 in every product, also in one with 1."""
        smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        x = jnp.asarray(np.array([3 * smallest, 1.0, -smallest], dtype))
        work = jax.jit(lambda x, rule: clip(x, rule, nonfinite="zero").grads, static_argnums=1)
        for rule in (MaxNorm(2.0), MaxNorm(2.0, min_norm=0.5), Bounds(-1.0, 1.0)):
            assert np.asarray(work(x, rule)).tobytes() == np.asarray(x).tobytes()

    def test_float32_is_accurate_enough(self):
        random = np.random.default_rng(0)
        for x in (random.standard_normal(1 << 22), np.full(1 << 22, 0.1), np.full(1 << 20, 1e-19), np.full(1 << 20, 3e22)):
            x = x.astype(np.float32)
            want = np.linalg.norm(x.astype(np.float64))
            assert float(jax.jit(gradclip.norm)(x)) == pytest.approx(want, rel=1e-6)

    def test_small_values_beside_larger_ones_are_not_lost(self):
        """Their squares are below float32's range, and there are many of them."""
        x = np.full(1 << 20, 1e-19, np.float32)
        x[0] = 5e-16
        assert float(jax.jit(gradclip.norm)(x)) == pytest.approx(np.linalg.norm(x.astype(np.float64)), rel=1e-6)

    @pytest.mark.parametrize("p", [0.5, 1, 2, 3, inf])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_norms_and_types(self, p, dtype):
        x = normal(40, 3, dtype=dtype) * 3
        want = gradclip.norm(np.asarray(x), p)
        assert float(jax.jit(lambda x: gradclip.norm(x, p))(x)) == pytest.approx(float(want), rel=2e-6)
        clipped = jax.jit(lambda x: clip(x, MaxNorm(1.0), p=p, nonfinite="keep").grads)(x)
        assert clipped.dtype == dtype
        assert float(gradclip.norm(clipped, p)) == pytest.approx(1.0, rel=2e-6 if dtype in ("float32", "complex64") else 0.01)

    def test_units(self):
        x = normal(4, 5, 3) * 3
        work = jax.jit(lambda x: gradclip.norm([x, x[0, 0]], scope=Unit(1)))
        want = gradclip.norm([np.asarray(x), np.asarray(x[0, 0])], scope=Unit(1))
        assert np.asarray(work(x)) == pytest.approx(want, rel=1e-6)
        assert jax.jit(lambda x: gradclip.norm(x, scope="unit"))(x).shape == (3,)
        extreme = jnp.stack([x * 1e-25, x * 1e20])
        want = gradclip.norm(np.asarray(extreme), scope=Unit(0))
        assert np.asarray(jax.jit(lambda x: gradclip.norm(x, scope=Unit(0)))(extreme)) == pytest.approx(want, rel=1e-6)

    def test_complex_values_by_their_modulus(self):
        x = g(3 + 4j, 0.3 - 0.4j, 12j, dtype=jnp.complex64)
        work = jax.jit(lambda x: clip(x, MaxNorm(1.0), scope="element", nonfinite="keep"))
        assert np.asarray(work(x).grads) == pytest.approx(np.array([0.6 + 0.8j, 0.3 - 0.4j, 1j]), rel=1e-6)
        assert work(x).clipped
        assert not work(x * 0.05).clipped
        with pytest.raises(TypeError, match="is complex"):
            jax.jit(lambda x: clip(x, Bounds(-1.0, 1.0), nonfinite="keep"))(x)

    def test_in_a_loop_with_a_state(self):
        rule = Median(window=8, warmup=3)
        scales = np.float32([1, 1.1, 0.9, 1, 40, nan, 1.05, 50])

        def body(state, scale):
            clipped = clip({"w": g(3, 4) * scale}, rule, state=state, nonfinite="skip")
            return clipped.state, (clipped.limit, clipped.skipped)

        for run in (jax.lax.scan, jax.jit(jax.lax.scan, static_argnums=0)):
            limits, skipped = run(body, gradclip.init({"w": g(0, 0)}, rule), scales)[1]
            clipper = Clipper(rule, nonfinite="skip")
            want = [clipper({"w": np.float64([3, 4]) * scale}) for scale in scales]
            assert np.asarray(limits) == pytest.approx(np.array([float(x.limit) for x in want]), rel=1e-5)
            assert skipped.tolist() == [bool(x.skipped) for x in want]

    def test_strict_promotion(self):
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            for rule, scope in ((MaxNorm(1.0), None), (MaxNorm(1.0), "tensor"), (Bounds(-1.0, 1.0), None), (ZScore(), None)):
                tree = [normal(3, 4), normal(3, dtype=np.float16)]
                state = gradclip.init(tree, rule)
                work = jax.jit(lambda tree: clip(tree, rule, scope=scope, state=state, nonfinite="zero"))  # noqa: B023
                assert work(tree).finite

    def test_an_argument_that_is_static(self):
        work = jax.jit(lambda x, rule: clip(x, rule, nonfinite="keep").grads, static_argnames="rule")
        assert work(g(3, 4), rule=MaxNorm(1.0)) == pytest.approx([0.6, 0.8], rel=1e-6)


def directional(f, x, along):
    """The derivative by differences, in float64 NumPy."""
    step = 1e-5
    return (f(x + step * along) - f(x - step * along)) / (2 * step)


class TestDerivatives:
    @pytest.mark.parametrize("jit", [False, True])
    @pytest.mark.parametrize(
        ("rule", "scope"), [(MaxNorm(1.0), None), (MaxNorm(9.0, min_norm=8.0), None), (MaxNorm(1.0), "tensor")]
    )
    @pytest.mark.parametrize("p", [1, 2, 3, inf])
    def test_through_the_clip(self, jit, rule, scope, p):
        x, along = np.array([0.3, -0.4, 1.2]), np.array([0.2, 1.0, -0.5])
        weights = np.array([1.0, 2.0, -3.0])

        def loss(x):
            return (clip(x, rule, scope=scope, p=p, nonfinite="keep").grads * weights.astype(x.dtype)).sum()

        slope = jax.grad(loss)
        found = (jax.jit(slope) if jit else slope)(jnp.asarray(x, jnp.float32))
        assert float(found @ along.astype(np.float32)) == pytest.approx(directional(loss, x, along), rel=1e-4)

    @pytest.mark.parametrize("jit", [False, True])
    @pytest.mark.parametrize("p", [0.5, 1, 1.5, 2, 3, inf])
    def test_at_zero_the_clip_is_the_identity_and_the_norm_is_flat(self, jit, p):
        for rule in (MaxNorm(1.0), MaxNorm(2.0, min_norm=1.0)):
            slope = jax.jacobian(lambda x: clip(x, rule, p=p, nonfinite="keep").grads)  # noqa: B023
            assert (jax.jit(slope) if jit else slope)(jnp.zeros(3)).tolist() == np.eye(3).tolist()
        flat = jax.grad(lambda x: gradclip.norm(x, p))
        assert (jax.jit(flat) if jit else flat)(jnp.zeros(3)).tolist() == [0, 0, 0]

    def test_beside_zeros_and_of_extreme_values(self):
        slope = jax.grad(lambda x: gradclip.norm(x))
        assert slope(g(3, 0, 4)) == pytest.approx([0.6, 0, 0.8], rel=1e-6)
        for scale in (1e-25, 1e25, 1e38):
            for run in (slope, jax.jit(slope)):
                assert run(g(3, 0, 4) * (scale / 5)) == pytest.approx([0.6, 0, 0.8], rel=1e-5)
        within = jax.jit(jax.jacobian(lambda x: clip(x, MaxNorm(inf), nonfinite="keep").grads))
        assert within(g(3, 4)).tolist() == [[1, 0], [0, 1]]

    def test_the_derivative_of_values_is_one_inside_and_zero_outside(self):
        for rule in (MaxNorm(1.0), Bounds(-2.0, 1.0)):
            slope = jax.grad(lambda x: clip(x, rule, scope="element", nonfinite="keep").grads.sum())  # noqa: B023
            assert slope(g(0.5, 3, 0)).tolist() == [1, 0, 1]

    def test_raise_can_look_where_nothing_is_compiled(self):
        slope = jax.grad(lambda x: clip(x, MaxNorm(1.0)).grads.sum())
        assert np.isfinite(np.asarray(slope(g(3, 4)))).all()
        with pytest.raises(NonFiniteError):
            slope(g(3, nan))

    def test_batches_have_norms_of_their_own(self):
        x = normal(5, 4) * np.float32([[1e-25], [1], [0], [1e25], [1e-3]])
        for run in (jax.vmap, lambda f: jax.jit(jax.vmap(f))):
            norms, clipped = run(lambda x: clip(x, MaxNorm(0.5), nonfinite="keep")[1::-1])(x)
            want = [clip(np.asarray(row), MaxNorm(0.5)) for row in x]
            assert np.asarray(norms) == pytest.approx([float(one.norm) for one in want], rel=1e-6)
            assert np.asarray(clipped) == pytest.approx(np.stack([one.grads for one in want]), rel=1e-6)

    def test_per_example_gradients(self):
        def loss(w, x):
            return jnp.sin(w @ x)

        w, xs = normal(4), normal(6, 4) * 9
        work = jax.jit(jax.vmap(lambda x: clip(jax.grad(loss)(w, x), MaxNorm(1.0), nonfinite="keep").grads))
        assert np.linalg.norm(np.asarray(work(xs)), axis=1) == pytest.approx(
            np.minimum(np.linalg.norm(np.asarray(jax.vmap(lambda x: jax.grad(loss)(w, x))(xs)), axis=1), 1), rel=1e-5
        )


class TestX64:
    @pytest.fixture(autouse=True)
    def x64(self):
        with jax.enable_x64(True):
            yield

    @pytest.mark.parametrize("dtype", ["float64", "float32", "complex128", "bfloat16"])
    @pytest.mark.parametrize(("scope", "p"), [("global", 2), ("tensor", 3), ("global", inf), ("element", 2)])
    def test_norms_are_float64(self, dtype, scope, p):
        x = normal(50, dtype=dtype) * (1 if dtype == "bfloat16" else 3)
        want = clip([np.asarray(x)], MaxNorm(0.5), scope=scope, p=p)

        def work(x):
            return clip([x], MaxNorm(0.5), scope=scope, p=p, nonfinite="keep")

        for got in (work(x), jax.jit(work)(x)):
            assert got.norm.dtype == np.float64
            assert np.asarray(got.norm) == pytest.approx(want.norm, rel=1e-14)
            wide = dtype in ("float64", "complex128")
            mine, theirs = (np.asarray(grads[0]).astype(np.complex128) for grads in (got.grads, want.grads))
            assert mine == pytest.approx(theirs, rel=1e-14 if wide else 2.0**-8 if dtype == "bfloat16" else 2.0**-22)

    @pytest.mark.parametrize("values", [[1e200] * 4, [1e-200, 3e-190], [1e-320, 1e-310]])
    def test_the_range(self, values):
        x = jnp.asarray(values)
        want = gradclip.norm(np.array(values))
        assert float(gradclip.norm(x)) == pytest.approx(float(want), rel=1e-12)
        if values[0] > 1e-300:  # below, XLA has zeros only
            assert float(jax.jit(gradclip.norm)(x)) == pytest.approx(float(want), rel=1e-12)
            assert float(gradclip.norm(jax.jit(lambda x: clip(x, MaxNorm(1.0, min_norm=1.0), nonfinite="keep").grads)(x))) == (
                pytest.approx(1.0, rel=1e-6)
            )

    def test_state_keeps_its_type(self):
        rule = ZScore(2.0, warmup=2)
        state = gradclip.init(g(1.0), rule)
        body = lambda state, x: (clip(x, rule, state=state, nonfinite="keep").state, 0)  # noqa: E731
        after = jax.lax.scan(body, state, jnp.ones((5, 2)))[0]
        assert {x.dtype for x in after} == {np.dtype("float64")}


def test_x64_is_off_again():
    assert backend._wide() == np.float32
