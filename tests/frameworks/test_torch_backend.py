"""What torch's tensors can be besides plain: views, sparse, on a device, with a derivative, under a tracer."""

import math
import subprocess
import sys
from math import inf, nan

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
from gradclip import Bounds, Clipper, MaxNorm, NonFiniteError, clip, clip_, native

VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "channels_last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
    "every other": lambda x: x[:, ::2],
    "one column": lambda x: x[:, 1:2, 0],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "0-d": lambda x: x[0, 0, 0],
    "empty": lambda x: x[:0],
}


def cube(dtype=torch.float32):
    return torch.from_numpy(np.random.default_rng(0).standard_normal((4, 6, 5))).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("p", [1, 2, 3, inf])
def test_views(view, dtype, p):
    x = view(cube(dtype))
    plain = x.contiguous().clone()
    norm = gradclip.norm(x, p)
    assert norm.dtype is torch.float64
    wide = plain.to(torch.complex128 if dtype.is_complex else torch.float64)
    assert norm == pytest.approx(torch.linalg.vector_norm(wide, p).item() if x.numel() else 0.0, rel=1e-12)
    assert norm == pytest.approx(gradclip.norm(plain, p).item(), rel=1e-15)
    clipped = clip(x, MaxNorm(0.5), norm=norm)
    assert torch.equal(clipped.grads, clip(plain, MaxNorm(0.5), norm=norm).grads)
    assert clipped.grads.shape == x.shape
    by_value = clip(x, MaxNorm(0.5), scope="element").grads
    assert torch.equal(by_value, clip(plain, MaxNorm(0.5), scope="element").grads)
    assert torch.equal(x, plain)


@pytest.mark.parametrize("view", [view for name, view in VIEWS.items() if name != "expanded"])
@pytest.mark.parametrize("rule", [MaxNorm(0.5), Bounds(-0.5, 0.25)])
def test_views_are_written_through(view, rule):
    base = cube()
    x = view(base.mul_(9))
    want = clip(x, rule).grads.clone()
    version = x._version
    clip_(x, rule)
    assert torch.equal(x, want)
    if x.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() and x.numel():
        assert torch.equal(view(base), want)
    assert x._version > version or not x.numel()


def test_conjugate_and_negative_views():
    z = torch.view_as_complex(torch.tensor([[[3.0, -4.0]], [[0.5, 12.0]]]))
    for view in (lambda z: z.conj(), lambda z: z.conj().imag, lambda z: z[:1].conj().imag, lambda z: z.conj().real):
        x = view(z.clone())
        plain = x.clone().resolve_conj().resolve_neg()
        assert gradclip.norm(x) == gradclip.norm(plain)
        for rule, scope in ((MaxNorm(1.0), "global"), (MaxNorm(1.0), "element")):
            want = clip(plain, rule, scope=scope).grads
            assert torch.equal(clip(x, rule, scope=scope).grads, want)
            written = view(z.clone())
            clip_(written, rule, scope=scope)
            assert torch.equal(written, want)
        if not x.is_complex():
            want = clip(plain, Bounds(-1.0, 2.0)).grads
            assert torch.equal(clip(x, Bounds(-1.0, 2.0)).grads, want)
            clip_(x, Bounds(-1.0, 2.0))
            assert torch.equal(x, want)


def test_the_version_counter_moves_exactly_where_something_is_written():
    small, large = torch.tensor([0.3]), torch.tensor([3.0, 4.0])
    versions = small._version, large._version
    clip_([small, large], MaxNorm(10.0))
    assert (small._version, large._version) == versions
    clip_([small, large], MaxNorm(1.0), scope="tensor")
    assert (small._version, large._version) == (versions[0], versions[1] + 1)
    clip_([small, large], MaxNorm(0.7), scope="element")
    assert small._version == versions[0]
    assert large._version > versions[1] + 1
    clip_([large.mul_(nan)], MaxNorm(1.0), nonfinite="zero")
    assert large.tolist() == [0, 0]
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    clip_([y.detach()], MaxNorm(0.1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_that_require_a_gradient_are_written_as_others_are():
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    clip_([x], MaxNorm(1.0))
    assert x.tolist() == pytest.approx([0.6, 0.8])
    strided = torch.tensor([3.0, 0.0, 4.0, 0.0], requires_grad=True)
    clip_([strided[::2]], MaxNorm(1.0))
    assert strided.tolist() == pytest.approx([0.6, 0, 0.8, 0])
    with torch.inference_mode():
        y = torch.tensor([3.0, 4.0])
    clip_([y], MaxNorm(1.0))
    assert y.tolist() == pytest.approx([0.6, 0.8])


def test_memory_is_written_once():
    x = torch.tensor([3.0, 4.0])
    clip_([x, x.view(2, 1), x.t()], MaxNorm(math.sqrt(75)))
    assert x.tolist() == [3, 4]
    clip_([x, x.view(2, 1)], MaxNorm(1.0))
    assert float(gradclip.norm([x, x])) == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"'0' and '1' share"):
        clip_([x, x[:1]], MaxNorm(1.0))
    with pytest.raises(ValueError, match="by two indices"):
        clip_(x[:1].expand(3), MaxNorm(1.0))


@pytest.mark.parametrize("work", [lambda p: clip(p, MaxNorm(1.0)), lambda p: clip_([p], MaxNorm(1.0)), gradclip.norm])
def test_parameters_are_refused(work):
    with pytest.raises(TypeError, match=r"is a Parameter.*pass its gradient, p\.grad"):
        work(torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(TypeError, match=r"'layers\.0' is a Parameter"):
        Clipper(MaxNorm(1.0))({"layers": [torch.nn.Parameter(torch.ones(2))]})


@pytest.mark.filterwarnings("ignore:Sparse BSC tensor support is in beta")  # torch says so of the tensor made here
def test_what_else_is_refused():
    with pytest.raises(TypeError, match=r"'a.1' is of torch.int64"):
        clip({"a": [torch.ones(1), torch.tensor([1])]}, MaxNorm(1.0))
    with pytest.raises(TypeError, match=r"layout torch\.sparse_bsc"):
        clip(torch.eye(2).to_sparse_bsc((1, 1)), MaxNorm(1.0))
    with pytest.raises(TypeError, match=r"torch \(0\) and numpy \(1\)"):
        clip([torch.ones(1), np.ones(1)], MaxNorm(1.0))
    with pytest.raises(TypeError, match="norm= must be real numbers"):
        clip(torch.ones(1), MaxNorm(1.0), norm=torch.tensor(1j))


def embedding(indices, values):
    return torch.sparse_coo_tensor([indices], torch.tensor(values), (4, 2), check_invariants=True)


@pytest.mark.parametrize("merged", [False, True])
def test_sparse_gradients_are_merged_for_the_norm_and_stay_sparse(merged):
    def make():
        x = embedding([1, 3, 1], [[3.0, 0.0], [0.0, 12.0], [0.0, 4.0]])
        return x.coalesce() if merged else x

    dense = make().to_dense()
    for rule, scope in ((MaxNorm(1.0), "global"), (MaxNorm(2.0), "element"), (Bounds(-1.0, 3.5), None)):
        x = make()
        clipped = clip({"emb": x, "w": torch.zeros(2)}, rule, scope=scope)
        want = clip(dense, rule, scope=scope)
        assert float(clipped.norm) == float(want.norm)
        assert clipped.grads["emb"].is_sparse
        assert torch.equal(clipped.grads["emb"].to_dense(), want.grads)
        assert torch.equal(x.to_dense(), dense)
        clip_({"emb": x}, rule, scope=scope)
        assert x.is_sparse
        assert torch.equal(x.to_dense(), want.grads)
    far = make()
    assert clip(far, MaxNorm(100.0)).grads is far
    lost = embedding([1], [[nan, 1.0]])
    with pytest.raises(NonFiniteError, match="1 NaN of 2"):
        clip(lost, MaxNorm(1.0))
    clip_(lost, MaxNorm(1.0), nonfinite="zero")
    assert not lost.to_dense().any()


def test_mixed_types_share_one_norm():
    grads = [torch.tensor([3.0]).half(), torch.tensor([4.0]).bfloat16(), torch.tensor([12.0]).double(), torch.tensor([84j])]
    clipped = clip(grads, MaxNorm(8.5))
    assert float(clipped.norm) == 85
    assert [x.dtype for x in clipped.grads] == [x.dtype for x in grads]
    assert [complex(x) for x in clipped.grads] == pytest.approx([0.3, 0.4, 1.2, 8.4j], rel=1e-2)


def test_a_million_elements_to_the_last_digits():
    for values in (torch.full((1 << 20,), 0.1), torch.full((1 << 20,), 3e-23), torch.full((1 << 20,), 1e20)):
        for x in (values, values.bfloat16(), values.view(1024, 1024).t(), values[::3]):
            true = math.sqrt(x.numel()) * float(x.reshape(-1)[0].double())
            assert float(gradclip.norm(x)) == pytest.approx(true, rel=1e-12)
    half = torch.full((10**6,), 60000.0, dtype=torch.float16)
    assert float(gradclip.norm(half)) == pytest.approx(6e7, rel=1e-12)


def test_threads_of_torch_bound_ours():
    from gradclip.backends import torch as backend

    if native.available:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            assert backend.arrays([torch.ones(2)], str, False).memory.threads == 1
        finally:
            torch.set_num_threads(before)


def test_a_coefficient_outside_the_range_of_float32():
    x = torch.tensor([3e38, 1e38])
    want = x.double() * (1e-3 / torch.linalg.vector_norm(x.double()))
    assert torch.equal(clip(x, MaxNorm(1e-3)).grads, want.float())
    strided = torch.tensor([3e38, 0, 1e38, 0])[::2]
    assert torch.equal(clip(strided, MaxNorm(1e-3)).grads, want.float())
    assert torch.equal(clip(x.requires_grad_(), MaxNorm(1e-3)).grads, want.float())


def test_two_factors_write_repeated_memory_once():
    x = torch.tensor([3e200, 4e200], dtype=torch.float64)
    clip_([x, None, x.view(2, 1)], MaxNorm(math.sqrt(2) * 5e-100))
    assert x.tolist() == pytest.approx([3e-100, 4e-100], rel=1e-15)


def test_fields_are_tensors_on_the_gradients_device():
    clipped = clip([torch.tensor([3.0]), torch.tensor([4.0])], MaxNorm(1.0), scope="tensor")
    assert {x.dtype for x in (clipped.norm, clipped.limit, clipped.coef)} == {torch.float64}
    assert {x.dtype for x in (clipped.clipped, clipped.finite, clipped.skipped)} == {torch.bool}
    assert clipped.to_dict()["coef"] == {"0": 1 / 3, "1": 0.25}
    meta = clip(torch.ones(2, device="meta"), MaxNorm(1.0), nonfinite="keep")
    assert {x.device.type for x in meta[:7] if x is not None} == {"meta"}
    assert repr(meta) == "Clipped(1 tensor, traced)"


def test_reduce_and_norm_get_and_take_tensors():
    seen = []

    def reduce(power, p):
        seen.append(power)
        return power * 4 if p != inf else power

    x = [torch.tensor([3.0, 4.0])]
    assert float(clip(x, MaxNorm(1.0), reduce=reduce).norm) == 10
    assert float(clip(x, MaxNorm(1.0), reduce=reduce, p=inf).norm) == 4
    assert [(power.dtype, tuple(power.shape)) for power in seen] == [(torch.float64, ()), (torch.float64, (2,))]
    assert float(clip(x, MaxNorm(1.0), norm=torch.tensor(50.0)).coef) == 1 / 50
    assert float(clip(x, MaxNorm(torch.tensor(2.5))).coef) == 0.5


@pytest.mark.parametrize("p", [1, 2, 3, 1.5, inf])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_the_derivative_of_a_clip(p, scope):
    x, y = cube(torch.float64)[0].requires_grad_(), cube(torch.float64)[1, 0].requires_grad_()
    for limit in (0.5, 1e3):
        assert torch.autograd.gradcheck(lambda x, y, m=limit: tuple(clip([x, y], MaxNorm(m), p=p, scope=scope).grads), (x, y))
    assert torch.autograd.gradcheck(lambda x, y: gradclip.norm([x, y], p), (x, y))


def test_the_derivative_by_value():
    x = torch.tensor([3.0, 0.5, -2.0], dtype=torch.float64, requires_grad=True)
    clip(x, MaxNorm(1.0), scope="element").grads.sum().backward()
    assert x.grad.tolist() == [0, 1, 0]


@pytest.mark.parametrize("p", [1, 2, 3, inf])
def test_the_derivative_at_zero(p):
    x = torch.zeros(3, requires_grad=True)
    for rule in (MaxNorm(1.0), MaxNorm(2.0, min_norm=1.0)):
        (got,) = torch.autograd.grad(clip(x, rule, p=p).grads.sum(), x)
        assert got.tolist() == [1, 1, 1]
    (got,) = torch.autograd.grad(gradclip.norm(x, p), x)
    assert not got.isnan().any()
    assert p == inf or got.tolist() == [0, 0, 0]


def test_a_derivative_with_policies():
    x = torch.tensor([3.0, nan], requires_grad=True)
    with pytest.raises(NonFiniteError, match="1 NaN of 2"):
        clip(x, MaxNorm(1.0))
    skipped = clip(x, MaxNorm(1.0), nonfinite="skip")
    assert skipped.skipped and skipped.grads is x
    assert clip(x, MaxNorm(1.0), nonfinite="zero").grads.tolist() == [0, 0]


def test_learning_to_learn_through_a_clip():
    """The gradient of a loss after one clipped step, against the same written out."""
    w, rate = torch.tensor([2.0, -1.0], requires_grad=True), torch.tensor(0.3, requires_grad=True)

    def after(clipped):
        (grad,) = torch.autograd.grad((w**4).sum(), w, create_graph=True)
        return ((w - rate * clipped(grad)) ** 2).sum()

    ours = torch.autograd.grad(after(lambda g: clip(g, MaxNorm(1.0)).grads), (w, rate))
    theirs = torch.autograd.grad(after(lambda g: g / torch.linalg.vector_norm(g)), (w, rate))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-5)


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def waits(self):
        return sum("_local_scalar_dense" in name for name in self.names)


def counted(count, policy, scope="global", dtype=torch.float32, device="cpu", work=clip_):
    xs = [torch.ones(8, 8, dtype=dtype, device=device) for _ in range(count)]
    with Counting() as counting:
        work(xs, MaxNorm(1.0), nonfinite=policy, scope=scope)
    return counting


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scope", ["global", "element"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("work", [clip, clip_])
def test_an_accelerator_runs_few_operations_and_never_waits(device, scope, dtype, work):
    if work is clip and scope == "element":
        return  # torch has no call that clamps many tensors into new ones with both bounds
    few, many = (counted(count, "keep", scope, dtype, device, work) for count in (2, 200))
    assert few.names == many.names
    assert len(many.names) <= 16
    assert many.waits == 0


@pytest.mark.parametrize("scope", ["global", "element"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_an_accelerator_waits_once_where_a_value_is_looked_at(policy, scope):
    counting = counted(200, policy, scope)
    assert len(counting.names) <= 16
    assert counting.waits == 1


def test_an_accelerator_does_not_wait_to_zero():
    few, many = counted(2, "zero"), counted(200, "zero")
    assert few.waits == many.waits == 0
    assert len(many.names) - len(few.names) == 198  # torch has no call that fills many tensors by a flag: one for each


def test_an_accelerator_writes_nothing_where_it_may_look():
    counting = counted(3, "raise")
    assert any("_foreach_mul_" in name for name in counting.names)
    xs = [torch.full((2,), 0.1)]
    with Counting() as counting:
        clipped = clip(xs, MaxNorm(1.0))
    assert not any("mul" in name for name in counting.names)
    assert clipped.grads[0] is xs[0]


def test_meta_tensors():
    xs = [torch.ones(3, device="meta"), torch.ones((), device="meta", dtype=torch.float16)]
    for policy in ("keep", "zero", "skip"):
        clipped = clip(xs, MaxNorm(1.0), nonfinite=policy)
        assert [(x.shape, x.dtype, x.device.type) for x in clipped.grads] == [(x.shape, x.dtype, "meta") for x in xs]
    with pytest.raises(ValueError, match='pass nonfinite="keep"'):
        clip(xs, MaxNorm(1.0))


def test_function_transforms():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    rows = torch.vmap(lambda g: clip(g, MaxNorm(1.0), nonfinite="keep").grads)(x)
    assert torch.allclose(rows, torch.tensor([[0.6, 0.8], [0.3, 0.4]]))
    grad = torch.func.grad(lambda g: clip(g, MaxNorm(1.0), nonfinite="keep").grads.sum())(torch.tensor([3.0, 4.0]))
    assert torch.allclose(grad, torch.tensor([0.032, -0.024]))
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda g: clip(g, MaxNorm(1.0), nonfinite="keep").grads)(x)
    assert torch.allclose(graph(10 * x), 10 * x / torch.linalg.vector_norm(10 * x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own jvp uses it
def test_forward_derivatives():
    x, direction = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
    for policy in ("raise", "keep"):
        _, got = torch.func.jvp(lambda g, policy=policy: clip(g, MaxNorm(1.0), nonfinite=policy).grads, (x,), (direction,))
        assert torch.allclose(got, torch.tensor([0.128, -0.096]))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        tangent = torch.autograd.forward_ad.unpack_dual(clip(dual, MaxNorm(1.0)).grads).tangent
    assert torch.allclose(tangent, torch.tensor([0.128, -0.096]))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_sees_the_clip():
    traced = torch.jit.trace(
        lambda g: clip(g, MaxNorm(1.0), nonfinite="keep").grads, torch.tensor([3.0, 4.0]), check_trace=False
    )
    assert torch.allclose(traced(torch.tensor([0.0, 50.0])), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("rule", [MaxNorm(1.0), MaxNorm(0.5, min_norm=0.1)])
def test_memory_is_written_once_on_a_device_too(rule):
    def clipped(x):
        clip_([x, x, x.view(2, 1)], rule, nonfinite="keep")
        return x

    want = clipped(torch.tensor([3.0, 4.0]))
    with Counting():
        assert torch.equal(clipped(torch.tensor([3.0, 4.0])), want)
        with pytest.raises(ValueError, match="share a part"):
            clip_([x := torch.ones(3), x[1:]], rule)
    labelled = torch.tensor([3.0, 4.0]).as_subclass(Labelled)
    assert torch.allclose(clipped(labelled).as_subclass(torch.Tensor), want)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x):
        clip_([x, x], rule, nonfinite="keep")
        return x

    same = torch.tensor([3.0, 4.0])
    clip_([same, same], rule)
    assert torch.allclose(compiled(torch.tensor([3.0, 4.0])), same)


@pytest.mark.parametrize("scope", ["global", "element"])
def test_a_threshold_that_changes_is_never_stale(scope):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda g, limit: clip(g, MaxNorm(limit), scope=scope, nonfinite="keep").grads, fullgraph=True, backend="aot_eager"
    )
    for limit in (1.0, 2.0, 0.5, torch.tensor(3.0), torch.tensor(0.25)):
        got = compiled(torch.tensor([30.0, 40.0]), limit)
        want = clip(torch.tensor([30.0, 40.0]), MaxNorm(float(limit)), scope=scope).grads
        assert torch.allclose(got, want)


def test_vmap_over_some_of_the_gradients():
    x, shared = torch.tensor([[3.0], [6.0]]), torch.tensor([4.0])
    for order in (lambda g: [g, shared], lambda g: [shared, g]):
        norms = torch.vmap(lambda g, order=order: gradclip.norm(order(g)))(x)
        assert torch.allclose(norms, torch.tensor([5.0, math.sqrt(52)], dtype=torch.float64))


def test_norms_of_any_type_may_be_given():
    x = torch.tensor([3.0, 4.0])
    for norm in (
        torch.tensor(10.0).bfloat16(),
        torch.tensor(10.0).half(),
        torch.tensor(10),
        torch.tensor(10.0, requires_grad=True),
    ):
        assert clip(x, MaxNorm(1.0), norm=norm).coef.item() == 0.1


class Labelled(torch.Tensor):
    """A subclass, as libraries make them."""


def test_a_subclass_stays_one():
    x = torch.tensor([3.0, 4.0]).as_subclass(Labelled)
    clipped = clip([x], MaxNorm(1.0))
    assert type(clipped.grads[0]) is Labelled
    assert torch.allclose(clipped.grads[0], torch.tensor([0.6, 0.8]).as_subclass(Labelled))
    clip_([x], MaxNorm(1.0))
    assert torch.allclose(x, torch.tensor([0.6, 0.8]).as_subclass(Labelled))


def test_tensors_without_storage():
    zero = torch._efficientzerotensor((3,))
    assert gradclip.norm(zero) == 0
    functional = torch.func.functionalize(lambda x: clip(x, MaxNorm(1.0), nonfinite="keep").grads)
    assert torch.allclose(functional(torch.tensor([3.0, 4.0])), torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("scope", ["global", "element"])
def test_sparse_gradients_are_written_on_a_device_too(scope):
    x = embedding([1, 3, 1], [[3.0, 0.0], [0.0, 12.0], [0.0, 4.0]])
    want = clip(x.to_dense(), MaxNorm(1.0), scope=scope).grads
    with Counting():
        clip_(x, MaxNorm(1.0), scope=scope)
    assert torch.allclose(x.to_dense(), want)
    lost = embedding([1, 1], [[nan, 0.0], [0.0, 12.0]])
    with Counting():
        clip_(lost, MaxNorm(1.0), nonfinite="zero")
    assert not lost.to_dense().any()
    leaf = embedding([1, 1], [[3.0, 0.0], [0.0, 4.0]]).requires_grad_()
    clip_(leaf, MaxNorm(1.0))
    assert leaf.detach().to_dense().norm().item() == pytest.approx(1.0)


def test_types_stay_where_0d_meets_0d():
    x = torch.tensor(3.0, dtype=torch.float16, requires_grad=True)
    assert clip(x, MaxNorm(torch.tensor(1.0)), scope="element").grads.dtype is torch.float16


def test_inference_tensors_become_zeros():
    with torch.inference_mode():
        y = torch.tensor([nan])
    x = torch.tensor([1.0])
    clip_([x, y], MaxNorm(1.0), nonfinite="zero")
    assert (x.item(), y.item()) == (0, 0)


def test_vmap_by_value_in_place():
    def work(g):
        clip_([g], MaxNorm(1.0), scope="element", nonfinite="keep")
        return g

    assert torch.vmap(work)(torch.tensor([[3.0], [0.5]])).tolist() == [[1.0], [0.5]]


@pytest.mark.parametrize("leaf", [torch.nn.Linear(1, 1), torch.float32])
def test_what_is_no_tensor_is_refused(leaf):
    with pytest.raises(TypeError, match="gradients are tensors"):
        clip({"a": leaf}, MaxNorm(1.0))


FORKED = """
import os, torch, gradclip
from gradclip.backends._torch_tensors import TEAM
torch.set_num_threads(4)
gradclip.set_threads(4)
x = torch.ones(4_000_000)
assert TEAM, "torch's OpenMP was not found"
assert gradclip.norm(x + 1).item() == 4000 and x.sum().item() == 4e6
child = os.fork()
if not child:
    os._exit(0 if gradclip.norm(x).item() == 2000 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(
    not native.available or sys.platform != "linux", reason="torch's own threads are used by the core, on Linux"
)
def test_torchs_threads_do_the_work_but_not_in_a_forked_child():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=60)


def test_many_threads_and_few_give_the_same_bits():
    before, x = torch.get_num_threads(), torch.randn(3_000_001)
    try:
        norms = {torch.set_num_threads(n) or gradclip.norm([x, x[:7]]).item() for n in (1, 2, 3, 8)}
    finally:
        torch.set_num_threads(before)
    assert len(norms) == 1
