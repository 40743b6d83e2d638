"""The C++ core, on addresses: one door for the arrays of every framework.

Without the core every array counts as one whose memory cannot be reached, and its framework's own kernel does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import native

if native.available:
    from ..native import _core

Array = Any
NOT_HELD = 255
SIZES = np.array([8, 4, 2, 2])


class Memory(NamedTuple):
    """Where arrays lie: addresses, lengths in elements, and dtypes by the core's code; 255: nowhere that can be reached."""

    addresses: Array
    lengths: Array
    dtypes: Array
    most: int = native.MOST  # threads that may work on it
    team: int = 0  # see `find_team`

    @property
    def threads(self) -> int:
        """How many threads work on it."""
        return min(self.most, native.threads())

    @property
    def held(self) -> Array:
        """Which arrays the core can work on."""
        return self.dtypes != NOT_HELD

    @property
    def whole(self) -> bool:
        """Can it work on all of them?"""
        return bool(self.held.all())

    def bounds(self) -> tuple[Array, Array]:
        """The addresses where arrays begin and end."""
        starts = self.addresses.astype(np.int64)
        return starts, starts + self.lengths * SIZES[self.dtypes & 3]

    def only(self, which: Array) -> Memory:
        """Some of the arrays."""
        return Memory(self.addresses[which], self.lengths[which], self.dtypes[which], self.most, self.team)


def open_buffers(xs: list[Array], writable: bool) -> Memory:
    """The memory of NumPy arrays, which the caller keeps alive."""
    if native.available:
        return Memory(*_core.open_buffers(xs, writable))
    return nowhere(len(xs))


def find_team() -> int:
    """The threads of the OpenMP that a framework has loaded, which this call finds at work; 0: there is none to be found.

    After each of the framework's loops they keep their cores busy for some milliseconds, waiting for the next one: given
    ours they begin at once, where a thread of our own would find no core.
    """
    return _core.find_team() if native.available else 0


def open_tensors(xs: Sequence[Array], exchange: Any, most: int = native.MOST, team: int = 0) -> Memory | None:
    """The memory of tensors whose type offers DLPack's exchange table; None where one has none that may be read.

    `most` threads may work on it, those of a `team` if there is one. The caller keeps the tensors alive.
    """
    if not native.available or exchange is None:
        return None
    opened = _core.open_tensors(list(xs), exchange)
    return Memory(*opened, most, team) if len(opened[0]) == len(xs) else None


def nowhere(count: int) -> Memory:
    """The memory of arrays that the core cannot reach."""
    none = np.zeros(count, np.int64)
    return Memory(none.astype(np.uint64), none, np.full(count, NOT_HELD, np.uint8))


def powers(memory: Memory, p: float, divisors: Array) -> list[float]:
    """Σ|x / divisor|^p of every block of the arrays that are held; for p = inf the largest |x|, NaN kept."""
    held = memory.held
    if not held.any():
        return []
    memory, divisors = memory.only(held), None if divisors is None else divisors[held]
    found: list[float] = _core.measure(*memory[:3], p, divisors, memory.threads, memory.team)[0].tolist()
    return found


def unit_powers(rows: Array, p: float, divisors: Array) -> Array | None:
    """Σ|x / divisor|^p of each row of a 2-D array; None where the core cannot read it."""
    memory = open_buffers([rows], False)
    if not memory.whole:
        return None
    (count, length), (stride, step) = rows.shape, (stride // rows.itemsize for stride in rows.strides)
    address, dtype = int(memory.addresses[0]), int(memory.dtypes[0])
    return _core.measure_units(address, count, length, stride, step, dtype, p, divisors, native.threads())


def scale(source: Memory, target: Memory, coefs: Array) -> None:
    """target = source · coef, the product in float64 and rounded once; all of them held."""
    if len(coefs):
        at = source.addresses, target.addresses, source.lengths, source.dtypes
        _core.scale(*at, coefs, target.threads, target.team)


def clamp(source: Memory, target: Memory, bounds: Array) -> Array:
    """target = source between its (low, high), bounds that the dtype holds; which changed? All of them held."""
    if not len(bounds):
        return np.zeros(0, np.uint8)
    low, high = np.ascontiguousarray(bounds.T)
    at = source.addresses, target.addresses, source.lengths, source.dtypes
    return _core.clamp(*at, low, high, target.threads, target.team)


def nonfinite(memory: Memory) -> list[tuple[int, int]]:
    """How many NaN and how many inf there are in each of the arrays that are held."""
    if not memory.held.any():
        return []
    held = memory.only(memory.held)
    nan, infinite = _core.count_nonfinite(*held[:3], held.threads, held.team)
    return list(zip(nan.tolist(), infinite.tolist(), strict=True))
