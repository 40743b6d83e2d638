"""MLX. Evaluated arrays on the CPU go through the native core, and what becomes of them is decided on the host.

Inside `mx.compile` and `mx.vmap` arrays have no value yet, under `mx.grad` they have a derivative to keep, and on a GPU a look
at them would wait: those stay with MLX's own kernels, in float64 on the CPU and in float32 where there is no float64.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from itertools import accumulate, compress, islice
from typing import Any, cast

import mlx.core as mx
import numpy as np

from . import _blocks, _powers, native, numpy as host
from ._overlap import said

Array = Any
DTYPES = (mx.float16, mx.bfloat16, mx.float32, mx.float64, mx.complex64)
SMALLEST, LARGEST = 1e-30, 1e36  # between them a float32 power has not lost digits

floor = mx.floor
abs = mx.abs
quiet = host.quiet


def where(condition: Array, yes: Any, no: Any) -> mx.array:
    """A number takes the type of the array beside it; two of them are as precise as norms are."""
    if type(yes) is float and type(no) is float:
        yes = mx.array(yes, _wide())
    return mx.where(*(field(x) if isinstance(x, host.HOST) else x for x in (condition, yes, no)))


def isfinite(x: mx.array) -> mx.array:
    return mx.abs(x) < math.inf


def any(x: mx.array) -> mx.array:
    return mx.any(x)


def all(x: mx.array) -> mx.array:
    return mx.all(x)


def like(x: mx.array, value: Any) -> mx.array:
    return mx.full(x.shape, field(value), dtype=x.dtype)


def total(x: mx.array) -> mx.array:
    return mx.sum(x)


def sort(x: mx.array) -> mx.array:
    return mx.sort(x, axis=0)


def put(window: mx.array, slot: mx.array, value: mx.array) -> mx.array:
    places = mx.arange(window.shape[0]).reshape([-1] + [1] * (window.ndim - 1))
    return mx.where(places == slot, value, window)


def take(x: mx.array, place: mx.array) -> mx.array:
    return mx.take(x, place.astype(mx.int32), axis=0)


def scalar(value: Any) -> Any:
    return value if isinstance(value, mx.array) else host.scalar(value)


def choose(condition: mx.array, yes: Callable[[], mx.array], no: Callable[[], mx.array]) -> mx.array:
    """Both are computed: MLX has no branch on a value."""
    return yes()


def known(x: Any) -> Array | None:
    if isinstance(x, host.HOST):
        return x
    return _plain(x).astype(np.float64)[()] if _evaluated([x]) and not _derived([x]) else None


def truth(flag: Any) -> bool | None:
    return bool(flag) if _evaluated([flag]) else None


def _evaluated(xs: Sequence[mx.array]) -> bool:
    """Have they values, now that these were asked for? Inside `mx.compile` and `mx.vmap` they have none."""
    try:
        mx.eval(xs)
    except ValueError:
        return False
    except RuntimeError as error:  # what closes over such an array is not marked as one
        if "without a primitive" not in str(error):
            raise
        return False
    return True


def _derived(xs: Sequence[mx.array]) -> bool:
    """Do they, evaluated, still know what they were made from? Then somebody is going to differentiate."""
    graph = StringIO()
    mx.export_to_dot(graph, *xs)
    return "->" in graph.getvalue()


def _on_cpu() -> bool:
    return bool(mx.default_device().type == mx.cpu)


def _wide() -> mx.Dtype:
    """The precision that norms are computed in."""
    return mx.float64 if _on_cpu() else mx.float32


def stack(xs: Sequence[Array]) -> Array:
    return mx.stack(list(xs)) if isinstance(xs[0], mx.array) else host.stack(xs)


def unstack(x: mx.array) -> list[mx.array]:
    return [x[i] for i in range(x.shape[0])]


def norms(name: str, x: Any) -> Array:
    if not isinstance(x, mx.array):
        return host.norms(name, x)
    if x.dtype in (mx.bool_, mx.complex64):
        raise TypeError(f"{name} must be real numbers; got {x!r}")
    on_host = known(x) if _on_cpu() else None
    return x.astype(_wide()) if on_host is None else np.asarray(on_host)


def field(x: Any, xs: Sequence[mx.array] = ()) -> mx.array:
    if isinstance(x, mx.array):
        return x
    x = np.asarray(x)
    return mx.array(x, mx.bool_ if x.dtype == np.bool_ else _wide())


class Arrays(list[mx.array]):
    """Evaluated arrays that know where they lie."""

    def __init__(self, xs: Sequence[mx.array], memory: native.Memory | None = None) -> None:
        super().__init__(xs)
        self.memory = native.open_buffers(self, False) if memory is None else memory


def arrays(leaves: Sequence[Any], path: Callable[[int], str], writable: bool) -> list[mx.array]:
    for i, leaf in enumerate(leaves):
        if leaf.dtype not in DTYPES:
            raise TypeError(f"{said(path(i))} is of {leaf.dtype}: gradients are of {', '.join(map(str, DTYPES))}")
    if writable:
        raise TypeError(
            f"{said(path(0))} is an MLX array, a value that others may hold, and that a derivative would not see change: use "
            "clip(), which returns new ones"
        )
    on_host = _on_cpu() and _evaluated(leaves) and not _derived(leaves)
    return Arrays(leaves) if on_host else list(leaves)


def restore(x: mx.array, leaf: mx.array) -> mx.array:
    return x


def _plain(x: mx.array) -> Array:
    """As NumPy's; without a copy, but for bfloat16, which NumPy does not have."""
    return np.asarray(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


def _blocks_of(x: mx.array) -> Iterator[Array]:
    return _blocks.blocks(_plain(x))


def powers(xs: Sequence[mx.array], counts: Sequence[int], p: float, divisors: Array = None) -> Array:
    if isinstance(xs, Arrays):
        return _powers.joined(xs.memory, counts, p, divisors, lambda i: _blocks_of(xs[i]))
    magnitudes = [_size(x) for x in xs]
    if divisors is not None:
        each = [by for by, count in zip(unstack(divisors), counts, strict=True) for _ in range(count)]
        magnitudes = [x / by for x, by in zip(magnitudes, each, strict=True)]
    parts = [_power(x, p) for x in magnitudes]
    join = _largest if p == math.inf else mx.sum
    ends = accumulate(counts)
    return mx.stack(
        [join(mx.stack(parts[end - count : end])) if count else _zero() for end, count in zip(ends, counts, strict=True)]
    )


def _zero() -> mx.array:
    return mx.zeros((), _wide())


def _size(x: mx.array) -> mx.array:
    """|x| for complex x, in the norm's precision."""
    return (mx.abs(x) if is_complex(x) else x).astype(_wide())


def _power(x: mx.array, p: float) -> mx.array:
    """Σ|x|^p, its derivative 0 where x is 0."""
    return _largest(mx.abs(x)) if p == math.inf else mx.sum(_raised(x, p))


def _raised(x: mx.array, p: float) -> mx.array:
    if p == 1:
        return mx.abs(x)
    if p == 2:
        return mx.square(x)
    some = x != 0
    return mx.where(some, mx.abs(mx.where(some, x, 1.0)) ** p, 0.0)


def _largest(x: mx.array) -> mx.array:
    return mx.max(x) if x.size else _zero()


def unit_powers(xs: Sequence[mx.array], axes: Sequence[int | None], p: float, divisors: Array = None) -> Array:
    if isinstance(xs, Arrays):
        return host.unit_powers([_plain(x) for x in xs], axes, p, divisors)
    rows = [_rows(_size(x), axis) for x, axis in zip(xs, axes, strict=True)]
    if divisors is not None:
        ends = accumulate(len(row) for row in rows)
        rows = [row / divisors[end - len(row) : end, None] for row, end in zip(rows, ends, strict=True)]
    return mx.concatenate([_row_powers(row, p) for row in rows])


def _rows(x: mx.array, axis: int | None) -> mx.array:
    """One row for every index along the axis."""
    if axis is None:
        return x.reshape(1, x.size)
    units = x.shape[axis]
    return mx.moveaxis(x, axis, 0).reshape(units, x.size // max(1, units))


def _row_powers(rows: mx.array, p: float) -> mx.array:
    if p != math.inf:
        return mx.sum(_raised(rows, p), axis=1)
    return mx.max(mx.abs(rows), axis=1) if rows.size else mx.zeros(len(rows), rows.dtype)


def fits(xs: Sequence[mx.array], p: float) -> bool:
    exact = isinstance(xs, Arrays) or _on_cpu()
    return exact and not _some_wide(xs) and host.SMALLEST_P <= p <= host.LARGEST_P


def _some_wide(xs: Sequence[mx.array]) -> bool:
    return mx.float64 in [x.dtype for x in xs]


def lost(powers: Array, p: float) -> Array:
    if isinstance(powers, mx.array) and powers.dtype == mx.float32:
        return ~((powers > SMALLEST) & (powers < LARGEST))
    inside = (powers > host.SMALLEST) & (powers < host.LARGEST)
    return ~inside | (p < host.SMALLEST_P)


def root(powers: Array, p: float) -> Array:
    if not isinstance(powers, mx.array) or p in (1, math.inf):
        return host.root(powers, p)
    some = powers > 0  # the root of 0 has no derivative
    safe = mx.where(some, powers, 1.0)
    return mx.where(some, mx.sqrt(safe) if p == 2 else safe ** (1 / p), powers)


def peak(peaks: Array) -> Array:
    return _largest(peaks) if isinstance(peaks, mx.array) else host.peak(peaks)


def sizes(xs: Sequence[mx.array], counts: Sequence[int]) -> Array:
    each = (x.size for x in xs)
    found = np.array([sum(islice(each, count)) for count in counts], np.float64)
    return found if isinstance(xs, Arrays) else field(found)


def pick(xs: Sequence[mx.array], places: Sequence[int]) -> list[mx.array]:
    picked = [xs[i] for i in places]
    return Arrays(picked, xs.memory.only(np.array(places, np.intp))) if isinstance(xs, Arrays) else picked


def unit_axis(x: mx.array) -> int | None:
    return 0


def aligned(coef: Array, x: mx.array, axis: int | None) -> Array:
    return coef[0] if axis is None else coef.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


def is_complex(x: mx.array) -> bool:
    return bool(x.dtype == mx.complex64)


def nonfinite(xs: Sequence[mx.array]) -> list[tuple[int, int]]:
    return [_blocks.nonfinite(_plain(x)) for x in xs]


def working(xs: Sequence[mx.array], norm: Array) -> Array:
    wide = _some_wide(xs)
    if isinstance(norm, mx.array):
        return norm.astype(mx.float64 if wide else mx.float32)
    return np.atleast_1d(norm).astype(np.float64 if wide else np.float32)


def widened(coef: Array, norm: Array) -> Array:
    return mx.broadcast_to(coef.astype(norm.dtype), norm.shape) if isinstance(coef, mx.array) else host.widened(coef, norm)


def scale(xs: Sequence[mx.array], coefs: Sequence[Any]) -> list[mx.array]:
    if not isinstance(xs, Arrays) or mx.array in set(map(type, coefs)):
        return [_product(x, coef) for x, coef in zip(xs, coefs, strict=True)]
    direct = [held and np.ndim(coef) == 0 and coef != 1 for held, coef in zip(xs.memory.held.tolist(), coefs, strict=True)]
    fresh, source, target = _fresh(xs, direct)
    native.scale(source, target, np.array(list(compress(coefs, direct)), np.float64))
    done = iter(fresh)
    return [next(done) if one else _scaled(x, coef) for x, coef, one in zip(xs, coefs, direct, strict=True)]


def _fresh(xs: Arrays, which: Sequence[bool]) -> tuple[list[mx.array], native.Memory, native.Memory]:
    """New arrays for some of xs, and the memory of those and of these."""
    fresh = [_empty(x) for x in compress(xs, which)]
    mx.eval(fresh)
    return fresh, xs.memory.only(np.array(which, np.bool_)), native.open_buffers(fresh, True)


def _empty(x: mx.array) -> mx.array:
    """A new array that lies in memory as x does, where that is dense."""
    strides = cast("tuple[int, ...]", memoryview(x).strides)
    order = sorted(range(x.ndim), key=lambda axis: -strides[axis])
    return mx.zeros([x.shape[axis] for axis in order], x.dtype).transpose([order.index(axis) for axis in range(x.ndim)])


def _scaled(x: mx.array, coef: Any) -> mx.array:
    """x · coef, formed in float64 and rounded once: by NumPy, where the core does not reach."""
    if not np.any(coef != 1):
        return x
    if x.dtype == mx.bfloat16:
        return mx.array(_blocks.to_odd(_plain(x) * np.float64(coef))).astype(x.dtype)
    y = _empty(x)
    mx.eval(y)
    _blocks.scaled(np.asarray(x), coef, np.asarray(y))
    return y


def _product(x: mx.array, coef: Any) -> mx.array:
    """x · coef, formed in the norm's precision and rounded once; in float32 for complex x, which have no more."""
    coef = coef if isinstance(coef, mx.array) else field(coef)
    if is_complex(x):
        return mx.where(coef == 1, x, x * coef.astype(mx.float32))  # since inf · (1 + 0i) is NaN
    return (x.astype(coef.dtype) * coef).astype(x.dtype)


def clamp(xs: Sequence[mx.array], low: Any, high: Any, peaks: Any) -> tuple[list[mx.array], Any]:
    if not isinstance(xs, Arrays) or isinstance(low, mx.array) or isinstance(high, mx.array):
        return [_clamped(x, low, high) for x in xs], _some_outside(xs, low, high)
    bounds = _bounds(xs, low, high)
    doubtful = _blocks.doubtful(bounds, peaks)
    direct = [held and doubt for held, doubt in zip(xs.memory.held.tolist(), doubtful, strict=True)]
    fresh, source, target = _fresh(xs, direct)
    hit = native.clamp(source, target, np.array(list(compress(bounds, direct))).reshape(-1, 2)).tolist()
    done = iter(y if changed else None for y, changed in zip(fresh, hit, strict=True))
    new = [next(done) if one else _changed(x, low, high) for x, one in zip(xs, direct, strict=True)]
    return [x if y is None else y for x, y in zip(xs, new, strict=True)], builtins.any(y is not None for y in new)


def _bounds(xs: Sequence[mx.array], low: float, high: float) -> list[tuple[float, float]]:
    """The bounds of each array, as its type rounds them."""
    rounded = {dtype: tuple(_rounded(bound, dtype).item() for bound in (low, high)) for dtype in {x.dtype for x in xs}}
    return [(low, high) if is_complex(x) else cast("tuple[float, float]", rounded[x.dtype]) for x in xs]


def _changed(x: mx.array, low: float, high: float) -> mx.array | None:
    """x between the bounds, if it was not."""
    return _clamped(x, low, high) if _outside(x, low, high) else None


def _rounded(bound: Any, dtype: mx.Dtype) -> mx.array:
    return bound.astype(dtype) if isinstance(bound, mx.array) else mx.array(bound, dtype)


def _some_outside(xs: Sequence[mx.array], low: Any, high: Any) -> mx.array:
    return mx.any(mx.stack([_outside(x, low, high) for x in xs])) if xs else mx.array(False)


def _outside(x: mx.array, low: Any, high: Any) -> mx.array:
    if is_complex(x):
        return mx.any(mx.abs(x) > high)
    return mx.any((x < _rounded(low, x.dtype)) | (x > _rounded(high, x.dtype)))


def _clamped(x: mx.array, low: Any, high: Any) -> mx.array:
    if not is_complex(x):
        least, most = _rounded(low, x.dtype), _rounded(high, x.dtype)
        return mx.where(x > most, most, mx.where(x < least, least, x))
    size = mx.abs(x)
    above = size > high
    return mx.where(above, x * (high / mx.where(above, size, 1.0)), x)


def zeros(xs: Sequence[mx.array]) -> list[mx.array]:
    return [mx.zeros_like(x) for x in xs]


def keep(xs: Sequence[mx.array], finite: mx.array) -> list[mx.array]:
    return [mx.where(finite, x, mx.zeros_like(x)) for x in xs]
