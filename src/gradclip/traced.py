"""Apply a decision where no value may be looked at: under a tracer, on an accelerator, for a derivative.

The same steps as in `eager` with `where` in place of `if`: gradients are always multiplied, by 1 where they need no clipping.
"""

from __future__ import annotations

import math
from typing import Any

from .clipped import Clipped
from .eager import stopped
from .nonfinite import NonFiniteError
from .rule import State
from .step import Applied, Step

Array = Any
SMALLEST, LARGEST = 1e-37, 1e37  # between them a float32 coefficient has not lost digits
REFUSED = (
    'nonfinite="raise" has to look at the gradients, and under a tracer they have no values yet: pass nonfinite="keep" (NaN '
    'spreads as in the framework), "zero" (the gradients become 0) or "skip" (the same, and .skipped says not to step)'
)


def clipped(step: Step) -> Clipped:
    """The result of a call, as arrays that the framework may compute whenever it likes."""
    policy, ops = step.call.nonfinite, step.ops
    step = step._replace(finite=ops.all(step.norm < math.inf))
    known = step.opened.backend.truth(step.finite) if policy in ("raise", "skip") else None
    if policy == "raise" and known is None:
        raise ValueError(REFUSED)
    if known is False:
        return _refused(step)
    step = step.decided()
    step = step._replace(state=_state(step))
    new, coef, changed = step.clamped() if step.call.scope == "element" else _scaled(step)
    lost = ops.where(step.finite, False, True) if policy in ("zero", "skip") and known is None else False
    stopped = either(lost, step.bound.skip)
    if stopped is False:
        return step.result(new, coef, clipped=changed)
    go = ops.where(stopped, False, True)  # else zeros, so that a forgotten look at .skipped does no harm
    return step.result(
        step.write.keep(new, go),
        None if coef is None else ops.where(go, coef, 0.0),
        clipped=changed | stopped,
        skipped=either(lost if policy == "skip" else False, step.bound.skip),
    )


def either(a: Array, b: Array) -> Array:
    """One or the other flag, where False is a flag that is known."""
    return b if a is False else a if b is False else a | b


def _refused(step: Step) -> Clipped:
    """What is to be done about gradients that are known not to be finite."""
    if step.call.nonfinite == "raise":
        raise NonFiniteError.of(step.opened, step.norm)
    return stopped(step.decided()._replace(state=step.before))


def _scaled(step: Step) -> Applied:
    coef, new = step.coefficient(), step.opened.arrays()
    for factor in _factors(step, coef):
        new = step.write.scale(new, step.layout.each(factor))
    return new, coef, step.ops.any(coef != 1.0)


def _factors(step: Step, coef: Array) -> list[Array]:
    """The coefficient, as two factors where it is of a type that may not hold it."""
    if step.formula or "float32" not in str(coef.dtype):
        return [coef]
    ops = step.ops
    extreme = ops.isfinite(step.norm) & ~((coef > SMALLEST) & (coef < LARGEST))
    half = ops.where(extreme, step.limit(), 1.0) ** 0.5 / ops.where(extreme, step.norm, 1.0) ** 0.5
    return [ops.where(extreme, half, 1.0), ops.where(extreme, half, coef)]


def _state(step: Step) -> State:
    """The next state, which a norm that is not finite does not enter."""
    other = step.before if step.call.nonfinite == "skip" else step.call.rule.passed(step.before)
    pairs = zip(step.state, other, strict=True)
    return tuple(new if new is old else step.ops.where(step.finite, new, old) for new, old in pairs)
