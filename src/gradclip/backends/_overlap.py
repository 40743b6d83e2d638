"""Which arrays may be written: every stretch of memory once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = Any


class Span(NamedTuple):
    """The bytes between an array's first and last element."""

    start: int
    stop: int
    which: int


def overlaps_itself(x: Array) -> bool:
    """Do two indices reach one element? Said of every layout that is not a cut from a dense one."""
    reach = x.itemsize
    for stride, count in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1 and x.size):
        if stride < reach:
            return True
        reach = stride * (count - 1) + reach
    return False


def same_memory(x: Array, y: Array) -> bool:
    """Are they the same elements, in whatever order?"""
    if x.dtype != y.dtype or x.size != y.size:
        return False
    return (_dense(x) and _dense(y)) or (x.shape == y.shape and x.strides == y.strides)


def written_once(
    count: int, array: Callable[[int], Array], starts: Array, stops: Array, apart: Array, path: Callable[[int], str]
) -> list[bool]:
    """For each array: is its memory an earlier one's? ValueError for what shares only a part of it, or reaches itself twice.

    array(i): a NumPy array on that memory. starts, stops: where arrays lie, for those that are dense; apart: the others.
    """
    for i in np.flatnonzero(apart).tolist():
        if overlaps_itself(array(i)):
            raise ValueError(f"{said(path(i))} may reach one element by two indices: use clip(), or pass a copy")
        starts[i], stops[i] = bounds(array(i))
    order = np.argsort(starts)
    if not (starts[order[1:]] < stops[order[:-1]]).any():
        return [False] * count
    again, shared = _repeats([array(i) for i in range(count)], starts, stops)
    if shared is not None:
        raise ValueError(
            f"{said(path(shared[0]))} and {said(path(shared[1]))} share a part of their memory, which would be "
            "scaled twice: pass copies, or use clip()"
        )
    return again


def said(path: str) -> str:
    """A leaf's name in a message."""
    return repr(path) if path else "the gradient"


def _repeats(xs: Sequence[Array], starts: Array, stops: Array) -> tuple[list[bool], tuple[int, int] | None]:
    """Which arrays are an earlier one's memory, and the first pair that shares only a part of it."""
    again = [False] * len(xs)
    spans = sorted(Span(int(starts[i]), int(stops[i]), i) for i, x in enumerate(xs) if x.size)
    open_spans: list[Span] = []
    for span in spans:
        open_spans = [o for o in open_spans if o.stop > span.start]
        for other in open_spans:
            x, y = xs[span.which], xs[other.which]
            if (span.start, span.stop) == (other.start, other.stop) and same_memory(x, y):
                again[max(span.which, other.which)] = True
            elif np.shares_memory(x, y):
                return again, (min(span.which, other.which), max(span.which, other.which))
        open_spans.append(span)
    return again, None


def _dense(x: Array) -> bool:
    start, stop = bounds(x)
    return bool(stop - start == x.nbytes)


def bounds(x: Array) -> tuple[int, int]:
    """The addresses of the first byte of an array and of the one behind its last."""
    start = stop = x.__array_interface__["data"][0]
    for stride, count in zip(x.strides, x.shape, strict=True):
        start, stop = start + min(0, stride * (count - 1)), stop + max(0, stride * (count - 1))
    return start, stop + x.itemsize
