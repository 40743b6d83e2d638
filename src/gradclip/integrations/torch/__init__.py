"""PyTorch: the functions of `torch.nn.utils`, `attach`, which makes the optimizer clip, and `Layout` for many processes."""

from .attach import Attached, attach
from .functional import clip_grad_norm, clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from .layout import Joined, Layout
from .units import units

__all__ = [
    "Attached",
    "Joined",
    "Layout",
    "attach",
    "clip_grad_norm",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "units",
]
