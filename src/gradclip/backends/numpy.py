"""NumPy: the default, and the reference for all others. Norms are float64; sums go by blocks, so that memory stays flat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain, compress, islice
from typing import Any

import numpy as np

from . import _blocks, native
from ._blocks import BLOCK
from ._overlap import bounds, overlaps_itself, repeats

Array = Any
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")

where = np.where
abs = np.abs
floor = np.floor
isfinite = np.isfinite


def quiet() -> Any:
    """A context without NumPy's floating-point warnings: the norms say themselves what is not finite."""
    return np.errstate(all="ignore")


def total(x: Array) -> Array:
    return np.float64(_sum(np.ravel(x).tolist()))


def sort(x: Array) -> Array:
    return np.sort(x, axis=0)


def put(window: Array, slot: Array, value: Array) -> Array:
    window = np.array(window)
    window[int(slot)] = value
    return window


def scalar(value: Any) -> Any:
    return value.item() if getattr(value, "shape", None) == () else value


def stack(xs: Sequence[Array]) -> Array:
    return np.stack(xs)


def norms(name: str, x: Any) -> Array:
    """Norms that the caller gives, as this backend's own."""
    given = np.asarray(x)
    if (given.dtype.kind not in "iuf" and not _accepted(given.dtype)) or given.dtype.kind == "c":
        raise TypeError(f"{name} must be real numbers; got {x!r}")
    return given.astype(np.float64)


def field(x: Any) -> Array:
    return np.asarray(x)


class Arrays(list[Array]):
    """Arrays that know where they lie, and which of them lie where an earlier one does."""

    def __init__(self, xs: Iterable[Array], writable: bool = False) -> None:
        super().__init__(xs)
        self.memory = native.open_buffers(self, writable)
        self.again = [False] * len(self)


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
            raise TypeError(f"{_said(path(i))} is a {type(leaf).__name__}, which cannot be written: use clip()")
        x = np.asarray(leaf)
    elif type(leaf) in (np.ndarray, np.memmap):
        x = leaf if type(leaf) is np.ndarray else leaf.view(np.ndarray)
    else:
        raise TypeError(f"{_said(path(i))} is a {type(leaf).__name__}: pass a plain array, numpy.asarray(x)")
    if not _accepted(x.dtype):
        raise TypeError(f"{_said(path(i))} is of {x.dtype}: gradients are of {', '.join(DTYPES)}")
    return x


def _writable_once(xs: Arrays, path: Callable[[int], str]) -> list[bool]:
    """Which arrays are an earlier one's memory; ValueError for what cannot be written, or only in part apart."""
    starts, stops = xs.memory.bounds()
    for i in np.flatnonzero(~xs.memory.held).tolist():
        if not xs[i].flags.writeable:
            raise ValueError(f"{_said(path(i))} is read-only: use clip(), or pass a copy")
        if overlaps_itself(xs[i]):
            raise ValueError(f"{_said(path(i))} may reach one element by two indices: use clip(), or pass a copy")
        starts[i], stops[i] = bounds(xs[i])
    again, shared = repeats(xs, starts, stops)
    if shared is not None:
        raise ValueError(
            f"{_said(path(shared[0]))} and {_said(path(shared[1]))} share a part of their memory, which would be "
            "scaled twice: pass copies, or use clip()"
        )
    return again


def _said(path: str) -> str:
    return repr(path) if path else "the gradient"


def restore(x: Array, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return x
    return x[()] if isinstance(leaf, np.generic) else x.item()


def memory(xs: Sequence[Array], writable: bool = False) -> native.Memory:
    return xs.memory if isinstance(xs, Arrays) else native.open_buffers(list(xs), writable)


def powers(
    groups: Sequence[Sequence[Array]], p: float, axes: Sequence[int | None] | None = None, divisors: Array = None
) -> Array:
    with np.errstate(all="ignore"):
        if axes is not None:
            return _unit_powers(groups, p, axes, divisors)
        xs = groups[0] if len(groups) == 1 else Arrays(chain.from_iterable(groups))
        each_divisor = None if divisors is None else np.repeat(divisors, [len(group) for group in groups])
        partials, counts = _partials(xs, p, each_divisor)
        join = _peak if p == math.inf else _sum
        if len(groups) == 1:
            return np.array([join(partials)])
        each_count, each_partial = iter(counts), iter(partials)
        blocks = [sum(islice(each_count, len(group))) for group in groups]
        return np.array([join(list(islice(each_partial, count))) for count in blocks], np.float64)


def _partials(xs: Sequence[Array], p: float, divisors: Array) -> tuple[list[float], list[int]]:
    """The power of every block of every array, and how many blocks each array has."""
    opened = memory(xs)
    direct = iter(native.powers(opened, p, divisors))
    if opened.whole:
        return list(direct), (-(-opened.lengths // BLOCK)).tolist()
    counts = [-(-x.size // BLOCK) for x in xs]
    found: list[float] = []
    for i, x in enumerate(xs):
        by = None if divisors is None else divisors[i]
        found += islice(direct, counts[i]) if opened.held[i] else (_partial(block, p, by) for block in _blocks.blocks(x))
    return found, counts


def _partial(block: Array, p: float, divisor: float | None) -> float:
    """The power of one block, by the core where it can be given a dense copy, so that layouts do not change the bits."""
    block = np.ascontiguousarray(block, block.dtype.newbyteorder("="))
    direct = native.powers(memory([block]), p, None if divisor is None else np.array([divisor]))
    return direct[0] if direct else _blocks.power(block, p, divisor)


def _unit_powers(groups: Sequence[Sequence[Array]], p: float, axes: Sequence[int | None], divisors: Array) -> Array:
    found: list[Array] = [np.zeros(0)]
    first = 0
    for (x,), axis in zip(groups, axes, strict=True):
        rows = _blocks.units(x, axis)
        by = None if divisors is None else np.ascontiguousarray(divisors[first : first + len(rows)])
        direct = native.unit_powers(rows, p, by)
        found += _blocks.row_powers(rows, p, by) if direct is None else [direct]
        first += len(rows)
    return np.concatenate(found)


def _sum(parts: Iterable[float]) -> float:
    """The correctly rounded sum; inf where it is too large."""
    try:
        return math.fsum(parts)
    except OverflowError:
        return math.inf


def _peak(parts: Sequence[float]) -> float:
    return float(np.max(parts)) if parts else 0.0


def root(powers: Array, p: float) -> Array:
    if p == math.inf or p == 1:
        return powers
    with np.errstate(all="ignore"):
        return np.sqrt(powers) if p == 2 else powers ** (1.0 / p)


def peak(peaks: Array) -> Array:
    return np.max(peaks, initial=0.0)


def sizes(groups: Sequence[Sequence[Array]]) -> Array:
    return np.array([_size(group) for group in groups], np.float64)


def _size(group: Sequence[Array]) -> int:
    if isinstance(group, Arrays) and group.memory.whole:
        return int(group.memory.lengths.sum())
    return sum(x.size for x in group)


def is_complex(x: Array) -> bool:
    return bool(x.dtype.kind == "c")


def nonfinite(xs: Sequence[Array]) -> list[tuple[int, int]]:
    opened = memory(xs)
    direct = iter(native.nonfinite(opened))
    return [next(direct) if held else _blocks.nonfinite(x) for x, held in zip(xs, opened.held.tolist(), strict=True)]


def working(xs: Sequence[Array], norm: Array) -> Array:
    wide = any(x.dtype.name in ("float64", "complex128") for x in xs)
    with np.errstate(all="ignore"):
        # 1-d, since NumPy 1 computes a float32 scalar and a Python float in float64
        return np.atleast_1d(norm).astype(np.float64 if wide else np.float32)


def widened(coef: Array, norm: Array) -> Array:
    return np.broadcast_to(coef, np.atleast_1d(norm).shape).astype(np.float64).reshape(np.shape(norm))


def scale(xs: Sequence[Array], coefs: Sequence[float]) -> list[Array]:
    out = [x if coef == 1 else _empty(x) for x, coef in zip(xs, coefs, strict=True)]
    if 1 in coefs:
        keep = [coef != 1 for coef in coefs]
        _scale_into(list(compress(xs, keep)), list(compress(coefs, keep)), list(compress(out, keep)))
    else:
        _scale_into(xs, coefs, out)
    return out


def scale_(xs: Sequence[Array], coefs: Sequence[float]) -> list[Array]:
    again = xs.again if isinstance(xs, Arrays) else [False] * len(xs)
    picked, factors = xs, coefs
    if 1 in coefs or True in again:
        keep = [coef != 1 and not done for coef, done in zip(coefs, again, strict=True)]
        picked, factors = list(compress(xs, keep)), list(compress(coefs, keep))
    _scale_into(picked, factors, picked)
    return list(xs)


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
    """As x in layout, where x is dense."""
    return np.empty_like(x) if x.flags.c_contiguous or isinstance(_blocks.line(x), np.ndarray) else np.empty(x.shape, x.dtype)


def clamp(xs: Sequence[Array], low: float, high: float, peaks: Array) -> tuple[list[Array], bool]:
    doubtful = _doubtful(xs, low, high, peaks)
    out = [_empty(x) if doubt else x for x, doubt in zip(xs, doubtful, strict=True)]
    changed = iter(_clamp_into([(x, y) for x, y in zip(xs, out, strict=True) if y is not x], low, high))
    out = [y if y is not x and next(changed) else x for x, y in zip(xs, out, strict=True)]
    return out, any(y is not x for x, y in zip(xs, out, strict=True))


def clamp_(xs: Sequence[Array], low: float, high: float, peaks: Array) -> tuple[list[Array], bool]:
    again = xs.again if isinstance(xs, Arrays) else [False] * len(xs)
    doubtful = _doubtful(xs, low, high, peaks)
    work = [(x, x) for x, doubt, done in zip(xs, doubtful, again, strict=True) if doubt and not done]
    return list(xs), any(_clamp_into(work, low, high))


def _doubtful(xs: Sequence[Array], low: float, high: float, peaks: Array) -> list[bool]:
    """May a value lie outside? Said by the largest |x|; a NaN hides the others."""
    return [not peak <= min(-a, b) for peak, (a, b) in zip(peaks.tolist(), _bounds(xs, low, high), strict=True)]


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
