"""What a call asks for, checked before anything is looked at."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple, TypeVar

from .layout import Unit
from .measure import Reduce
from .nonfinite import POLICIES
from .rule import Rule

Array = Any
F = TypeVar("F", bound=Callable[..., Any])
SCOPES = ("element", "unit", "tensor", "global")
NO_P = 'scope "element" looks at every value by itself: it takes neither p= nor norm='


class Call(NamedTuple):
    """What a call asks for, checked."""

    rule: Rule
    scope: str
    unit: Unit | None
    p: float
    nonfinite: str
    reduce: Reduce | None
    norm: Array | None


def resolve(
    rule: Rule, scope: str | Unit | None, p: float, nonfinite: str, reduce: Reduce | None = None, norm: Array | None = None
) -> Call:
    """The call with its scope filled in; TypeError or ValueError where it cannot be served."""
    name, order = scope_of(rule, scope), order_of(p)
    one_of("nonfinite", nonfinite, POLICIES)
    if norm is not None and reduce is not None:
        raise ValueError("norm= replaces measuring, so that there is nothing for reduce= to join: pass one of them")
    if name == "element" and (order != 2 or norm is not None):
        raise ValueError(NO_P)
    return Call(rule, name, scope if isinstance(scope, Unit) else None, order, nonfinite, reduce, norm)


def scope_of(rule: Rule, scope: str | Unit | None) -> str:
    """The scope, the rule's default for None; ValueError for one that the rule cannot serve."""
    if not isinstance(rule, Rule):
        raise TypeError(f"the rule must be one of gradclip's, such as MaxNorm(1.0); got {rule!r}")
    allowed = rule.allowed_scopes()
    if scope is None:
        return allowed[0]
    if isinstance(scope, Unit):
        scope = "unit"
    if scope not in allowed:
        raise ValueError(f"scope must be one of {', '.join(map(repr, allowed))} for {rule!r}; got {scope!r}")
    return scope


def order_of(p: float) -> float:
    """The norm's order as a float > 0."""
    if isinstance(p, bool) or not isinstance(p, Real):
        raise TypeError(f"p must be a number > 0 or inf; got {p!r} ({type(p).__name__})")
    if not p > 0:
        raise ValueError(f"p must be a number > 0 or inf; got {p!r}")
    return float(p)


def one_of(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    """ValueError for anything but one of the accepted words."""
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}; got {value!r}")


def as_it_is(function: F) -> F:
    """Said to AutoGraph, which would rewrite all Python that a tf.function calls: here is nothing for it to do."""
    setattr(function, "autograph_info__", {})  # noqa: B010
    return function
