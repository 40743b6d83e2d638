"""torch.nn.utils."""

from __future__ import annotations

import torch
from torch.nn import Parameter, utils

from ._own import Array, Framework, Own


def _parameters(grads: list[Array]) -> list[Array]:
    found = [Parameter(torch.zeros_like(x)) for x in grads]
    for p, grad in zip(found, grads, strict=True):
        p.grad = grad.clone()
    return found


def by_value(grads: list[Array], limit: float) -> tuple[list[Array], None]:
    params = _parameters(grads)
    utils.clip_grad_value_(params, limit)
    return [p.grad for p in params], None


def by_norm(grads: list[Array], limit: float) -> tuple[list[Array], list[Array]]:
    params = _parameters(grads)
    norms = [utils.clip_grad_norm_(p, limit) for p in params]
    return [p.grad for p in params], norms


def by_global_norm(grads: list[Array], limit: float) -> tuple[list[Array], Array]:
    params = _parameters(grads)
    norm = utils.clip_grad_norm_(params, limit)
    return [p.grad for p in params], norm


FRAMEWORK = Framework(
    torch.__version__,
    lambda x, dtype: torch.from_numpy(x.copy()).to(getattr(torch, dtype)),
    lambda x: x.detach().double().numpy(),
    {
        "element": Own("clip_grad_value_", by_value),
        "tensor": Own("clip_grad_norm_ of each", by_norm),
        "global": Own("clip_grad_norm_", by_global_norm),
    },
)
