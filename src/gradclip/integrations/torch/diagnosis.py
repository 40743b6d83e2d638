"""Do the processes fit together? What they tell each other beside their part of the norm, in the same collective."""

from __future__ import annotations

import math
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...backends._torch_shares import is_spread, local, shards
from ...clip import norm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CLOSE = 1e-6  # copies are made by one all-reduce, to the bit or nearly
ENTRIES = 4  # how many gradients are missing, which parameters there are, which parts are here, how large those with copies are


class Report(NamedTuple):
    """What a diagnosis found, by rank within the group."""

    missing: dict[int, int]  # how many parameters have no gradient, where others have one
    nonfinite: list[int]  # whose own part of the norm is NaN or inf
    disagree: list[int]  # whose copies of gradients are not those of others
    strangers: list[int]  # whose parameters are others than those of rank 0, though all are said to be copies

    def __str__(self) -> str:
        found = []
        if self.strangers:
            found.append(
                f"ranks {self.strangers} have other parameters than rank 0, which were counted as if all had copies of them: "
                "stages of a pipeline, or experts? Declare them, Layout(pieces=…)"
            )
        elif self.disagree:
            found.append(
                f"ranks {self.disagree} have other values in gradients that should be copies: is the clip before the gradients "
                "are reduced, inside no_sync()?"
            )
        if self.missing:
            found.append(f"gradients are missing, by rank: {self.missing}")
        if self.nonfinite:
            found.append(f"gradients are not finite on ranks {self.nonfinite}")
        return "; ".join(found) or "all processes fit together"


class Census:
    """What every process says of itself, and what follows."""

    def __init__(self, group: ProcessGroup, named: Mapping[str, Tensor], pieces: Mapping[str, int]) -> None:
        self.group = group
        self.named = named
        self.pieces = pieces
        self.report: Report | None = None
        self._warned = ""

    def over(self, names: Sequence[str]) -> Callable[[Tensor, float], Tensor]:
        """The join of powers that were taken over these parameters' gradients."""
        return lambda power, p: self._gathered(names, power, p)

    def _gathered(self, names: Sequence[str], power: Tensor, p: float) -> Tensor:
        import torch.distributed as dist

        sent = torch.cat([power.detach().reshape(-1), torch.tensor(self._own(names), dtype=power.dtype).to(power.device)])
        everyone = [torch.empty_like(sent) for _ in range(self.group.size())]
        dist.all_gather(everyone, sent, self.group)
        table = torch.stack(everyone)
        powers = table[:, :-ENTRIES]
        self._read(powers, table[:, -ENTRIES:].tolist(), p)
        return (powers.amax(0) if p == math.inf else powers.sum(0)).reshape(power.shape)

    def _own(self, names: Sequence[str]) -> list[float]:
        missing = sum(p.requires_grad for p in self.named.values()) - len(names)
        copied = [name for name in names if shards(self._grad(name)) * self.pieces[name] < self.group.size()]
        size = float(norm([local(self._grad(name)).detach() for name in copied]))
        return [missing, _code(self._undeclared()), _code(map(self._part, copied)), size if math.isfinite(size) else 0.0]

    def _grad(self, name: str) -> Any:
        return self.named[name].grad

    def _undeclared(self) -> list[str]:
        return [f"{name} {tuple(p.shape)}" for name, p in self.named.items() if self.pieces[name] == 1]

    def _part(self, name: str) -> str:
        """Which part of the parameter lies here: the same on all processes that have a copy of it."""
        grad = self._grad(name)
        if not is_spread(grad):
            return name
        here = zip(grad.placements, grad.device_mesh.get_coordinate(), strict=True)
        return f"{name} {[0 if placement.is_replicate() else place for placement, place in here]}"

    def _read(self, powers: Tensor, table: list[list[float]], p: float) -> None:
        missing, kinds, parts, sizes = zip(*table, strict=True)
        own = powers[:, powers.shape[1] // 2 :] > 0 if p == math.inf else ~powers.isfinite()
        least = min(missing)
        self.report = Report(
            missing={rank: int(count) for rank, count in enumerate(missing) if count > least},
            nonfinite=own.any(1).nonzero().flatten().tolist(),
            disagree=_outliers(parts, sizes),
            strangers=[rank for rank, kind in enumerate(kinds) if kind != kinds[0]],
        )
        self._warn(self.report)

    def _warn(self, report: Report) -> None:
        if (report.disagree or report.strangers or report.missing) and str(report) != self._warned:
            self._warned = str(report)
            warnings.warn(f"gradclip: {report}", stacklevel=2)


def _code(texts: Any) -> float:
    """A number that float64 holds, the same for the same texts in the same order."""
    return float(zlib.crc32("\n".join(texts).encode()))


def _outliers(parts: Sequence[float], sizes: Sequence[float]) -> list[int]:
    """Ranks with the same parts, whose gradients are of another size."""
    alike: dict[float, list[int]] = defaultdict(list)
    for rank, part in enumerate(parts):
        alike[part].append(rank)
    return sorted(rank for ranks in alike.values() if _differ([sizes[rank] for rank in ranks]) for rank in ranks)


def _differ(sizes: Sequence[float]) -> bool:
    return max(sizes) - min(sizes) > CLOSE * max(sizes)
