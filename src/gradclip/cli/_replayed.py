"""A rule run over the norms of a log, and what that comes to."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from ..backends import host
from ..clip import decide, init
from ..rule import Rule
from .errors import UserError

Array = Any
QUARTERS = 4
GRADS = [0.0]  # stands for the gradients, of which the norm is known


class Steps(NamedTuple):
    """What the rule decided at every step, [n] each."""

    norms: Array  # NaN where not finite
    limits: Array  # NaN likewise, inf for none
    clipped: Array
    skipped: Array
    levels: Array  # how often it had taken a new level for granted by then

    def part(self, first: int, last: int) -> Steps:
        return Steps(*(values[first:last] for values in self))


class Part(NamedTuple):
    """What became of some steps in a row. Norms and limits are of those with a finite norm: None where there is none."""

    first: int
    last: int
    clipped: int
    skipped: int
    nonfinite: int
    levels: int
    limit_median: float | None
    limit_last: float | None
    norm_median: float | None
    norm_largest: float | None


def check(rule: Rule, text: str) -> None:
    """UserError for a rule that asks for more than one norm a step."""
    lacks = {
        "has a limit for each group of tensors, and a log holds the norm of all": rule.grouped,
        "compares with the norm of the weights, which a log does not hold": rule.needs_weights,
        "needs the number of elements, which a log does not hold": rule.needs_size,
        "bounds values, and a log holds norms": rule.signed,
        "bounds the norm of each tensor, and a log holds that of all": "global" not in rule.allowed_scopes(),
    }
    for reason, so in lacks.items():
        if so:
            raise UserError(f"{text} cannot be replayed: it {reason}")


def run(rule: Rule, norms: Array) -> Steps:
    """Every norm in turn; one that is not finite enters no state."""
    state, rows = init(GRADS, rule, "global"), []
    watched = Console(stderr=True)
    for norm in track(norms.tolist(), "replaying", console=watched, transient=True, disable=not sys.stderr.isatty()):
        done = decide(GRADS, rule, norm=norm, scope="global", state=state, nonfinite="skip")
        state, finite = done.state, bool(done.finite)
        rebased = rule.rebased(state)
        levels = 0 if rebased is None else int(host.field(rebased))
        limit = float(done.limit) if finite else math.nan
        rows.append((norm, limit, bool(done.clipped), finite and bool(done.skipped), levels))
    return Steps(*(np.array(column) for column in zip(*rows, strict=True)))


def parts(steps: Steps) -> list[Part]:
    """The whole run, then its quarters, where it has so many steps."""
    total = len(steps.norms)
    edges = [round(total * quarter / QUARTERS) for quarter in range(QUARTERS + 1)] if total >= QUARTERS else []
    return [_part(steps, 0, total), *(_part(steps, first, last) for first, last in pairwise(edges))]


def _part(steps: Steps, first: int, last: int) -> Part:
    norms, limits, clipped, skipped, levels = steps.part(first, last)
    finite = np.isfinite(norms)
    norms, limits = norms[finite], limits[finite]
    return Part(
        first + 1,
        last,
        int(clipped.sum()),
        int(skipped.sum()),
        int((~finite).sum()),
        int(levels[-1]) - (int(steps.levels[first - 1]) if first else 0),
        *((float(np.median(limits)), float(limits[-1])) if len(limits) else (None, None)),
        *((float(np.median(norms)), float(norms.max())) if len(norms) else (None, None)),
    )
