"""Which axis of a weight has the outputs, where the module tells."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch.nn.modules.conv import _ConvTransposeNd

from ...layout import Unit


def units(model: Module) -> Unit:
    """The scope "unit" for this model's parameters: the axis of the outputs, which a transposed convolution has second.

    For `attach(optimizer, Ratio(0.01), scope=units(model), named_parameters=model.named_parameters())`. With groups > 1 a
    transposed convolution's second axis has the outputs of one group, so that a unit is the same output of every group.

    >>> from torch import nn
    >>> scope = units(nn.Sequential(nn.Linear(2, 3), nn.ConvTranspose1d(4, 5, 3)))
    >>> scope.axis("0.weight", None), scope.axis("1.weight", None), scope.axis("1.bias", None)
    (0, 1, None)
    """
    axes: dict[str, int | None] = {}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False):
            second = isinstance(module, _ConvTransposeNd)
            axes[name] = None if p.ndim < 2 else int(second)

    def axis(path: str, x: Any) -> int | None:
        if path not in axes:
            raise ValueError(f"{path} is no parameter of this model: pass named_parameters=model.named_parameters() too")
        return axes[path]

    return Unit(axis)
