"""One call between its decision and its result: what `eager` and `traced` have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from .backends import Gradients, Ops
from .call import Call
from .clipped import Clipped, Listed
from .conventions import Formula
from .layout import Layout
from .rule import Bound, Measured, State

Array = Any
Applied: TypeAlias = tuple[list[Array], Array | None, Any]  # the new arrays, their coefficient, did anything change?


class Writer(NamedTuple):
    """How results come about: as new arrays, in place, or not at all."""

    scale: Callable[[list[Array], list[Any]], list[Array]]
    clamp: Callable[[list[Array], Any, Any, Array], tuple[list[Array], Any]]
    zero: Callable[[list[Array]], list[Array]]
    keep: Callable[[list[Array], Array], list[Array]]


class Step(NamedTuple):
    """One call; `bound` and `state` are the rule's decision."""

    layout: Layout
    call: Call
    measured: Measured
    before: State
    write: Writer
    ops: Ops
    finite: Any = True
    bound: Bound = Bound(0.0, 0.0)
    state: State = ()

    @property
    def opened(self) -> Gradients:
        """The gradients."""
        return self.layout.opened

    @property
    def norm(self) -> Array:
        """The norm, before clipping."""
        return self.measured.norm

    @property
    def formula(self) -> Formula | None:
        """Another framework's coefficient, where the rule asks for it."""
        return self.call.rule.formula(self.call.scope)

    def decided(self) -> Step:
        """With the bound in force and the next state, as if the norm were finite."""
        bound, state = self.call.rule.decide(self.measured, self.before, self.ops)
        return self._replace(bound=Bound(*bound), state=state)  # a rule may give the two numbers alone

    def limit(self) -> Array:
        """The bound in force, shaped like the norm."""
        (low, high, _), norm = self.bound, self.norm
        if self.call.scope == "element":
            return self.filled(largest(-low, high, self.ops))
        if unbounded(low):
            return self.filled(high)
        return self.ops.where((norm < low) & (norm > 0), low, high)

    def filled(self, value: Any) -> Array:
        """The value, shaped like the norm."""
        return self.ops.like(self.norm, value)

    def coefficient(self) -> Array:
        """What the gradients are to be multiplied by."""
        low, high, _ = self.bound
        return coefficient(self.norm, low, high, self.ops) if self.formula is None else self._frameworks(self.formula)

    def _frameworks(self, formula: Formula) -> Array:
        """Another framework's coefficient, in the precision that it would compute in; 1 for a None."""
        backend, norm, limit = self.opened.backend, self.norm, self.bound.high
        working = backend.working(self.opened.arrays(), norm)
        if not isinstance(limit, float):
            limit = backend.working(self.opened.arrays(), limit)
        coef = backend.widened(formula(working, limit, self.ops), norm)
        return self.ops.where(self.measured.size == 0, 1.0, coef)

    def clamped(self) -> Applied:
        """Every value between the bounds: the arrays, no coefficient, and did anything change?"""
        low, high, _ = self.bound
        if self.call.rule.signed:
            refuse_complex(self.opened)
        else:
            low = -high
        new, changed = self.write.clamp(self.opened.arrays(), low, high, self.measured.peaks)
        return new, None, changed

    def result(self, new: list[Array], coef: Array | None, *, clipped: Any, skipped: Any = False) -> Clipped:
        """The gradients in their tree, and what was measured as arrays of their framework."""
        field, xs = self.opened.backend.field, self.opened.arrays()
        kind = Clipped if self.layout.one or self.call.scope == "tensor" else Listed
        return kind(
            grads=self.opened.replaced(new),
            norm=field(self.norm, xs),
            limit=field(self.limit(), xs),
            coef=None if coef is None else field(coef, xs),
            clipped=field(clipped, xs),
            finite=field(self.finite, xs),
            skipped=field(skipped, xs),
            state=self.state,
        )


def coefficient(norm: Array, low: Array, high: Array, ops: Ops) -> Array:
    """What brings `norm` between low and high; 1 where it lies there or is 0, NaN where it is NaN.

    The divisor is made safe first, so that a zero norm neither warns nor puts NaN into a derivative.
    """
    below_high = norm <= high
    coef = ops.where(below_high, 1.0, high / ops.where(below_high, 1.0, norm))
    if unbounded(low):
        return coef
    above_low = (norm >= low) | (norm == 0) | (norm != norm)
    return ops.where(above_low, coef, low / ops.where(above_low, 1.0, norm))


def largest(x: Any, y: Any, ops: Ops) -> Any:
    """The larger of two bounds, of which one may have no value yet."""
    known = isinstance(x, float) and isinstance(y, float)
    return max(x, y) if known else ops.where(x > y, x, y)


def unbounded(low: Any) -> bool:
    """Is it known that no norm is too small? Then there is nothing to compute for it."""
    return isinstance(low, float) and low == 0.0


def refuse_complex(opened: Gradients) -> None:
    """TypeError for a complex gradient, by its path."""
    for path, x in zip(opened.paths(), opened.xs, strict=True):
        if x is not None and opened.backend.is_complex(x):
            raise TypeError(f"{path or 'the gradient'} is complex, which Bounds cannot order: MaxNorm bounds its modulus")
