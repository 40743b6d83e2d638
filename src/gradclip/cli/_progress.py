"""One bar a run, while it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from ._training import Run, Tell

COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("{task.fields[state]}"),
)


class Board:
    """The bars; they are gone when all is done, and never there where nobody watches."""

    def __init__(self, progress: Progress, tasks: dict[str, TaskID]) -> None:
        self._progress = progress
        self._tasks = tasks

    def tell(self, name: str) -> Tell:
        """What a run calls after each step."""

        def tell(loss: float, norm: float) -> None:
            self._progress.update(self._tasks[name], advance=1, state=f"loss {loss:<8.3g} norm {norm:.3g}")

        return tell

    def end(self, run: Run) -> None:
        if run.nonfinite is not None:
            self._progress.update(self._tasks[run.name], state=f"not finite at step {run.nonfinite}")


@contextmanager
def board(names: list[str], steps: int) -> Iterator[Board]:
    with Progress(*COLUMNS, transient=True, disable=not sys.stdout.isatty()) as progress:
        yield Board(progress, {name: progress.add_task(name, total=steps, state="") for name in names})
