"""`gradclip replay`: a rule run over the norms that a training has logged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import EXTRA, _log, _replayed
from ._replay_page import Page
from ._rule_expression import rule_of
from .errors import UserError, printable, told
from .files import check_apart, check_source, replacing
from .stdout import show


def replay(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG", readable=False, help="Norms before clipping: .jsonl (JSON lines), .csv, or a Trainer's .json."
        ),
    ],
    text: Annotated[str, typer.Option("--rule", metavar="RULE", help="Such as 'Median(k=2)'; it is read, and never run.")],
    column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which column holds the norms; else norm or grad_norm.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="PNG", readable=False, help="Draw norm and limit, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Run a rule over a log of gradient norms: how often would it have clipped, and at what limit?"""
    rule = rule_of(text)
    _replayed.check(rule, text)
    _check(log, out)
    read = _log.read(log, column)
    steps = _replayed.run(rule, read.norms)
    page = Page(log, text, rule, read, _replayed.parts(steps))
    if out is not None:
        _draw(out, steps, printable(text))
    said = page.json() if as_json else page.table()
    show(said if as_json or out is None else f"{said}\n{printable(str(out))}")


def _check(log: Path, out: Path | None) -> None:
    check_source(log)
    if out is None:
        return
    if out.suffix.lower() != ".png":
        raise UserError(f"{out} must end in .png: the picture is one")
    check_apart(log, out)


def _draw(out: Path, steps: _replayed.Steps, title: str) -> None:
    with told(EXTRA, ModuleNotFoundError):
        from ._replay_picture import draw
    with replacing(out) as temporary:
        draw(temporary, steps, title)
