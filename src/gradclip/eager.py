"""Apply a decision on the host, where every norm has a value: what need not change is left as it is."""

from __future__ import annotations

from typing import Any

from .backends import Ops
from .clipped import Clipped
from .measure import LARGEST, SMALLEST
from .nonfinite import NonFiniteError
from .step import Applied, Step

Array = Any


def clipped(step: Step) -> Clipped:
    """The result of a call; NonFiniteError before anything is changed."""
    policy = step.call.nonfinite
    finite = bool(step.ops.isfinite(step.norm).all())
    if not finite and policy == "raise":
        raise NonFiniteError.of(step.opened, step.norm)
    step = step._replace(finite=finite).decided()
    if finite:
        return left_out(step) if step.bound.skip else _applied(step)
    state = step.before if policy == "skip" else step.call.rule.passed(step.before)
    step = step._replace(state=state)  # which such a norm does not enter
    return _applied(step) if policy == "keep" else stopped(step)


def stopped(step: Step) -> Clipped:
    """Under "zero" every gradient becomes 0, whatever it was; under "skip" nothing changes."""
    xs, skip = step.opened.arrays(), step.call.nonfinite == "skip"
    coef = None if step.call.scope == "element" else step.filled(1.0 if skip else 0.0)
    return step.result(xs if skip else step.write.zero(xs), coef, clipped=not skip, skipped=skip)


def left_out(step: Step) -> Clipped:
    """What a rule that skips has decided: gradients as they are, and the caller should not step."""
    return step.result(step.opened.arrays(), step.filled(1.0), clipped=False, skipped=True)


def _applied(step: Step) -> Clipped:
    new, coef, changed = step.clamped() if step.call.scope == "element" else _scaled(step)
    return step.result(new, coef, clipped=changed)


def _scaled(step: Step) -> Applied:
    coef, new = step.coefficient(), step.opened.arrays()
    if not (coef != 1).any():
        return new, coef, False
    for factor in [coef] if step.formula else _factors(coef, step.norm, step.limit(), step.ops):
        new = step.write.scale(new, step.layout.each(factor))
    return new, coef, True


def _factors(coef: Array, norm: Array, limit: Array, ops: Ops) -> list[Array]:
    """The coefficient, as two factors where it is too small or too large to be exact itself."""
    extreme = ops.isfinite(norm) & (coef != 0) & ~((coef > SMALLEST) & (coef < LARGEST))
    if not extreme.any():
        return [coef]
    half = limit**0.5 / ops.where(extreme, norm, 1.0) ** 0.5
    return [ops.where(extreme, half, 1.0), ops.where(extreme, half, coef)]
