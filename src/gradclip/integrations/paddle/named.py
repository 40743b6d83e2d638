"""Parameters by name, and which of their gradients are clipped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paddle import Tensor

Parameter = Any
Grad = Any
Pairs = list[tuple[Parameter, Grad]]
Named = dict[str, tuple[Parameter, Grad]]


def named(parameters: Iterable[Any]) -> dict[str, Parameter]:
    """By name, each once; given with names or without."""
    return _distinct((p.name, p) if isinstance(p, Tensor) else p for p in parameters)


def chosen(pairs: Pairs, names: dict[int, str]) -> Named:
    """The gradients to be clipped, by their parameter's name: those that are there and are not left out."""
    grads = {id(p): grad for p, grad in pairs}
    params = _distinct((names.get(id(p), p.name), p) for p, _ in pairs)
    return {name: (p, grads[id(p)]) for name, p in params.items() if grads[id(p)] is not None and needs_clip(p)}


def needs_clip(p: Parameter) -> bool:
    """Is it one that Paddle has not been told to leave out?"""
    return bool(getattr(p, "need_clip", True))


def weights(of: Named) -> dict[str, Any]:
    """The parameters' own values."""
    return {name: p.detach() for name, (p, _) in of.items()}


def _distinct(pairs: Iterable[tuple[str, Parameter]]) -> dict[str, Parameter]:
    """Every parameter once, and under a name of its own even where a model has one name twice."""
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for name, p in pairs:
        if id(p) not in seen:
            seen.add(id(p))
            found[name if name not in found else f"{name}#{len(found)}"] = p
    return found
