"""What a clip did to a file, as a table and as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..clip import norm
from ..clipped import Clipped
from .errors import printable
from .page import rendered

Array = Any


class Tensor(NamedTuple):
    """One row."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    before: float
    after: float
    clipped: bool


class Report(NamedTuple):
    """Everything that is told."""

    source: Path
    target: Path
    scope: str
    p: float
    clipped: Clipped
    tensors: list[Tensor]

    @classmethod
    def of(cls, source: Path, target: Path, scope: str, p: float, grads: dict[str, Array], clipped: Clipped) -> Report:
        new = clipped.grads
        norms = zip(norm(grads, p, "tensor").tolist(), norm(new, p, "tensor").tolist(), strict=True)
        tensors = [
            Tensor(name, x.shape, x.dtype.name, before, after, _differ(x, new[name]))
            for (name, x), (before, after) in zip(grads.items(), norms, strict=True)
        ]
        return cls(source, target, scope, p, clipped, tensors)

    def json(self) -> str:
        fields = {
            "input": str(self.source),
            "output": str(self.target),
            "scope": self.scope,
            "p": "inf" if self.p == math.inf else self.p,
            **self.clipped.to_dict(),
            "tensors": [
                tensor._asdict() | {"before": _finite(tensor.before), "after": _finite(tensor.after)} for tensor in self.tensors
            ],
        }
        return json.dumps(fields, allow_nan=False)

    def table(self) -> str:
        """The tensors, and what was done in one line."""
        parts: list[RenderableType] = [self._table(), Text()] if self.tensors else []
        return rendered(*parts, Text(repr(self.clipped)))

    def _table(self) -> Table:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("tensor", overflow="fold")
        table.add_column("shape")
        table.add_column("norm before", justify="right")
        table.add_column("norm after", justify="right")
        table.add_column("clipped")
        for tensor in self.tensors:
            name = Text(printable(tensor.name) or "''")
            before, after, clipped = f"{tensor.before:.6g}", f"{tensor.after:.6g}", "yes" if tensor.clipped else "no"
            table.add_row(name, str(tensor.shape), before, after, clipped, style="bold" if tensor.clipped else None)
        return table


def _differ(x: Array, y: Array) -> bool:
    return x is not y and bool(((x != y) & ((x == x) | (y == y))).any())


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
