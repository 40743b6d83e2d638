"""Gradient clipping that is right, fast and explains itself.

A clipper measures a norm, a rule says how large it may be, the clipper applies it.

>>> import gradclip
>>> gradclip.clip([3.0, 4.0], gradclip.MaxNorm(1.0))
norm 5.0 → 1.0 (×0.2), 2 tensors, clipped
"""

from .clip import clip, clip_, clip_by_global_norm, clip_by_norm, clip_by_value, init, norm
from .clipped import Clipped
from .clipper import Clipper
from .native import set_threads
from .nonfinite import NonFiniteError
from .rules import Bounds, MaxNorm

__version__ = "0.1.0"

__all__ = [
    "Bounds",
    "Clipped",
    "Clipper",
    "MaxNorm",
    "NonFiniteError",
    "clip",
    "clip_",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "init",
    "norm",
    "set_threads",
]
