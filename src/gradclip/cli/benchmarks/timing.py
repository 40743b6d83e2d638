"""Two ways of doing one thing, timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

Work = Callable[[], object]


class Row(NamedTuple):
    """A comparison: `ours` against `theirs`. Either at least so many times faster, or at most so many times slower."""

    name: str
    against: str
    ours: Work
    theirs: Work
    at_least: float | None = None
    at_most: float | None = None


class Timed(NamedTuple):
    """A row's medians in seconds, and what became of its goal."""

    name: str
    against: str
    ours: float
    theirs: float
    ratio: float
    goal: str
    reached: bool

    @classmethod
    def of(cls, row: Row, ours: float, theirs: float) -> Timed:
        """The row's ratio: how many times faster, or how many times slower where the goal is a limit."""
        if row.at_most is not None:
            ratio = ours / theirs
            return cls(row.name, row.against, ours, theirs, ratio, f"≤ {row.at_most:g}", ratio <= row.at_most)
        ratio = theirs / ours
        goal = "" if row.at_least is None else f"≥ {row.at_least:g}"
        return cls(row.name, row.against, ours, theirs, ratio, goal, row.at_least is None or ratio >= row.at_least)


def timed(row: Row, rounds: int) -> Iterator[Timed | None]:
    """None after every round but the last, then the row's result; the first round only warms up."""
    taken: list[tuple[float, float]] = []
    for i in range(rounds + 1):
        pair = seconds(row.ours), seconds(row.theirs)
        if i:
            taken.append(pair)
        if i < rounds:
            yield None
    ours, theirs = (median(column) for column in zip(*taken, strict=True))
    yield Timed.of(row, ours, theirs)


def seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
