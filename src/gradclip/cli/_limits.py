"""The limits that one would read off the norms of a run without clipping."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from ._training import SCOPES, Run

JUMP = 10  # times the median so far: the gradient has exploded
FIRST = 5  # norms that a median needs
MULTIPLES = {"element": 0.1, "tensor": 1.0, "global": 1.0}


@dataclass(frozen=True)
class Limits:
    """What the limits are read from: the medians, over the calm steps, of each step's largest norm by scope."""

    calm: int  # steps before the explosion
    exploded: bool
    medians: dict[str, float]

    @classmethod
    def of(cls, run: Run) -> Limits:
        calm = _calm(run.norms)
        exploded = calm < len(run.norms) or run.nonfinite is not None
        return cls(calm, exploded, {scope: _median(run.largest[scope][:calm]) for scope in SCOPES})

    def limit(self, scope: str) -> float:
        """To three digits, so that what is printed is what was used."""
        return float(f"{MULTIPLES[scope] * self.medians[scope]:.3g}")


def _calm(norms: list[float]) -> int:
    """How many steps there are before the norm first exceeds JUMP times its median so far."""
    seen: list[float] = []
    for step, norm in enumerate(norms):
        if step >= FIRST and norm > JUMP * seen[len(seen) // 2]:
            return step
        insort(seen, norm)
    return len(norms)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
