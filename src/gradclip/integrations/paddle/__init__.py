"""PaddlePaddle: `ClipGrad`, an optimizer's `grad_clip=`, and `attach`, which makes the optimizer that you have clip.

Once this is imported, `paddle.jit.to_static(full_graph=True)` leaves gradclip's own text alone: its functions trace as they
are.
"""

import paddle

import gradclip

from .attach import Attached, attach
from .clip_grad import ClipGrad

__all__ = ["Attached", "ClipGrad", "attach"]

paddle.jit.ignore_module([gradclip])
