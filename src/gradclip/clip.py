"""Measure a norm, decide how large it may be, apply.

>>> import gradclip
>>> clipped = gradclip.clip({"w": 3.0, "b": 4.0}, gradclip.MaxNorm(1.0))
>>> clipped
norm 5.0 → 1.0 (×0.2), 2 tensors, clipped
>>> clipped.grads
{'w': 0.6000000000000001, 'b': 0.8}
"""

from __future__ import annotations

from typing import Any

from . import eager, traced
from .backends import Gradients, on_host, open_gradients, ops_for
from .call import NO_P, SCOPES, Call, as_it_is, one_of, order_of, resolve
from .clipped import Clipped
from .layout import Layout, Unit, layout_of
from .measure import Reduce, given, measure, measure_elements
from .rule import Measured, Rule, State, Threshold, fits
from .rules import Bounds, MaxNorm
from .step import Step, Writer

Array = Any
NOTHING = Writer(
    scale=lambda xs, coefs: xs, clamp=lambda xs, low, high, peaks: (xs, False), zero=lambda xs: xs, keep=lambda xs, finite: xs
)


@as_it_is
def clip(
    grads: Any,
    rule: Rule,
    *,
    scope: str | Unit | None = None,
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
    return _run(opened, call, weights, state, Writer(backend.scale, backend.clamp, backend.zeros, backend.keep))


@as_it_is
def clip_(
    grads: Any,
    rule: Rule,
    *,
    scope: str | Unit | None = None,
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
    return _run(opened, call, weights, state, Writer(backend.scale_, backend.clamp_, backend.zero_, backend.keep_))


@as_it_is
def decide(
    grads: Any,
    rule: Rule,
    *,
    scope: str | Unit | None = None,
    p: float = 2,
    weights: Any = None,
    state: State | None = None,
    nonfinite: str = "raise",
    reduce: Reduce | None = None,
    norm: Array | None = None,
) -> Clipped:
    """What `clip` would do, with the gradients as they are: for a face that multiplies by `coef` itself."""
    call = resolve(rule, scope, p, nonfinite, reduce, norm)
    return _run(open_gradients(grads), call, weights, state, NOTHING)


@as_it_is
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


@as_it_is
def clip_by_norm(grads: Any, max_norm: Threshold, p: float = 2) -> Clipped:
    """g · min(1, max_norm / ‖g‖ₚ) for every tensor g by its own norm.

    >>> clip_by_norm([3.0, 0.5], 1.0).grads
    [1.0, 0.5]
    """
    return clip(grads, MaxNorm(max_norm), scope="tensor", p=p)


@as_it_is
def clip_by_global_norm(grads: Any, max_norm: Threshold, p: float = 2) -> Clipped:
    """g · min(1, max_norm / n) for every tensor g, with n the norm of all of them together.

    >>> clip_by_global_norm([3.0, 4.0], 1.0).norm
    array(5.)
    """
    return clip(grads, MaxNorm(max_norm), p=p)


@as_it_is
def norm(grads: Any, p: float = 2, scope: str | Unit = "global") -> Array:
    """(Σ|g|^p)^(1/p), or the largest |g| for p=inf: 0-d, [n] for scope "tensor", 0-d and the largest for "element".

    Only measures: NaN gives NaN.

    >>> norm([3.0, 4.0]), norm([3.0, None, -4.0], scope="tensor")
    (array(5.), array([3., 0., 4.]))
    """
    unit = scope if isinstance(scope, Unit) else None
    scope = "unit" if isinstance(scope, Unit) else scope
    one_of("scope", scope, SCOPES)
    p = order_of(p)
    if scope == "element" and p != 2:
        raise ValueError(NO_P)
    opened = open_gradients(grads)
    with opened.backend.quiet():
        found = measure_elements(opened) if scope == "element" else measure(layout_of(opened, scope, unit), p)
        return opened.backend.field(found.norm, opened.arrays())


@as_it_is
def init(grads: Any, rule: Rule, scope: str | Unit | None = None) -> State:
    """The state that a rule starts from, for `clip(…, state=)`; () for a rule that does not remember.

    >>> init([3.0, 4.0], MaxNorm(lambda step: 1.0 / (step + 1)))
    (0,)
    """
    call = resolve(rule, scope, 2, "keep")
    return rule.init(layout_of(open_gradients(grads), call.scope, call.unit, rule).zero())


def _run(opened: Gradients, call: Call, weights: Any, state: State | None, write: Writer) -> Clipped:
    with opened.backend.quiet():
        layout = layout_of(opened, call.scope, call.unit, call.rule)
        measured = _measured(layout, call, weights)
        before = _like_the_norm(_state(call.rule, state), measured.norm, opened)
        if before and on_host(measured.norm):
            _check_shapes(call.rule, before, layout)
        step = Step(layout, call, measured, before, write, ops_for(measured.norm))
        return eager.clipped(step) if on_host(measured.norm) else traced.clipped(step)


def _like_the_norm(state: State, norm: Array, opened: Gradients) -> State:
    """The state as numbers where the norm is one, whoever gave it, else as the framework's arrays."""
    if not on_host(norm):
        return tuple(opened.backend.field(entry, opened.arrays()) for entry in state)
    return tuple(opened.backend.known(entry) if hasattr(entry, "shape") else entry for entry in state)


def _check_shapes(rule: Rule, state: State, layout: Layout) -> None:
    if not fits(rule, state, layout.zero()):
        found = ", ".join(str(getattr(entry, "shape", entry)) for entry in state)
        raise ValueError(
            f"state= is not one of {rule!r} for norms of shape {layout.shape()}, but of another rule, window, scope or tree; "
            f"its entries have the shapes {found}"
        )


def _measured(layout: Layout, call: Call, weights: Any) -> Measured:
    rule, known = call.rule, layout.opened.backend.known
    measured = _norms(layout, call)
    if rule.needs_weights:
        measured = measured._replace(weights=_weights(layout, call, weights))
    if call.nonfinite in ("raise", "skip") and not on_host(measured.norm):
        norm = known(measured.norm)  # a number, where it can be one now: what has to be looked at is looked at once
        if norm is not None:
            measured = measured._replace(norm=norm)
    if rule.needs_size or rule.formula(call.scope):
        measured = measured._replace(size=layout.sizes())
    others = {name: value for name in ("weights", "size") if (value := getattr(measured, name)) is not None}
    alike = _like_the_norm(tuple(others.values()), measured.norm, layout.opened)
    return measured._replace(**dict(zip(others, alike, strict=True)))


def _norms(layout: Layout, call: Call) -> Measured:
    if call.norm is not None:
        return given(layout, call.norm)
    if call.scope == "element":
        return measure_elements(layout.opened, call.reduce)
    return measure(layout, call.p, call.reduce)


def _weights(layout: Layout, call: Call, weights: Any) -> Array:
    name, opened = type(call.rule).__name__, layout.opened
    if weights is None:
        raise ValueError(f"{name} compares gradients with weights: pass weights=, a tree like the gradients")
    theirs = open_gradients(weights)
    if opened.paths() != theirs.paths():
        raise ValueError("weights= must be a tree like the gradients")
    for path, x, w in zip(opened.paths(), opened.xs, theirs.xs, strict=True):
        if (x is None) < (w is None) or (x is not None and tuple(x.shape) != tuple(w.shape)):
            raise ValueError(f"weights= must have the gradients' shapes; {path or 'the gradient'}: {_shape(x)} and {_shape(w)}")
    kept = theirs.only([x is not None for x in opened.xs])
    return measure(layout._replace(opened=kept), call.p, call.reduce).norm


def _shape(x: Array) -> Any:
    return None if x is None else tuple(x.shape)


def _state(rule: Rule, state: State | None) -> State:
    initial = rule.init(0.0)
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
