"""Gradient clipping that is right, fast and explains itself.

A clipper measures a norm, a rule says how large it may be, the clipper applies it.

>>> import gradclip
>>> gradclip.clip([3.0, 4.0], gradclip.MaxNorm(1.0))
norm 5.0 → 1.0 (×0.2), 2 tensors, clipped
"""

from .clip import clip, clip_, clip_by_global_norm, clip_by_norm, clip_by_value, init, norm
from .clipped import Clipped
from .clipper import Clipper
from .combinations import Both, Groups, Skip
from .layout import Unit
from .native import set_threads
from .nonfinite import NonFiniteError
from .rules import Bounds, EmaRatio, MaxNorm, MaxRms, Median, Quantile, Ratio, UnitNorm, ZScore

__version__ = "0.1.0"

__all__ = [
    "Both",
    "Bounds",
    "Clipped",
    "Clipper",
    "EmaRatio",
    "Groups",
    "MaxNorm",
    "MaxRms",
    "Median",
    "NonFiniteError",
    "Quantile",
    "Ratio",
    "Skip",
    "Unit",
    "UnitNorm",
    "ZScore",
    "clip",
    "clip_",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "init",
    "norm",
    "set_threads",
]
