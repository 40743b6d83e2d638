"""What came of all runs, in words."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text as Line

from ._limits import JUMP, Limits
from ._training import Run
from .page import rendered

COLUMNS = ("run", "limit", "final loss", "largest norm", "steps clipped", "first non-finite step")


def told(runs: list[Run], limits: Limits, entropy: float) -> str:
    """The table, how the limits were read, and what the numbers are."""
    return rendered(_table(runs), Line(), Line("\n".join([_read(limits), RULES, _units(entropy)])))


def _table(runs: list[Run]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "run" else "right")
    for run in runs:
        table.add_row(*_row(run))
    return table


def _row(run: Run) -> list[str]:
    loss = run.final_loss()
    return [
        run.name,
        "–" if run.limit is None else f"{run.limit:g}",
        "diverged" if loss is None else f"{loss:.3f}",
        f"{max(run.norms):.3g}",
        "–" if run.limit is None else f"{run.clipped / len(run.norms):.0%}",
        "–" if run.nonfinite is None else str(run.nonfinite),
    ]


def _read(limits: Limits) -> str:
    medians = limits.medians
    return (
        f"{_explosion(limits)} Medians over steps 1 to {limits.calm}: norm {medians['global']:.3g}, "
        f"largest norm of a tensor {medians['tensor']:.3g}, largest value {medians['element']:.3g}."
    )


def _explosion(limits: Limits) -> str:
    if not limits.exploded:
        return f"Unclipped, the norm never exceeded {JUMP} times its median."
    return f"Unclipped, the norm exploded at step {limits.calm + 1}: it exceeded {JUMP} times its median so far."


RULES = (
    "The limits are these medians; by value a tenth of it, "
    "since values that are each within a limit still add up to a large norm."
)


def _units(entropy: float) -> str:
    return (
        f"Loss in nats a character ({entropy:.2f} for one who knows only how frequent each is); "
        "norms of all gradients together, before clipping."
    )
