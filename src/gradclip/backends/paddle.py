"""PaddlePaddle. Plain CPU tensors go through the native core, and what becomes of them is decided on the host.

Values of a static graph, tensors of an accelerator and those with a derivative to keep stay with Paddle's own kernels, and
their norms with them, in float64. Rows of a sparse gradient (SelectedRows) are merged first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import compress, islice
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import paddle
from paddle import Tensor
from paddle.base.framework import EagerParamBase
from paddle.jit.sot import psdb
from paddle.nn.clip import merge_selected_rows
from paddle.pir import Value

from . import _blocks, _powers, native
from . import numpy as host
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

abs = paddle.abs
floor = paddle.floor


def where(condition: Array, yes: Any, no: Any) -> Array:
    kind = next((x.dtype for x in (yes, no) if isinstance(x, OURS)), paddle.bool if isinstance(yes, bool) else paddle.float64)
    given = [condition, _tensor(yes, kind), _tensor(no, kind)]
    shape = list(np.broadcast_shapes(*(tuple(x.shape) for x in given)))
    return paddle.where(*(x if list(x.shape) == shape else x.expand(shape) for x in given))


def _tensor(x: Any, kind: Any) -> Array:
    return x if isinstance(x, OURS) else paddle.full([], x, kind)


def isfinite(x: Array) -> Array:
    return x.abs() < math.inf


def any(x: Array) -> Array:
    return x.any()


def all(x: Array) -> Array:
    return x.all()


def like(x: Array, value: Any) -> Array:
    return _tensor(value, x.dtype).astype(x.dtype).expand(x.shape)


def total(x: Array) -> Array:
    return x.sum()


def sort(x: Array) -> Array:
    return paddle.sort(x, axis=0)


def put(window: Array, slot: Any, value: Array) -> Array:
    places = paddle.arange(window.shape[0]).reshape([-1] + [1] * value.ndim)
    return where(places == _whole(slot), value, window)


def take(x: Array, place: Any) -> Array:
    return paddle.gather(x, _whole(place).reshape([1]))[0]


def _whole(x: Any) -> Array:
    return x.astype(paddle.int64) if isinstance(x, OURS) else paddle.full([], int(x), paddle.int64)


def scalar(value: Any) -> Any:
    """In float64; an eager tensor that meets a graph under construction, which takes none, as the number it holds."""
    if isinstance(value, Tensor) and not paddle.in_dynamic_mode():
        return value.item()
    return value.astype(paddle.float64) if isinstance(value, OURS) else value


def choose(condition: Array, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
    """Both are computed: a look at the condition would wait for the device."""
    return yes()


def known(x: Any) -> Array | None:
    if isinstance(x, host.HOST):
        return x
    return None if isinstance(x, Value) or _has_derivative([x]) else x.astype(paddle.float64).numpy()[()]


def truth(flag: Array) -> bool | None:
    return None if isinstance(flag, Value) else bool(flag)


def quiet() -> AbstractContextManager[Any]:
    return cast("AbstractContextManager[Any]", host.quiet())


def stack(xs: Sequence[Array]) -> Array:
    return paddle.stack(list(xs)) if isinstance(xs[0], OURS) else host.stack(xs)


def unstack(x: Array) -> list[Array]:
    return list(paddle.unbind(x))


def norms(name: str, x: Any) -> Array:
    if not isinstance(x, OURS):
        return host.norms(name, x)
    if x.dtype in COMPLEX or x.dtype == paddle.bool:
        raise TypeError(f"{name} must be real numbers; got {x!r}")
    if isinstance(x, Value) or _has_derivative([x]) or not x.place.is_cpu_place():
        return x.astype(paddle.float64)
    return host.norms(name, x.astype(paddle.float64).numpy())


def field(x: Any, xs: Sequence[Array] = ()) -> Array:
    if isinstance(x, OURS):
        return x
    place = xs[0].place if xs and isinstance(xs[0], Tensor) else None
    return paddle.to_tensor(np.array(x), place=place)


class Tensors(list[Tensor]):
    """Plain CPU tensors that know where they lie, which lie where an earlier one does, and for which sparse ones some stand."""

    def __init__(self, xs: Sequence[Tensor], memory: native.Memory) -> None:
        super().__init__(xs)
        self.memory = memory
        self.again = [False] * len(self)
        self.sparse: dict[int, Tensor] = {}


def arrays(leaves: Sequence[Any], path: Callable[[int], str], writable: bool) -> list[Array]:
    psdb.fallback(recursive=True)  # to_static's symbolic mode, which cannot follow, runs the whole call as it is
    stays = not set(map(type, leaves)) <= {Tensor} or (not writable and _has_derivative(leaves))
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
    xs = Tensors(values, _memory(values))
    xs.sparse = sparse
    return _once(xs, path) if writable else xs


def _has_derivative(xs: Sequence[Tensor]) -> bool:
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


def _memory(xs: Sequence[Tensor]) -> native.Memory:
    return native.open_tensors(xs, EXCHANGE) or native.nowhere(len(xs))


def _once(xs: Tensors, path: Callable[[int], str]) -> Tensors:
    """Ready to be written, each stretch of memory once; ValueError for what shares only a part of it."""
    xs.again = written_once(len(xs), lambda i: _view(xs[i]), *xs.memory.bounds(), ~xs.memory.held, path)
    return xs


def _view(x: Tensor) -> Array:
    """A NumPy array on a tensor's memory, which it keeps alive."""
    interface = {
        "version": 3,
        "data": (x.data_ptr() or 8, False),
        "shape": tuple(x.shape),
        "strides": tuple(stride * x.element_size() for stride in x.strides),
        "typestr": np.dtype(NUMPY[x.dtype]).str,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface, tensor=x))


def _plain(x: Tensor) -> Array:
    """As NumPy's, without a copy where NumPy has the type."""
    return _view(x.astype(paddle.float32) if x.dtype == paddle.bfloat16 else x)


def restore(x: Array, leaf: Array) -> Array:
    if not _is_sparse(leaf):
        return x
    if not leaf.rows():
        return leaf
    merged = merge_selected_rows(leaf)
    paddle.assign(x, output=merged._get_tensor_from_selected_rows())
    return merged


def powers(xs: Sequence[Array], counts: Sequence[int], p: float, divisors: Array = None) -> Array:
    if isinstance(xs, Tensors):
        return _powers.joined(xs.memory, counts, p, divisors, lambda i: _blocks.blocks(_plain(xs[i])))
    parts = _parts(xs, counts, p, divisors)
    return paddle.stack([_joined(list(islice(parts, count)), p) for count in counts])


def _parts(xs: Sequence[Array], counts: Sequence[int], p: float, divisors: Array) -> Iterator[Array]:
    """Σ|x|^p of every array."""
    each = [None] * len(counts) if divisors is None else unstack(divisors)
    repeated = [by for by, count in zip(each, counts, strict=True) for _ in range(count)]
    return iter([_power(_size(x) if by is None else _size(x) / by, p) for x, by in zip(xs, repeated, strict=True)])


def _joined(parts: list[Array], p: float) -> Array:
    if not parts:
        return paddle.zeros([], paddle.float64)
    return paddle.stack(parts).max() if p == math.inf else paddle.stack(parts).sum()


def _power(size: Array, p: float) -> Array:
    """Σ size^p, its derivative 0 where it is 0."""
    if p == math.inf:
        return _largest(size)
    if p in (1, 2):
        return size.sum() if p == 1 else size.square().sum()
    return _raised(size, p).sum()


def _raised(x: Array, p: float) -> Array:
    some = x != 0
    return where(some, where(some, x, 1.0) ** p, 0.0)


def _largest(x: Array) -> Array:
    return x.sum() if 0 in tuple(x.shape) else x.max()


def _size(x: Array) -> Array:
    """|x| in float64."""
    return x.astype(paddle.complex128 if x.dtype in COMPLEX else paddle.float64).abs()


def unit_powers(xs: Sequence[Array], axes: Sequence[int | None], p: float, divisors: Array = None) -> Array:
    if isinstance(xs, Tensors):
        return host.unit_powers([_plain(x) for x in xs], axes, p, divisors)
    found, first = [], 0
    for x, axis in zip(xs, axes, strict=True):
        rows = _rows(_size(x), axis)
        count = rows.shape[0]
        by = 1.0 if divisors is None else divisors[first : first + count].reshape([-1, 1])
        found.append(_row_powers(rows / by, p))
        first += count
    return paddle.concat(found) if found else paddle.zeros([0], paddle.float64)


def _rows(x: Array, axis: int | None) -> Array:
    """One row for every index along the axis."""
    if axis is None:
        return x.reshape([1, -1]) if 0 not in tuple(x.shape) else x.reshape([1, 0])
    shape = [x.shape[axis], math.prod(x.shape) // max(1, x.shape[axis])]
    return paddle.moveaxis(x, axis, 0).reshape(shape)


def _row_powers(rows: Array, p: float) -> Array:
    if p == math.inf:
        return rows.max(axis=1) if rows.shape[1] else rows.sum(axis=1)
    return (rows if p == 1 else rows.square() if p == 2 else _raised(rows, p)).sum(axis=1)


def fits(xs: Sequence[Array], p: float) -> bool:
    return host.SMALLEST_P <= p <= host.LARGEST_P and not _some_wide(xs)


def _some_wide(xs: Sequence[Array]) -> bool:
    """Is a gradient of float64 among them, or of complex numbers of two?"""
    if isinstance(xs, Tensors) and xs.memory.whole:
        return not xs.memory.dtypes.all()  # float64's code is 0
    return not WIDE.isdisjoint({x.dtype for x in xs})


def lost(powers: Array, p: float) -> Array:
    if not isinstance(powers, OURS):
        return host.lost(powers, p)
    if p < host.SMALLEST_P:
        return paddle.ones(powers.shape, paddle.bool)
    return ~((powers > host.SMALLEST) & (powers < host.LARGEST))


def root(powers: Array, p: float) -> Array:
    if not isinstance(powers, OURS) or p in (1, math.inf):
        return host.root(powers, p)
    some = powers > 0  # the root of 0 has no derivative
    return where(some, where(some, powers, 1.0) ** (1 / p), powers)


def peak(peaks: Array) -> Array:
    return _largest(peaks) if isinstance(peaks, OURS) else host.peak(peaks)


def sizes(xs: Sequence[Array], counts: Sequence[int]) -> Array:
    if isinstance(xs, Tensors) and xs.memory.whole and len(counts) == 1:
        return np.array([xs.memory.lengths.sum()], np.float64)
    each = (math.prod(x.shape) for x in xs)
    found = np.array([sum(islice(each, count)) for count in counts], np.float64)
    return found if isinstance(xs, Tensors) or not xs else field(found, xs)


def pick(xs: Sequence[Array], places: Sequence[int]) -> list[Array]:
    picked = [xs[i] for i in places]
    return Tensors(picked, xs.memory.only(np.array(places, np.intp))) if isinstance(xs, Tensors) else picked


def unit_axis(x: Array) -> int | None:
    return 1 if len(x.shape) == 2 else 0


def aligned(coef: Array, x: Array, axis: int | None) -> Array:
    return coef[0] if axis is None else coef.reshape([-1 if i == axis else 1 for i in range(len(x.shape))])


def is_complex(x: Array) -> bool:
    return x.dtype in COMPLEX


def nonfinite(xs: Sequence[Tensor]) -> list[tuple[int, int]]:
    memory = xs.memory if isinstance(xs, Tensors) else native.nowhere(len(xs))
    direct = iter(native.nonfinite(memory))
    return [
        next(direct) if held else _blocks.nonfinite(_plain(x.cpu())) for x, held in zip(xs, memory.held.tolist(), strict=True)
    ]


def working(xs: Sequence[Array], norm: Array) -> Array:
    wide = _some_wide(xs)
    if isinstance(norm, OURS):
        return norm.astype(paddle.float64 if wide else paddle.float32)
    return np.atleast_1d(norm).astype(np.float64 if wide else np.float32)


def widened(coef: Array, norm: Array) -> Array:
    return coef.astype(norm.dtype).expand(norm.shape) if isinstance(coef, OURS) else host.widened(coef, norm)


def scale(xs: Sequence[Array], coefs: Sequence[Any]) -> list[Array]:
    if not isinstance(xs, Tensors):
        return [_product(x, coef) for x, coef in zip(xs, coefs, strict=True)]
    out = [_empty(x) if np.any(coef != 1) else x for x, coef in zip(xs, coefs, strict=True)]
    _scale_into(xs, coefs, out, [y is not x for x, y in zip(xs, out, strict=True)])
    return out


def scale_(xs: list[Array], coefs: Sequence[Any]) -> list[Array]:
    if not isinstance(xs, Tensors):
        return _written(xs, scale(xs, coefs))
    which = [bool(np.any(coef != 1)) and not done for coef, done in zip(coefs, xs.again, strict=True)]
    _scale_into(xs, coefs, xs, which)
    return _merged(xs, which)


def _empty(x: Tensor) -> Tensor:
    """As x in layout, where x is dense."""
    if x.is_contiguous():
        return paddle.empty_like(x)
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    return paddle.empty([x.shape[axis] for axis in order], x.dtype).transpose([order.index(axis) for axis in range(x.ndim)])


def _scale_into(xs: Tensors, coefs: Sequence[Any], ys: list[Tensor], which: Sequence[bool]) -> None:
    """Writes x · coef into every y that is asked for: the product in float64, rounded once."""
    if True not in which:
        return
    targets = xs.memory if ys is xs else _memory(ys)
    numbers = np.array([not np.ndim(coef) for coef in coefs])
    direct = xs.memory.held & targets.held & numbers & np.array(which)
    factors = np.array(list(compress(coefs, direct.tolist())), np.float64)
    native.scale(xs.memory.only(direct), targets.only(direct), factors)
    for i in np.flatnonzero(np.array(which) & ~direct).tolist():
        _view(ys[i])[...] = _view(_product(xs[i], coefs[i]))
    _changed(ys, which)


def _changed(ys: Sequence[Tensor], which: Sequence[bool]) -> None:
    """Tells Paddle's differentiation what was written."""
    for y in compress(ys, which):
        y._bump_inplace_version()


def _product(x: Array, coef: Any) -> Array:
    """x · coef, formed in float64 and rounded once; a coefficient may lie outside float32's range."""
    if isinstance(coef, np.ndarray):
        coef = paddle.to_tensor(coef)
    if x.dtype in COMPLEX:
        return paddle.complex(*(part.astype(paddle.float64) * coef for part in (x.real(), x.imag()))).astype(x.dtype)
    return (x.astype(paddle.float64) * coef).astype(x.dtype)


def clamp(xs: Sequence[Array], low: Any, high: Any, peaks: Any) -> tuple[list[Array], Any]:
    if not isinstance(xs, Tensors):
        return [_clamped(x, low, high) for x in xs], _outside(xs, low, high)
    doubtful = _doubtful(xs, low, high, peaks)
    out = [_empty(x) if doubt else x for x, doubt in zip(xs, doubtful, strict=True)]
    changed = _clamp_into(xs, low, high, out, doubtful)
    return [y if hit else x for x, y, hit in zip(xs, out, changed, strict=True)], True in changed


def clamp_(xs: list[Array], low: Any, high: Any, peaks: Any) -> tuple[list[Array], Any]:
    if not isinstance(xs, Tensors):
        new, changed = clamp(xs, low, high, peaks)
        return _written(xs, new), changed
    doubtful = [doubt and not done for doubt, done in zip(_doubtful(xs, low, high, peaks), xs.again, strict=True)]
    hit = _clamp_into(xs, low, high, xs, doubtful)
    return _merged(xs, hit), True in hit


def _doubtful(xs: Sequence[Tensor], low: float, high: float, peaks: Array | None) -> list[bool]:
    """May a value lie outside? Said by the largest |x|; a NaN hides the others."""
    if peaks is None:
        return [True] * len(xs)
    bounds = {dtype: _rounded(low, high, dtype) for dtype in {x.dtype for x in xs}}
    least = [min(-a, b) for a, b in (bounds[x.dtype] for x in xs)]
    return [not peak <= bound for peak, bound in zip(peaks.tolist(), least, strict=True)]


def _rounded(low: float, high: float, dtype: Any) -> tuple[float, float]:
    """The bounds as the type rounds them; those of a modulus have no such type."""
    least, most = (_held(bound, dtype) for bound in (low, high))
    return float(least), float(most)


def _held(bound: Any, dtype: Any) -> Array:
    """A bound as the type rounds it, in float64."""
    wide = _tensor(bound, paddle.float64)
    return wide if dtype in COMPLEX else wide.astype(dtype).astype(paddle.float64)


def _clamp_into(xs: Tensors, low: float, high: float, ys: list[Tensor], which: Sequence[bool]) -> list[bool]:
    """Writes x between the bounds into every y that is asked for; which changed?"""
    changed = np.zeros(len(xs), np.bool_)
    if True not in which:
        return cast("list[bool]", changed.tolist())
    targets = xs.memory if ys is xs else _memory(ys)
    direct = xs.memory.held & targets.held & np.array(which)
    bounds = {dtype: _rounded(low, high, dtype) for dtype in {x.dtype for x in xs}}
    each = [bounds[x.dtype] for x in compress(xs, direct.tolist())]
    changed[direct] = native.clamp(xs.memory.only(direct), targets.only(direct), np.array(each).reshape(-1, 2))
    for i in np.flatnonzero(np.array(which) & ~direct).tolist():
        changed[i] = bool(_outside([xs[i]], low, high))
        if changed[i]:
            _view(ys[i])[...] = _view(_clamped(xs[i], low, high))
    found: list[bool] = changed.tolist()
    _changed(ys, found)
    return found


def _clamped(x: Array, low: Any, high: Any) -> Array:
    least, most = _held(low, x.dtype), _held(high, x.dtype)
    if x.dtype not in COMPLEX:
        wide = x.astype(paddle.float64)
        return where(wide > most, most, where(wide < least, least, wide)).astype(x.dtype)
    size = _size(x)
    above = size > most
    return _product(x, where(above, most / where(above, size, 1.0), 1.0))


def _outside(xs: Sequence[Array], low: Any, high: Any) -> Array:
    """Does any value lie outside the bounds?"""
    flags = [_outside_one(x, _held(low, x.dtype), _held(high, x.dtype)) for x in xs]
    return paddle.stack(flags).any() if flags else paddle.zeros([], paddle.bool)


def _outside_one(x: Array, least: Array, most: Array) -> Array:
    if x.dtype in COMPLEX:
        return (_size(x) > most).any()
    wide = x.astype(paddle.float64)
    return ((wide < least) | (wide > most)).any()


def zeros(xs: Sequence[Array]) -> list[Array]:
    return [paddle.zeros(x.shape, x.dtype) for x in xs]


def zero_(xs: list[Array]) -> list[Array]:
    if not isinstance(xs, Tensors):
        return _written(xs, zeros(xs))
    for x in xs:
        _view(x)[...] = 0
    which = [True] * len(xs)
    _changed(xs, which)
    return _merged(xs, which)


def keep(xs: Sequence[Array], finite: Array) -> list[Array]:
    return [where(finite, x, 0.0) for x in xs]


def keep_(xs: list[Array], finite: Array) -> list[Array]:
    return _written(xs, keep(xs, finite))


def _written(xs: list[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
    if xs and isinstance(xs[0], Value):
        raise TypeError("the values of a static graph cannot be written: use clip()")
    with paddle.no_grad():
        for x, y in zip(xs, ys, strict=True):
            x.set_value(y)
    return xs


def _merged(xs: Tensors, written: Sequence[bool]) -> Tensors:
    """Put back into sparse gradients what was written; a row that occurs again holds 0 where it does."""
    for i, sparse in xs.sparse.items():
        if written[i] and sparse.rows():
            first = {row: at for at, row in reversed(list(enumerate(sparse.rows())))}
            view = _view(sparse._get_tensor_from_selected_rows())
            view[...] = 0
            view[[first[row] for row in merge_selected_rows(sparse).rows()]] = _view(xs[i])
    return xs
