"""How a model's parameters are spread over processes: what placements tell, and what has to be said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch import Tensor

from ...backends import Backend, Gradients, open_gradients, torch as backend
from ...backends._torch_shares import UNDECLARED, Shares, group_of, is_spread, joined, local
from ...backends._torch_tensors import Elsewhere, arrays, shared
from ...nonfinite import NonFiniteError
from .diagnosis import Census, Report
from .partial import add_up_

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Named: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """What DTensors do not show of how parameters are spread over processes.

    pieces: how many different tensors go by one name, on different processes: the number of stages for what a pipeline splits,
        that of expert-parallel ranks for experts that are plain tensors; 1 for what all processes have a copy of. An int, or by
        name {pattern: int} as fnmatch has them, of which the first that matches counts.
    group: the processes whose gradients make one norm. Left out: those of the mesh that the DTensors' meshes are parts of, or
        without DTensors all.
    diagnose: look for processes that do not fit together, at every step: `attach(…).report` says what was found, and a warning
        does once. One collective too, of a few numbers more, and one more look at the gradients that have copies.

    >>> Layout(pieces={"experts.*": 4, "*": 1}).pieces_of("experts.0.weight")
    4
    """

    pieces: int | Mapping[str, int] = 1
    group: ProcessGroup | None = None
    diagnose: bool = False

    def __post_init__(self) -> None:
        for pieces in self._pieces():
            if isinstance(pieces, bool) or not isinstance(pieces, int) or pieces < 1:
                raise ValueError(f"pieces must be whole numbers > 0, or {{pattern: number}}; got {self.pieces!r}")

    @property
    def complete(self) -> bool:
        """Have all processes the same tensors, as far as is said here?"""
        return set(self._pieces()) <= {1}

    def _pieces(self) -> Iterable[int]:
        return self.pieces.values() if isinstance(self.pieces, Mapping) else [self.pieces]

    def pieces_of(self, name: str) -> int:
        """Those of one parameter; ValueError where no pattern has its name."""
        if not isinstance(self.pieces, Mapping):
            return self.pieces
        for pattern, pieces in self.pieces.items():
            if fnmatchcase(name, pattern):
                return pieces
        raise ValueError(f"no pattern of pieces matches {name!r}: say '*': 1 last, for what all processes have a copy of")

    def over(self, named: Named) -> Joined:
        """The processes and weights of these parameters, {name: parameter} or `dict(model.named_parameters())`."""
        return Joined(self, dict(named))


class Joined:
    """Parameters that are spread over processes. All processes of the group make the same calls, gradients or not.

    >>> import gradclip, torch
    >>> from torch.distributed import destroy_process_group, init_process_group, HashStore
    >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> everywhere = Layout(pieces=1).over({"weight": weight})
    >>> gradclip.clip_(everywhere.gradients(), gradclip.MaxNorm(1.0)).norm
    tensor(5., dtype=torch.float64)
    >>> weight.grad
    tensor([0.6000, 0.8000])
    >>> destroy_process_group()
    """

    def __init__(self, layout: Layout, named: dict[str, Tensor]) -> None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("a Layout is one of several processes: call torch.distributed.init_process_group first")
        meshes = [p.device_mesh for p in named.values() if is_spread(p)]  # type: ignore[attr-defined]
        self.named = named
        self.group = layout.group or (group_of(meshes) if meshes else dist.group.WORLD)
        self.pieces = {name: layout.pieces_of(name) for name in named}
        self.complete = layout.complete
        self._census = Census(self.group, named, self.pieces) if layout.diagnose else None

    @property
    def report(self) -> Report | None:
        """What the last diagnosis found; None where none was asked for, or no norm was taken yet."""
        return None if self._census is None else self._census.report

    def gradients(self) -> Gradients:
        """All gradients, for `clip_(…)` and `norm(…)`; Partial ones are added up first, and written back."""
        add_up_(self.named.values())
        return self.opened({name: local(p.grad) for name, p in self.named.items()})

    def weights(self) -> Gradients:
        """All parameters, for rules that compare the gradients with them."""
        return self.opened({name: local(p).detach() for name, p in self.named.items()})

    def opened(self, here: Mapping[str, Tensor | None]) -> Gradients:
        """What lies here of tensors that are spread as the gradients are."""
        opened = open_gradients(dict(here), writable=True)
        names = [name for name, x in here.items() if x is not None]
        if not names:  # the same steps as on the others, where there are gradients
            opened = opened._replace(backend=cast(Backend, backend), present=self._nothing())
        wholes = [self._whole(name) for name in names]
        pieces = [self.pieces[name] for name in names]
        shares = Shares(wholes, pieces, self.group.size(), self._join(names), self.complete)
        return opened._replace(present=shared(opened.present, shares))

    def _nothing(self) -> list[Tensor]:
        on_cpu = all(p.device.type == "cpu" for p in self.named.values())
        return arrays([], str, True) if on_cpu else Elsewhere()

    def _whole(self, name: str) -> Any:
        p = self.named[name]
        return p if p.grad is None else p.grad

    def _join(self, names: list[str]) -> Any:
        if self._census is None:
            return lambda power, p: joined(self.group, power, p)
        return self._census.over(names)

    def told(self, error: NonFiniteError) -> NonFiniteError:
        """The error with what every process found; all of them have one, since they have the same norm."""
        import torch.distributed as dist

        causes: list[Any] = [None] * self.group.size()
        dist.all_gather_object(causes, error.cause if "gradients are not finite" in error.cause else "", self.group)
        ranks = dist.get_process_group_ranks(self.group)
        found = [f"rank {rank}: {cause}" for rank, cause in zip(ranks, causes, strict=True) if cause]
        cause = "; ".join(found) or error.cause
        told = NonFiniteError(str(error).replace(error.cause, cause))
        told.cause = cause
        return told


def spread(named: Named, layout: Layout | None) -> Joined | None:
    """How these are spread; None for plain tensors of which nothing was said, which need no other process.

    ValueError for plain tensors beside DTensors of which nothing was said.
    """
    if layout is not None:
        return layout.over(named)
    if not any(map(is_spread, named.values())):
        return None
    for name in _plain(named):
        raise ValueError(UNDECLARED.format(name, name))
    return Layout().over(named)


def _plain(named: Named) -> Iterator[str]:
    return (name for name, p in named.items() if not is_spread(p))
