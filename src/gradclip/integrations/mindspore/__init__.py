"""MindSpore: clipping as a cell, in a step, in an optimizer; in PyNative and Graph mode, with data sinking or without."""

from ._cells import ClipGradients

__all__ = ["ClipGradients"]
