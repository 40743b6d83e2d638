"""The matrix on a terminal: what agrees, what does not, and why."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ..page import rendered
from .known import cause_of

Result = dict[str, Any]
OURS = {True: "[green]✓[/]", False: "[bold red]✗[/]"}
THEIRS = {"agrees": "[green]✓[/]", "rounds": "[yellow]≈[/]", "differs": "[red]✗[/]", "raises": "[red]![/]"}
LEGEND = (
    "Each cell: the library, then the framework's own function, against float64. ✓ within 4 units in the last place, "
    "≈ within 0.1 %, ✗ beyond, ! an error, – no such function, or the framework has no such type on this machine."
)


class Notes:
    """Footnotes, numbered as they are asked for."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


class Cell(NamedTuple):
    """How the library fared in a row, and how the framework's own function; `note` says why it differs."""

    ours: str
    theirs: str
    note: str | None


def cell(row: dict[str, Any] | None) -> Cell:
    """What a row says; "absent" where there is nothing to say."""
    if row is None:
        return Cell("absent", "absent", None)
    ours = "absent" if row["ours"]["kind"] == "absent" else "agrees" if row["ours"]["ok"] else "differs"
    own = row["own"]
    if own is None or ours == "absent":
        return Cell(ours, "absent", None if ours != "differs" else f"the library: {row['ours']}")
    if own["kind"] == "agrees":
        return Cell(ours, "agrees", None)
    cause = cause_of(own["function"], row["case"]) or ("less exact" if own["kind"] == "rounds" else "new: not known before")
    said = f" ({own['said']})" if own["said"] else ""
    return Cell(ours, own["kind"], f"{own['function']}: {cause}" if own["kind"] != "raises" else f"{own['function']}{said}")


def report(results: list[Result]) -> str:
    """The matrix, its footnotes, and what was not there."""
    ran = [result for result in results if "rows" in result]
    notes, table = Notes(), Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("case", "scope", *(result["framework"] for result in ran)):
        table.add_column(name)
    by = [{(row["case"], row["scope"]): row for row in result["rows"]} for result in ran]
    for case, scope in dict.fromkeys(key for rows in by for key in rows):
        table.add_row(escape(case), scope, *(_drawn(cell(rows.get((case, scope))), notes) for rows in by))
    versions = ", ".join(f"{result['framework']} {result['version']} (core {result['core']})" for result in ran)
    absent = [f"{result['framework']}: {result['said']}" for result in results if "rows" not in result]
    texts = [f"{i} {text}" for i, text in enumerate(notes.texts, 1)]
    return rendered(table, "", LEGEND, *map(escape, [*texts, versions, *absent, verdict(ran)]))


def _drawn(cell: Cell, notes: Notes) -> str:
    if cell.ours == "absent":
        return "–"
    theirs = "–" if cell.theirs == "absent" else THEIRS[cell.theirs]
    return f"{OURS[cell.ours == 'agrees']} {theirs}{notes.number(cell.note) if cell.note else ''}"


def verdict(ran: list[Result]) -> str:
    """How many comparisons the library passed, and the frameworks."""
    cells = [cell(row) for result in ran for row in result["rows"]]
    ours = [each.ours for each in cells if each.ours != "absent"]
    theirs = [each.theirs for each in cells if each.theirs != "absent"]
    return (
        f"the library agrees in {ours.count('agrees')} of {len(ours)} comparisons, the frameworks' own functions in "
        f"{theirs.count('agrees')} of {len(theirs)}"
    )
