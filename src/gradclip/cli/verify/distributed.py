"""`gradclip verify --distributed`: one norm for any layout, on processes of this machine, beside torch's own function."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ..page import rendered
from .table import Notes
from .worker_process import last, started

SIZES = (2, 4)
ALONE = (  # where torch's function stops a rank, or the process itself
    ("FSDP2: an empty shard", "inf"),
    ("the last rank has no gradient", "2.0"),
    ("the first rank lacks one gradient", "2.0"),
)
PATIENCE = 240  # seconds that all ranks together may take
OURS = {True: "[green]✓[/]", False: "[bold red]✗[/]"}
THEIRS = {"right": "[green]✓[/]", "wrong": "[red]✗[/]", "raises": "[red]![/]", "stops": "[bold red]![/]"}
LEGEND = (
    "Each cell: the library, then torch.nn.utils.clip_grad_norm_, against the same gradients on one process in float64. ✓ "
    "right on every rank (the library: to 1e-6, the same bits on all), ✗ wrong, ! an error, a hang or a crash, – not tried. "
    "Collectives: the library's for p = 2 and ∞, torch's."
)
Row = dict[str, Any]


def rows(python: Path, sizes: Sequence[int] = SIZES) -> list[Row]:
    """What all ranks together found, one row for each layout, number of ranks and p."""
    found = {}
    for size in sizes:
        for each in zip(*_ranks(python, size), strict=True):
            row = _joined(each, size)
            found[size, row["layout"], row["p"]] = row
    with ThreadPoolExecutor(2) as pool:
        tried = {(size, *one): pool.submit(_alone, python, size, *one) for size in sizes for one in ALONE}
    for key, result in tried.items():
        found[key]["theirs"] = result.result()
    return list(found.values())


def _ranks(python: Path, size: int, *one: str) -> list[list[Row]]:
    """What every rank wrote; RuntimeError with the words of one that did not."""
    with TemporaryDirectory() as folder:
        store, outs = Path(folder) / "store", [Path(folder) / f"{rank}.json" for rank in range(size)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen(
                started(python, "rank", str(rank), str(size), str(store), str(out), *one),
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, out in enumerate(outs)
        ]
        said = _ended(running)
        if not all(out.exists() for out in outs):
            rank = next(i for i, out in enumerate(outs) if not out.exists())
            raise RuntimeError(f"rank {rank} {said[rank]}")
        return [json.loads(out.read_text(encoding="utf-8")) for out in outs]


def _ended(running: list[subprocess.Popen[str]]) -> list[str]:
    """How every process ended; all are gone then."""
    with ThreadPoolExecutor(len(running)) as pool:
        return list(pool.map(_end, running))


def _end(process: subprocess.Popen[str]) -> str:
    try:
        _, said = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"did not end within {PATIENCE} seconds"
    return f"ended with exit code {process.returncode}: {last(said)}"


def _joined(each: Sequence[Row], size: int) -> Row:
    ours, theirs = ([row[side] for row in each] for side in ("ours", "theirs"))
    same = len({one["norm"] for one in ours}) == 1
    return {
        "layout": each[0]["layout"],
        "p": each[0]["p"],
        "ranks": size,
        "ours": {
            "ok": same and all(one["ok"] for one in ours),
            "norm": ours[0]["norm"],
            "error": max((one.get("error") or 0.0 for one in ours), default=0.0),
            "collectives": max(one["collectives"] for one in ours),
            "said": next((one["said"] for one in ours if one["said"]), "" if same else "ranks have different bits"),
        },
        "theirs": None if theirs[0] is None else _worst(theirs),
    }


def _worst(theirs: list[Row]) -> Row:
    """What torch's function did on the rank that fared worst."""
    for kind in ("raises", "wrong"):
        found = [one | {"said": f"rank {rank}: {one['said']}"} for rank, one in enumerate(theirs) if one["kind"] == kind]
        if found:
            return min(found, key=lambda one: "gloo" in one["said"])  # its own error rather than that of who waited for it
    return theirs[0]


def _alone(python: Path, size: int, layout: str, p: str) -> Row:
    """A layout that torch's function does not survive: what becomes of it."""
    try:
        found = _ranks(python, size, layout, p)
    except RuntimeError as error:
        return {"kind": "stops", "said": str(error), "collectives": 0}
    return _worst([row["theirs"] for (row,) in found])


def report(found: list[Row]) -> str:
    """The table, its footnotes, the verdict."""
    notes, table = Notes(), Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    orders = list(dict.fromkeys(row["p"] for row in found))
    for name in (
        "layout",
        "ranks",
        *(f"p = {'∞' if float(p) == math.inf else f'{float(p):g}'}" for p in orders),
        "collectives",
    ):
        table.add_column(name)
    by = {(row["layout"], row["ranks"], row["p"]): row for row in found}
    for layout, ranks in dict.fromkeys((row["layout"], row["ranks"]) for row in found):
        each = [by[layout, ranks, p] for p in orders]
        table.add_row(escape(layout), str(ranks), *(_drawn(row, notes) for row in each), _counts(each))
    texts = [f"{i} {text}" for i, text in enumerate(notes.texts, 1)]
    return rendered(table, "", LEGEND, *map(escape, [*texts, verdict(found)]))


def _drawn(row: Row, notes: Notes) -> str:
    ours, theirs = row["ours"], row["theirs"]
    drawn = f"{OURS[ours['ok']]}{'' if ours['ok'] else notes.number(ours['said'])}"
    if theirs is None:
        return f"{drawn} –"
    return f"{drawn} {THEIRS[theirs['kind']]}{notes.number(_general(theirs['said'])) if theirs['said'] else ''}"


def _general(said: str) -> str:
    """One footnote for all that fails alike: without the values that a wrong norm has."""
    return said if "Error" in said or "exit code" in said else "ranks are told norms of their own, or of another size"


def _counts(each: list[Row]) -> str:
    ours = {row["p"]: row["ours"]["collectives"] for row in each}
    theirs = next((row["theirs"]["collectives"] for row in each if row["theirs"] and row["theirs"]["kind"] != "raises"), None)
    return f"{ours.get('2.0')}, {ours.get('inf')} / {'–' if theirs is None else theirs}"


def verdict(found: list[Row]) -> str:
    """How often each was right."""
    theirs = [row["theirs"]["kind"] for row in found if row["theirs"]]
    ours = [row["ours"]["ok"] for row in found]
    right = theirs.count("right")
    return f"the library is right in {sum(ours)} of {len(ours)} cases, torch's function in {right} of {len(theirs)}"
