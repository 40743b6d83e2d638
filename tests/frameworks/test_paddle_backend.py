"""What Paddle's tensors can be besides plain: views, complex, sparse rows, with a derivative, values of a static graph."""

from math import inf, nan

import numpy as np
import paddle
import pytest
from paddle.nn.clip import merge_selected_rows

import gradclip
from gradclip import Bounds, Clipper, MaxNorm, NonFiniteError, clip, clip_, native
from gradclip.backends import _paddle_tensors as opened

VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose([2, 0, 1]),
    "every other": lambda x: x[:, ::2],
    "one column": lambda x: x[:, 1:2, 0],
    "0-d": lambda x: x[0, 0, 0],
    "empty": lambda x: x[:0],
}
DTYPES = ["float64", "float32", "bfloat16", "float16", "complex64", "complex128"]


@pytest.fixture(params=["core", "pure"])
def memory(request, monkeypatch):
    """With the core, and as in an install without it."""
    if request.param == "pure":
        monkeypatch.setattr(opened.native, "open_tensors", lambda *_: None)
        monkeypatch.setattr(opened.native, "open_buffers", lambda xs, writable: native_nowhere(len(xs)))
    return request.param


native_nowhere = opened.native.nowhere


def cube(dtype="float32"):
    return paddle.to_tensor(np.random.default_rng(0).standard_normal((4, 6, 5))).astype(dtype)


def wide(x):
    """NumPy, in the widest type."""
    x = x if x.is_complex() else x.astype("float64")
    return x.numpy().astype(np.complex128 if x.is_complex() else np.float64)


def same(x, y):
    return x.dtype == y.dtype and list(x.shape) == list(y.shape) and np.array_equal(wide(x), wide(y), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("p", [1, 2, 3, inf])
def test_views(view, dtype, p, memory):
    x = view(cube(dtype))
    before = wide(x).copy()
    norm = gradclip.norm(x, p)
    assert norm.dtype == paddle.float64
    assert float(norm) == pytest.approx(np.linalg.norm(before.ravel(), p) if before.size else 0.0, rel=1e-12)
    for scope in ("global", "tensor", "element"):
        got, want = clip(x, MaxNorm(0.5), scope=scope), clip(before, MaxNorm(0.5), scope=scope)
        step = {"float64": 1e-15, "complex128": 1e-15, "bfloat16": 2**-8, "float16": 2**-11}.get(dtype, 2**-23)
        assert got.grads.dtype == x.dtype
        assert list(got.grads.shape) == list(x.shape)
        np.testing.assert_allclose(wide(got.grads), want.grads, rtol=step)
        assert bool(got.clipped) == bool(want.clipped)
    assert np.array_equal(wide(x), before)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [MaxNorm(0.5), Bounds(-0.5, 0.25)])
def test_views_are_written_through(view, dtype, rule, memory):
    base = cube(dtype) * 9
    x = view(base)
    if x.is_complex() and isinstance(rule, Bounds):
        return
    want, version = clip(x, rule).grads.clone(), x.inplace_version
    untouched = float(gradclip.norm(base)) ** 2 - float(gradclip.norm(x)) ** 2
    clip_(x, rule)
    assert same(x, want)
    assert float(gradclip.norm(base)) ** 2 == pytest.approx(untouched + float(gradclip.norm(x)) ** 2, rel=1e-6)
    if x.size:
        assert x.inplace_version > version


def test_the_norm_is_right_where_paddles_own_is_not():
    """Its norm saturates near 2^24 in float32; squares of 1e20 overflow, those of 1e-25 vanish."""
    ones = paddle.ones([40_000_000])
    assert float(gradclip.norm(ones)) == pytest.approx(40_000_000**0.5, rel=1e-15)
    assert float(paddle.linalg.norm(ones)) == 4096.0
    assert float(gradclip.norm(paddle.full([100], 1e20))) == pytest.approx(1e21, rel=1e-7)
    assert float(gradclip.norm(paddle.full([4], 1e-25))) == pytest.approx(2e-25, rel=1e-7)
    half = paddle.full([1000], 60000, "float16")
    assert float(gradclip.norm(half)) == pytest.approx(1897366.59610103, rel=1e-12)


def test_the_same_bits_as_numpy():
    random = np.random.default_rng(3)
    for dtype in (np.float64, np.float32, np.float16):
        x = random.standard_normal(200_001).astype(dtype)
        ours, numpys = clip([paddle.to_tensor(x)], MaxNorm(1.0)), clip([x], MaxNorm(1.0))
        assert float(ours.norm) == float(numpys.norm)
        assert np.array_equal(ours.grads[0].numpy(), numpys.grads[0])


def test_what_is_not_clipped_is_the_same_object():
    x = cube()
    version = x.inplace_version
    assert clip([x], MaxNorm(1e3)).grads[0] is x
    clip_([x], MaxNorm(1e3))
    assert x.inplace_version == version


REFUSED = {
    "a parameter": (lambda: paddle.create_parameter([2], "float32"), "p.grad"),
    "whole numbers": (lambda: paddle.to_tensor([1, 2]), "int64"),
    "flags": (lambda: paddle.to_tensor([True]), "bool"),
    "coordinates": (lambda: paddle.sparse.sparse_coo_tensor([[0, 1]], [1.0, 2.0], [3]), "a dense tensor nor"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_gradient_is_refused_by_path(make, words):
    fine = cube()
    before = fine.numpy().copy()
    for do in (clip, clip_):
        with pytest.raises(TypeError, match=rf"'b\.0' is .*{words}"):
            do({"a": fine, "b": [make()]}, MaxNorm(0.1))
    assert np.array_equal(fine.numpy(), before)


def test_gradients_of_another_framework_are_refused():
    with pytest.raises(TypeError, match=r"one framework; got paddle \(w\) and numpy \(b\)"):
        clip({"w": cube(), "b": np.ones(2)}, MaxNorm(1.0))


def test_weights_are_left_as_they_are():
    net = paddle.nn.Linear(2, 2)
    before = net.weight.numpy().copy()
    with pytest.raises(TypeError, match="would scale the weights"):
        clip_(net.parameters(), MaxNorm(1e-3))
    assert np.array_equal(net.weight.numpy(), before)


def test_a_gradient_of_a_parameter_goes_the_quick_way_though_nothing_stops_its_derivative():
    net = paddle.nn.Linear(2, 1)
    net(paddle.ones([1, 2])).sum().backward()
    grad = net.weight.grad
    assert not grad.stop_gradient
    assert clip([grad], MaxNorm(1e3)).grads[0] is grad
    clip_([grad], MaxNorm(0.1))
    assert float(gradclip.norm([net.weight.grad])) == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_the_derivative_of_a_clip(scope):
    def clipped(x):
        return clip([x], MaxNorm(1.0), scope=scope, nonfinite="keep").grads[0]

    for values in ([3.0, 4.0], [0.3, 0.4], [0.0, 0.0]):
        x = paddle.to_tensor(np.float64(values), stop_gradient=False)
        (jacobian,) = [np.stack([paddle.grad(y, x, retain_graph=True)[0].numpy() for y in clipped(x)])]
        norm = np.hypot(*values)
        unit = np.float64(values) / max(norm, 1.0)
        want = (np.eye(2) - np.outer(unit, unit)) / norm if norm > 1 else np.eye(2)
        np.testing.assert_allclose(jacobian, want, atol=1e-12)


def test_the_derivative_of_a_norm_of_zeros_is_zero():
    x = paddle.zeros([3])
    x.stop_gradient = False
    gradclip.norm([x]).backward()
    assert x.grad.numpy().tolist() == [0, 0, 0]


@pytest.mark.parametrize("do", [clip, clip_])
def test_nonfinite(do):
    grads = {"a": paddle.to_tensor([1.0, nan]), "b": paddle.to_tensor([inf])}
    with pytest.raises(NonFiniteError, match=r"a \(1 NaN of 2\), b \(1 inf of 1\)"):
        do(grads, MaxNorm(1.0))
    done = do(grads, MaxNorm(1.0), nonfinite="skip")
    assert done.skipped
    assert done.grads["b"].numpy().tolist() == [inf]
    assert do(grads, MaxNorm(1.0), nonfinite="zero").grads["a"].numpy().tolist() == [0, 0]


def test_memory_that_is_given_twice_is_written_once():
    x = paddle.to_tensor([3.0, 4.0])
    clip_([x, x], MaxNorm(1.0), norm=5.0)
    assert x.numpy() == pytest.approx([0.6, 0.8])
    base = paddle.ones([6])
    with pytest.raises(ValueError, match="share a part"):
        clip_([base[:4], base[2:]], MaxNorm(0.1))
    assert base.numpy().tolist() == [1] * 6


def test_a_threshold_may_be_a_tensor():
    limit = paddle.to_tensor(1.0)
    clipper = Clipper(MaxNorm(limit))
    assert float(clipper([paddle.to_tensor([3.0, 4.0])]).coef) == pytest.approx(0.2)
    limit.set_value(paddle.to_tensor(2.0))
    assert float(clipper([paddle.to_tensor([3.0, 4.0])]).coef) == pytest.approx(0.4)
    clip([paddle.to_tensor([3.0])], Bounds(-limit, limit))
    with pytest.raises(ValueError, match="got -1"):
        clip([paddle.to_tensor([3.0])], MaxNorm(paddle.to_tensor(-1.0)))


def test_norms_from_elsewhere():
    x = [paddle.to_tensor([3.0, 4.0])]
    assert float(clip(x, MaxNorm(1.0), norm=paddle.to_tensor(10.0)).coef) == pytest.approx(0.1)
    assert float(clip(x, MaxNorm(1.0), reduce=lambda power, p: 4 * power).norm) == 10.0
    assert float(clip(x, MaxNorm(1.0), p=inf, reduce=lambda peak, p: 2 * peak).norm) == 8.0
    with pytest.raises(TypeError, match="norm= must be real numbers"):
        clip(x, MaxNorm(1.0), norm=paddle.to_tensor(True))


def test_what_a_clip_shows():
    done = clip({"w": paddle.to_tensor([3.0, 4.0])}, MaxNorm(1.0), scope="tensor")
    assert repr(done) == "largest norm 5.0 → 1.0, 1 tensor, clipped"
    assert done.to_dict()["norm"] == {"w": 5.0}


def embedded(ids=(3, 1, 1), dtype="float32"):
    """The sparse gradient of an embedding of six rows, and the same as a dense array."""
    layer = paddle.nn.Embedding(6, 2, sparse=True)
    layer.to(dtype=dtype)
    weights = paddle.arange(1, 1 + 2 * len(ids)).astype(dtype).reshape([-1, 2])
    (layer(paddle.to_tensor(list(ids), "int64")) * weights).sum().backward()
    return layer.weight.grad


def dense(sparse, height=6):
    full = np.zeros((height, 2))
    if sparse.rows():
        np.add.at(full, sparse.rows(), sparse._get_tensor_from_selected_rows().numpy())
    return full


@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
@pytest.mark.parametrize("do", [clip, clip_])
@pytest.mark.parametrize("ids", [(3, 1, 1), (5, 0, 2), (4,), (1, 1, 1)])
def test_repeated_rows_count_once(do, scope, ids, memory):
    sparse = embedded(ids)
    full = dense(sparse)
    want, got = clip(full, MaxNorm(2.0), scope=scope), do([sparse, None], MaxNorm(2.0), scope=scope)
    assert got.norm.numpy().ravel()[0] == pytest.approx(want.norm.ravel()[0], rel=1e-7)
    assert got.grads[0].is_selected_rows()
    np.testing.assert_allclose(dense(got.grads[0]), want.grads, rtol=1e-6)
    assert (got.grads[0] is sparse) == (do is clip_ or not got.clipped)
    if do is clip:
        assert np.array_equal(dense(sparse), full)


def test_sparse_rows_that_need_no_clip_are_left_as_they_are():
    sparse, other = embedded(), paddle.to_tensor([100.0])
    assert clip([sparse], MaxNorm(1e3)).grads[0] is sparse
    before = sparse._get_tensor_from_selected_rows().numpy().copy()
    clip_([sparse, other], MaxNorm(50.0), scope="tensor")
    assert other.item() == pytest.approx(50.0)
    assert np.array_equal(sparse._get_tensor_from_selected_rows().numpy(), before)


@pytest.mark.parametrize("do", [clip, clip_])
def test_sparse_rows_that_are_not_finite(do):
    sparse = embedded()
    opened.numpy_view(sparse._get_tensor_from_selected_rows())[0, 0] = nan
    with pytest.raises(NonFiniteError, match=r"e \(1 NaN of 4\)"):
        do({"e": sparse}, MaxNorm(1.0))
    assert not dense(do({"e": sparse}, MaxNorm(1.0), nonfinite="zero").grads["e"]).any()


@pytest.mark.parametrize("do", [clip, clip_])
def test_an_embedding_that_was_asked_for_nothing(do):
    sparse = embedded(())
    assert sparse.rows() == []
    done = do([sparse, paddle.to_tensor([3.0, 4.0])], MaxNorm(1.0))
    assert float(done.norm) == 5.0
    assert done.grads[0] is sparse
    assert done.grads[1].numpy() == pytest.approx([0.6, 0.8])


def test_rows_are_merged_in_whatever_order_paddle_likes():
    many = embedded(tuple(np.random.default_rng(0).integers(0, 6, 50).tolist()))
    want = clip(dense(many), Bounds(-3.0, 5.0)).grads
    assert sorted(merge_selected_rows(many).rows()) == sorted(set(many.rows()))
    clip_([many], Bounds(-3.0, 5.0))
    np.testing.assert_allclose(dense(many), want)


def test_the_core_is_here():
    assert native.available
    assert opened.EXCHANGE is not None
