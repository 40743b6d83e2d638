"""Nested dicts, lists, tuples and namedtuples as a flat list, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

Leaf = Any
Rebuild = Callable[[Iterable[Leaf]], Any]
CONTAINERS = (dict, list, tuple)


def flatten(tree: Any) -> tuple[list[Leaf], Rebuild]:
    """The leaves in order, None among them, and a function that puts others in their places.

    The containers come back as they were (subclasses too), new ones every time.
    """
    leaves: list[Leaf] = []
    _bounded(_collect, tree, leaves)
    return leaves, lambda new: _bounded(_refill, tree, iter(new))


def paths(tree: Any) -> list[str]:
    """A dotted name for every leaf, "blocks.0.weight"; the root's is ""."""
    names: list[str] = []
    _name(tree, "", names)
    taken: set[str] = set()
    for i, name in enumerate(names):
        again = count(2)
        while names[i] in taken:  # {"a.b": x, "a": {"b": y}}: nobody's number may be lost
            names[i] = f"{name}#{next(again)}"
        taken.add(names[i])
    return names


def _bounded(walk: Callable[[Any, Any], Any], tree: Any, leaves: Any) -> Any:
    try:
        return walk(tree, leaves)
    except RecursionError:
        raise ValueError("the gradients are nested too deeply, or contain themselves") from None


def _collect(node: Any, leaves: list[Leaf]) -> None:
    if not isinstance(node, CONTAINERS):
        leaves.append(node)
        return
    children = node.values() if isinstance(node, dict) else node
    if _flat(children):
        leaves.extend(children)
        return
    for child in children:
        _collect(child, leaves)


def _flat(children: Iterable[Any]) -> bool:
    """No containers among them: told by their few types, since there may be thousands."""
    return not any(issubclass(kind, CONTAINERS) for kind in set(map(type, children)))


def _refill(node: Any, leaves: Iterator[Leaf]) -> Any:
    if isinstance(node, dict):
        return _refill_dict(node, leaves)
    if not isinstance(node, CONTAINERS):
        return next(leaves)
    children = list(islice(leaves, len(node))) if _flat(node) else [_refill(child, leaves) for child in node]
    if type(node) is list:
        return children
    if isinstance(node, list):
        copied = copy.copy(node)
        copied[:] = children
        return copied
    return node._make(children) if hasattr(node, "_make") else type(node)(children)


def _refill_dict(node: dict[Any, Any], leaves: Iterator[Leaf]) -> dict[Any, Any]:
    if type(node) is dict:
        return {key: _refill(child, leaves) for key, child in node.items()}
    filled = copy.copy(node)
    for key, child in node.items():
        filled[key] = _refill(child, leaves)
    return filled


def _name(node: Any, path: str, names: list[str]) -> None:
    children = _children(node)
    if children is None:
        names.append(path)
        return
    for key, child in children:
        _name(child, f"{path}.{key}" if path else str(key), names)


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    if isinstance(node, dict):
        return node.items()
    if isinstance(node, list | tuple):
        fields = getattr(node, "_fields", None)
        return zip(fields, node, strict=True) if fields else enumerate(node)
    return None
