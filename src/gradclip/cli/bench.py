"""`gradclip bench`: how fast this machine clips, beside what people use today."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import __version__, native
from . import benchmarks
from .benchmarks.timing import Row, Timed, timed
from .errors import UserError
from .page import rendered
from .stdout import show

NAMES = frozenset(module.name for module in iter_modules(benchmarks.__path__)) - {"timing"}


def bench(
    frameworks: Annotated[
        list[str] | None, typer.Option("--framework", help="What to be held against; all that are installed by default.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is timed; the median counts.")] = 15,
    power: Annotated[int, typer.Option(min=10, max=30, help="The large arrays have 2^POWER elements.")] = 26,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Time clipping in turns with what it is held against; medians, as ratios, in one process for each framework."""
    names = [_known(name) for name in frameworks or _installed()]
    alone = len(names) == 1
    machine = _machine() | {name: _version(name) for name in names if name != "numpy"}
    results = [row for name in names for row in (_run(name, power, rounds) if alone else _apart(name, power, rounds))]
    show(json.dumps(machine | {"rows": [row._asdict() for row in results]}) if as_json else _report(results, machine))


def _known(name: str) -> str:
    if name not in NAMES:
        raise UserError(f"--framework must be one of {', '.join(sorted(NAMES))}; got {name!r}")
    if find_spec(name) is None:
        raise UserError(f"--framework {name}: {name} is not installed here")
    return name


def _version(name: str) -> str:
    """Of the package that has this module, which may go by another name: tensorflow-cpu, paddlepaddle."""
    return version(packages_distributions()[name][0])


def _installed() -> list[str]:
    return ["numpy", *sorted(name for name in NAMES - {"numpy"} if find_spec(name))]


def _apart(name: str, power: int, rounds: int) -> list[Timed]:
    """In a process of its own, since not every two frameworks can share one."""
    command = [sys.executable, "-m", "gradclip.cli", "bench", "--framework", name, "--json"]
    done = subprocess.run(
        [*command, "--power", str(power), "--rounds", str(rounds)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"the benchmark against {name} ended with exit code {done.returncode}")
    return [Timed(**row) for row in json.loads(done.stdout)["rows"]]


def _run(name: str, power: int, rounds: int) -> list[Timed]:
    rows: list[Callable[[], Row]] = list(import_module(f"{benchmarks.__name__}.{name}").rows(1 << power))
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


def _report(results: list[Timed], machine: dict[str, Any]) -> str:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("work", "against", "ours", "theirs", "ratio", "goal", ""):
        table.add_column(name, justify="right" if name in ("ours", "theirs", "ratio", "goal") else "left")
    for row in results:
        times = (f"{1e3 * seconds:.2f} ms" for seconds in (row.ours, row.theirs))
        mark = "" if not row.goal else "[green]reached[/]" if row.reached else "[red]short of it[/]"
        table.add_row(row.name, row.against, *times, f"{row.ratio:.2f}", row.goal, mark)
    short = [row.name for row in results if not row.reached]
    said = f"short of the goal: {'; '.join(short)}" if short else "every goal is reached"
    return rendered(table, "", said, ", ".join(f"{name} {value}" for name, value in machine.items()))
