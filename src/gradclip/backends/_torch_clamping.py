"""Gradients between bounds, which are rounded as the gradient's type rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import _blocks, native
from ._torch_tensors import Tensors, distinct, fusible, memory_of, merged, write


def clamp(xs: Sequence[Tensor], low: Any, high: Any, peaks: Any) -> tuple[list[Tensor], Any]:
    if not isinstance(xs, Tensors):
        return [_clamped(x, low, high) for x in xs], _outside(xs, low, high, peaks)
    bounds = _bounds(xs, low, high)
    doubtful = _blocks.doubtful(bounds, peaks)
    out = [torch.empty_like(x) if doubt else x for x, doubt in zip(xs, doubtful, strict=True)]
    changed = _clamp_into(xs, bounds, out, doubtful)
    return [y if hit else x for x, y, hit in zip(xs, out, changed, strict=True)], True in changed


def clamp_(xs: list[Tensor], low: Any, high: Any, peaks: Any) -> tuple[list[Tensor], Any]:
    if not isinstance(xs, Tensors):
        return _clamped_(xs, low, high, peaks)
    bounds = _bounds(xs, low, high)
    doubtful = [doubt and not done for doubt, done in zip(_blocks.doubtful(bounds, peaks), xs.again, strict=True)]
    changed = _clamp_into(xs, bounds, xs, doubtful)
    return (merged(xs) if True in changed else xs), True in changed


def _bounds(xs: Sequence[Tensor], low: float, high: float) -> list[tuple[float, float]]:
    """The bounds as each tensor's type rounds them."""
    rounded = {dtype: _rounded(low, high, dtype) for dtype in {x.dtype for x in xs}}
    return list(rounded.values()) * len(xs) if len(rounded) == 1 else [rounded[x.dtype] for x in xs]


def _rounded(low: Any, high: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The bounds as the type rounds them; those of a modulus have no such type, and those on a device stay there."""
    if dtype.is_complex or isinstance(low, Tensor) or isinstance(high, Tensor):
        return low, high
    if torch.compiler.is_compiling():  # they may be symbols, whose digits cannot be looked at
        low, high = (torch.full((), bound, dtype=torch.float64).to(dtype) for bound in (low, high))
        return low, high
    return _nearest(low, dtype), _nearest(high, dtype)


def _nearest(bound: float, dtype: torch.dtype) -> float:
    """The number of that type that lies nearest."""
    if not math.isfinite(bound):
        return bound
    info = torch.finfo(dtype)
    step = info.eps * max(info.tiny, math.ldexp(1.0, math.frexp(bound)[1] - 1))
    nearest = round(bound / step) * step
    return nearest if -info.max <= nearest <= info.max else math.copysign(math.inf, bound)


def _clamp_into(xs: Tensors, bounds: list[tuple[float, float]], ys: list[Tensor], which: Sequence[bool]) -> list[bool]:
    """Writes x between its bounds into every y that is asked for; which changed?"""
    changed = np.zeros(len(xs), np.bool_)
    if True not in which:
        return cast("list[bool]", changed.tolist())
    targets = xs.memory if ys is xs else memory_of(ys)
    direct = xs.memory.held & targets.held & np.array(which)
    changed[direct] = native.clamp(xs.memory.only(direct), targets.only(direct), np.array(bounds).reshape(-1, 2)[direct])
    if ys is xs:
        increment_version(list(compress(ys, (direct & changed).tolist())))
    for i in np.flatnonzero(np.array(which) & ~direct).tolist():
        changed[i] = bool(_outside([xs[i]], *bounds[i], None))
        if changed[i]:
            write(ys[i], _clamped(xs[i].detach(), *bounds[i]))
    return cast("list[bool]", changed.tolist())


def _clamped(x: Tensor, low: Any, high: Any) -> Tensor:
    if not x.is_complex():
        return x.clamp(*_rounded(low, high, x.dtype)).to(x.dtype)  # a 0-d tensor takes the type of a 0-d bound
    size = x.abs()
    above = size > high
    return torch.where(above, x * (high / torch.where(above, size, 1.0)), x)


def _clamped_(xs: list[Tensor], low: Any, high: Any, peaks: Any) -> tuple[list[Tensor], Any]:
    """Two calls for all tensors of a type."""
    with torch.no_grad():
        changed = False if peaks is None else _outside(xs, low, high, peaks)  # without peaks nobody asks
        for dtype in {x.dtype for x in xs}:
            same, (least, most) = [x for x in distinct(xs) if x.dtype == dtype], _rounded(low, high, dtype)
            if not fusible(same) or isinstance(least, Tensor) or isinstance(most, Tensor):
                for x in same:
                    x.copy_(_clamped(x, low, high))
            else:
                torch._foreach_clamp_min_(same, least)
                torch._foreach_clamp_max_(same, most)
    return merged(xs), changed


def _outside(xs: Sequence[Tensor], low: Any, high: Any, peaks: Any) -> Tensor:
    """Does any value lie outside the bounds? Told by the largest |x| of each where they are alike and of one type."""
    dtypes = {x.dtype for x in xs}
    symbols = torch.compiler.is_compiling() or isinstance(low, Tensor) or isinstance(high, Tensor)
    if isinstance(peaks, Tensor) and len(dtypes) == 1 and not symbols and low == -high:
        return (peaks > _rounded(low, high, *dtypes)[1]).any()
    flags = []
    for x in xs:
        least, most = _rounded(low, high, x.dtype)
        flags.append((x.abs() > most).any() if x.is_complex() else ((x < least) | (x > most)).any())
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any() if flags else torch.zeros((), dtype=torch.bool)
