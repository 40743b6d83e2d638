"""NumPy's own kernels, block by block so that memory stays flat: what the native core does, where there is none.

They also serve what the core does not open: complex numbers, foreign byte orders, arrays with gaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Array = Any
BLOCK = 65_536


def power(block: Array, p: float, divisor: float | None) -> float:
    """Σ|x / divisor|^p of one block, or the largest |x|."""
    return float(_joined(_magnitudes(block, divisor), p))


def units(x: Array, axis: int | None) -> Array:
    """The array as rows, one for every index along the axis."""
    if axis is None or x.ndim == 0:
        return x.reshape(1, x.size)
    units = x.shape[axis]
    return np.moveaxis(x, axis, 0).reshape(units, x.size // max(1, units))


def row_powers(rows: Array, p: float, divisors: Array) -> list[Array]:
    """Σ|x / divisor|^p of each row, some rows at a time."""
    at_once = max(1, BLOCK // max(1, rows.shape[1]))
    return [
        _joined(_magnitudes(rows[i : i + at_once], None if divisors is None else divisors[i : i + at_once, None]), p)
        for i in range(0, len(rows), at_once)
    ]


def nonfinite(x: Array) -> tuple[int, int]:
    """How many NaN and how many inf there are."""
    counts = [(int(np.isnan(block).sum()), int(np.isinf(block).sum())) for block in blocks(x)]
    return sum(nan for nan, _ in counts), sum(infinite for _, infinite in counts)


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


def line(x: Array) -> Any:
    """All elements in one row, in the order of memory where it is dense; slices of it can be read and assigned."""
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    ordered = x.transpose(order)
    return ordered.reshape(-1) if ordered.flags.c_contiguous else x.flat


def blocks(x: Array) -> Iterator[Array]:
    """The elements, in slices of one row."""
    row = line(x)
    return (row[start : start + BLOCK] for start in range(0, x.size, BLOCK))


def scaled(x: Array, coef: Any, out: Array) -> Array:
    """out = x · coef, a number or an array that broadcasts: the product in float64, rounded once."""
    with np.errstate(all="ignore"):
        if x.dtype.kind == "c":
            scaled(x.real, coef, out.real)
            scaled(x.imag, coef, out.imag)
        elif x.dtype.name == "bfloat16" and np.ndim(coef):
            out[...] = to_odd(x.astype(np.float64) * coef).astype(x.dtype)
        elif x.dtype.name == "bfloat16":
            source, target = line(x), line(out)
            for start in range(0, x.size, BLOCK):
                part = slice(start, start + BLOCK)
                target[part] = to_odd(source[part].astype(np.float64) * coef).astype(x.dtype)
        else:
            np.multiply(x, coef, out=out, dtype=np.float64, casting="unsafe")
    return out


def to_odd(x: Array) -> Array:
    """float64 as float32, an inexact one with its last bit set, so that rounding it again to bfloat16 rounds only once."""
    near = x.astype(np.float32)
    bits = near.view(np.uint32)
    bits -= (np.abs(near) > np.abs(x)).astype(np.uint32)
    bits |= (near != x).astype(np.uint32)
    return near


def doubtful(bounds: Sequence[tuple[float, float]], peaks: Array | None) -> list[bool]:
    """May a value of an array lie outside its bounds? Said by the largest |x| of each; a NaN hides the others."""
    if peaks is None:
        return [True] * len(bounds)
    return [not peak <= min(-low, high) for peak, (low, high) in zip(peaks.tolist(), bounds, strict=True)]


def clamp(x: Array, out: Array, low: float, high: float) -> bool:
    """out = x between the bounds; did anything change? Nothing is written to a block of x itself that lies inside."""
    if out is not x:
        np.copyto(out, x)
    row, changed = line(out), False
    for start in range(0, x.size, BLOCK):
        part = row[start : start + BLOCK]
        above, below = _outside(part, low, high)
        if above.any() or below.any():
            _set(part, above, high)
            _set(part, below, low)
            row[start : start + BLOCK] = part
            changed = True
    return changed


def _outside(block: Array, low: float, high: float) -> tuple[Array, Array]:
    """What lies above and what below, with the bounds rounded to the gradients' type as the results will be."""
    if block.dtype.kind == "c":
        above = np.abs(block.astype(np.complex128)) > high
        return above, np.zeros_like(above)
    least, most = (block.dtype.type(rounded(bound, block.dtype)) for bound in (low, high))
    return block > most, block < least


def _set(block: Array, which: Array, bound: float) -> None:
    """Brings some of the values to the bound."""
    if block.dtype.kind != "c":
        np.copyto(block, block.dtype.type(rounded(bound, block.dtype)), where=which)
        return
    wide = block[which].astype(np.complex128)
    block[which] = wide * (bound / np.abs(wide))


def rounded(bound: float, dtype: Any) -> float:
    """The bound as a value of the type; a complex one's modulus has no such values."""
    if dtype.kind == "c":
        return bound
    with np.errstate(all="ignore"):
        return float(np.float64(bound).astype(dtype))
