"""Norms of a call's tensors: by the core where they lie in memory, else by torch's kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import _powers, numpy as host
from ._blocks import BLOCK
from ._torch_shares import Opened
from ._torch_tensors import Tensors, fusible, precision, some_wide

Array = Any


def aligned(coef: Array, x: Tensor, axis: int | None) -> Array:
    return coef[0] if axis is None else coef.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


def powers(xs: Sequence[Tensor], counts: Sequence[int], p: float, divisors: Array = None) -> Array:
    if p != math.inf and isinstance(xs, Opened) and xs.shares is not None:
        return _weighted(xs, counts, p, divisors, xs.shares.weights)
    return _powers_here(xs, counts, p, divisors)


def _weighted(xs: Opened, counts: Sequence[int], p: float, divisors: Array, weights: list[float]) -> Array:
    """What is this process's part of the powers, where others have copies of the same elements."""
    if len(set(weights)) <= 1:
        return _powers_here(xs, counts, p, divisors) * sum(weights[:1])
    each = None if divisors is None else _repeated(divisors, counts)
    found = _powers_here(xs, [1] * len(xs), p, each)
    if isinstance(found, np.ndarray):
        parts = iter((found * weights).tolist())
        return np.array([_powers.total(islice(parts, count)) for count in counts])
    scaled = torch.stack(torch._foreach_mul(list(found.unbind()), weights))  # numbers need not travel to the device
    return torch.stack([group.sum() for group in scaled.split(list(counts))])


def _repeated(values: Array, counts: Sequence[int]) -> Array:
    """Every group's value once for each of its tensors."""
    if isinstance(values, np.ndarray):
        return np.repeat(values, counts)
    return torch.cat([value.expand(count) for value, count in zip(values.unbind(), counts, strict=True)])


def _powers_here(xs: Sequence[Tensor], counts: Sequence[int], p: float, divisors: Array) -> Array:
    if isinstance(xs, Tensors):
        return _powers.joined(xs.memory, counts, p, divisors, lambda i: _blocks_of(xs[i]))
    parts = _stacked(xs, p, divisors, counts)
    if len(counts) == len(xs) and set(counts) == {1}:
        return parts
    if len(counts) == 1 and p != math.inf:
        return parts.sum(0, keepdim=True)
    groups = parts.split(list(counts))
    return torch.stack([(largest(group) if p == math.inf else group.sum()) for group in groups])


def _blocks_of(x: Tensor) -> Iterator[Array]:
    """The elements as dense NumPy blocks."""
    for block in x.detach().resolve_conj().resolve_neg().contiguous().view(-1).split(BLOCK):
        yield (block.float() if block.dtype is torch.bfloat16 else block).numpy()


def _stacked(xs: Sequence[Tensor], p: float, divisors: Tensor | None, counts: Sequence[int]) -> Tensor:
    """Σ|x|^p of every tensor, on the first one's device."""
    if not xs:
        return torch.zeros(0, dtype=torch.float64)
    if divisors is not None:
        each = [by for by, count in zip(divisors.unbind(), counts, strict=True) for _ in range(count)]
        xs = [_size(x) / by.to(x.device) for x, by in zip(xs, each, strict=True)]
    parts = _fused(xs, p) if fusible(xs) else [_power(x, p) for x in xs]
    return torch.stack([part if part.device == parts[0].device else part.to(parts[0].device) for part in parts])


def _fused(xs: Sequence[Tensor], p: float) -> list[Tensor]:
    wide = precision(xs[0])
    if p != math.inf:
        return list(torch._foreach_powsum(xs, p, dtype=wide))
    full = [x for x in xs if x.numel()]
    each = iter(torch._foreach_norm(full, p, dtype=wide) if full else [])
    return [next(each) if x.numel() else torch.zeros((), dtype=wide, device=x.device) for x in xs]


def _power(x: Tensor, p: float) -> Tensor:
    """Σ|x|^p, its derivative 0 where x is 0."""
    size = _size(x)
    if p == math.inf:
        return largest(size.abs())
    if p == 1:
        return size.abs().sum()
    if p == 2:
        return size.square().sum()
    some = size != 0
    return torch.where(some, torch.where(some, size, 1.0).abs() ** p, 0.0).sum()


def largest(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.sum()


def unit_powers(xs: Sequence[Tensor], axes: Sequence[int | None], p: float, divisors: Array = None) -> Array:
    if isinstance(xs, Opened) and xs.shares is not None:
        raise ValueError(
            'scope "unit" has a norm for every slice, and this process has parts of tensors: use scope "tensor" or "global"'
        )
    if isinstance(xs, Tensors):
        return host.unit_powers([_plain(x) for x in xs], axes, p, divisors)
    counts = [1 if axis is None else x.shape[axis] for x, axis in zip(xs, axes, strict=True)]
    if divisors is not None:
        parts = zip(xs, divisors.split(counts), axes, strict=True)
        xs = [_size(x) / aligned(part, x, axis).to(x.device) for x, part, axis in parts]
    found = [_unit_powers(_size(x), axis, p) for x, axis in zip(xs, axes, strict=True)]
    return torch.cat([part.to(found[0].device) for part in found]) if found else torch.zeros(0, dtype=torch.float64)


def _plain(x: Tensor) -> Array:
    """As NumPy's, without a copy where torch allows that."""
    x = x.detach().resolve_conj().resolve_neg()
    return (x.float() if x.dtype is torch.bfloat16 else x).numpy()


def _unit_powers(x: Tensor, axis: int | None, p: float) -> Tensor:
    if axis is None:
        return _power(x, p).reshape(1)
    rows = x.movedim(axis, 0).reshape(x.shape[axis], -1)
    return torch.stack([_power(row, p) for row in rows.unbind()]) if p not in (1, 2) else _rows(rows, p)


def _rows(rows: Tensor, p: float) -> Tensor:
    return (rows.abs() if p == 1 else rows.square()).sum(1)


def _size(x: Tensor) -> Tensor:
    """|x| for complex x, in the norm's precision."""
    return (x.abs() if x.is_complex() else x).to(precision(x))


def fits(xs: Sequence[Tensor], p: float) -> bool:
    exact = isinstance(xs, Tensors) or not xs or precision(xs[0]) is torch.float64
    return exact and not some_wide(xs) and host.SMALLEST_P <= p <= host.LARGEST_P


def lost(powers: Array, p: float) -> Array:
    if isinstance(powers, Tensor) and powers.dtype is torch.float32:
        return ~((powers > 1e-30) & (powers < 1e36))
    return host.lost(powers, p)


def root(powers: Array, p: float) -> Array:
    if not isinstance(powers, Tensor) or p in (1, math.inf):
        return host.root(powers, p)
    if not powers.requires_grad:
        return powers.sqrt() if p == 2 else powers ** (1 / p)
    some = powers > 0  # the root of 0 has no derivative
    return torch.where(some, torch.where(some, powers, 1.0) ** (1 / p), powers)


def peak(peaks: Array) -> Array:
    return largest(peaks) if isinstance(peaks, Tensor) else host.peak(peaks)
