"""NumPy: the default, and the reference for all others. Norms are float64; sums go by blocks, so that memory stays flat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ._overlap import overlaps_itself, repeats

Array = Any
BLOCK = 65_536
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


def norms(x: Any) -> Array:
    """Norms that the caller gives, as this backend's own."""
    return np.asarray(x, np.float64)


def field(x: Any) -> Array:
    return np.asarray(x)


def arrays(leaves: Sequence[Any], path: Callable[[int], str], writable: bool) -> list[Array]:
    xs = [_opened(leaf, i, path, writable) for i, leaf in enumerate(leaves)]
    if writable:
        _, shared = repeats(xs)
        if shared is not None:
            raise ValueError(
                f"{_said(path(shared[0]))} and {_said(path(shared[1]))} share a part of their memory, which would be "
                "scaled twice: pass copies, or use clip()"
            )
    return xs


def _opened(leaf: Any, i: int, path: Callable[[int], str], writable: bool) -> Array:
    if not isinstance(leaf, np.ndarray):
        if writable:
            raise TypeError(f"{_said(path(i))} is a {type(leaf).__name__}, which cannot be written: use clip()")
        x = np.asarray(leaf)
    elif type(leaf) in (np.ndarray, np.memmap):
        x = leaf if type(leaf) is np.ndarray else leaf.view(np.ndarray)
    else:
        raise TypeError(f"{_said(path(i))} is a {type(leaf).__name__}: pass a plain array, numpy.asarray(x)")
    if x.dtype.name not in DTYPES:
        raise TypeError(f"{_said(path(i))} is of {x.dtype}: gradients are of {', '.join(DTYPES)}")
    if writable and not x.flags.writeable:
        raise ValueError(f"{_said(path(i))} is read-only: use clip(), or pass a copy")
    if writable and overlaps_itself(x):
        raise ValueError(f"{_said(path(i))} reaches one element by two indices: use clip(), or pass a copy")
    return x


def _said(path: str) -> str:
    return repr(path) if path else "the gradient"


def restore(x: Array, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return x
    return x[()] if isinstance(leaf, np.generic) else x.item()


def powers(groups: Sequence[Sequence[Array]], p: float, axes: Sequence[int | None] | None = None, peaks: Array = None) -> Array:
    with np.errstate(all="ignore"):
        if axes is not None:
            return _unit_powers(groups, p, axes, peaks)
        divisors = [None] * len(groups) if peaks is None else peaks
        return np.array([_power(group, p, by) for group, by in zip(groups, divisors, strict=True)], np.float64)


def _power(group: Sequence[Array], p: float, divisor: float | None) -> float:
    partials = [_join_block(block, p, divisor) for x in group for block in _blocks(x)]
    return _peak(partials) if p == math.inf else _sum(partials)


def _join_block(block: Array, p: float, divisor: float | None) -> float:
    return float(_joined(_magnitudes(block, divisor), p))


def _magnitudes(x: Array, divisor: Any) -> Array:
    """|x| in float64, divided where a divisor is given."""
    wide = np.abs(x.astype(np.complex128 if x.dtype.kind == "c" else np.float64))
    return wide if divisor is None else wide / divisor


def _joined(magnitudes: Array, p: float) -> Array:
    """Σ m^p along the last axis, or the largest."""
    if p == math.inf:
        return magnitudes.max(axis=-1, initial=0.0)
    if p != 1:
        magnitudes = np.square(magnitudes) if p == 2 else magnitudes**p
    return magnitudes.sum(axis=-1)


def _unit_powers(groups: Sequence[Sequence[Array]], p: float, axes: Sequence[int | None], peaks: Array) -> Array:
    found: list[Array] = []
    first = 0
    for (x,), axis in zip(groups, axes, strict=True):
        rows = x.reshape(1, -1) if axis is None or x.ndim == 0 else np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
        at_once = max(1, BLOCK // max(1, rows.shape[1]))
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            by = None if peaks is None else peaks[first : first + len(part), None]
            found.append(_joined(_magnitudes(part, by), p))
            first += len(part)
    return np.concatenate(found) if found else np.zeros(0)


def _sum(parts: Iterable[float]) -> float:
    """The correctly rounded sum; inf where it is too large."""
    try:
        return math.fsum(parts)
    except OverflowError:
        return math.inf


def _peak(parts: Sequence[float]) -> float:
    return float(np.max(parts)) if parts else 0.0


def _line(x: Array) -> Any:
    """All elements in one row, in the order of memory where it is dense; slices of it can be read and assigned."""
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    ordered = x.transpose(order)
    return ordered.reshape(-1) if ordered.flags.c_contiguous else x.flat


def _blocks(x: Array) -> Iterator[Array]:
    line = _line(x)
    return (line[start : start + BLOCK] for start in range(0, x.size, BLOCK))


def root(powers: Array, p: float) -> Array:
    if p == math.inf or p == 1:
        return powers
    with np.errstate(all="ignore"):
        return np.sqrt(powers) if p == 2 else powers ** (1.0 / p)


def sizes(groups: Sequence[Sequence[Array]]) -> Array:
    return np.array([sum(x.size for x in group) for group in groups], np.float64)


def is_complex(x: Array) -> bool:
    return bool(x.dtype.kind == "c")


def nonfinite(xs: Sequence[Array]) -> list[tuple[int, int]]:
    return [(int(np.isnan(x).sum()), int(np.isinf(x).sum())) for x in xs]


def working(xs: Sequence[Array], norm: Array) -> Array:
    wide = any(x.dtype.name in ("float64", "complex128") for x in xs)
    with np.errstate(all="ignore"):
        # 1-d, since NumPy 1 computes a float32 scalar and a Python float in float64
        return np.atleast_1d(norm).astype(np.float64 if wide else np.float32)


def widened(coef: Array, norm: Array) -> Array:
    return np.broadcast_to(coef, np.atleast_1d(norm).shape).astype(np.float64).reshape(np.shape(norm))


def scale(xs: Sequence[Array], coefs: Sequence[float]) -> list[Array]:
    return [x if coef == 1 else _scaled(x, coef, _empty(x)) for x, coef in zip(xs, coefs, strict=True)]


def scale_(xs: Sequence[Array], coefs: Sequence[float]) -> list[Array]:
    again, _ = repeats(xs)
    for x, coef, done in zip(xs, coefs, again, strict=True):
        if coef != 1 and not done:
            _scaled(x, coef, x)
    return list(xs)


def _empty(x: Array) -> Array:
    return np.empty_like(x) if isinstance(_line(x), np.ndarray) else np.empty(x.shape, x.dtype)


def _scaled(x: Array, coef: float, out: Array) -> Array:
    """out = x · coef: the product in float64, rounded once."""
    with np.errstate(all="ignore"):
        if x.dtype.kind == "c":
            _scaled(x.real, coef, out.real)
            _scaled(x.imag, coef, out.imag)
        elif x.dtype.name == "bfloat16":
            source, target = _line(x), _line(out)
            for start in range(0, x.size, BLOCK):
                part = slice(start, start + BLOCK)
                target[part] = _to_odd(source[part].astype(np.float64) * coef).astype(x.dtype)
        else:
            np.multiply(x, coef, out=out, dtype=np.float64, casting="unsafe")
    return out


def _to_odd(x: Array) -> Array:
    """float64 as float32, an inexact one with its last bit set, so that rounding it again to bfloat16 rounds only once."""
    near = x.astype(np.float32)
    bits = near.view(np.uint32)
    bits -= (np.abs(near) > np.abs(x)).astype(np.uint32)
    bits |= (near != x).astype(np.uint32)
    return near


def clamp(xs: Sequence[Array], low: float, high: float) -> tuple[list[Array], bool]:
    out = [x if _inside(x, low, high) else _clamped(x.copy(order="K"), low, high) for x in xs]
    return out, any(x is not y for x, y in zip(xs, out, strict=True))


def clamp_(xs: Sequence[Array], low: float, high: float) -> tuple[list[Array], bool]:
    inside = [_inside(x, low, high) for x in xs]
    for x, untouched in zip(xs, inside, strict=True):
        if not untouched:
            _clamped(x, low, high)
    return list(xs), not all(inside)


def _inside(x: Array, low: float, high: float) -> bool:
    """No value lies outside; NaN lies nowhere."""
    return not any(np.any(outside) for block in _blocks(x) for outside in _outside(block, low, high))


def _clamped(x: Array, low: float, high: float) -> Array:
    line = _line(x)
    for start in range(0, x.size, BLOCK):
        part = line[start : start + BLOCK]
        above, below = _outside(part, low, high)
        if above.any() or below.any():
            part[above], part[below] = _nearest(part[above], high), _nearest(part[below], low)
            line[start : start + BLOCK] = part
    return x


def _outside(block: Array, low: float, high: float) -> tuple[Array, Array]:
    """What lies above and what below, with the bounds rounded to the gradients' type as the results will be."""
    if block.dtype.kind == "c":
        above = np.abs(block.astype(np.complex128)) > high
        return above, np.zeros_like(above)
    least, most = _rounded(low, block.dtype), _rounded(high, block.dtype)
    return block > most, block < least


def _nearest(values: Array, bound: float) -> Array:
    if values.dtype.kind != "c":
        return _rounded(bound, values.dtype)
    wide = values.astype(np.complex128)
    return (wide * (bound / np.abs(wide))).astype(values.dtype)


def _rounded(bound: float, dtype: Any) -> Array:
    with np.errstate(all="ignore"):
        return np.float64(bound).astype(dtype)


def zeros(xs: Sequence[Array]) -> list[Array]:
    return [np.zeros_like(x) for x in xs]


def zero_(xs: Sequence[Array]) -> list[Array]:
    for x in xs:
        x[...] = 0
    return list(xs)
