"""MindSpore: clipping as a cell, in a training step, in an optimizer; PyNative and Graph mode, with data sinking or without."""

from ._cells import ClipGradients
from ._optimizer import clipped
from ._steps import TrainOneStepCell, TrainOneStepWithLossScaleCell

__all__ = ["ClipGradients", "TrainOneStepCell", "TrainOneStepWithLossScaleCell", "clipped"]
