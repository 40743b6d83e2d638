"""What is TensorFlow's own: memory, tapes, tf.function and XLA, slices of embeddings, variables, unknown shapes."""

from math import inf, nan

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import gradclip
from gradclip import Bounds, Clipper, Groups, MaxNorm, Median, NonFiniteError, Ratio, Unit, ZScore, clip, clip_
from gradclip.backends import tensorflow as backend

DTYPES = ["float64", "float32", "float16", "bfloat16", "complex64"]
WAYS = {"function": tf.function, "xla": lambda f: tf.function(f, jit_compile=True)}


@pytest.fixture(params=WAYS)
def traced(request):
    return WAYS[request.param]


def g(*values, dtype=tf.float32):
    return tf.constant(values, dtype)


def normal(*shape, dtype="float32"):
    return tf.constant(np.random.default_rng(0).standard_normal(shape).astype(dtype))


def slices(rows, values, height=5):
    return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(rows, tf.int64), tf.constant([height, 2], tf.int64))


class TestEager:
    def test_not_clipped_means_the_very_same_tensors(self):
        tree = {"a": g(3, 4), "b": [g(12, dtype=tf.bfloat16), None], "c": slices([1], [[0.0, 0.0]])}
        for rule, scope in ((MaxNorm(13.0), "global"), (MaxNorm(12.0), "tensor"), (Bounds(-1.0, 12.0), "element")):
            clipped = clip(tree, rule, scope=scope)
            assert not clipped.clipped
            assert clipped.grads["a"] is tree["a"]
            assert clipped.grads["b"][0] is tree["b"][0]
            assert clipped.grads["b"][1] is None

    def test_only_what_is_clipped_is_new(self):
        small, large = g(0.1), g(5)
        out = clip([small, large], MaxNorm(1.0), scope="tensor").grads
        assert out[0] is small
        assert out[1].numpy().tolist() == [1]
        assert large.numpy().tolist() == [5]

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("scope", "p"), [("global", 2), ("tensor", 1), ("unit", 3), ("global", inf), ("element", 2)])
    def test_numbers_are_those_of_numpy(self, dtype, scope, p):
        """To the bit, since the same core does the work."""
        tree = [normal(30, 7, dtype=dtype), normal(5, dtype=dtype)]
        plain = [np.array(x) for x in tree]
        rule = Ratio(0.1) if scope == "unit" else MaxNorm(0.5)
        ours = clip(tree, rule, scope=scope, p=p, weights=tree)
        want = clip(plain, rule, scope=Unit(-1) if scope == "unit" else scope, p=p, weights=plain)
        for mine, theirs in zip(ours.grads, want.grads, strict=True):
            assert tf.is_tensor(mine)
            assert mine.dtype == dtype
            assert mine.numpy().tobytes() == theirs.tobytes()
        assert np.array_equal(ours.norm, want.norm)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 0, 2), (5,)])
    def test_every_shape(self, dtype, shape):
        """Also the single bfloat16, of which NumPy finds no memory."""
        x = tf.ones(shape, dtype) * 3
        clipped = clip([x], MaxNorm(1.0))
        count = int(tf.size(x))
        assert float(clipped.norm) == pytest.approx(3 * count**0.5)
        assert clipped.grads[0].shape == shape
        assert clipped.grads[0].dtype == dtype
        assert float(gradclip.norm(clipped.grads)) == pytest.approx(min(count, 1), rel=0.01)

    def test_results_live_as_long_as_they_are_used(self):
        """Their memory is NumPy's, handed over: nobody else may free it, or write it."""
        kept = [clip([normal(1000, 3)], MaxNorm(0.1)).grads[0] for _ in range(20)]
        want = kept[0].numpy().copy()
        for _ in range(50):
            np.random.default_rng(1).standard_normal((1000, 3))
        assert all(np.array_equal(x.numpy(), want) for x in kept)
        variable = tf.Variable(kept[0])
        variable.assign_add(tf.ones((1000, 3)))
        assert np.array_equal(kept[0].numpy(), want)

    def test_the_fields_are_tensors_or_numbers_that_tensorflow_takes(self):
        for scope in ("global", "tensor", "element"):
            clipped = clip([g(3), g(4)], MaxNorm(1.0), scope=scope)
            for name in ("norm", "limit"):
                assert tf.convert_to_tensor(getattr(clipped, name)).shape == ((2,) if scope == "tensor" else ())
            assert tf.cast(clipped.clipped, tf.float32).numpy() == 1
        assert repr(clip([g(3), g(4)], MaxNorm(1.0))) == "norm 5.0 → 1.0 (×0.2), 2 tensors, clipped"

    def test_what_is_no_gradient_is_refused_by_path(self):
        for leaf, words in (
            (tf.constant([1]), r"'a\.0' is of int32"),
            (tf.constant([True]), r"'a\.0' is of bool"),
            (tf.constant(["text"]), r"'a\.0' is of string"),
            (tf.ragged.constant([[1.0], [2.0, 3.0]]), r"'a\.0' is a RaggedTensor: gradients are dense tensors or"),
            (tf.sparse.from_dense([[1.0]]), r"'a\.0' is a SparseTensor: gradients are dense tensors or"),
            (np.ones(1), r"tensorflow \(b\) and numpy \(a\.0\)"),
        ):
            with pytest.raises(TypeError, match=words):
                clip({"b": g(1), "a": [leaf]}, MaxNorm(1.0))

    def test_tensors_are_never_written(self):
        with pytest.raises(TypeError, match=r"'w' is TensorFlow's, whose tensors cannot be written: use clip\(\)"):
            clip_({"w": g(1)}, MaxNorm(1.0))
        with pytest.raises(TypeError, match=r"'w' is TensorFlow's"):
            clip_({"w": tf.Variable([1.0])}, MaxNorm(1.0))

    def test_a_variable_is_read_like_a_tensor(self):
        sums = tf.Variable([3.0, 4.0])
        out = clip([sums], MaxNorm(1.0)).grads[0]
        assert out.numpy() == pytest.approx([0.6, 0.8])
        same = clip([sums], MaxNorm(9.0)).grads[0]
        sums.assign([1.0, 1.0])
        assert np.asarray(same).tolist() in ([3, 4], [1, 1])
        assert out.numpy() == pytest.approx([0.6, 0.8])

    def test_policies(self):
        tree = {"a": g(3, nan), "b": g(4)}
        with pytest.raises(NonFiniteError, match=r"a \(1 NaN of 2\)"):
            clip(tree, MaxNorm(1.0))
        assert clip(tree, MaxNorm(1.0), nonfinite="zero").grads["a"].numpy().tolist() == [0, 0]
        skipped = clip(tree, MaxNorm(1.0), nonfinite="skip")
        assert skipped.skipped
        assert skipped.grads["a"] is tree["a"]

    @pytest.mark.parametrize("limit", [1.0, np.float32(1), tf.constant(1.0), tf.constant(1.0, tf.bfloat16), tf.Variable(1.0)])
    def test_thresholds_of_every_kind(self, limit):
        assert clip(g(3, 4), MaxNorm(limit)).grads.numpy() == pytest.approx([0.6, 0.8], rel=1e-6)

    @pytest.mark.parametrize("limit", [tf.constant(-1.0), tf.constant(nan), tf.constant([1.0, 2.0]), tf.constant("1")])
    def test_thresholds_that_are_none(self, limit):
        with pytest.raises((TypeError, ValueError), match="max_norm must be a number"):
            clip(g(3), MaxNorm(limit))

    @pytest.mark.parametrize("given", [10.0, np.float64(10), tf.constant(10.0), tf.constant(10.0, tf.bfloat16)])
    def test_a_norm_that_is_known_already(self, given):
        assert clip(g(3, 4), MaxNorm(1.0), norm=given).grads.numpy() == pytest.approx([0.3, 0.4], rel=1e-6)
        graph = tf.function(lambda x: clip(x, MaxNorm(1.0), norm=given, nonfinite="keep").grads)
        assert graph(g(3, 4)).numpy() == pytest.approx([0.3, 0.4], rel=1e-6)

    def test_a_norm_that_is_no_number(self):
        with pytest.raises(TypeError, match="norm= must be real numbers"):
            clip(g(3), MaxNorm(1.0), norm=tf.constant(1j))

    def test_a_clipper_remembers(self):
        clipper = Clipper(ZScore(2.0, warmup=2))
        for scale in (1.0, 1.1, 0.9, 50.0):
            clipper({"w": g(scale)})
        assert clipper.counts == (4, 1, 0, 0)
        again = Clipper(ZScore(2.0, warmup=2))
        again.load_state_dict(clipper.state_dict())
        assert again({"w": g(50.0)}).grads["w"] == clipper({"w": g(50.0)}).grads["w"]

    def test_on_two_devices_of_the_cpu(self):
        """Tensors with a device of their own go the same way as all others."""
        with tf.device("/CPU:0"):
            placed = g(12)
        assert clip([g(3, 4), placed], MaxNorm(1.0)).norm == 13


class TestSlices:
    """Embeddings: rows that occur twice are one row of the gradient that is applied."""

    def test_repeated_rows_are_merged_for_the_norm(self):
        grad = slices([2, 0, 2], [[3.0, 0.0], [0.0, 12.0], [1.0, 3.0]])
        clipped = clip({"table": grad, "w": g(0.0)}, MaxNorm(6.5))
        assert clipped.norm == 13
        out = clipped.grads["table"]
        assert isinstance(out, tf.IndexedSlices)
        assert tf.convert_to_tensor(out).numpy() == pytest.approx(tf.convert_to_tensor(grad).numpy() / 2)
        assert out.dense_shape.numpy().tolist() == [5, 2]

    def test_what_a_tape_gives(self, traced):
        table = tf.Variable(tf.reshape(tf.range(8.0), (4, 2)))

        def step(rows):
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(tf.gather(table, rows) ** 2)
            return clip([tape.gradient(value, table)], MaxNorm(1.0), nonfinite="keep")

        rows = tf.constant([3, 1, 3])
        dense = np.zeros((4, 2))
        np.add.at(dense, [3, 1, 3], 2 * table.numpy()[[3, 1, 3]])
        for run in (step, traced(step)):
            clipped = run(rows)
            assert float(clipped.norm) == pytest.approx(np.linalg.norm(dense), rel=1e-6)
            assert tf.convert_to_tensor(clipped.grads[0]).numpy() == pytest.approx(dense / np.linalg.norm(dense), rel=1e-6)

    @pytest.mark.parametrize("scope", ["tensor", "element"])
    def test_in_other_scopes(self, scope):
        grad = slices([2, 2], [[3.0, 0.0], [0.0, 4.0]])
        out = tf.convert_to_tensor(clip([grad], MaxNorm(1.0), scope=scope).grads[0]).numpy()[2]
        assert out == pytest.approx([0.6, 0.8] if scope == "tensor" else [1, 1])

    def test_without_rows(self):
        empty = slices(np.zeros(0, np.int64), np.zeros((0, 2)))
        assert clip([empty, g(3.0)], MaxNorm(1.0)).norm == 3
        assert tf.function(lambda: clip([empty], MaxNorm(1.0), nonfinite="zero").norm)() == 0

    def test_not_finite(self):
        with pytest.raises(NonFiniteError, match=r"table \(1 NaN of 2\)"):
            clip({"table": slices([1, 1], [[nan, 1.0], [1.0, 1.0]])}, MaxNorm(1.0))


class TestTraced:
    def test_raise_is_refused_while_tracing(self, traced):
        with pytest.raises(ValueError, match=r'nonfinite="raise" has to look .* "zero"'):
            traced(lambda x: clip(x, MaxNorm(1.0)))(g(3))

    def test_a_symbol_has_no_value_to_show(self):
        shown = []
        tf.function(lambda x: shown.append(repr(clip(x, MaxNorm(1.0), nonfinite="keep"))))(g(3))
        assert shown == ["Clipped(1 tensor, traced)"]

    def test_one_trace_for_every_threshold(self, traced):
        traces = []

        @traced
        def step(x, high, low):
            traces.append(1)
            both = clip(x, MaxNorm(high, min_norm=low), nonfinite="keep").grads
            by_value = clip(x, MaxNorm(high), scope="element", nonfinite="keep")
            return both, by_value.grads, by_value.limit, clip(x, Bounds(-low, high), nonfinite="keep").grads

        for high, low in ((1.0, 0.5), (2.0, 0.25), (10.0, 7.0)):
            both, by_value, limit, within = step(g(3, 4), tf.constant(high), tf.constant(low))
            assert float(gradclip.norm(both)) == pytest.approx(min(max(5.0, low), high), rel=1e-6)
            assert by_value.numpy().tolist() == [min(3, high), min(4, high)]
            assert limit == high
            assert within.numpy().tolist() == [min(3, high), min(4, high)]
        assert len(traces) == 1

    def test_a_threshold_in_a_variable_is_never_stale(self, traced):
        limit = tf.Variable(1.0)
        step = traced(lambda x: clip(x, MaxNorm(tf.identity(limit)), nonfinite="zero").grads)
        for value in (1.0, 2.0, 0.5):
            limit.assign(value)
            assert step(g(3, 4)).numpy() == pytest.approx([0.6 * value, 0.8 * value], rel=1e-6)
        assert step.experimental_get_tracing_count() == 1

    def test_one_trace_for_shapes_that_are_not_known(self):
        @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec(None)])
        def step(x, y):
            clipped = clip([x, y], MaxNorm(1.0), nonfinite="zero")
            return clipped.norm, clipped.grads

        for rows in (1, 7, 5000):
            x, y = np.full((rows, 3), 2.0, np.float32), np.full((2, rows), 3.0, np.float32)
            norm, grads = step(x, y)
            want = np.sqrt(rows * 12 + rows * 18)
            assert float(norm) == pytest.approx(want, rel=1e-6)
            assert grads[0].numpy() == pytest.approx(x / want, rel=1e-6)
        assert step.experimental_get_tracing_count() == 1

    def test_the_unit_scope_has_to_know_the_shapes(self):
        step = tf.function(lambda x: gradclip.norm(x, scope="unit"), input_signature=[tf.TensorSpec([None, 3])])
        with pytest.raises(ValueError, match=r'scope "unit" has to know every shape when it is traced.*set_shape'):
            step(tf.ones((2, 3)))

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_subnormals_keep_their_bits_where_nothing_is_clipped(self, dtype, traced):
        smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        x = tf.constant(np.array([3 * smallest, 1.0, -smallest], dtype))
        for rule in (MaxNorm(2.0), MaxNorm(2.0, min_norm=0.5)):
            out = traced(lambda x: clip(x, rule, nonfinite="keep").grads)(x)  # noqa: B023
            assert out.numpy().tobytes() == x.numpy().tobytes()

    def test_float32_is_accurate_enough(self, traced):
        random = np.random.default_rng(0)
        for x in (random.standard_normal(1 << 22), np.full(1 << 22, 0.1), np.full(1 << 20, 1e-19), np.full(1 << 20, 3e22)):
            x = x.astype(np.float32)
            want = np.linalg.norm(x.astype(np.float64))
            assert float(traced(gradclip.norm)(x)) == pytest.approx(want, rel=1e-6)

    @pytest.mark.parametrize("p", [0.5, 1, 2, 3, inf])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_norms_and_types(self, p, dtype, traced):
        x = normal(40, 3, dtype=dtype) * 3
        want = gradclip.norm(x.numpy(), p)
        assert float(traced(lambda x: gradclip.norm(x, p))(x)) == pytest.approx(float(want), rel=2e-6)
        clipped = traced(lambda x: clip(x, MaxNorm(1.0), p=p, nonfinite="keep").grads)(x)
        assert clipped.dtype == dtype
        assert float(gradclip.norm(clipped, p)) == pytest.approx(1.0, rel=0.01 if dtype in ("float16", "bfloat16") else 2e-6)

    def test_units(self, traced):
        x = normal(4, 5, 3) * 3
        want = gradclip.norm([x.numpy(), x[0, 0].numpy()], scope=Unit(1))
        assert traced(lambda x: gradclip.norm([x, x[0, 0]], scope=Unit(1)))(x).numpy() == pytest.approx(want, rel=1e-6)
        extreme = tf.stack([x * 1e-25, x * 1e20])
        want = gradclip.norm(extreme.numpy(), scope=Unit(0))
        assert traced(lambda x: gradclip.norm(x, scope=Unit(0)))(extreme).numpy() == pytest.approx(want, rel=1e-6)

    def test_complex_values_by_their_modulus(self, traced):
        x = g(3 + 4j, 0.3 - 0.4j, 12j, dtype=tf.complex64)
        work = traced(lambda x: clip(x, MaxNorm(1.0), scope="element", nonfinite="keep"))
        assert work(x).grads.numpy() == pytest.approx(np.array([0.6 + 0.8j, 0.3 - 0.4j, 1j]), rel=1e-6)
        assert work(x).clipped
        assert not work(x * 0.05).clipped
        with pytest.raises(TypeError, match="is complex"):
            traced(lambda x: clip(x, Bounds(-1.0, 1.0), nonfinite="keep"))(x)

    @pytest.mark.parametrize(
        ("rule", "scope"), [(MaxNorm(1.0), None), (Bounds(-1.0, 1.0), None), (Groups({"*": MaxNorm(1.0)}), None)]
    )
    def test_every_kind_of_result_passes_through(self, rule, scope, traced):
        tree = {"b": g(3, 4), "a": [g(1)]}
        clipped = traced(lambda tree: clip(tree, rule, scope=scope, nonfinite="keep"))(tree)
        assert type(clipped) is type(clip(tree, rule, scope=scope))
        assert clipped.to_dict() == clip(tree, rule, scope=scope).to_dict()

    def test_in_a_loop_with_a_state(self, traced):
        """A tf.while_loop, whose variables may not change their type."""
        rule = Median(window=8, warmup=3)
        scales = np.float32([1, 1.1, 0.9, 1, 40, nan, 1.05, 50])
        first = tuple(tf.constant(entry, tf.float64) for entry in gradclip.init([g(0, 0)], rule))

        def run(scales):
            def body(i, state, limits):
                clipped = clip([g(3, 4) * scales[i]], rule, state=state, nonfinite="skip")
                return i + 1, clipped.state, limits.write(i, clipped.limit)

            limits = tf.TensorArray(tf.float64, len(scales))
            return tf.while_loop(lambda i, *_: i < len(scales), body, (0, first, limits))[2].stack()

        clipper = Clipper(rule, nonfinite="skip")
        want = [float(clipper([np.float64([3, 4]) * scale]).limit) for scale in scales]
        assert traced(run)(tf.constant(scales)).numpy() == pytest.approx(np.array(want), rel=1e-5)

    def test_a_state_in_variables(self, traced):
        rule = ZScore(1.5, warmup=2)
        kept = tuple(tf.Variable(tf.constant(entry, tf.float64)) for entry in gradclip.init([g(1)], rule))

        def step(x):
            clipped = clip([x], rule, state=tuple(map(tf.identity, kept)), nonfinite="keep")
            for variable, value in zip(kept, clipped.state, strict=True):
                variable.assign(value)
            return clipped.limit

        step = traced(step)
        clipper = Clipper(rule)
        for scale in (1.0, 1.2, 0.8, 40.0):
            assert float(step(g(scale))) == pytest.approx(float(clipper([g(scale)]).limit), rel=1e-6)

    def test_autograph_reads_the_flags(self):
        @tf.function
        def step(x):
            clipped = clip([x], MaxNorm(1.0), nonfinite="skip")
            if clipped.skipped:
                return tf.constant("left out")
            return tf.constant("clipped") if clipped.clipped else tf.constant("as it was")

        for x, want in ((g(nan), b"left out"), (g(3), b"clipped"), (g(0.5), b"as it was")):
            assert step(x).numpy() == want


def directional(f, x, along):
    """The derivative by differences, in float64 NumPy."""
    step = 1e-5
    return (f(x + step * along) - f(x - step * along)) / (2 * step)


def slope(f, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = f(x)
    return tape.gradient(value, x)


def matrix(f, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = f(x)
    return tape.jacobian(value, x)


class TestDerivatives:
    @pytest.mark.parametrize("run", [lambda f: f, tf.function])
    @pytest.mark.parametrize(
        ("rule", "scope"), [(MaxNorm(1.0), None), (MaxNorm(9.0, min_norm=8.0), None), (MaxNorm(1.0), "tensor")]
    )
    @pytest.mark.parametrize("p", [1, 2, 3, inf])
    def test_through_the_clip(self, run, rule, scope, p):
        x, along = np.array([0.3, -0.4, 1.2]), np.array([0.2, 1.0, -0.5])
        weights = np.array([1.0, 2.0, -3.0])

        def numpys(x):
            return (clip(x, rule, scope=scope, p=p).grads * weights).sum()

        def loss(x):
            return tf.reduce_sum(clip(x, rule, scope=scope, p=p, nonfinite="keep").grads * tf.constant(weights, x.dtype))

        found = run(lambda x: slope(loss, x))(tf.constant(x, tf.float32))
        assert float(found.numpy() @ along) == pytest.approx(directional(numpys, x, along), rel=1e-4)

    @pytest.mark.parametrize("run", [lambda f: f, tf.function])
    @pytest.mark.parametrize("p", [0.5, 1, 1.5, 2, 3, inf])
    def test_at_zero_the_clip_is_the_identity_and_the_norm_is_flat(self, run, p):
        for rule in (MaxNorm(1.0), MaxNorm(2.0, min_norm=1.0)):
            found = run(lambda x: matrix(lambda x: clip(x, rule, p=p, nonfinite="keep").grads, x))(tf.zeros(3))  # noqa: B023
            assert found.numpy().tolist() == np.eye(3).tolist()
        flat = run(lambda x: slope(lambda x: gradclip.norm(x, p), x))(tf.zeros(3))
        assert flat.numpy().tolist() == [0, 0, 0]

    def test_beside_zeros_and_of_extreme_values(self):
        for scale in (1e-25, 1.0, 1e25):
            found = slope(gradclip.norm, g(3, 0, 4) * (scale / 5))
            assert found.numpy() == pytest.approx([0.6, 0, 0.8], rel=1e-5)

    def test_the_derivative_of_values_is_one_inside_and_zero_outside(self):
        for rule in (MaxNorm(1.0), Bounds(-2.0, 1.0)):
            found = slope(lambda x: tf.reduce_sum(clip(x, rule, scope="element").grads), g(0.5, 3, 0))  # noqa: B023
            assert found.numpy().tolist() == [1, 0, 1]

    def test_raise_can_look_where_a_tape_records(self):
        with pytest.raises(NonFiniteError):
            slope(lambda x: tf.reduce_sum(clip(x, MaxNorm(1.0)).grads), g(3, nan))

    def test_per_example_gradients(self):
        """tf.vectorized_map over the examples."""
        xs = normal(6, 4) * 9
        found = tf.vectorized_map(lambda x: clip(x, MaxNorm(1.0), nonfinite="keep").grads, xs).numpy()
        norms = np.linalg.norm(xs.numpy(), axis=1, keepdims=True)
        assert found == pytest.approx(xs.numpy() / np.maximum(norms, 1), rel=1e-5)


class TestMemory:
    def test_eager_tensors_go_through_the_core(self, monkeypatch):
        """As memory, without one operation of TensorFlow."""
        monkeypatch.setattr(backend, "_power", None)
        monkeypatch.setattr(backend, "_products", None)
        assert clip([normal(100, 3)], MaxNorm(0.1)).clipped
        with tf.GradientTape(), pytest.raises(TypeError):
            clip([tf.Variable([1.0]) * 2], MaxNorm(0.1))

    def test_a_result_may_be_the_next_gradient(self):
        out = clip([normal(999)], MaxNorm(1.0)).grads
        for _ in range(5):
            out = clip([out[0] * 3], MaxNorm(1.0)).grads
        assert float(gradclip.norm(out)) == pytest.approx(1.0, rel=1e-6)
