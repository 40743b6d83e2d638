"""What a rule is: it bounds a norm, and `clip` turns the bound into a coefficient. No framework in it, and no array library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, ClassVar, NamedTuple, TypeAlias

from .conventions import Formula

Array = Any
State: TypeAlias = tuple[Array, ...]
Threshold: TypeAlias = float | Array | Callable[[Any], Any]


class Bound(NamedTuple):
    """The least and the largest norm allowed; `skip`: is the whole step to be left out?"""

    low: Array
    high: Array
    skip: Array = False


class Measured(NamedTuple):
    """What a rule may look at: 0-d for the scopes "global" and "element", [n] for "tensor"."""

    norm: Array
    weights: Array = None  # the norm of the weights, for rules that ask for it
    size: Array = None  # how many elements the norm was taken over, likewise
    peaks: Array | None = None  # [n] the largest |g| of every array, in the scope "element"


class Rule:
    """Bounds a norm. Subclasses are frozen dataclasses; a new one needs `decide` and, if it remembers, `init`."""

    scopes: ClassVar[tuple[str, ...]] = ("global", "tensor")  # the first is the default
    needs_weights: ClassVar[bool] = False
    needs_size: ClassVar[bool] = False
    can_skip: ClassVar[bool] = False
    grouped: ClassVar[bool] = False  # norms are those of `members`
    signed: ClassVar[bool] = False  # in the scope "element": the bound is one of values, not of their modulus

    def init(self, zero: Array) -> State:
        """The state before the first step; `zero` is NumPy's, shaped like the norm. `()`: the rule does not remember."""
        return ()

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        """The bound in force, `Bound` or (low, high), and the state for the next step."""
        raise NotImplementedError

    def members(self, leaves: Sequence[tuple[str, bool]], complete: bool) -> list[list[int]]:
        """The places of the tensors that share each norm, for a rule that is `grouped`.

        leaves: the path of each, and whether it has a gradient; places are counted among those that have one. complete: are
        these all leaves that there are, or have other processes others?
        """
        raise NotImplementedError

    def rebased(self, state: State) -> Array | None:
        """How often the rule took a new level for granted, after too many clips in a row; None: it never does."""
        return None

    def kind(self) -> str:
        """What a saved state belongs to: the rule's name, and those of its parts."""
        return type(self).__name__

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


def fraction(name: str, value: Any) -> None:
    """Raises for what does not lie between 0 and 1."""
    if not known(name, value) or not 0 < as_float(value) < 1:
        raise ValueError(f"{name} must be a number between 0 and 1; got {value!r}")


def count(name: str, value: Any) -> None:
    """Raises for what is no whole number > 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number > 0; got {value!r}")


def fits(rule: Rule, state: State, zero: Array | None = None) -> bool:
    """Can this be a state of the rule, for norms of the shape of `zero` where that is known?"""
    begun = rule.init(0.0 if zero is None else zero)
    return len(state) == len(begun) and all(_entry_fits(*pair, zero) for pair in zip(state, begun, strict=True))


def _entry_fits(entry: Any, begun: Any, zero: Array | None) -> bool:
    if not hasattr(entry, "shape") and not isinstance(entry, Real):
        return False
    found, first = _shape(entry), _shape(begun)
    if zero is None:
        return found[: len(first)] == first
    return found == first or (first == () and found == _shape(zero))  # a rule may begin with a number for all


def _shape(entry: Any) -> tuple[int, ...]:
    return (len(entry),) if isinstance(entry, list) else tuple(getattr(entry, "shape", ()))


def window(zero: Array, size: int) -> Array:
    """Zeros [size, *zero.shape]."""
    rows = [[0.0]] * size if getattr(zero, "shape", ()) else [0.0] * size
    return zero + rows if hasattr(zero, "shape") else rows


def one(flag: Array, ops: Any) -> Array:
    """1 where the flag is set, else 0."""
    return ops.where(flag, 1.0, 0.0)


def averaged(
    mean: Array, variance: Array, known: Array, value: Array, warmup: int, decay: float, ops: Any
) -> tuple[Array, Array]:
    """Mean and variance with one more value: of all so far during the warm-up, exponential after it."""
    weight = ops.where(known < warmup, 1.0 / (known + 1.0), 1.0 - decay)
    new = mean + weight * (value - mean)
    early = (1.0 - weight) * variance + weight * (value - mean) * (value - new)
    later = decay * variance + (1.0 - decay) * (value - new) ** 2
    return new, ops.where(known < warmup, early, later)


def kept(state: State, norm: Array, size: int, ops: Any) -> State:
    """The window with one more norm, in place of its oldest."""
    norms, known = state
    slot = known - size * ops.floor(known / size)
    return ops.put(norms, slot, norm), known + 1.0


def quantile(state: State, q: float, size: int, ops: Any) -> Array:
    """The q-quantile of the norms in the window, interpolated linearly; 0 of none. What is not filled is 0 and sorts first."""
    norms, known = state
    ascending = ops.sort(norms)
    filled = ops.where(known < size, known, 1.0 * size)
    place = q * ops.where(filled > 1, filled - 1.0, 0.0)
    below = ops.floor(place)
    first = size - filled + below
    low = ops.take(ascending, ops.where(first < size, first, size - 1.0))
    high = ops.take(ascending, ops.where(first + 1.0 < size, first + 1.0, size - 1.0))
    return low + (place - below) * (high - low)
