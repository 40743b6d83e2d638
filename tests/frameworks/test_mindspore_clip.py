"""`gradclip.clip` on MindSpore's tensors in PyNative mode, held against the same call on NumPy arrays."""

import math
import subprocess
import sys
from math import inf, nan

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops

import gradclip
from gradclip import Bounds, Clipper, MaxNorm, NonFiniteError, clip, clip_
from gradclip.backends import host, mindspore as backend

FLOATS = [ms.float16, ms.bfloat16, ms.float32, ms.float64]
LIKE = list(gradclip.rules.CONVENTIONS)
CASES = {
    "clipped": (MaxNorm(1.0), {}),
    "not clipped": (MaxNorm(1e9), {}),
    "measured only": (MaxNorm(inf), {}),
    "raised": (MaxNorm(1e9, min_norm=1e3), {}),
    "p=1": (MaxNorm(1.0), {"p": 1}),
    "p=3": (MaxNorm(1.0), {"p": 3}),
    "p=inf": (MaxNorm(1.0), {"p": inf}),
    "by norm": (MaxNorm(1.0), {"scope": "tensor"}),
    "by norm, raised": (MaxNorm(10.0, min_norm=5.0), {"scope": "tensor"}),
    "by value": (MaxNorm(0.5), {"scope": "element"}),
    "between bounds": (Bounds(-0.25, 0.5), {}),
}


@pytest.fixture(autouse=True)
def _pynative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a failed compilation leaves files behind
    ms.set_context(mode=ms.PYNATIVE_MODE)


def t(*values, dtype=ms.float32):
    return Tensor(list(values), dtype)


def drawn(dtype):
    """Gradients of three shapes, computed so that they are the result of a kernel."""
    draw = np.random.default_rng(0)
    return {name: Tensor(draw.standard_normal(shape), dtype) for name, shape in (("w", (7, 5)), ("b", (5,)), ("s", ()))}


def as_numpy(x):
    return x.astype(ms.float32).asnumpy() if x.dtype == ms.bfloat16 else x.asnumpy()


def numpy_of(tree):
    return {name: backend._view(x).copy() for name, x in tree.items()}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_numpy_gives_to_the_bit(case, dtype):
    rule, options = CASES[case]
    grads = drawn(dtype)
    ours, theirs = clip(grads, rule, **options), clip(numpy_of(grads), rule, **options)
    for name, x in ours.grads.items():
        assert x.dtype == dtype
        assert x.shape == grads[name].shape
        assert backend._view(x).tobytes() == theirs.grads[name].tobytes()
        assert (x is grads[name]) == (case in ("not clipped", "measured only"))
    assert ours.norm.asnumpy().tolist() == theirs.norm.tolist()
    assert ours.to_dict() == theirs.to_dict()
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("name", LIKE)
def test_another_frameworks_arithmetic(name):
    rule = MaxNorm(1.0, like=name)
    grads = drawn(ms.float32)
    ours, theirs = clip(grads, rule), clip(numpy_of(grads), rule)
    assert ours.coef.asnumpy().tolist() == theirs.coef.tolist()
    assert all(x.asnumpy().tobytes() == y.tobytes() for x, y in zip(ours.grads.values(), theirs.grads.values(), strict=True))


def test_mindspores_own_functions_are_matched():
    x, y = drawn(ms.float32)["w"], drawn(ms.float32)["b"]
    assert math.isclose(
        float(ops.clip_by_norm((x, y), 1.0)[0][0, 0]),
        float(clip([x, y], MaxNorm(1.0, like="mindspore.clip_by_norm")).grads[0][0, 0]),
        rel_tol=3e-7,
    )
    assert math.isclose(
        float(ops.clip_by_global_norm((x, y), 1.0)[0][0, 0]),
        float(clip([x, y], MaxNorm(1.0, like="mindspore.clip_by_global_norm")).grads[0][0, 0]),
        rel_tol=3e-7,
    )
    theirs = ms.nn.ClipByNorm()(x, t(1.0))
    ours = clip([x], MaxNorm(1.0, like="mindspore.ClipByNorm")).grads[0]
    assert np.allclose(theirs.asnumpy(), ours.asnumpy(), rtol=3e-7)


def test_trees_nones_and_mixed_types():
    grads = {"a": [t(3.0), None], "b": (t(4.0, dtype=ms.float16), t(12.0, dtype=ms.float64))}
    clipped = clip(grads, MaxNorm(1.0))
    assert float(clipped.norm) == 13.0
    assert clipped.grads["a"][1] is None
    assert [x.dtype for x in (clipped.grads["a"][0], *clipped.grads["b"])] == [ms.float32, ms.float16, ms.float64]
    assert clip(grads, MaxNorm(1.0), scope="tensor").to_dict()["norm"] == {"a.0": 3.0, "a.1": 0.0, "b.0": 4.0, "b.1": 12.0}


def test_complex_gradients_by_their_modulus():
    x = Tensor(np.array([3 + 4j, 0.1j], np.complex64))
    clipped = clip([x], MaxNorm(1.0), scope="element")
    assert clipped.grads[0].dtype == ms.complex64
    assert np.allclose(clipped.grads[0].asnumpy(), [0.6 + 0.8j, 0.1j])
    assert float(gradclip.norm([x])) == pytest.approx(math.sqrt(25.01), rel=1e-7)


@pytest.mark.parametrize(
    ("values", "dtype", "norm"),
    [
        ([60000.0] * 1000, ms.float16, 60000 * math.sqrt(1000)),
        ([1e20] * 100, ms.float32, 1e21),
        ([1e-25] * 4, ms.float32, 2e-25),
        ([1e200] * 4, ms.float64, 2e200),
    ],
)
def test_norms_that_their_own_kernels_lose(values, dtype, norm):
    x = Tensor(values, dtype)
    assert float(gradclip.norm(x)) == pytest.approx(norm, rel=1e-6 if dtype != ms.float64 else 1e-15)
    assert float(gradclip.norm(x)) == float(gradclip.norm(backend._view(x)))


def test_more_elements_than_float32_can_count():
    x = ops.ones((1 << 25,), ms.float32)
    assert float(gradclip.norm(x)) == math.sqrt(1 << 25)


def test_tensors_of_no_elements_are_norm_zero():
    empty = Tensor(np.zeros((0, 3), np.float32))
    clipped = clip([empty, t(3.0, 4.0)], MaxNorm(1.0))
    assert float(clipped.norm) == 5.0
    assert clipped.grads[0] is empty or clipped.grads[0].shape == (0, 3)
    assert gradclip.norm([empty, t(1.0)], scope="tensor").asnumpy().tolist() == [0.0, 1.0]


def test_views_are_read_through_their_strides():
    base = Tensor(np.arange(12.0, dtype=np.float32).reshape(3, 4)) * 1
    for view in (base[1:], base[:, 1], base.T, base[::2]):
        assert float(gradclip.norm(view)) == pytest.approx(np.linalg.norm(view.asnumpy().astype(np.float64)), rel=1e-12)
        assert np.allclose(clip(view, MaxNorm(1.0)).grads.asnumpy(), view.asnumpy() / np.linalg.norm(view.asnumpy()))


def test_what_a_kernel_has_not_finished_is_waited_for():
    x = ops.ones((1 << 24,), ms.float32)
    for _ in range(10):
        x = x * 1.01
    assert float(gradclip.norm(x)) == pytest.approx(1.01**10 * 2**12, rel=1e-5)


def test_results_go_on_being_computed_with():
    clipped = clip((t(3.0, 4.0), t(12.0)), MaxNorm(1.0))
    assert ((clipped.grads[0] * 2).sum() + clipped.norm).asnumpy() == pytest.approx(2 * 7 / 13 + 13)


def test_in_place():
    x, y = t(3.0, 4.0) * 1, t(12.0) * 1
    clipped = clip_([x, y], MaxNorm(1.0))
    assert clipped.grads[0] is x
    assert (x + 0).asnumpy() == pytest.approx([3 / 13, 4 / 13])
    assert (y + 0).asnumpy() == pytest.approx([12 / 13])


def test_in_place_through_a_view():
    base = Tensor(np.arange(4.0, dtype=np.float32)) * 1
    clip_(base[2:], MaxNorm(1.0), scope="element")
    assert base.asnumpy().tolist() == [0.0, 1.0, 1.0, 1.0]


def test_in_place_one_memory_is_written_once_and_a_part_of_it_refused():
    x = t(3.0, 4.0) * 1
    clip_([x, x, None], MaxNorm(1.0))
    assert x.asnumpy() == pytest.approx(np.array([3, 4]) / math.sqrt(50))
    with pytest.raises(ValueError, match="share a part"):
        clip_([x, x[:1]], MaxNorm(0.1))


@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_not_finite(value, scope):
    grads = {"w": t(1.0, value), "b": t(3.0)}
    with pytest.raises(NonFiniteError, match=r"w \(1 (NaN|inf) of 2\)"):
        clip(grads, MaxNorm(1.0), scope=scope)
    zero = clip(grads, MaxNorm(1.0), scope=scope, nonfinite="zero")
    assert [x.asnumpy().tolist() for x in zero.grads.values()] == [[0.0, 0.0], [0.0]]
    skip = clip(grads, MaxNorm(1.0), scope=scope, nonfinite="skip")
    assert bool(skip.skipped)
    assert skip.grads["w"] is grads["w"]
    keep = clip(grads, MaxNorm(1.0), scope=scope, nonfinite="keep")
    want = clip({name: x.asnumpy() for name, x in grads.items()}, MaxNorm(1.0), scope=scope, nonfinite="keep")
    for name, x in keep.grads.items():
        assert x.asnumpy().tobytes() == want.grads[name].tobytes()


def test_a_parameter_is_a_threshold_that_may_change():
    limit = Parameter(Tensor(2.0), name="limit", requires_grad=False)
    rule = MaxNorm(limit)
    assert float(clip(t(3.0, 4.0), rule).limit) == 2.0
    limit.set_data(Tensor(1.0))
    assert float(clip(t(3.0, 4.0), rule).limit) == 1.0


def test_a_clipper_remembers():
    clipper = Clipper(MaxNorm(lambda step: 10.0 / (step + 1)), nonfinite="skip")
    assert [float(clipper((t(30.0, 40.0),)).limit) for _ in range(3)] == [10.0, 5.0, 10 / 3]
    clipper((t(nan),))
    assert clipper.counts == (4, 3, 1, 1)


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (
            Parameter(Tensor([1.0]), name="w"),
            ["a.0", "Parameter", "scale the weights", "value_and_grad", "optimizer.parameters"],
        ),
        (Tensor([1, 2]), ["a.0", "Int64", "Float32"]),
        (Tensor([True]), ["a.0", "Bool"]),
        (ms.COOTensor(Tensor([[0, 1]]), Tensor([1.0]), (2, 2)), ["a.0", "COOTensor", "dense"]),
        (np.ones(2), ["mindspore (fine)", "numpy (a.0)", "one framework"]),
    ],
    ids=["parameter", "integer", "bool", "sparse", "numpy"],
)
def test_what_is_no_gradient_is_refused_by_path(leaf, words):
    with pytest.raises(TypeError) as error:
        clip({"fine": t(1.0), "a": [leaf]}, MaxNorm(1.0))
    assert [word for word in words if word not in str(error.value)] == []


def test_reduce_and_a_norm_that_is_known():
    clipped = clip([t(3.0, 4.0)], MaxNorm(1.0), reduce=lambda power, p: power * 4)
    assert float(clipped.norm) == 10.0
    assert float(clip([t(3.0, 4.0)], MaxNorm(1.0), norm=Tensor(2.0)).coef) == 0.5
    with pytest.raises(TypeError, match="norm= must be real numbers"):
        clip([t(3.0)], MaxNorm(1.0), norm=Tensor([True]))


# Derivatives: MindSpore's own kernels do the work, so that there is one.


def loss_of(rule, **options):
    return lambda x: clip((x, x * 0.5), rule, **options).grads[0].sum()


DERIVATIVES = {
    "clipped": (MaxNorm(1.0), {}),
    "not clipped": (MaxNorm(1e9), {}),
    "raised": (MaxNorm(1e9, min_norm=1e3), {}),
    "p=1": (MaxNorm(1.0), {"p": 1}),
    "p=3": (MaxNorm(1.0), {"p": 3}),
    "by norm": (MaxNorm(1.0), {"scope": "tensor"}),
    "by value": (MaxNorm(2.0), {"scope": "element"}),
    "keep": (MaxNorm(1.0), {"nonfinite": "keep"}),
    "skip": (MaxNorm(1.0), {"nonfinite": "skip"}),
}


@pytest.mark.parametrize("case", DERIVATIVES)
def test_the_derivative_is_that_of_finite_differences(case):
    rule, options = DERIVATIVES[case]
    loss, x, step = loss_of(rule, **options), np.array([3.0, -1.0, 0.5]), 1e-5
    got = ms.grad(loss)(Tensor(x)).asnumpy()
    shifts = step * np.eye(3)
    want = [(float(loss(Tensor(x + by))) - float(loss(Tensor(x - by)))) / (2 * step) for by in shifts]
    assert got == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_at_zero_the_derivative_of_clip_is_the_identity_and_that_of_norm_is_zero():
    zero = t(0.0, 0.0)
    for p in (1, 2, 3):
        assert ms.grad(lambda x, p=p: gradclip.norm(x, p=p))(zero).asnumpy().tolist() == [0.0, 0.0]
        assert ms.grad(lambda x, p=p: clip(x, MaxNorm(1.0), p=p).grads.sum())(zero).asnumpy().tolist() == [1.0, 1.0]


def under_a_derivative(look, *xs):
    """What a function sees while it is differentiated; it must not raise, which leaves MindSpore 2.10 in that state."""
    seen = []

    def loss(*xs):
        seen.append(look(*xs))
        return sum(x.astype(ms.float32).sum() for x in xs)

    ms.grad(loss)(*xs)
    return seen[0]


@pytest.mark.parametrize("case", CASES)
def test_under_a_derivative_it_gives_what_it_gives_without(case):
    rule, options = CASES[case]
    x = drawn(ms.float32)["w"]

    def look(x):
        return clip({"x": x, "y": x * 2, "none": None}, rule, **options)

    ours, theirs = under_a_derivative(look, x), look(x)
    for field in ("norm", "limit", "coef", "clipped", "finite", "skipped"):
        a, b = getattr(ours, field), getattr(theirs, field)
        assert (a is None) == (b is None)
        assert a is None or np.allclose(a.asnumpy(), b.asnumpy(), rtol=1e-6), field
    assert np.allclose(ours.grads["x"].asnumpy(), theirs.grads["x"].asnumpy(), rtol=1e-6)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("options", [{}, {"p": inf}, {"scope": "element"}, {"scope": "tensor"}], ids=str)
def test_under_a_derivative_nan_is_found_wherever_it_is(options, place):
    values = [1.0, 1.0]
    values[place] = nan

    def look(x):
        with pytest.raises(NonFiniteError, match=r"w \(1 NaN of 2\)"):
            clip({"w": x}, MaxNorm(1.0), **options)
        return clip([x], MaxNorm(1.0), nonfinite="zero", **options)

    assert under_a_derivative(look, t(*values)).grads[0].asnumpy().tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("values", "norm"), [([1e20] * 4, 2e20), ([1e-25] * 4, 2e-25), ([0.0, 0.0], 0.0)])
def test_under_a_derivative_no_power_leaves_the_range(values, norm):
    assert float(under_a_derivative(lambda x: gradclip.norm([x]), t(*values))) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16], ids=str)
def test_half_precision_under_a_derivative(dtype):
    clipped = under_a_derivative(lambda x: clip([x, x], MaxNorm(1.0), scope="element"), t(300.0, 0.5, dtype=dtype))
    assert clipped.grads[0].dtype == dtype
    assert as_numpy(clipped.grads[0]).tolist() == [1.0, 0.5]


def test_float64_and_float32_under_a_derivative():
    clipped = under_a_derivative(lambda x, y: clip([x, y], MaxNorm(1.0)), t(1e200, dtype=ms.float64), t(1.0))
    assert float(clipped.norm) == pytest.approx(1e200, rel=1e-12)


# Beside other packages.


def test_numpy_2_beside_mindspore_is_one_error_that_says_what_to_do():
    with pytest.raises(ImportError, match=r"MindSpore 2\.10\.0 .* NumPy 2\.4\.6: pip install 'numpy<2'"):
        backend.check_numpy("2.4.6", "2.10.0")
    backend.check_numpy("1.26.4", "2.10.0")
    backend.check_numpy("2.4.6", "2.11.0")


def test_mindspore_is_imported_when_a_tensor_of_it_is_clipped_and_no_sooner():
    code = (
        "import sys, gradclip; gradclip.clip([1.0], gradclip.MaxNorm(1.0)); assert 'mindspore' not in sys.modules; "
        "import mindspore; print(float(gradclip.norm(mindspore.Tensor([3.0, 4.0]))))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split()[-1] == "5.0"


def test_the_bits_do_not_depend_on_threads_or_order():
    draw = np.random.default_rng(1)
    grads = [Tensor(draw.standard_normal(70_000 + i).astype(np.float32)) for i in range(5)]
    norms = {float(gradclip.norm(order)) for order in (grads, grads[::-1])}
    for n in (1, 2, 5):
        gradclip.set_threads(n)
        norms.add(float(gradclip.norm(grads)))
    gradclip.set_threads(None)
    assert norms == {float(host.norms("", gradclip.norm([x.asnumpy() for x in grads])))}
