"""`gradclip bench`: how fast this machine clips, beside what people use today."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import __version__, native
from .benchmarks import numpy as against_numpy
from .benchmarks.timing import Row, Timed, timed
from .page import rendered
from .stdout import show


def bench(
    rounds: Annotated[int, typer.Option(min=1, help="How often each is timed; the median counts.")] = 15,
    power: Annotated[int, typer.Option(min=10, max=30, help="The large arrays have 2^POWER elements.")] = 26,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Time clipping in turns with what it is held against; medians, as ratios, in one process."""
    results = _run(list(against_numpy.rows(1 << power)), rounds)
    show(json.dumps(_machine() | {"rows": [row._asdict() for row in results]}) if as_json else _report(results))


def _run(rows: list[Callable[[], Row]], rounds: int) -> list[Timed]:
    results: list[Timed] = []
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(rows) * (rounds + 1))
        for make in rows:
            row = make()
            progress.update(task, description=row.name)
            for result in timed(row, rounds):
                progress.advance(task)
                results += [result] if result else []
    return results


def _machine() -> dict[str, Any]:
    return {
        "gradclip": __version__,
        "core": native.core(),
        "threads": native.threads(),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _report(results: list[Timed]) -> str:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("work", "against", "ours", "theirs", "ratio", "goal", ""):
        table.add_column(name, justify="right" if name in ("ours", "theirs", "ratio", "goal") else "left")
    for row in results:
        times = (f"{1e3 * seconds:.2f} ms" for seconds in (row.ours, row.theirs))
        mark = "" if not row.goal else "[green]reached[/]" if row.reached else "[red]short of it[/]"
        table.add_row(row.name, row.against, *times, f"{row.ratio:.2f}", row.goal, mark)
    short = [row.name for row in results if not row.reached]
    said = f"short of the goal: {'; '.join(short)}" if short else "every goal is reached"
    return rendered(table, "", said, ", ".join(f"{name} {value}" for name, value in _machine().items()))
