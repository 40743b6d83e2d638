"""Norms of a call's tensors: by the core where they lie in memory, else by Paddle's kernels in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import paddle

from . import _blocks, _powers, numpy as host
from ._paddle_tensors import COMPLEX, OURS, Tensors, as_numpy, some_wide, where

Array = Any


def powers(xs: Sequence[Array], counts: Sequence[int], p: float, divisors: Array = None) -> Array:
    if isinstance(xs, Tensors):
        return _powers.joined(xs.memory, counts, p, divisors, lambda i: _blocks.blocks(as_numpy(xs[i])))
    parts = _parts(xs, counts, p, divisors)
    return paddle.stack([_joined(list(islice(parts, count)), p) for count in counts])


def _parts(xs: Sequence[Array], counts: Sequence[int], p: float, divisors: Array) -> Iterator[Array]:
    """Σ|x|^p of every array."""
    each = [None] * len(counts) if divisors is None else paddle.unbind(divisors)
    repeated = [by for by, count in zip(each, counts, strict=True) for _ in range(count)]
    return iter([_power(magnitudes(x) if by is None else magnitudes(x) / by, p) for x, by in zip(xs, repeated, strict=True)])


def _joined(parts: list[Array], p: float) -> Array:
    if not parts:
        return paddle.zeros([], paddle.float64)
    return paddle.stack(parts).max() if p == math.inf else paddle.stack(parts).sum()


def _power(size: Array, p: float) -> Array:
    """Σ size^p, its derivative 0 where it is 0."""
    if p == math.inf:
        return largest(size)
    if p in (1, 2):
        return size.sum() if p == 1 else size.square().sum()
    return _raised(size, p).sum()


def _raised(x: Array, p: float) -> Array:
    some = x != 0
    return where(some, where(some, x, 1.0) ** p, 0.0)


def largest(x: Array) -> Array:
    return x.sum() if 0 in tuple(x.shape) else x.max()


def magnitudes(x: Array) -> Array:
    """|x| in float64."""
    return x.astype(paddle.complex128 if x.dtype in COMPLEX else paddle.float64).abs()


def unit_powers(xs: Sequence[Array], axes: Sequence[int | None], p: float, divisors: Array = None) -> Array:
    if isinstance(xs, Tensors):
        return host.unit_powers([as_numpy(x) for x in xs], axes, p, divisors)
    found, first = [], 0
    for x, axis in zip(xs, axes, strict=True):
        rows = _rows(magnitudes(x), axis)
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
    return host.SMALLEST_P <= p <= host.LARGEST_P and not some_wide(xs)


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
    return largest(peaks) if isinstance(peaks, OURS) else host.peak(peaks)
