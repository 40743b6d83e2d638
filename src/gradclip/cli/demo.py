"""`gradclip demo`: a recurrent network whose gradient explodes, and how each way of clipping stops that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import EXTRA
from .errors import UserError, printable, told
from .files import check_apart, check_source, replacing
from .stdout import show

FEWEST = 40


def demo(
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", readable=False, help="UTF-8 text to learn; else Python's own manual.")
    ] = None,
    steps: Annotated[int, typer.Option(help=f"Steps of each run, at least {FEWEST}.")] = 400,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the order of the text.")] = 0,
    out: Annotated[Path, typer.Option(metavar="PNG", readable=False, help="Where the picture goes.")] = Path(
        "gradclip-demo.png"
    ),
) -> None:
    """Train a small recurrent network that explodes, then the same with each way of clipping."""
    with told(EXTRA, ModuleNotFoundError):
        from . import _picture, _runs, _table, _text

    _check(text, steps, seed, out)
    with replacing(out) as temporary:
        learned = _text.read(text)
        runs, limits = _runs.train_all(learned, steps, seed)
        _picture.draw(temporary, runs, limits, learned.entropy(), steps)
    show(f"{_table.told(runs, limits, learned.entropy())}\n{printable(str(out))}")


def _check(text: Path | None, steps: int, seed: int, out: Path) -> None:
    if steps < FEWEST:
        raise UserError(f"--steps must be at least {FEWEST}; got {steps}")
    if seed < 0:
        raise UserError(f"--seed must be at least 0; got {seed}")
    if out.suffix.lower() != ".png":
        raise UserError(f"{out} must end in .png: the picture is one")
    if text is not None:
        check_source(text)
        check_apart(text, out)
