"""How gradients may be spread over processes: each layout as the parameters of one rank, and the whole gradients in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

Array = Any
SHAPES = ((7, 6), (11, 4), (8,), (8, 4))  # over 2 and 4 ranks: even and uneven
SHORT = ((7, 6), (1, 4), (8,), (8, 4))  # one with less rows than ranks


@dataclass
class Spread:
    """What a rank has; `whole` is the same on all, every element once."""

    named: dict[str, Tensor] = field(default_factory=dict)
    whole: list[Array] = field(default_factory=list)
    pieces: int | Mapping[str, int] | None = None  # what has to be declared; None: nothing

    def add(self, name: str, whole: Tensor, grad: Any) -> None:
        """A parameter with this gradient, of which `whole` is part of the norm; None: on other ranks."""
        self.whole.append(whole.double().numpy())
        if grad is not None:
            p = Parameter(grad.detach().clone())
            p.grad = grad
            self.named[name] = p


@dataclass(frozen=True)
class Ranks:
    """This process among the others."""

    rank: int
    size: int

    @property
    def half(self) -> int:
        """Which half of the ranks it is in."""
        return self.rank // (self.size // 2)

    def line(self, name: str = "dp") -> DeviceMesh:
        return init_device_mesh("cpu", (self.size,), mesh_dim_names=(name,))

    def grid(self, *names: str) -> DeviceMesh:
        """Two dimensions, of which the second has two ranks."""
        return init_device_mesh("cpu", (self.size // 2, 2), mesh_dim_names=names)


def normal(i: int, shape: Sequence[int], dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """The same on every rank."""
    return torch.from_numpy(np.random.default_rng(i).standard_normal(shape) * scale).to(dtype)


def placed(whole: Tensor, mesh: DeviceMesh, *placements: Any) -> Tensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def copies(ranks: Ranks) -> Spread:
    spread = Spread()
    for i, shape in enumerate(SHAPES):
        spread.add(f"w{i}", normal(i, shape), normal(i, shape))
    return spread


def sharded(
    ranks: Ranks, dtype: torch.dtype = torch.float32, scale: float = 1.0, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> Spread:
    spread, mesh = Spread(), ranks.line()
    for i, shape in enumerate(shapes):
        whole = normal(i, shape, dtype, scale)
        spread.add(f"w{i}", whole, placed(whole, mesh, Shard(0)))
    return spread


def replicated_shards(ranks: Ranks) -> Spread:
    spread, mesh = Spread(), ranks.grid("replicate", "shard")
    for i, shape in enumerate(SHAPES):
        spread.add(f"w{i}", normal(i, shape), placed(normal(i, shape), mesh, Replicate(), Shard(0)))
    return spread


def two_dimensions(ranks: Ranks) -> Spread:
    spread, mesh = Spread(), ranks.grid("dp", "tp")
    for i, (shape, along) in enumerate(zip(SHAPES, (Shard(1), Replicate(), Replicate(), Shard(0)), strict=True)):
        spread.add(f"w{i}", normal(i, shape), placed(normal(i, shape), mesh, Shard(0), along))
    return spread


def some_on_one_dimension(ranks: Ranks) -> Spread:
    spread, mesh = Spread(), ranks.grid("dp", "tp")
    spread.add("linear", normal(0, (6, 4)), placed(normal(0, (6, 4)), mesh, Shard(0), Shard(1)))
    spread.add("norm", normal(1, (8,)), placed(normal(1, (8,)), mesh["dp"], Shard(0)))
    return spread


def two_meshes(ranks: Ranks) -> Spread:
    spread, dense, sparse = Spread(), ranks.line("fsdp"), ranks.grid("efsdp", "ep")
    spread.add("dense", normal(0, (7, 6)), placed(normal(0, (7, 6)), dense, Shard(0)))
    spread.add("experts", normal(1, (8, 6)), placed(normal(1, (8, 6)), sparse, Shard(1), Shard(0)))
    return spread


def copies_beside(ranks: Ranks) -> Spread:
    spread = sharded(ranks)
    spread.add("plain", normal(9, (3, 3)), normal(9, (3, 3)))
    spread.pieces = 1
    return spread


def partial(ranks: Ranks, how: str = "sum") -> Spread:
    spread, mesh = Spread(), ranks.line()
    for i, shape in enumerate(SHAPES):
        parts = [normal(10 * i + rank, shape) for rank in range(ranks.size)]
        whole = torch.stack(parts).double().sum(0) / (ranks.size if how == "avg" else 1)
        grad = DTensor.from_local(parts[ranks.rank].clone(), mesh, [Partial(how)], run_check=False)
        if i % 2:
            spread.add(f"w{i}", whole, grad)
        else:  # beside others that are not
            spread.add(f"w{i}", normal(i, shape), placed(normal(i, shape), mesh, Shard(0)))
    return spread


def stages(ranks: Ranks) -> Spread:
    spread = Spread(pieces=2)
    for stage in range(2):
        for i, shape in enumerate(SHAPES[: 2 + stage]):
            whole = normal(10 * stage + i, shape)
            spread.add(f"stage{stage}.w{i}", whole, whole.clone() if stage == ranks.half else None)
    return spread


def sharded_stages(ranks: Ranks) -> Spread:
    spread = Spread(pieces=2)
    mesh = init_device_mesh("cpu", (2, ranks.size // 2), mesh_dim_names=("pp", "dp"))
    for stage in range(2):
        whole = normal(stage, (7, 6))
        spread.add(f"stage{stage}", whole, placed(whole, mesh["dp"], Shard(0)) if stage == ranks.half else None)
    return spread


def tied(ranks: Ranks) -> Spread:
    spread = stages(ranks)
    spread.add("embedding", normal(30, (4, 4)), normal(30, (4, 4)))
    spread.pieces = {"embedding": 1, "*": 2}
    return spread


def experts(ranks: Ranks) -> Spread:
    spread = sharded(ranks)
    for rank in range(ranks.size):
        whole = normal(40 + rank, (3, 4))
        spread.add(f"experts.{rank}", whole, whole.clone() if rank == ranks.rank else None)
    spread.pieces = {"experts.*": ranks.size, "*": 1}
    return spread


def without(ranks: Ranks, lacking: Callable[[int], Sequence[int]]) -> Spread:
    """Sharded over rows, of which some ranks lack the gradients; their rows are no part of the norm."""
    spread = sharded(ranks)
    for i, p in enumerate(spread.named.values()):
        step = math.ceil(SHAPES[i][0] / ranks.size)  # torch gives the first ranks the larger parts
        for rank in range(ranks.size):
            if i in lacking(rank):
                spread.whole[i][rank * step : (rank + 1) * step] = 0
        if i in lacking(ranks.rank):
            p.grad = None
    return spread


def not_finite(ranks: Ranks) -> Spread:
    spread = sharded(ranks)
    spread.whole[3][-1, -1] = math.nan
    spread.named["w3"].grad = placed(torch.from_numpy(spread.whole[3]).float(), ranks.line(), Shard(0))
    return spread


LAYOUTS: dict[str, Callable[[Ranks], Spread]] = {
    "DDP: copies": copies,
    "FSDP2: uneven shards": sharded,
    "FSDP2: an empty shard": lambda ranks: sharded(ranks, shapes=SHORT),
    "HSDP: copies of shards": replicated_shards,
    "FSDP2 × TP": two_dimensions,
    "FSDP2 × TP, some on FSDP2's dimension alone": some_on_one_dimension,
    "experts on a mesh of their own": two_meshes,
    "copies beside DTensors": copies_beside,
    "Partial, to be added up": partial,
    "Partial, to be averaged": lambda ranks: partial(ranks, "avg"),
    "pipeline of 2 stages": stages,
    "pipeline of 2 stages × FSDP2": sharded_stages,
    "embedding tied over 2 stages": tied,
    "plain experts on every rank, FSDP2 for the rest": experts,
    "the last rank has no gradient": lambda ranks: without(ranks, lambda rank: range(4) if rank == ranks.size - 1 else ()),
    "the first rank lacks one gradient": lambda ranks: without(ranks, lambda rank: (1,) if rank == 0 else ()),
    "float16, of norm 1e5": lambda ranks: sharded(ranks, torch.float16, 1e4),
    "bfloat16": lambda ranks: sharded(ranks, torch.bfloat16),
    "float32 of 1e25": lambda ranks: sharded(ranks, torch.float32, 1e25),
    "NaN on the last rank with a row": not_finite,
}
ORDERS = (2.0, 1.0, 3.0, math.inf)
STOPS_TORCH = (  # what leaves torch's own collectives in disorder: not run beside others, but the first and p=2 alone
    ("FSDP2: an empty shard", math.inf),
    *((layout, p) for layout in ("the last rank has no gradient", "the first rank lacks one gradient") for p in ORDERS),
)
