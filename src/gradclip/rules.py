"""How large may a gradient's norm be? One frozen dataclass per method, simplest first.

A rule bounds the norm; `clip` turns the bound into a coefficient. Rules use operators and the few names in `ops`, so one text
serves 0-d arrays and vectors of norms, eager or traced, in every framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, ClassVar, NamedTuple, TypeAlias

from .conventions import CONVENTIONS, Formula

Array = Any
State: TypeAlias = tuple[Array, ...]
Bound: TypeAlias = tuple[Array, Array]
Threshold: TypeAlias = float | Array | Callable[[Any], Any]


class Measured(NamedTuple):
    """What a rule may look at: 0-d for the scopes "global" and "element", [n] for "tensor"."""

    norm: Array
    weights: Array | None = None  # the norm of the weights, for rules that ask for it
    size: Array | None = None  # how many elements the norm was taken over, likewise
    peaks: Array | None = None  # [n] the largest |g| of every array, in the scope "element"


class Rule:
    """Bounds a norm. Subclasses are frozen dataclasses; a new one needs `decide` and, if it remembers, `init`."""

    scopes: ClassVar[tuple[str, ...]] = ("global", "tensor")  # the first is the default
    needs_weights: ClassVar[bool] = False
    needs_size: ClassVar[bool] = False
    signed: ClassVar[bool] = False  # in the scope "element": the bound is one of values, not of their modulus

    def init(self, zero: Array) -> State:
        """The state before the first step; `zero` is shaped like the norm. `()`: the rule does not remember."""
        return ()

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        """((low, high), state): the least and the largest norm allowed, and the state for the next step."""
        raise NotImplementedError

    def passed(self, state: State) -> State:
        """The state after a step that was taken though its norm was not finite, and so is not taken in."""
        return state

    def allowed_scopes(self) -> tuple[str, ...]:
        """The scopes that this rule can serve, its default first."""
        return self.scopes

    def formula(self, scope: str) -> Formula | None:
        """Another framework's coefficient for this scope; None: the library's own."""
        return None


def threshold(name: str, value: Any) -> Any:
    """`value` if it can bound a norm, else an error; arrays and functions are looked at when they are used."""
    if known(name, value) and not as_float(value) > 0:
        raise ValueError(f"{name} must be a number > 0, or inf to measure only; got {value!r}")
    return value


def known(name: str, value: Any) -> bool:
    """Is it a number, to be checked now? TypeError for what is neither that, nor a 0-d array, nor a function."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return True
    if getattr(value, "shape", None) == () or callable(value):
        return False
    raise TypeError(f"{name} must be a number, a 0-d array or a function of the step; got {value!r} ({type(value).__name__})")


def as_float(value: Any) -> float:
    """The number as a float; NaN, which no check lets pass, for an integer that is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.nan


def at(name: str, value: Threshold, step: Array, ops: Any) -> Threshold:
    """The threshold in force at this step, a float wherever its value can be known."""
    value = ops.scalar(value(step) if callable(value) else value)
    if callable(value):
        raise TypeError(f"{name} at step {step} is a function, {value!r}: a schedule gives a number")
    return as_float(value) if known(name, value) else value


def remembers(*values: Threshold | None) -> State:
    """The state of a rule whose thresholds may be schedules: (step,), counted from 0, or ()."""
    return (0,) if any(callable(value) for value in values) else ()


def step_of(state: State) -> tuple[Array, State]:
    """The step that a schedule is asked for, and the state that counts it."""
    return (state[0], (state[0] + 1,)) if state else (None, ())


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
        return (0.0 if low is None else low, high), state

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
        return (low, high), state

    def passed(self, state: State) -> State:
        return step_of(state)[1]


def check_norms(low: Any, high: Any) -> None:
    """Raises where they are numbers and not 0 < low ≤ high, low finite."""
    threshold("max_norm", high)
    if low is None:
        return
    threshold("min_norm", low)
    least = as_float(low) if known("min_norm", low) else 0.0
    most = as_float(high) if known("max_norm", high) else math.inf
    if least > most or least == math.inf:
        raise ValueError(f"min_norm must be finite and at most max_norm; got min_norm={low!r} and max_norm={high!r}")


def check_bounds(low: Any, high: Any) -> None:
    """Raises where they are numbers and not low ≤ 0 ≤ high, low < high."""
    least = as_float(low) if known("low", low) else -1.0
    most = as_float(high) if known("high", high) else 1.0
    if not (least <= 0 <= most and least < most):
        raise ValueError(f"bounds must have low <= 0 <= high and low < high; got low={low!r} and high={high!r}")
