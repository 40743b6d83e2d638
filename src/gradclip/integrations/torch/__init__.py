"""PyTorch: the functions of `torch.nn.utils`, and `attach`, which makes the optimizer clip."""

from .attach import Attached, attach
from .functional import clip_grad_norm, clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from .units import units

__all__ = [
    "Attached",
    "attach",
    "clip_grad_norm",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "units",
]
