"""`gradclip verify`: each framework in a process of its own, as two that share one may crash it."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import UserError
from ..files import replacing
from ..stdout import show
from . import distributed, frameworks
from .html import page
from .table import report
from .worker_process import INSTALLED_ONLY, last, started

NAMES = sorted(module.name for module in iter_modules(frameworks.__path__) if not module.name.startswith("_"))
NEEDS = {"jax": ("jax", "optax")}
PATIENCE = 600  # seconds that one framework may take
Result = dict[str, Any]


def verify(
    pythons: Annotated[
        list[Path] | None,
        typer.Option("--python", help="Another environment's Python, where further frameworks are; repeatable."),
    ] = None,
    names: Annotated[list[str] | None, typer.Option("--framework", help="Only this one; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as one page, too.")] = None,
    ranks: Annotated[bool, typer.Option("--distributed", help="PyTorch alone, on 2 and 4 processes, in every layout.")] = False,
) -> None:
    """Compare the library with float64 and with every framework's own functions; exit code 1 if ours disagrees."""
    if ranks:
        _verify_distributed(pythons or [], names, as_json, html)
        return
    for name in names or []:
        if name not in NAMES:
            raise UserError(f"--framework must be one of {', '.join(NAMES)}; got {name!r}")
    results = _run(_found([Path(sys.executable), *(pythons or [])], names or NAMES))
    if html is not None:
        with replacing(html) as written:
            written.write_text(page(results), encoding="utf-8")
    show(json.dumps({"frameworks": results}) if as_json else report(results))
    if any(not row["ours"]["ok"] for result in results for row in result.get("rows", [])):
        raise typer.Exit(1)


def _verify_distributed(pythons: list[Path], names: list[str] | None, as_json: bool, html: Path | None) -> None:
    if html is not None or (names or ["torch"]) != ["torch"]:
        raise UserError("--distributed is of PyTorch, and prints a table or --json: leave out --html and --framework")
    python = _found([Path(sys.executable), *pythons], ["torch"])["torch"]
    if python is None:
        raise UserError("--distributed needs PyTorch: pip install torch, or name another environment's Python with --python")
    with Console(stderr=True).status("2 and 4 processes try every layout"):
        rows = distributed.rows(python)
    show(json.dumps({"rows": rows}) if as_json else distributed.report(rows))
    if not all(row["ours"]["ok"] for row in rows):
        raise typer.Exit(1)


def _found(pythons: list[Path], names: list[str]) -> dict[str, Path | None]:
    """For each framework the first of the environments that has it."""
    return {name: next((python for python in pythons if _has(python, name)), None) for name in names}


def _has(python: Path, name: str) -> bool:
    needed = NEEDS.get(name, (name,))
    code = f"from importlib.util import find_spec; raise SystemExit(not all(map(find_spec, {needed!r})))"
    try:
        return subprocess.run([python, "-c", INSTALLED_ONLY + code], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise UserError(f"--python {python}: {error.strerror}") from None


def _run(places: dict[str, Path | None]) -> list[Result]:
    found: dict[str, Result] = {name: {"framework": name, "said": "not installed"} for name, at in places.items() if at is None}
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress, ThreadPoolExecutor(2) as pool:
        running = {pool.submit(_worked, name, python): name for name, python in places.items() if python is not None}
        task = progress.add_task("verifying", total=len(running))
        for done in as_completed(running):
            found[running[done]] = done.result()
            progress.update(task, advance=1, description=f"verified {running[done]}")
    return [found[name] for name in places]


def _worked(name: str, python: Path) -> Result:
    """What the framework's process found; one that crashes is told of, and does not stop the others."""
    try:
        done = subprocess.run(started(python, "worker", name), capture_output=True, text=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return {"framework": name, "said": f"did not end within {PATIENCE} seconds"}
    if done.returncode:
        return {"framework": name, "said": f"its process ended with exit code {done.returncode}: {last(done.stderr)}"}
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result
