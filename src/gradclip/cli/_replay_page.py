"""What a replay says: a table of the whole run and its quarters, and what the numbers cannot know."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..rule import Rule
from ._log import Log
from ._replayed import Part
from .page import rendered

Array = Any
COLUMNS = ("steps", "clipped", "skipped", "not finite", "limit: median", "last", "norm: median", "largest", "new levels")
SHARE, NEAR = 0.02, 1e-4  # so many of the norms, so near the largest: they were cut off there
CAUTION = "A replay cannot know what the training would have done had it clipped: the norms are those of the run as it was."
TRAINER = "A Trainer logs the norm of every logging_steps-th step alone: the rule has not seen those between."


class Page(NamedTuple):
    """Everything that is told; `parts` is the whole run, then its quarters."""

    source: Path
    text: str  # the rule as it was given
    rule: Rule
    log: Log
    parts: list[Part]

    def json(self) -> str:
        whole, *quarters = map(_fields, self.parts)
        said = {"log": str(self.source), "column": self.log.column, "passed_over": self.log.without, "rule": self.text}
        return json.dumps({**said, "whole": whole, "quarters": quarters, "notes": self.notes()}, allow_nan=False)

    def table(self) -> str:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "steps" else "right")
        for part in self.parts:
            table.add_row(*_row(part), style="bold" if part is self.parts[0] else None)
        return rendered(table, Text(), Text("\n".join(self.notes())))

    def notes(self) -> list[str]:
        """What is to be kept in mind."""
        log, kind = self.log, type(self.rule).__name__
        of_tensors = self.rule.allowed_scopes()[0] != "global"
        notes = [
            CAUTION,
            _censored(log.norms),
            TRAINER if log.trainer else "",
            f"{kind} bounds the norm of each tensor by default; here it bounds that of all together." if of_tensors else "",
            f"Records without {log.column!r}, passed over: {log.without}." if log.without else "",
        ]
        return [note for note in notes if note]


def _censored(norms: Array) -> str:
    """Says so where many norms lie at the largest."""
    norms = norms[np.isfinite(norms)]
    largest = norms.max(initial=0.0)
    near = int((norms >= largest * (1 - NEAR)).sum())
    if not largest or near <= max(1, SHARE * len(norms)):
        return ""
    return (
        f"{near / len(norms):.0%} of the norms lie within {NEAR:g} of the largest, {largest:.4g}: the log was probably written "
        "after clipping, and a rule has to see the norms before it."
    )


def _row(part: Part) -> list[str]:
    steps = part.last - part.first + 1
    return [
        f"{part.first}–{part.last}",
        f"{part.clipped / steps:.1%}",
        str(part.skipped),
        str(part.nonfinite),
        *map(_number, (part.limit_median, part.limit_last, part.norm_median, part.norm_largest)),
        str(part.levels),
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else "none" if value == math.inf else f"{value:.4g}"


def _fields(part: Part) -> dict[str, Any]:
    return {name: None if value == math.inf else value for name, value in part._asdict().items()}
