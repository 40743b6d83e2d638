"""Tensors that are spread over processes: what part of Σ|g|^p is this one's, and how all parts are joined.

An element that lies on k processes of a group counts 1/k on each, and one all-reduce of one number adds up the whole. k follows
from placements alone: the group's size, by the product of the mesh dimensions that are not Replicate, by the number of
different pieces that placements do not show.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Join: TypeAlias = Callable[[Tensor, float], Tensor]
UNDECLARED = (
    "{} is a plain tensor beside DTensors: is it a copy of what all processes have, or a piece that only some have? Say so: "
    "attach(optimizer, rule, layout=Layout(pieces=1)) for a copy, pieces={{{!r}: n, '*': 1}} for one of n different pieces"
)
PARTIAL = (
    "{} is Partial, and the norm of a sum is not the sum of norms: clip by attach or clip_grad_norm_, which add it up first, "
    "or call grad.redistribute(placements=…) yourself"
)


class Shares:
    """Of every tensor its weight in the norm, and the size of the whole; looked at only when a norm is asked for."""

    def __init__(self, wholes: Sequence[Any], pieces: Sequence[int], size: int, join: Join, complete: bool = True) -> None:
        self.wholes = wholes
        self.pieces = pieces
        self.size = size
        self.join = join
        self.complete = complete

    @cached_property
    def weights(self) -> list[float]:
        """1 / how many processes of the group have each element."""
        return [shards(x) * pieces / self.size for x, pieces in zip(self.wholes, self.pieces, strict=True)]

    @property
    def numels(self) -> list[int]:
        """The elements of the whole tensors."""
        return [x.numel() for x in self.wholes]

    def of(self, places: Sequence[int]) -> Shares:
        """Those of some of the tensors."""
        return Shares([self.wholes[i] for i in places], [self.pieces[i] for i in places], self.size, self.join, self.complete)


class ByPlacement(Shares):
    """What DTensors alone tell, joined over the mesh that theirs are parts of."""

    def __init__(self, wholes: Sequence[Any], path: Callable[[int], str]) -> None:
        self.path = path
        super().__init__(wholes, [1] * len(wholes), 1, self._join)

    @cached_property
    def group(self) -> ProcessGroup:
        """Found when it is needed; ValueError for what placements do not tell."""
        for i, x in enumerate(self.wholes):
            name = self.path(i)
            if not is_spread(x):
                raise ValueError(UNDECLARED.format(name or "the gradient", name))
            if is_partial(x):
                raise ValueError(PARTIAL.format(name or "the gradient"))
        return group_of(x.device_mesh for x in self.wholes)

    @cached_property
    def weights(self) -> list[float]:
        self.size = self.group.size()
        return super().weights

    def _join(self, power: Tensor, p: float) -> Tensor:
        return joined(self.group, power, p)


class Opened(list[Tensor]):
    """Tensors of one call: which lie where an earlier one does, which stand for a sparse one, how they are spread."""

    again: Sequence[bool] = ()
    unmerged: Sequence[tuple[Tensor, Tensor]] = ()
    shares: Shares | None = None

    @property
    def complete(self) -> bool:
        """Have all processes the same tensors, or copies or parts of the same?"""
        return self.shares is None or self.shares.complete

    @property
    def reduce(self) -> Join | None:
        """How powers of these become those of the wholes; None where these are the wholes."""
        return None if self.shares is None else self.shares.join


def is_spread(x: Any) -> bool:
    """Is it a DTensor? There are none where nobody has imported them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_partial(x: Any) -> bool:
    """Is it a DTensor whose elements are still to be added up?"""
    return is_spread(x) and any(placement.is_partial() for placement in x.placements)


def local(x: Any) -> Any:
    """What of it lies here."""
    if not is_spread(x):
        return x
    here = x.to_local()
    return here.wait() if hasattr(here, "wait") else here


def rewrapped(here: Tensor, whole: Any) -> Any:
    """What lies here as a part of the same whole."""
    wrap, mesh, placements = type(whole).from_local, whole.device_mesh, whole.placements
    return wrap(here, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def shards(x: Any) -> int:
    """In how many parts does the whole lie, each on a process of its own?"""
    if not is_spread(x):
        return 1
    return math.prod(x.device_mesh.size(i) for i, placement in enumerate(x.placements) if not placement.is_replicate())


def group_of(meshes: Iterable[DeviceMesh]) -> ProcessGroup:
    """All processes of the meshes that these are parts of; ValueError where no mesh has them all."""
    roots = dict.fromkeys(mesh._get_root_mesh() for mesh in dict.fromkeys(meshes))
    root = max(roots, key=lambda mesh: mesh.size())
    ranks = set(root.mesh.flatten().tolist())
    for other in roots:
        if not ranks.issuperset(other.mesh.flatten().tolist()):
            raise ValueError(f"parameters lie on meshes of different processes, {root} and {other}: say Layout(group=…)")
    return _group(root, ranks)


def _group(root: DeviceMesh, ranks: set[int]) -> ProcessGroup:
    import torch.distributed as dist

    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return root.get_group() if root.ndim == 1 else root._flatten().get_group()


def joined(group: ProcessGroup, power: Tensor, p: float) -> Tensor:
    """The sum over the group, for p = inf the largest: the same bits on every process."""
    import torch.distributed as dist

    if power.requires_grad:
        raise ValueError("a norm that is joined over processes has no derivative: detach the gradients, or use torch.no_grad()")
    sent = power.to(device_for(group, power.device), copy=True)
    dist.all_reduce(sent, dist.ReduceOp.MAX if p == math.inf else dist.ReduceOp.SUM, group)
    return sent.to(power.device)


def device_for(group: ProcessGroup, device: torch.device) -> torch.device:
    """This device, where the group can send from it; for gradients that are kept on the CPU it may know another only."""
    kinds = group._device_types
    return device if device.type in {kind.type for kind in kinds} else kinds[0]
