"""A log of gradient norms: JSON lines, CSV, or the trainer_state.json of Hugging Face, by the file's extension."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeAlias

import numpy as np

from .errors import UserError, told

Array = Any
Record: TypeAlias = tuple[str, dict[str, Any]]  # where it stands in the file, and its fields
COLUMNS = ("norm", "grad_norm")  # where norms are looked for: ours, and the Trainer's
FAULTS = (OSError, ValueError, RecursionError, csv.Error)


class Log(NamedTuple):
    """The norms before clipping, in order."""

    norms: Array  # [n] float64; NaN for each that is not finite, or null
    column: str
    without: int  # records that hold none
    trainer: bool  # is it a Hugging Face Trainer's?


def read(path: Path, column: str | None) -> Log:
    """The log; UserError for a file that is none, naming the line."""
    form = _form(path)
    with told(f"cannot read {path}", FAULTS), path.open(encoding="utf-8-sig", newline="") as stream:
        columns: dict[str, list[float]] = {name: [] for name in ([column] if column is not None else COLUMNS)}
        total, others = 0, dict[str, None]()
        for where, record in form(stream):
            total += 1
            others |= dict.fromkeys(record)
            for name in columns.keys() & record.keys():
                columns[name].append(_norm(where, record[name]))
    name = _column(path, columns, list(others), total)
    return Log(np.array(columns[name]), name, total - len(columns[name]), form is _trainer)


def _form(path: Path) -> Callable[[TextIO], Iterator[Record]]:
    form = FORMATS.get(path.suffix.lower())
    if form is None:
        raise UserError(f"{path} must end in .jsonl (JSON lines), .csv or .json (a Trainer's trainer_state.json)")
    return form


def _column(path: Path, columns: dict[str, list[float]], others: list[str], total: int) -> str:
    """The one column that holds norms."""
    found = [name for name, norms in columns.items() if norms]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{path} has both {' and '.join(found)}: say which with --column")
    if not total:
        raise UserError(f"{path} is empty: it holds no norms")
    there = _short(", ".join(others))
    raise UserError(f"{path} holds no {' or '.join(columns)}: say with --column where the norms are; there is {there}")


def _norm(where: str, value: Any) -> float:
    """The norm as a number ≥ 0, NaN for one that is not finite."""
    if isinstance(value, dict | list):
        raise ValueError(f"{where} has a norm for each of several: log that of the scope global, one number a step")
    try:
        norm = math.nan if value is None else float(value)
    except ValueError:
        raise ValueError(f"{where}: a norm is a number; got {_short(repr(value))}") from None
    if norm < 0 or isinstance(value, bool):
        raise ValueError(f"{where}: a norm is a number that is not negative; got {value!r}")
    return norm if norm < math.inf else math.nan


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _lines(stream: TextIO) -> Iterator[Record]:
    """What `json.dumps(clipped.to_dict())` wrote, or any other objects, one in a line."""
    for number, line in enumerate(stream, 1):
        if line.strip():
            yield f"line {number}", _object(f"line {number}", line)


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_int=float)  # a whole number may be too large for int to read
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} is no JSON object, but {_short(text.strip())}")
    return found


def _rows(stream: TextIO) -> Iterator[Record]:
    """A cell that is empty was not logged."""
    rows = csv.DictReader(stream, restkey="")
    for name, count in Counter(rows.fieldnames or []).items():
        if count > 1 and name:
            raise ValueError(f"{count} columns are called {name!r}")
    for row in rows:
        yield f"line {rows.line_num}", {name: cell for name, cell in row.items() if name and cell and cell.strip()}


def _trainer(stream: TextIO) -> Iterator[Record]:
    history = _object("the file", stream.read()).get("log_history")
    if not isinstance(history, list):
        raise ValueError("it has no log_history, which a trainer_state.json has; JSON lines are to end in .jsonl")
    for place, record in enumerate(history):
        if not isinstance(record, dict):
            raise ValueError(f"log_history[{place}] is no object, but {_short(repr(record))}")
        yield f"log_history[{place}]", record


FORMATS = {".jsonl": _lines, ".csv": _rows, ".json": _trainer}
