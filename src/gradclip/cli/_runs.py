"""All four runs: one that shows where the limits should be, and three that keep to them."""

from __future__ import annotations

from ._limits import Limits
from ._progress import board
from ._text import Text
from ._training import NAMES, SCOPES, Run, Setup, train


def train_all(text: Text, steps: int, seed: int) -> tuple[list[Run], Limits]:
    setup = Setup(text, steps, seed)
    with board(list(NAMES.values()), steps) as bars:

        def run(scope: str | None, limit: float | None) -> Run:
            run = train(setup, scope, limit, bars.tell(NAMES[scope]))
            bars.end(run)
            return run

        unclipped = run(None, None)
        limits = Limits.of(unclipped)
        return [unclipped, *(run(scope, limits.limit(scope)) for scope in SCOPES)], limits
