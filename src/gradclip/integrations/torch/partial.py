"""Gradients whose elements are still to be added up over processes: norms are not linear, so that comes first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...backends._torch_shares import is_partial, local


def add_up_(parameters: Iterable[Tensor]) -> None:
    """Replaces every Partial p.grad by what it stands for: one all-reduce for all of a mesh, a dimension and a type.

    The optimizer would have added them up one by one. Processes have to have the same gradients that are Partial.
    """
    partials = [p for p in parameters if is_partial(p.grad)]
    while partials:
        buckets: dict[Any, list[Tensor]] = defaultdict(list)
        for p in partials:
            buckets[_bucket(p.grad)].append(p)
        for (mesh, dim, op, _, _), members in buckets.items():
            _add_up(members, mesh, dim, op)
        partials = [p for p in partials if is_partial(p.grad)]


def _bucket(grad: Any) -> tuple[Any, int, str, torch.dtype, torch.device]:
    """Where it is to be added up: the mesh, its first such dimension, how, and what can travel together."""
    dim = next(i for i, placement in enumerate(grad.placements) if placement.is_partial())
    return grad.device_mesh, dim, grad.placements[dim].reduce_op, grad.dtype, grad.device


def _add_up(members: list[Tensor], mesh: Any, dim: int, op: str) -> None:
    import torch.distributed as dist

    with torch.no_grad():
        here = [local(p.grad) for p in members]
        flat = torch.cat([x.reshape(-1) for x in here])
        dist.all_reduce(flat, dist.ReduceOp.SUM if op == "avg" else getattr(dist.ReduceOp, op.upper()), mesh.get_group(dim))
        if op == "avg":
            flat /= mesh.size(dim)
        for p, x, whole in zip(members, here, flat.split([x.numel() for x in here]), strict=True):
            p.grad = _replicated(p.grad, whole.view(x.shape), dim)


def _replicated(grad: Any, here: Tensor, dim: int) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate() if i == dim else placement for i, placement in enumerate(grad.placements)]
    mesh = grad.device_mesh
    return DTensor.from_local(here, mesh, placements, run_check=False, shape=grad.shape, stride=grad.stride())
