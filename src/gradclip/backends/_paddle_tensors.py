"""A call's tensors: which of them lie in memory that the core may read, and which stay with Paddle's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.base.framework import EagerParamBase
from paddle.jit.sot import psdb
from paddle.nn.clip import merge_selected_rows
from paddle.pir import Value

from . import native
from ._overlap import said, written_once

Array = Any
OURS = (Tensor, Value)
EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)
NUMPY = {  # bfloat16 as its bits, since NumPy has none
    paddle.float64: "f8",
    paddle.float32: "f4",
    paddle.bfloat16: "u2",
    paddle.float16: "f2",
    paddle.complex64: "c8",
    paddle.complex128: "c16",
}
COMPLEX = {paddle.complex64, paddle.complex128}
WIDE = {paddle.float64, paddle.complex128}


def where(condition: Array, yes: Any, no: Any) -> Array:
    kind = next((x.dtype for x in (yes, no) if isinstance(x, OURS)), paddle.bool if isinstance(yes, bool) else paddle.float64)
    given = [condition, tensor(yes, kind), tensor(no, kind)]
    shape = list(np.broadcast_shapes(*(tuple(x.shape) for x in given)))
    return paddle.where(*(x if list(x.shape) == shape else x.expand(shape) for x in given))


def tensor(x: Any, kind: Any) -> Array:
    return x if isinstance(x, OURS) else paddle.full([], x, kind)


class Tensors(list[Tensor]):
    """Plain CPU tensors that know where they lie, which lie where an earlier one does, and for which sparse ones some stand."""

    def __init__(self, xs: Sequence[Tensor], memory: native.Memory) -> None:
        super().__init__(xs)
        self.memory = memory
        self.again = [False] * len(self)
        self.sparse: dict[int, Tensor] = {}


def arrays(leaves: Sequence[Any], path: Callable[[int], str], writable: bool) -> list[Array]:
    psdb.fallback(recursive=True)  # to_static's symbolic mode, which cannot follow, runs the whole call as it is
    stays = not set(map(type, leaves)) <= {Tensor} or (not writable and has_derivative(leaves))
    plain = not stays and False not in set(map(Tensor.is_dense, leaves))  # of all others Paddle's DLPack reads what it must not
    memory = native.open_tensors(leaves, EXCHANGE) if plain else None
    if memory is not None and memory.whole:  # plain memory of a type that the core knows: there is nothing to check
        return _once(Tensors(leaves, memory), path) if writable else Tensors(leaves, memory)
    for i, leaf in enumerate(leaves):
        _check(leaf, i, path)
    values = [_values(x) for x in leaves]
    sparse = {i: x for i, (x, y) in enumerate(zip(leaves, values, strict=True)) if x is not y}
    if stays or not {x.place.is_cpu_place() for x in values} <= {True}:
        if writable and sparse:
            raise ValueError("sparse gradients are written in place on the CPU alone: use clip()")
        return values
    xs = Tensors(values, memory_of(values))
    xs.sparse = sparse
    return _once(xs, path) if writable else xs


def has_derivative(xs: Sequence[Tensor]) -> bool:
    """Is a derivative to be kept of one of these? Of a parameter's gradient there is none, though nothing stops it."""
    return paddle.is_grad_enabled() and True in {not x.stop_gradient and x.grad_fn is not None for x in xs}


def _check(x: Any, i: int, path: Callable[[int], str]) -> None:
    name = said(path(i))
    if isinstance(x, EagerParamBase) or (
        isinstance(x, Value) and x.persistable and x.get_defining_op().name() == "builtin.parameter"
    ):
        raise TypeError(
            f"{name} is a parameter, and clipping it would scale the weights: pass its gradient, p.grad; or let the optimizer "
            "clip, grad_clip=gradclip.integrations.paddle.ClipGrad(rule)"
        )
    if x.dtype not in NUMPY:
        raise TypeError(f"{name} is of {x.dtype}: gradients are of {', '.join(map(str, NUMPY))}")
    if not _is_dense(x) and not _is_sparse(x):
        raise TypeError(f"{name} is neither a dense tensor nor one of selected rows, and Paddle's other kinds are not clipped")


def _is_dense(x: Array) -> bool:
    return bool(x.is_dense_tensor_type() if isinstance(x, Value) else x.is_dense())


def _is_sparse(x: Array) -> bool:
    """Are these the rows of an embedding? A static graph has dense ones in their place."""
    return isinstance(x, Tensor) and bool(x.is_selected_rows())


def _values(x: Array) -> Array:
    """The values of a sparse gradient, rows that occur twice merged."""
    if not _is_sparse(x):
        return x
    if not x.rows():  # Paddle has no tensor of no rows
        return paddle.zeros([0, *x.shape[1:]], x.dtype)
    return merge_selected_rows(x)._get_tensor_from_selected_rows()


def memory_of(xs: Sequence[Tensor]) -> native.Memory:
    return native.open_tensors(xs, EXCHANGE) or native.nowhere(len(xs))


def _once(xs: Tensors, path: Callable[[int], str]) -> Tensors:
    """Ready to be written, each stretch of memory once; ValueError for what shares only a part of it."""
    xs.again = written_once(len(xs), lambda i: numpy_view(xs[i]), *xs.memory.bounds(), ~xs.memory.held, path)
    return xs


def numpy_view(x: Tensor) -> Array:
    """A NumPy array on a tensor's memory, which it keeps alive."""
    interface = {
        "version": 3,
        "data": (x.data_ptr() or 8, False),
        "shape": tuple(x.shape),
        "strides": tuple(stride * x.element_size() for stride in x.strides),
        "typestr": np.dtype(NUMPY[x.dtype]).str,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface, tensor=x))


def as_numpy(x: Tensor) -> Array:
    """As NumPy's, without a copy where NumPy has the type."""
    return numpy_view(x.astype(paddle.float32) if x.dtype == paddle.bfloat16 else x)


def restore(x: Array, leaf: Array) -> Array:
    if not _is_sparse(leaf):
        return x
    if not leaf.rows():
        return leaf
    merged = merge_selected_rows(leaf)
    paddle.assign(x, output=merged._get_tensor_from_selected_rows())
    return merged


def some_wide(xs: Sequence[Array]) -> bool:
    """Is a gradient of float64 among them, or of complex numbers of two?"""
    if isinstance(xs, Tensors) and xs.memory.whole:
        return not xs.memory.dtypes.all()  # float64's code is 0
    return not WIDE.isdisjoint({x.dtype for x in xs})


def put_back(xs: Tensors, written: Sequence[bool]) -> Tensors:
    """Put back into sparse gradients what was written; a row that occurs again holds 0 where it does."""
    for i, sparse in xs.sparse.items():
        if written[i] and sparse.rows():
            first = {row: at for at, row in reversed(list(enumerate(sparse.rows())))}
            view = numpy_view(sparse._get_tensor_from_selected_rows())
            view[...] = 0
            view[[first[row] for row in merge_selected_rows(sparse).rows()]] = numpy_view(xs[i])
    return xs


def empty_like(x: Tensor) -> Tensor:
    """As x in layout, where x is dense."""
    if x.is_contiguous():
        return paddle.empty_like(x)
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    return paddle.empty([x.shape[axis] for axis in order], x.dtype).transpose([order.index(axis) for axis in range(x.ndim)])


def tell_written(ys: Sequence[Tensor], which: Sequence[bool]) -> None:
    """Tells Paddle's differentiation what was written."""
    for y in compress(ys, which):
        y._bump_inplace_version()
