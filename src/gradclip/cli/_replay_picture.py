"""The norms of a log and the limit that a rule would have set, against the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ._picture import STYLE
from ._replayed import Steps

Array = Any
WIDTH, HEIGHT, DPI = 900, 420, 96
NORM, LIMIT, CLIPPED, LOST = "#767676", "#0072B2", "#D55E00", "#CC79A7"  # which the colour-blind tell apart
TITLE: Any = {"fontfamily": "DejaVu Sans Mono", "fontweight": "normal", "parse_math": False}
LONGEST = 90  # characters of a title


def draw(path: Path, steps: Steps, title: str) -> None:
    """A PNG of WIDTH × HEIGHT pixels."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout="constrained")
        axes = figure.subplots()
        axes.set_title(title if len(title) <= LONGEST else f"{title[:LONGEST]}…", **TITLE)
        axes.set_yscale("log")
        at = np.arange(1, len(steps.norms) + 1)
        axes.plot(at, _shown(steps.norms), color=NORM, linewidth=0.8, label="norm before clipping")
        axes.plot(at, _shown(steps.limits), color=LIMIT, linewidth=1.6, label="limit")
        _marks(axes, at, steps)
        axes.set_xlim(0, len(at) + 1)
        axes.set_xlabel("step of the log")
        axes.set_ylabel("gradient norm")
        figure.legend(loc="outside lower center", ncols=5)
        figure.savefig(path, format="png", pil_kwargs={"optimize": True})


def _marks(axes: Axes, at: Array, steps: Steps) -> None:
    """Every step that was not simply taken."""
    marks = {"clipped": (steps.clipped, ".", CLIPPED), "skipped": (steps.skipped, "x", CLIPPED)}
    for name, (which, marker, colour) in marks.items():
        if which.any():
            label = f"{name}: {which.mean():.1%}"
            axes.plot(at[which], _shown(steps.norms[which]), marker, color=colour, markersize=5, label=label)
    lost = np.isnan(steps.norms)
    if lost.any():
        top = np.ones(lost.sum())
        label = f"not finite: {lost.sum()}"
        axes.plot(at[lost], top, "v", color=LOST, transform=axes.get_xaxis_transform(), clip_on=False, label=label)


def _shown(values: Array) -> Array:
    """What a logarithmic axis can show."""
    return np.where((values > 0) & np.isfinite(values), values, np.nan)
