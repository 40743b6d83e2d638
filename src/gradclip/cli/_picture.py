"""Loss and gradient norm of all runs against the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from ._limits import Limits
from ._training import Run

Array = Any
WIDTH, HEIGHT, DPI = 1600, 1000, 160
LOOKS = {  # colours that the colour-blind tell apart, and widths that show lines below others
    None: ("#D55E00", 2.0),
    "element": ("#CC79A7", 3.6),
    "tensor": ("#009E73", 2.4),
    "global": ("#0072B2", 1.2),
}
INK, FAINT = "#333333", "#767676"
STYLE: Any = {
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "legend.edgecolor": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
BELOW, ABOVE = 5, 2000  # the norms shown, as multiples of the limit; an explosion goes on beyond them
HALO = [withStroke(linewidth=3, foreground="white")]


def draw(path: Path, runs: list[Run], limits: Limits, entropy: float, steps: int) -> None:
    """A PNG of WIDTH × HEIGHT pixels."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        above.set_title(_title(limits))
        _losses(above, runs, entropy, steps, limits.calm)
        _norms(below, runs, steps, limits)
        below.set_xlim(0, steps * 1.005)
        below.set_xlabel(f"step (the learning rate rises until {steps // 2}, then falls)")
        figure.align_ylabels()
        figure.savefig(path, format="png")


def _title(limits: Limits) -> str:
    end = "the gradient explodes" if limits.exploded else "the gradient does not explode this time"
    return f"The same training four times: without clipping {end}"


def _losses(axes: Axes, runs: list[Run], entropy: float, steps: int, calm: int) -> None:
    lowest, start = min(min(run.losses) for run in runs), runs[0].losses[0]
    axes.set_ylim(lowest - 0.1, start + 0.5 * (start - lowest))
    for run in runs:
        _line(axes, run, run.losses, steps, calm)
    axes.axhline(entropy, color=FAINT, linewidth=1, linestyle=":", zorder=1)
    _note(axes, entropy, 4, f"knowing only how frequent each character is: {entropy:.2f}", FAINT)
    axes.set_ylabel("loss (nats a character)")
    axes.legend(loc="upper right", ncols=2, title="loss at the end", alignment="left")


def _norms(axes: Axes, runs: list[Run], steps: int, limits: Limits) -> None:
    limit = limits.limit("global")
    axes.set_yscale("log")
    axes.set_ylim(limit / BELOW, limit * ABOVE)
    for run in runs:
        _line(axes, run, run.norms, steps, limits.calm)
    axes.axhline(limit, color=LOOKS["global"][0], linestyle="--", linewidth=1.2)
    _note(axes, limit, -24, f"limit by global norm: {limit:g}", LOOKS["global"][0])
    if limits.exploded:
        _explosion(axes, runs[0], steps, limits)
    axes.set_ylabel("gradient norm before clipping")


def _line(axes: Axes, run: Run, values: list[float], steps: int, calm: int) -> None:
    colour, width = LOOKS[run.scope]
    at, raw = np.arange(1, len(values) + 1), np.array(values)
    axes.plot(at, raw, color=colour, alpha=0.35, linewidth=0.8)
    smooth = _smooth(raw, steps) if run.scope else np.concatenate([_smooth(raw[:calm], steps), raw[calm:]])
    axes.plot(at, smooth, color=colour, linewidth=width, label=_label(run), zorder=3 if run.scope is None else 2)
    if run.nonfinite is not None:
        top = axes.get_ylim()[1]
        axes.plot([at[-1], run.nonfinite], [smooth[-1], top], color=colour, linewidth=width, zorder=3)
        axes.plot(run.nonfinite, top, "X", color=colour, markeredgecolor="white", markersize=10, clip_on=False, zorder=4)


def _label(run: Run) -> str:
    loss = run.final_loss()
    return f"{run.name}: {'diverged' if loss is None else format(loss, '.2f')}"


def _smooth(values: Array, steps: int) -> Array:
    """The median over the fortieth part of all steps around each."""
    reach = steps // 80
    return np.median(np.lib.stride_tricks.sliding_window_view(np.pad(values, reach, "reflect"), 2 * reach + 1), axis=-1)


def _explosion(axes: Axes, run: Run, steps: int, limits: Limits) -> None:
    lines = [f"explodes at step {limits.calm + 1}", f"largest norm {_power(max(run.norms))}"]
    if run.nonfinite is not None:
        lines.append(f"not finite at step {run.nonfinite}")
    late = limits.calm > 0.7 * steps
    axes.annotate(
        "\n".join(lines),
        (limits.calm + 1, limits.limit("global") * ABOVE**0.75),
        (-14 if late else 14, 0),
        textcoords="offset points",
        color=LOOKS[None][0],
        ha="right" if late else "left",
        va="center",
        path_effects=HALO,
    )


def _power(value: float) -> str:
    return f"{value:.2g}" if value < 1e4 else f"$10^{{{int(np.log10(value))}}}$"


def _note(axes: Axes, y: float, rise: float, text: str, colour: str) -> None:
    """At the right end, so many points above y."""
    axes.annotate(
        text,
        (1, y),
        (0, rise),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        color=colour,
        ha="right",
        path_effects=HALO,
    )
