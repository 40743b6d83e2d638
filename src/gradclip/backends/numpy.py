"""NumPy: the default, and the reference for all others. Norms are float64; sums go by blocks, so that memory stays flat."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import compress, islice
from typing import Any

import numpy as np

from . import _blocks, _powers, native
from ._overlap import said, written_once

Array = Any
WIDE = {"float64", "complex128"}
SMALLEST, LARGEST = 1e-270, 1e300  # between them Σ|g|^p has not lost digits
SMALLEST_P, LARGEST_P = 1e-3, 5.0  # below: the root multiplies an error too much; above: a float32's power leaves the range
HOST = (np.ndarray, np.generic)
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")

where = np.where
abs = np.abs
floor = np.floor
isfinite = np.isfinite


def quiet() -> Any:
    """A context without NumPy's floating-point warnings: the norms say themselves what is not finite."""
    return np.errstate(all="ignore")


def total(x: Array) -> Array:
    return np.float64(_powers.total(np.ravel(x).tolist()))


def sort(x: Array) -> Array:
    return np.sort(x, axis=0)


def put(window: Array, slot: Array, value: Array) -> Array:
    window = np.array(window)
    window[int(slot)] = value
    return window


def like(x: Array, value: Any) -> Array:
    return np.where(x > 0, value, value)


def grown(old: Any, fresh: Any) -> Any:
    """The old entries of a state, and the fresh ones of tensors that came to its end, along the last axis."""
    if np.shape(old) == np.shape(fresh):
        return old
    grown = np.array(fresh, np.float64)
    grown[..., : np.shape(old)[-1]] = old
    return grown


def take(x: Array, place: Any) -> Array:
    return x[int(place)]


def scalar(value: Any) -> Any:
    if getattr(value, "shape", None) != ():
        return value
    if hasattr(value, "item"):
        return value.item()
    value = value.numpy() if hasattr(value, "numpy") else value  # NumPy itself reads no bfloat16 of TensorFlow
    return np.asarray(value).item()


def any(x: Array) -> Any:
    return np.any(x)


def all(x: Array) -> Any:
    return np.all(x)


def choose(condition: Any, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
    return yes() if condition else no()


def known(x: Array) -> Array:
    return x


def truth(flag: Any) -> bool:
    return bool(flag)


def stack(xs: Sequence[Array]) -> Array:
    return np.stack(xs)


def unstack(x: Array) -> list[Array]:
    return list(x)


def norms(name: str, x: Any) -> Array:
    """Norms that the caller gives, as this backend's own."""
    given = np.asarray(x)
    if (given.dtype.kind not in "iuf" and not _accepted(given.dtype)) or given.dtype.kind == "c":
        raise TypeError(f"{name} must be real numbers; got {x!r}")
    return given.astype(np.float64)


def field(x: Any, xs: Sequence[Array] = ()) -> Array:
    return np.asarray(x)


class Arrays(list[Array]):
    """Arrays that know where they lie, and which of them lie where an earlier one does."""

    def __init__(self, xs: Iterable[Array], writable: bool = False) -> None:
        super().__init__(xs)
        self.memory = native.open_buffers(self, writable)
        self.again = [False] * len(self)

    def empty(self, x: Array) -> Array:
        """An array for what becomes of x: as x in layout, where x is dense."""
        return _empty(x)


def arrays(leaves: Sequence[Any], path: Callable[[int], str], writable: bool) -> list[Array]:
    xs = Arrays(leaves, writable)
    if set(map(type, leaves)) != {np.ndarray} or not xs.memory.whole:  # what the core could open needs no second look
        xs = Arrays([_opened(leaf, i, path, writable) for i, leaf in enumerate(leaves)], writable)
    if writable:
        xs.again = _writable_once(xs, path)
    return xs


@cache
def _accepted(dtype: Any) -> bool:
    return dtype.name in DTYPES


def _opened(leaf: Any, i: int, path: Callable[[int], str], writable: bool) -> Array:
    if not isinstance(leaf, np.ndarray):
        if writable:
            raise TypeError(f"{said(path(i))} is a {type(leaf).__name__}, which cannot be written: use clip()")
        x = np.asarray(leaf)
    elif type(leaf) in (np.ndarray, np.memmap):
        x = leaf if type(leaf) is np.ndarray else leaf.view(np.ndarray)
    else:
        raise TypeError(f"{said(path(i))} is a {type(leaf).__name__}: pass a plain array, numpy.asarray(x)")
    if not _accepted(x.dtype):
        raise TypeError(f"{said(path(i))} is of {x.dtype}: gradients are of {', '.join(DTYPES)}")
    return x


def _writable_once(xs: Arrays, path: Callable[[int], str]) -> list[bool]:
    apart = ~xs.memory.held
    for i in np.flatnonzero(apart).tolist():
        if not xs[i].flags.writeable:
            raise ValueError(f"{said(path(i))} is read-only: use clip(), or pass a copy")
    return written_once(len(xs), xs.__getitem__, *xs.memory.bounds(), apart, path)


def restore(x: Array, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return x
    return x[()] if isinstance(leaf, np.generic) else x.item()


def memory(xs: Sequence[Array], writable: bool = False) -> native.Memory:
    return xs.memory if isinstance(xs, Arrays) else native.open_buffers(list(xs), writable)


def powers(xs: Sequence[Array], counts: Sequence[int], p: float, divisors: Array = None) -> Array:
    return _powers.joined(memory(xs), counts, p, divisors, lambda i: _blocks.blocks(xs[i]))


def unit_powers(xs: Sequence[Array], axes: Sequence[int | None], p: float, divisors: Array = None) -> Array:
    found: list[Array] = [np.zeros(0)]
    first = 0
    for x, axis in zip(xs, axes, strict=True):
        rows = _blocks.units(x, axis)
        by = None if divisors is None else np.ascontiguousarray(divisors[first : first + len(rows)])
        direct = native.unit_powers(rows, p, by)
        found += _blocks.row_powers(rows, p, by) if direct is None else [direct]
        first += len(rows)
    return np.concatenate(found)


def root(powers: Array, p: float) -> Array:
    if p == math.inf or p == 1:
        return powers
    with np.errstate(all="ignore"):
        return np.sqrt(powers) if p == 2 else powers ** (1.0 / p)


def peak(peaks: Array) -> Array:
    return np.max(peaks, initial=0.0)


def fits(xs: Sequence[Array], p: float) -> bool:
    narrow = isinstance(xs, Arrays) and xs.memory.held.all() and xs.memory.dtypes.all()  # no float64, whose code is 0
    return SMALLEST_P <= p <= LARGEST_P and bool(narrow)


def lost(powers: Array, p: float) -> Array:
    return ~((powers > SMALLEST) & (powers < LARGEST)) | (p < SMALLEST_P)


def sizes(xs: Sequence[Array], counts: Sequence[int]) -> Array:
    each = (x.size for x in xs)
    return np.array([sum(islice(each, count)) for count in counts], np.float64)


def pick(xs: Sequence[Array], places: Sequence[int]) -> Arrays:
    return Arrays([xs[i] for i in places])


def unit_axis(x: Array) -> int | None:
    return 0


def aligned(coef: Array, x: Array, axis: int | None) -> Array:
    return coef[0] if axis is None else coef.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


def is_complex(x: Array) -> bool:
    return bool(x.dtype.kind == "c")


def nonfinite(xs: Sequence[Array]) -> list[tuple[int, int]]:
    opened = memory(xs)
    direct = iter(native.nonfinite(opened))
    return [next(direct) if held else _blocks.nonfinite(x) for x, held in zip(xs, opened.held.tolist(), strict=True)]


def working(xs: Sequence[Array], norm: Array) -> Array:
    return as_working(norm, not WIDE.isdisjoint(x.dtype.name for x in xs))


def as_working(norm: Array, wide: bool) -> Array:
    """In float32, unless a gradient is wider or a finite norm larger than that holds."""
    norm = np.atleast_1d(norm)  # 1-d, since NumPy 1 computes a float32 scalar and a Python float in float64
    large = bool((np.isfinite(norm) & (norm > np.finfo(np.float32).max)).any())
    with np.errstate(all="ignore"):
        return norm.astype(np.float64 if wide or large else np.float32)


def widened(coef: Array, norm: Array) -> Array:
    return np.broadcast_to(coef, np.atleast_1d(norm).shape).astype(np.float64).reshape(np.shape(norm))


def scale(xs: Sequence[Array], coefs: Sequence[Any]) -> list[Array]:
    empty = xs.empty if isinstance(xs, Arrays) else _empty
    if _by_units(coefs):
        return [_blocks.scaled(x, coef, empty(x)) if np.any(coef != 1) else x for x, coef in zip(xs, coefs, strict=True)]
    out = [x if coef == 1 else empty(x) for x, coef in zip(xs, coefs, strict=True)]
    if 1 in coefs:
        keep = [coef != 1 for coef in coefs]
        _scale_into(list(compress(xs, keep)), list(compress(coefs, keep)), list(compress(out, keep)))
    else:
        _scale_into(xs, coefs, out)
    return out


def scale_(xs: list[Array], coefs: Sequence[Any]) -> list[Array]:
    if _by_units(coefs):
        return _scale_units_(xs, coefs)
    again = xs.again if isinstance(xs, Arrays) else [False] * len(xs)
    picked, factors = xs, coefs
    if 1 in coefs or True in again:
        keep = [coef != 1 and not done for coef, done in zip(coefs, again, strict=True)]
        picked, factors = list(compress(xs, keep)), list(compress(coefs, keep))
    _scale_into(picked, factors, picked)
    return xs  # as it is, since it knows which arrays lie where an earlier one does


def _by_units(coefs: Sequence[Any]) -> bool:
    """Are there arrays among them, which broadcast with the gradients?"""
    return bool({type(coef) for coef in coefs} & {np.ndarray})


def _scale_units_(xs: list[Array], coefs: Sequence[Any]) -> list[Array]:
    again = xs.again if isinstance(xs, Arrays) else [False] * len(xs)
    for x, coef, done in zip(xs, coefs, again, strict=True):
        if np.any(coef != 1) and not done:
            _blocks.scaled(x, coef, x)
    return xs


def _scale_into(xs: Sequence[Array], coefs: Sequence[float], ys: Sequence[Array]) -> None:
    """Writes x · coef into every y."""
    if not xs:
        return
    targets = memory(ys, True)
    sources = targets if ys is xs else memory(xs)
    direct = sources.held & targets.held
    native.scale(sources.only(direct), targets.only(direct), np.array(coefs, np.float64)[direct])
    for i in np.flatnonzero(~direct).tolist():
        _blocks.scaled(xs[i], coefs[i], ys[i])


def _empty(x: Array) -> Array:
    return np.empty_like(x) if x.flags.c_contiguous or isinstance(_blocks.line(x), np.ndarray) else np.empty(x.shape, x.dtype)


def clamp(xs: Sequence[Array], low: float, high: float, peaks: Array) -> tuple[list[Array], bool]:
    doubtful = _blocks.doubtful(_bounds(xs, low, high), peaks)
    empty = xs.empty if isinstance(xs, Arrays) else _empty
    out = [empty(x) if doubt else x for x, doubt in zip(xs, doubtful, strict=True)]
    changed = iter(_clamp_into([(x, y) for x, y in zip(xs, out, strict=True) if y is not x], low, high))
    out = [y if y is not x and next(changed) else x for x, y in zip(xs, out, strict=True)]
    return out, not builtins.all(map(operator.is_, xs, out))


def clamp_(xs: Sequence[Array], low: float, high: float, peaks: Array) -> tuple[list[Array], bool]:
    again = xs.again if isinstance(xs, Arrays) else [False] * len(xs)
    doubtful = _blocks.doubtful(_bounds(xs, low, high), peaks)
    work = [(x, x) for x, doubt, done in zip(xs, doubtful, again, strict=True) if doubt and not done]
    return list(xs), True in _clamp_into(work, low, high)


def _bounds(xs: Sequence[Array], low: float, high: float) -> list[tuple[float, float]]:
    """The bounds as each array's type rounds them."""
    rounded = {dtype: (_blocks.rounded(low, dtype), _blocks.rounded(high, dtype)) for dtype in {x.dtype for x in xs}}
    return [rounded[x.dtype] for x in xs]


def _clamp_into(work: list[tuple[Array, Array]], low: float, high: float) -> list[bool]:
    """Writes x between the bounds for every (x, where to); which changed?"""
    xs = [x for x, _ in work]
    sources, targets = memory(xs), memory([y for _, y in work], True)
    held = sources.held & targets.held
    bounds = np.array(_bounds(xs, low, high)).reshape(-1, 2)[held]
    direct = iter(native.clamp(sources.only(held), targets.only(held), bounds))
    return [
        bool(next(direct)) if done else _blocks.clamp(x, y, low, high) for (x, y), done in zip(work, held.tolist(), strict=True)
    ]


def zeros(xs: Sequence[Array]) -> list[Array]:
    return [np.zeros_like(x) for x in xs]


def zero_(xs: Sequence[Array]) -> list[Array]:
    for x in xs:
        x[...] = 0
    return list(xs)


def keep(xs: Sequence[Array], finite: Any) -> list[Array]:
    return list(xs) if finite else zeros(xs)


def keep_(xs: Sequence[Array], finite: Any) -> list[Array]:
    return list(xs) if finite else zero_(xs)
