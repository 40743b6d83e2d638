"""One run: the network trained, its gradient measured and perhaps clipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..clip import norm
from ..clipper import Clipper
from ..rules import MaxNorm
from ._network import Network, fresh, loss_and_gradient
from ._text import Text

RATE = 4.0
SCOPES = ("element", "tensor", "global")
NAMES = {None: "unclipped", "element": "by value", "tensor": "by norm", "global": "by global norm"}


class Setup(NamedTuple):
    """What all runs share."""

    text: Text
    steps: int
    seed: int

    def rate(self, step: int) -> float:
        """The learning rate: up to RATE until half of the steps are done, then down again."""
        return RATE * min(step + 1, self.steps - step) / (self.steps / 2)


class Treated(NamedTuple):
    """A gradient after it was measured and perhaps clipped."""

    grads: Network
    largest: dict[str, float]  # norm by scope, before clipping
    clipped: bool

    def finite(self) -> bool:
        return math.isfinite(self.largest["global"])


Treat: TypeAlias = Callable[[Network], Treated]
Tell: TypeAlias = Callable[[float, float], None]


@dataclass
class Run:
    """What came of a run; a step that is not finite ends it and is not among the steps."""

    scope: str | None
    limit: float | None
    losses: list[float] = field(default_factory=list)
    largest: dict[str, list[float]] = field(default_factory=lambda: {scope: [] for scope in SCOPES})
    clipped: int = 0
    nonfinite: int | None = None  # the step's number, from 1

    @property
    def name(self) -> str:
        return NAMES[self.scope]

    @property
    def norms(self) -> list[float]:
        """Of all gradients together."""
        return self.largest["global"]

    def add(self, loss: float, treated: Treated) -> None:
        self.losses.append(loss)
        self.clipped += treated.clipped
        for scope, size in treated.largest.items():
            self.largest[scope].append(size)

    def final_loss(self) -> float | None:
        """The mean over the last twentieth; None where it diverged: not finite, or no better than at the start."""
        last = self.losses[-max(1, len(self.losses) // 20) :]
        mean = sum(last) / len(last)
        return mean if self.nonfinite is None and mean < self.losses[0] else None


def train(setup: Setup, scope: str | None, limit: float | None, tell: Tell) -> Run:
    """Trains from the seed; every run sees the same weights first and the same windows in the same order."""
    treat = _measured if scope is None or limit is None else _clipping(scope, limit)
    run, rng = Run(scope, limit), np.random.default_rng(setup.seed)
    network = fresh(setup.text.frequencies, rng)
    for step in range(setup.steps):
        loss, grads = loss_and_gradient(network, setup.text.windows(rng))
        treated = treat(grads)
        if not (math.isfinite(loss) and treated.finite()):
            run.nonfinite = step + 1
            break
        run.add(loss, treated)
        tell(loss, treated.largest["global"])
        network = network.stepped(treated.grads, setup.rate(step))
    return run


def _measured(grads: Network) -> Treated:
    return Treated(grads, {scope: _largest(norm(grads, scope=scope)) for scope in SCOPES}, clipped=False)


def _clipping(scope: str, limit: float) -> Treat:
    clipper = Clipper(MaxNorm(limit), scope, nonfinite="skip")

    def treat(grads: Network) -> Treated:
        clipped = clipper(grads)
        largest = {"global": _largest(norm(grads))} | {scope: _largest(clipped.norm)}
        return Treated(clipped.grads, largest, bool(clipped.clipped))

    return treat


def _largest(norms: Any) -> float:
    return float(np.max(norms))
