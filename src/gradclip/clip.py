"""Measure a norm, decide how large it may be, apply.

>>> import gradclip
>>> clipped = gradclip.clip({"w": 3.0, "b": 4.0}, gradclip.MaxNorm(1.0))
>>> clipped
norm 5.0 → 1.0 (×0.2), 2 tensors, clipped
>>> clipped.grads
{'w': 0.6000000000000001, 'b': 0.8}
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

from . import backends
from .backends import Gradients, Ops, host, open_gradients
from .clipped import Clipped
from .conventions import Formula
from .measure import LARGEST, SMALLEST, Reduce, given, groups_of, measure, shaped
from .nonfinite import POLICIES, NonFiniteError
from .rules import Bound, Bounds, MaxNorm, Measured, Rule, State, Threshold

Array = Any
SCOPES = ("element", "tensor", "global")
NO_P = 'scope "element" looks at every value by itself: it takes neither p= nor norm='


class Writer(NamedTuple):
    """How results come about: as new arrays, or in place."""

    scale: Callable[[list[Array], list[Any]], list[Array]]
    clamp: Callable[[list[Array], Any, Any, Array], tuple[list[Array], bool]]
    zero: Callable[[list[Array]], list[Array]]


class Call(NamedTuple):
    """What a call asks for, checked."""

    rule: Rule
    scope: str
    p: float
    nonfinite: str
    reduce: Reduce | None
    norm: Array | None


def clip(
    grads: Any,
    rule: Rule,
    *,
    scope: str | None = None,
    p: float = 2,
    weights: Any = None,
    state: State | None = None,
    nonfinite: str = "raise",
    reduce: Reduce | None = None,
    norm: Array | None = None,
) -> Clipped:
    """g · coef for every gradient g, with coef = 1 where low ≤ ‖g‖ₚ ≤ high or the norm is 0, else bound / ‖g‖ₚ.

    Args:
        grads: an array, or any nesting of dict, list, tuple and namedtuple of arrays; None keeps its place, and a generator
            gives a list. float16, bfloat16, float32, float64, complex; never written to. Where nothing has to change, the
            result holds the very same arrays.
        rule: how large a norm may be, `MaxNorm(1.0)` for one.
        scope: what a norm is taken over: "global", "tensor" or "element"; None: the rule's own default.
        p: the norm's order, a number > 0 or inf. ‖g‖ is right to 1e-12 and neither overflows nor underflows.
        weights: a tree like `grads`, for rules that compare with the weights.
        state: from `init`, then from the last call's `state`, for rules that remember.
        nonfinite: what to do when a gradient is NaN or inf: "raise", "zero" (every gradient becomes 0), "skip" (untouched,
            `skipped` is set), "keep" (NaN spreads as in the frameworks). The state never takes such a norm in.
        reduce: `reduce(power, p)` joins Σ|g|^p (0-d or [n]) over processes; for p=inf it gets [largest, is it NaN].
        norm: the norm, where it is known already.

    Raises:
        NonFiniteError: under "raise", before anything is changed; it names the gradients.
        TypeError, ValueError: with what was given and what is accepted; a gradient by its path.

    Source: torch.nn.utils.clip_grad_norm_ and its kin; the numbers differ where those are wrong.

    >>> clip([3.0, 4.0], MaxNorm(1.0), scope="tensor").grads
    [1.0, 1.0]
    """
    call = resolve(rule, scope, p, nonfinite, reduce, norm)
    opened = open_gradients(grads)
    backend = opened.backend
    return _run(opened, call, weights, state, Writer(backend.scale, backend.clamp, backend.zeros))


def clip_(
    grads: Any,
    rule: Rule,
    *,
    scope: str | None = None,
    p: float = 2,
    weights: Any = None,
    state: State | None = None,
    nonfinite: str = "raise",
    reduce: Reduce | None = None,
    norm: Array | None = None,
) -> Clipped:
    """`clip`, written into the arrays that it is given.

    Every stretch of memory is written once, even where the tree holds it twice; nothing is written where nothing has to
    change, nor where the call raises. ValueError for read-only arrays and for two that share only a part of their memory.

    >>> import numpy as np
    >>> g = np.array([3.0, 4.0])
    >>> clip_(g, MaxNorm(1.0)).coef.item(), g
    (0.2, array([0.6, 0.8]))
    """
    call = resolve(rule, scope, p, nonfinite, reduce, norm)
    opened = open_gradients(grads, writable=True)
    backend = opened.backend
    return _run(opened, call, weights, state, Writer(backend.scale_, backend.clamp_, backend.zero_))


def clip_by_value(grads: Any, value: Threshold | tuple[Threshold, Threshold]) -> Clipped:
    """min(max(g, -value), value) for every value g of the gradients; `value` may be (low, high).

    >>> clip_by_value([3.0, -0.5], 1.0).grads
    [1.0, -0.5]
    """
    if not isinstance(value, tuple | list):
        return clip(grads, MaxNorm(value), scope="element")
    if len(value) != 2:
        raise ValueError(f"value must be one number or (low, high); got {value!r}")
    return clip(grads, Bounds(*value), scope="element")


def clip_by_norm(grads: Any, max_norm: Threshold, p: float = 2) -> Clipped:
    """g · min(1, max_norm / ‖g‖ₚ) for every tensor g by its own norm.

    >>> clip_by_norm([3.0, 0.5], 1.0).grads
    [1.0, 0.5]
    """
    return clip(grads, MaxNorm(max_norm), scope="tensor", p=p)


def clip_by_global_norm(grads: Any, max_norm: Threshold, p: float = 2) -> Clipped:
    """g · min(1, max_norm / n) for every tensor g, with n the norm of all of them together.

    >>> clip_by_global_norm([3.0, 4.0], 1.0).norm
    array(5.)
    """
    return clip(grads, MaxNorm(max_norm), p=p)


def norm(grads: Any, p: float = 2, scope: str = "global") -> Array:
    """(Σ|g|^p)^(1/p), or the largest |g| for p=inf: 0-d, [n] for scope "tensor", 0-d and the largest for "element".

    Only measures: NaN gives NaN.

    >>> norm([3.0, 4.0]), norm([3.0, None, -4.0], scope="tensor")
    (array(5.), array([3., 0., 4.]))
    """
    _one_of("scope", scope, SCOPES)
    p = _order(p)
    if scope == "element" and p != 2:
        raise ValueError(NO_P)
    opened = open_gradients(grads)
    with host.quiet():
        return opened.backend.field(measure(opened, p, scope).norm)


def init(grads: Any, rule: Rule, scope: str | None = None) -> State:
    """The state that a rule starts from, for `clip(…, state=)`; () for a rule that does not remember.

    >>> init([3.0, 4.0], MaxNorm(lambda step: 1.0 / (step + 1)))
    (0,)
    """
    scope = _scope(rule, scope)
    opened = open_gradients(grads)
    return rule.init(shaped(0.0 * opened.backend.sizes(groups_of(opened, scope)), scope))


def _run(opened: Gradients, call: Call, weights: Any, state: State | None, write: Writer) -> Clipped:
    with host.quiet():
        step = _decided(opened, call, _measured(opened, call, weights), state, write)
        if not step.finite and call.nonfinite != "keep":
            return _stopped(step)
        return _elements(step) if call.scope == "element" else _norms(step)


def _decided(opened: Gradients, call: Call, measured: Measured, state: State | None, write: Writer) -> Step:
    """The bound in force and the next state, which a norm that is not finite does not enter."""
    ops = backends.ops_for(measured.norm)
    before = _state(call.rule, state, measured.norm)
    finite = bool(ops.isfinite(measured.norm).all())
    if not finite and call.nonfinite == "raise":
        raise NonFiniteError.of(opened, measured.norm)
    bound, after = call.rule.decide(measured, before, ops)
    if not finite:
        after = before if call.nonfinite == "skip" else call.rule.passed(before)
    return Step(opened, call, measured, bound, finite, after, write, ops)


class Step(NamedTuple):
    """One call after the decision."""

    opened: Gradients
    call: Call
    measured: Measured
    bound: Bound
    finite: bool
    state: State
    write: Writer
    ops: Ops

    @property
    def norm(self) -> Array:
        """The norm, before clipping."""
        return self.measured.norm

    def limit(self) -> Array:
        """The bound in force, shaped like the norm."""
        (low, high), norm, where = self.bound, self.norm, self.ops.where
        if self.call.scope == "element":
            return self.filled(max(abs(low), high))
        return where((norm < low) & (norm > 0), low, high)

    def filled(self, value: float) -> Array:
        """The value, shaped like the norm."""
        return self.ops.where(self.norm > 0, value, value)

    def result(self, new: list[Array], coef: Array | None, *, clipped: bool, skipped: bool = False) -> Clipped:
        """The gradients in their tree, and what was measured as arrays of their framework."""
        field = self.opened.backend.field
        return Clipped(
            grads=self.opened.replaced(new),
            norm=field(self.norm),
            limit=field(self.limit()),
            coef=None if coef is None else field(coef),
            clipped=field(clipped),
            finite=field(self.finite),
            skipped=field(skipped),
            state=self.state,
        )


def _norms(step: Step) -> Clipped:
    norm, ops, (low, high) = step.norm, step.ops, step.bound
    formula = step.call.rule.formula(step.call.scope)
    if formula is not None:
        coef = _framework_coefficient(formula, norm, high, step)
        factors = [coef]
    else:
        coef = coefficient(norm, low, high, ops)
        factors = _factors(coef, norm, step.limit(), ops)
    new = step.opened.arrays()
    for factor in factors:
        new = step.write.scale(new, _each(step.opened, factor))
    return step.result(new, coef, clipped=bool(set(_each(step.opened, coef)) - {1}))


def _elements(step: Step) -> Clipped:
    xs, (low, high) = step.opened.arrays(), step.bound
    if step.call.rule.signed:
        _refuse_complex(step.opened)
    else:
        low = -high
    new, changed = step.write.clamp(xs, low, high, step.measured.peaks)
    return step.result(new, None, clipped=changed)


def _refuse_complex(opened: Gradients) -> None:
    for path, x in zip(opened.paths(), opened.xs, strict=True):
        if x is not None and opened.backend.is_complex(x):
            raise TypeError(f"{path or 'the gradient'} is complex, which Bounds cannot order: MaxNorm bounds its modulus")


def _stopped(step: Step) -> Clipped:
    """Under "zero" every gradient becomes 0, whatever it was; under "skip" nothing changes."""
    xs, skip = step.opened.arrays(), step.call.nonfinite == "skip"
    coef = None if step.call.scope == "element" else step.filled(1.0 if skip else 0.0)
    return step.result(xs if skip else step.write.zero(xs), coef, clipped=not skip, skipped=skip)


def coefficient(norm: Array, low: Array, high: Array, ops: Ops) -> Array:
    """What brings `norm` between low and high; 1 where it lies there or is 0, NaN where it is NaN.

    The divisor is made safe first, so that a zero norm neither warns nor puts NaN into a derivative.
    """
    below_high = norm <= high
    above_low = (norm >= low) | (norm == 0)
    coef = ops.where(below_high, 1.0, high / ops.where(below_high, 1.0, norm))
    return ops.where(above_low, coef, low / ops.where(above_low, 1.0, norm))


def _framework_coefficient(formula: Formula, norm: Array, limit: Array, step: Step) -> Array:
    """Another framework's coefficient, in the precision that it would compute in; 1 for a None."""
    opened = step.opened
    coef = opened.backend.widened(formula(opened.backend.working(opened.arrays(), norm), limit, step.ops), norm)
    empty = step.measured.size == 0
    return step.ops.where(empty, 1.0, coef)


def _factors(coef: Array, norm: Array, limit: Array, ops: Ops) -> list[Array]:
    """The coefficient, as two factors where it is too small or too large to be exact itself."""
    extreme = ops.isfinite(norm) & (coef != 0) & ~((coef > SMALLEST) & (coef < LARGEST))
    if not extreme.any():
        return [coef]
    half = limit**0.5 / ops.where(extreme, norm, 1.0) ** 0.5
    return [ops.where(extreme, half, 1.0), ops.where(extreme, half, coef)]


def _each(opened: Gradients, coef: Array) -> list[Any]:
    """One coefficient for every array."""
    if not coef.shape:
        return [float(coef)] * len(opened.arrays())
    return [c for c, x in zip(coef.tolist(), opened.xs, strict=True) if x is not None]


def _measured(opened: Gradients, call: Call, weights: Any) -> Measured:
    measured = measure(opened, call.p, call.scope, call.reduce) if call.norm is None else given(opened, call.norm, call.scope)
    if not call.rule.needs_weights:
        return measured
    return measured._replace(weights=_weights(opened, call, weights))


def _weights(opened: Gradients, call: Call, weights: Any) -> Array:
    if weights is None:
        raise ValueError(
            f"{type(call.rule).__name__} compares gradients with weights: pass weights=, a tree like the gradients"
        )
    theirs = open_gradients(weights)
    if opened.paths() != theirs.paths():
        raise ValueError("weights= must be a tree like the gradients")
    return measure(theirs, call.p, call.scope, call.reduce).norm


def _state(rule: Rule, state: State | None, norm: Array) -> State:
    initial = rule.init(norm * 0.0)
    if state is None and initial:
        raise ValueError(
            f"{type(rule).__name__} remembers: pass state=gradclip.init(grads, rule) and then the last call's .state, "
            "or use gradclip.Clipper, which keeps it"
        )
    if state is not None and not isinstance(state, tuple):
        raise TypeError(f"state= is a tuple, from gradclip.init or the last call's .state; got {state!r}")
    if state is not None and len(state) != len(initial):
        raise ValueError(f"state= is not one of {rule!r}: it has {len(state)} entries, not {len(initial)}")
    return initial if state is None else state


def resolve(
    rule: Rule, scope: str | None, p: float, nonfinite: str, reduce: Reduce | None = None, norm: Array | None = None
) -> Call:
    """The call with its scope filled in; TypeError or ValueError where it cannot be served."""
    scope, order = _scope(rule, scope), _order(p)
    _one_of("nonfinite", nonfinite, POLICIES)
    if norm is not None and reduce is not None:
        raise ValueError("norm= replaces measuring, so that there is nothing for reduce= to join: pass one of them")
    if scope == "element" and (order != 2 or norm is not None):
        raise ValueError(NO_P)
    return Call(rule, scope, order, nonfinite, reduce, norm)


def _scope(rule: Rule, scope: str | None) -> str:
    if not isinstance(rule, Rule):
        raise TypeError(f"the rule must be one of gradclip's, such as MaxNorm(1.0); got {rule!r}")
    allowed = rule.allowed_scopes()
    if scope is None:
        return allowed[0]
    if scope not in allowed:
        raise ValueError(f"scope must be one of {', '.join(map(repr, allowed))} for {rule!r}; got {scope!r}")
    return scope


def _order(p: float) -> float:
    if isinstance(p, bool) or not isinstance(p, Real):
        raise TypeError(f"p must be a number > 0 or inf; got {p!r} ({type(p).__name__})")
    if not p > 0:
        raise ValueError(f"p must be a number > 0 or inf; got {p!r}")
    return float(p)


def _one_of(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}; got {value!r}")
