"""Σ|x|^p of groups of arrays on the CPU: one float64 partial for each block, their total rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from . import _blocks, native
from ._blocks import BLOCK

Array = Any
Blocks = Callable[[int], Iterable[Array]]


def joined(memory: native.Memory, counts: Sequence[int], p: float, divisors: Array, blocks: Blocks) -> Array:
    """The power of each group of `counts` arrays; `blocks(i)` gives the elements of one that the core cannot reach."""
    with np.errstate(all="ignore"):
        partials, parts = _partials(memory, p, None if divisors is None else np.repeat(divisors, counts), blocks)
        join = _peak if p == math.inf else total
        if len(counts) == 1:
            return np.array([join(partials)])
        each_partial, each_part = iter(partials), iter(parts)
        per_group = [sum(islice(each_part, count)) for count in counts]
        return np.array([join(list(islice(each_partial, count))) for count in per_group], np.float64)


def _partials(memory: native.Memory, p: float, divisors: Array, blocks: Blocks) -> tuple[list[float], list[int]]:
    """The power of every block of every array, and how many blocks each array has."""
    direct = native.powers(memory, p, divisors)
    many = -(-memory.lengths // BLOCK)
    if memory.whole:
        return direct, many.tolist()
    rest, found, parts = iter(direct), [], []
    for i, held in enumerate(memory.held.tolist()):
        by = None if divisors is None else divisors[i]
        one = list(islice(rest, int(many[i]))) if held else [_partial(block, p, by) for block in blocks(i)]
        found += one
        parts.append(len(one))
    return found, parts


def _partial(block: Array, p: float, divisor: float | None) -> float:
    """The power of one block, by the core where it can be given a dense copy, so that layouts do not change the bits."""
    block = np.ascontiguousarray(block, block.dtype.newbyteorder("="))
    direct = native.powers(native.open_buffers([block], False), p, None if divisor is None else np.array([divisor]))
    return direct[0] if direct else _blocks.power(block, p, divisor)


def total(parts: Iterable[float]) -> float:
    """The correctly rounded sum; inf where it is too large."""
    try:
        return math.fsum(parts)
    except OverflowError:
        return math.inf


def _peak(parts: Sequence[float]) -> float:
    return float(np.max(parts)) if parts else 0.0
