"""How large may a gradient's norm be? One frozen dataclass per method, simplest first.

Rules use operators and the few names in `ops`, so that one text serves 0-d arrays and vectors of norms, eager or traced, in
every framework. The thresholds of those that learn come from history without the current step. A norm that is not finite never
enters it; one above the threshold enters as twice the threshold at most, so that a spike does not raise the next one's.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

from .conventions import CONVENTIONS, Formula
from .published import AdaGC, AutoClip, Icefall, ZClip
from .rule import (
    Array,
    Bound,
    Measured,
    Rule,
    State,
    Threshold,
    at,
    averaged,
    check_bounds,
    check_norms,
    count,
    fraction,
    kept,
    one,
    quantile,
    remembers,
    step_of,
    threshold,
    window,
)

CAP = 2.0  # a norm enters history as at most so many times the limit


@dataclass(frozen=True)
class MaxNorm(Rule):
    """norm ≤ max_norm; with `min_norm` also norm ≥ min_norm, unless it is zero.

    Both are a number > 0 (`max_norm=inf` only measures), a 0-d array that may change between steps, or a function of the
    step. Scope "global" is `clip_grad_norm_`, "tensor" clips each by its own norm, "element" clips each value to
    ±max_norm (a complex one by its modulus). `like` takes the arithmetic of another framework's function, see
    `conventions.CONVENTIONS`; its scope is that function's. A schedule counts calls, less those skipped or raised.
    A gradient raised beyond what its type can hold becomes inf.

    Raises TypeError or ValueError for a threshold that is no number > 0, and where min_norm > max_norm.
    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013.

    >>> MaxNorm(1.0)
    MaxNorm(max_norm=1.0, min_norm=None, like=None)
    """

    max_norm: Threshold
    _: KW_ONLY
    min_norm: Threshold | None = None
    like: str | None = None

    scopes = ("global", "tensor", "element")

    def __post_init__(self) -> None:
        check_norms(self.min_norm, self.max_norm)
        if self.like is not None:
            self._check_like()

    def _check_like(self) -> None:
        if not isinstance(self.like, str) or self.like not in CONVENTIONS:
            raise ValueError(f"like must be one of {', '.join(map(repr, CONVENTIONS))}; got {self.like!r}")
        if self.min_norm is not None:
            raise ValueError(
                f"no function of another framework raises a norm: min_norm and like={self.like!r} exclude each other"
            )

    def allowed_scopes(self) -> tuple[str, ...]:
        if self.like is not None:
            return tuple(CONVENTIONS[self.like].formulas)
        return self.scopes if self.min_norm is None else ("global", "tensor")

    def formula(self, scope: str) -> Formula | None:
        return None if self.like is None else CONVENTIONS[self.like].formulas[scope]

    def init(self, zero: Array) -> State:
        return remembers(self.max_norm, self.min_norm)

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        step, state = step_of(state)
        high = at("max_norm", self.max_norm, step, ops)
        low = None if self.min_norm is None else at("min_norm", self.min_norm, step, ops)
        check_norms(low, high)
        return Bound(0.0 if low is None else low, high), state

    def passed(self, state: State) -> State:
        return step_of(state)[1]


@dataclass(frozen=True)
class Bounds(Rule):
    """low ≤ g ≤ high for every value g of the gradients.

    low ≤ 0 ≤ high and low < high (a bound without 0 would make a gradient out of none); either may be infinite. A number,
    a 0-d array or a function of the step. Real gradients only; NaN stays NaN under nonfinite="keep".

    Raises TypeError or ValueError for anything else.

    >>> Bounds(-1.0, 2.0)
    Bounds(low=-1.0, high=2.0)
    """

    low: Threshold
    high: Threshold

    scopes = ("element",)
    signed = True

    def __post_init__(self) -> None:
        check_bounds(self.low, self.high)

    def init(self, zero: Array) -> State:
        return remembers(self.low, self.high)

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        step, state = step_of(state)
        low, high = at("low", self.low, step, ops), at("high", self.high, step, ops)
        check_bounds(low, high)
        return Bound(low, high), state

    def passed(self, state: State) -> State:
        return step_of(state)[1]


@dataclass(frozen=True)
class UnitNorm(Rule):
    """norm = norm_, whatever it was: g · c / ‖g‖; a zero gradient stays zero.

    Changes the effective learning rate of optimizers that are not invariant to scale. Source: normalised gradient descent;
    `optax.normalize_by_update_norm` adds 1e-6 to the norm.
    """

    norm: Threshold = 1.0

    def __post_init__(self) -> None:
        threshold("norm", self.norm)

    def init(self, zero: Array) -> State:
        return remembers(self.norm)

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        step, state = step_of(state)
        wanted = at("norm", self.norm, step, ops)
        return Bound(wanted, wanted), state

    def passed(self, state: State) -> State:
        return step_of(state)[1]


@dataclass(frozen=True)
class MaxRms(Rule):
    """norm ≤ max_rms · √size: the root of the mean square is at most max_rms.

    Source: the update clipping of Adafactor (Shazeer and Stern, 2018); `optax.clip_by_block_rms`.
    """

    max_rms: Threshold = 1.0

    scopes = ("tensor", "global")
    needs_size = True

    def __post_init__(self) -> None:
        threshold("max_rms", self.max_rms)

    def init(self, zero: Array) -> State:
        return remembers(self.max_rms)

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        step, state = step_of(state)
        return Bound(0.0, at("max_rms", self.max_rms, step, ops) * measured.size**0.5), state

    def passed(self, state: State) -> State:
        return step_of(state)[1]


@dataclass(frozen=True)
class Ratio(Rule):
    """norm ≤ ratio · max(norm of the weights, floor): adaptive gradient clipping (AGC), per unit by default.

    Pass the weights, a tree like the gradients. `floor` lets weights that are zero move at all. Leave the last layer out, as
    the paper does. scope="tensor" with ratio=0.3 is DreamerV3's form.

    Source: Brock, De, Smith and Simonyan, "High-performance large-scale image recognition without normalization", 2021.
    """

    ratio: Threshold = 0.01
    _: KW_ONLY
    floor: float = 1e-3

    scopes = ("unit", "tensor")
    needs_weights = True

    def __post_init__(self) -> None:
        threshold("ratio", self.ratio)
        threshold("floor", self.floor)

    def init(self, zero: Array) -> State:
        return remembers(self.ratio)

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        step, state = step_of(state)
        weights = ops.where(measured.weights > self.floor, measured.weights, self.floor)
        return Bound(0.0, at("ratio", self.ratio, step, ops) * weights), state

    def passed(self, state: State) -> State:
        return step_of(state)[1]


@dataclass(frozen=True)
class Median(Rule):
    """norm ≤ k · the median of the last `window` norms: the choice where nothing is known of their scale.

    Half of the history may be spikes before the limit moves. After a lasting change of level it follows within half a window.
    No limit before `warmup` norms are known, or `warmup_norm`; nor where the median is 0.

    State: (window, how many norms). Source: the clipping scale of icefall's ScaledAdam (k2-fsa), which takes the median anew
    every 100 steps, of norms weighted by the parameters' scale.
    """

    k: float = 2.0
    _: KW_ONLY
    window: int = 100
    warmup: int = 10
    warmup_norm: float | None = None

    def __post_init__(self) -> None:
        threshold("k", self.k)
        check_history(self.window, self.warmup, self.warmup_norm)

    def init(self, zero: Array) -> State:
        return window(zero, self.window), 0.0

    @staticmethod
    def published(k: float = 2.0, *, period: int = 100) -> Rule:
        """As icefall has it: a limit that stays for `period` steps."""
        return Icefall(k, period)

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        median = quantile(state, 0.5, self.window, ops)
        limit = learnt(median > 0, self.k * median, state[1] >= self.warmup, self.warmup_norm, ops)
        return Bound(0.0, limit), kept(state, measured.norm, self.window, ops)


@dataclass(frozen=True)
class Quantile(Rule):
    """norm ≤ the q-quantile of the last `window` norms, interpolated linearly: AutoClip.

    It clips 1 - q of all steps, by construction; the paper's best runs with Adam clipped 90 %, q=0.1. No limit before `warmup`
    norms are known, or `warmup_norm`.

    State: (window, how many norms). Source: Seetharaman, Wichern, Pardo and Le Roux, "AutoClip", 2020, whose history is
    unbounded and holds the current norm: see `Quantile.published`.
    """

    q: float = 0.9
    _: KW_ONLY
    window: int = 1000
    warmup: int = 20
    warmup_norm: float | None = None

    def __post_init__(self) -> None:
        fraction("q", self.q)
        check_history(self.window, self.warmup, self.warmup_norm)

    def init(self, zero: Array) -> State:
        return window(zero, self.window), 0.0

    @staticmethod
    def published(q: float = 0.1, *, window: int = 10_000) -> Rule:
        """As the paper has it: the threshold holds the norm that it judges, and there is no warm-up."""
        return AutoClip(q, window)

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        found = quantile(state, self.q, self.window, ops)
        limit = learnt(found > 0, found, state[1] >= self.warmup, self.warmup_norm, ops)
        return Bound(0.0, limit), kept(state, capped(measured.norm, limit, ops), self.window, ops)


@dataclass(frozen=True)
class ZScore(Rule):
    """norm ≤ μ + z · σ, with μ and σ² exponential averages of the norms: ZClip that cannot lock in.

    `decay` is how much of the averages a step keeps. They begin as the mean and variance of the first `warmup` norms, during
    which there is no limit, or `warmup_norm`. After `max_consecutive` clips in a row the norms have a new level: the averages
    are scaled to it (`rebased` counts that).

    State: (μ, σ², norms known, clips in a row, times rebased). Source: Kumar, Owen, Roy Chowdhury and Güra, "ZClip", 2025;
    its history holds what was clipped to, so that after a lasting rise it clips for ever: see `ZScore.published`.
    """

    z: float = 2.5
    _: KW_ONLY
    decay: float = 0.97
    warmup: int = 25
    max_consecutive: int = 50
    warmup_norm: float | None = None

    def __post_init__(self) -> None:
        threshold("z", self.z)
        fraction("decay", self.decay)
        count("max_consecutive", self.max_consecutive)
        check_warmup(self.warmup, self.warmup_norm)

    def init(self, zero: Array) -> State:
        return (zero,) * 5

    @staticmethod
    def published(
        z: float = 2.5,
        *,
        decay: float = 0.97,
        warmup: int = 25,
        mode: str = "adaptive",
        max_norm: float | None = 1.0,
        skip_update: bool = False,
    ) -> Rule:
        """As zclip 1.0.0 has it, whose `max_norm` makes it a clip at 1 wherever norms are larger."""
        return ZClip(z, decay, warmup, mode, max_norm, skip_update)

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        (mean, variance, known, run, rebased), norm = state, measured.norm
        limit = learnt(mean > 0, mean + self.z * variance**0.5, known >= self.warmup, self.warmup_norm, ops)
        run, moved = in_a_row(run, norm > limit, self.max_consecutive, ops)
        scale = ops.where(moved, norm / ops.where(mean > 0, mean, 1.0), 1.0)
        value = ops.where(moved, norm, capped(norm, limit, ops))
        averages = averaged(mean * scale, variance * scale * scale, known, value, self.warmup, self.decay, ops)
        seen = norm > 0
        mean, variance = (ops.where(seen, new, old) for new, old in zip(averages, (mean, variance), strict=True))
        return Bound(0.0, limit), (mean, variance, known + one(seen, ops), run, rebased + one(moved, ops))

    def rebased(self, state: State) -> Array:
        return state[4]


@dataclass(frozen=True)
class EmaRatio(Rule):
    """norm ≤ ratio · max(the exponential average of its own norms, floor), for every tensor: AdaGC that freezes nothing.

    A tensor has no limit, or `warmup_norm`, until `warmup` of its norms that are not zero are known; their mean is what the
    average begins with. After `max_consecutive` clips in a row the average is set to the norm (`rebased` counts that).

    State: (average, norms known, clips in a row, times rebased), for each tensor. Source: Wang et al., "AdaGC", 2025, where
    the average begins as the least norm of the warm-up and learns what was clipped to: see `EmaRatio.published`.
    """

    ratio: float = 1.05
    _: KW_ONLY
    decay: float = 0.98
    warmup: int = 100
    floor: float = 1e-6
    max_consecutive: int = 50
    warmup_norm: float | None = None

    scopes = ("tensor", "global")

    def __post_init__(self) -> None:
        threshold("ratio", self.ratio)
        threshold("floor", self.floor)
        fraction("decay", self.decay)
        count("max_consecutive", self.max_consecutive)
        check_warmup(self.warmup, self.warmup_norm)

    def init(self, zero: Array) -> State:
        return (zero,) * 4

    @staticmethod
    def published(ratio: float = 1.05, *, decay: float = 0.98, warmup: int = 100, max_norm: float = 1.0) -> Rule:
        """As the paper has it: a clip of all at `max_norm` in the warm-up, whose least norms the averages begin as."""
        return AdaGC(ratio, decay, warmup, max_norm)

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        (average, known, run, rebased), norm = state, measured.norm
        above = self.ratio * ops.where(average > self.floor, average, self.floor)
        limit = learnt(known > 0, above, known >= self.warmup, self.warmup_norm, ops)
        run, moved = in_a_row(run, norm > limit, self.max_consecutive, ops)
        value = capped(norm, limit, ops)
        weight = ops.where(known < self.warmup, 1.0 / (known + 1.0), 1.0 - self.decay)
        average = ops.where(norm > 0, average + weight * (value - average), average)
        state = ops.where(moved, norm, average), known + one(norm > 0, ops), run, rebased + one(moved, ops)
        return Bound(0.0, limit), state

    def rebased(self, state: State) -> Array:
        return state[3]


def check_warmup(warmup: int, warmup_norm: float | None) -> None:
    """Raises where they are no count and no threshold."""
    count("warmup", warmup)
    if warmup_norm is not None:
        threshold("warmup_norm", warmup_norm)


def check_history(size: int, warmup: int, warmup_norm: float | None) -> None:
    """Raises where the warm-up does not fit into the window too."""
    count("window", size)
    check_warmup(warmup, warmup_norm)
    if warmup > size:
        raise ValueError(f"warmup must be at most window, which holds the norms; got warmup={warmup} and window={size}")


def learnt(usable: Array, limit: Array, warm: Array, warmup_norm: float | None, ops: Any) -> Array:
    """The limit that was learnt, once it is; before that `warmup_norm`, or none."""
    before = math.inf if warmup_norm is None else warmup_norm
    return ops.where(usable & warm, limit, before)


def capped(norm: Array, limit: Array, ops: Any) -> Array:
    """The norm as it enters history."""
    return ops.where(norm > CAP * limit, CAP * limit, norm)


def in_a_row(run: Array, clipped: Array, most: int, ops: Any) -> tuple[Array, Array]:
    """How many clips in a row that makes, and were they too many? Then they are counted from 0 again."""
    run = ops.where(clipped, run + 1.0, 0.0)
    moved = run >= most
    return ops.where(moved, 0.0, run), moved
