"""The rules that learn as their authors published them, for comparison with runs that used those.

Each has the weakness that ours mends: ZClip clips for ever after a lasting rise of the norm, since its history holds what was
clipped to; AutoClip's threshold holds the norm that it judges; AdaGC freezes a tensor whose gradient was zero in the warm-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .rule import Array, Bound, Measured, Rule, State, averaged, count, fraction, kept, one, quantile, threshold, window

EPS = 1e-6  # what the references add to the norm that they divide by


def scaled(limit: Array, norm: Array, ops: Any) -> Array:
    """The bound whose coefficient is limit / (norm + EPS), where that is below 1."""
    return ops.where(limit < norm + EPS, limit * norm / (norm + EPS), math.inf)


@dataclass(frozen=True)
class ZClip(Rule):
    """`ZScore.published`: PyPI's zclip 1.0.0."""

    z: float = 2.5
    decay: float = 0.97
    warmup: int = 25
    mode: str = "adaptive"
    max_norm: float | None = 1.0
    skip_update: bool = False

    def __post_init__(self) -> None:
        threshold("z", self.z)
        fraction("decay", self.decay)
        count("warmup", self.warmup)
        if self.max_norm is not None:
            threshold("max_norm", self.max_norm)
        if self.mode not in ("adaptive", "mean", "percentile"):
            raise ValueError(f'mode must be "adaptive", "mean" or "percentile"; got {self.mode!r}')

    def init(self, zero: Array) -> State:
        return zero, zero, zero

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        (mean, variance, known), norm = state, measured.norm
        deviation = variance**0.5
        score = (norm - mean) / (deviation + EPS)
        spike = (known >= self.warmup) & self._spike(norm, score, mean, deviation)
        value = ops.where(spike, self._target(score, mean, deviation, ops), norm)
        limit = value if self.max_norm is None else ops.where(value < self.max_norm, value, self.max_norm)
        new = averaged(mean, variance, known, value, self.warmup, self.decay, ops)
        learns = spike if self.skip_update else norm < 0  # where it does not
        mean, variance = (ops.where(learns, old, now) for old, now in zip((mean, variance), new, strict=True))
        return Bound(0.0, ops.where(limit < norm, scaled(limit, norm, ops), math.inf)), (mean, variance, known + 1.0)

    def _spike(self, norm: Array, score: Array, mean: Array, deviation: Array) -> Array:
        return norm > mean + self.z * deviation if self.mode == "percentile" else score > self.z

    def _target(self, score: Array, mean: Array, deviation: Array, ops: Any) -> Array:
        """What a spike is clipped to."""
        if self.mode == "mean":
            return mean
        if self.mode == "percentile":
            return mean + self.z * deviation
        return mean + self.z * deviation / (ops.where(score > self.z, score, self.z) / self.z)


@dataclass(frozen=True)
class AutoClip(Rule):
    """`Quantile.published`: pseeth/autoclip, its history the last `window` norms, the current one among them."""

    q: float = 0.1
    window: int = 10_000

    def __post_init__(self) -> None:
        fraction("q", self.q)
        count("window", self.window)

    def init(self, zero: Array) -> State:
        return window(zero, self.window), 0.0

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        state = kept(state, measured.norm, self.window, ops)
        limit = quantile(state, self.q, self.window, ops)
        return Bound(0.0, scaled(limit, measured.norm, ops)), state


@dataclass(frozen=True)
class AdaGC(Rule):
    """`EmaRatio.published`: pytorch-optimizer 4.1.0's AdaGC; p = 2, since its warm-up needs the norm of all tensors."""

    ratio: float = 1.05
    decay: float = 0.98
    warmup: int = 100
    max_norm: float = 1.0
    floor: float = 1e-8

    scopes = ("tensor",)

    def __post_init__(self) -> None:
        for name in ("ratio", "max_norm", "floor"):
            threshold(name, getattr(self, name))
        fraction("decay", self.decay)
        count("warmup", self.warmup)

    def init(self, zero: Array) -> State:
        return zero, zero

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        (average, known), norm = state, measured.norm
        whole = ops.total(norm * norm) ** 0.5
        early = norm * ops.where(whole > self.max_norm, self.max_norm / whole, 1.0)
        allowed = self.ratio * ops.where(average > self.floor, average, self.floor)
        late = ops.where(norm < allowed, norm, allowed)
        warm = known >= self.warmup - 1
        value = ops.where(warm, late, early)
        least = ops.where((known > 0) & (average < early), average, early)
        average = ops.where(warm, self.decay * average + (1.0 - self.decay) * value, least)
        return Bound(0.0, value), (average, known + one(norm >= 0, ops))


@dataclass(frozen=True)
class Icefall(Rule):
    """`Median.published`: the clipping scale of icefall's ScaledAdam, anew every `period` steps, and after 10, 20 and 40."""

    k: float = 2.0
    period: int = 100

    def __post_init__(self) -> None:
        threshold("k", self.k)
        count("period", self.period)

    def init(self, zero: Array) -> State:
        return window(zero, self.period), 0.0, zero

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        *history, limit = state
        norms, known = kept(tuple(history), measured.norm, self.period, ops)
        rank = 2.0 * ops.floor(ops.where(known < self.period, known, 1.0 * self.period) / 4.0)
        filled = ops.where(known < self.period, known, 1.0 * self.period)
        median = ops.take(ops.sort(norms), self.period - filled + rank)
        early = ((known == 10) | (known == 20) | (known == 40)) & (known < self.period)
        anew = known == self.period * ops.floor(known / self.period)
        limit = ops.where(anew, self.k * median, ops.where(early, 2.0 * self.k * median, limit))
        return Bound(0.0, ops.where(limit > 0, limit, math.inf)), (norms, known, limit)
