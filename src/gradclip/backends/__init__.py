"""Which backend owns an array, found by the name of its type's package: no framework is imported to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, ValuesView
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple, cast

from . import numpy as host
from ._protocol import Backend, Ops
from ._tree import Rebuild, flatten, paths

__all__ = ["Backend", "Gradients", "Ops", "flatten", "host", "open_gradients", "ops_for", "paths"]

NAMES = frozenset(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


class Gradients(NamedTuple):
    """A tree of gradients, opened: `xs` has an array or None for every leaf."""

    backend: Backend
    leaves: list[Any]
    xs: list[Any]
    rebuild: Rebuild
    paths: Callable[[], list[str]]

    def arrays(self) -> list[Any]:
        """The arrays alone."""
        return [x for x in self.xs if x is not None]

    def replaced(self, new: list[Any]) -> Any:
        """The tree with new arrays, one for each of `arrays()`; a leaf whose array stayed the same is itself."""
        fresh = iter(new)
        return self.rebuild(
            leaf if x is None or (y := next(fresh)) is x else self.backend.restore(y, leaf)
            for leaf, x in zip(self.leaves, self.xs, strict=True)
        )


def open_gradients(tree: Any, *, writable: bool = False) -> Gradients:
    """The leaves of a tree as arrays of the one framework that they belong to.

    TypeError, naming the leaf, for anything but floating or complex arrays; ValueError for one that cannot be written.
    """
    tree = list(tree) if isinstance(tree, Iterator | ValuesView) else tree
    leaves, rebuild = flatten(tree)
    present = [i for i, leaf in enumerate(leaves) if leaf is not None]
    backend = _common(leaves, present, tree)
    opened = backend.arrays([leaves[i] for i in present], lambda k: paths(tree)[present[k]], writable)
    xs: list[Any] = [None] * len(leaves)
    for i, x in zip(present, opened, strict=True):
        xs[i] = x
    return Gradients(backend, leaves, xs, rebuild, lambda: paths(tree))


def ops_for(x: Any) -> Ops:
    """The operations for norms of this kind."""
    kind: type = type(x)
    return cast(Ops, _module(_name(kind) or "numpy"))


def _common(leaves: list[Any], present: list[int], tree: Any) -> Backend:
    """The backend of all leaves; NumPy's where there are none."""
    found: dict[str, int] = {}
    for i in present:
        kind: type = type(leaves[i])
        name = _name(kind)
        if name is None:
            raise TypeError(_unknown(leaves[i], paths(tree)[i]))
        found.setdefault(name, i)
    if len(found) > 1:
        where = " and ".join(f"{name} ({paths(tree)[i] or 'the root'})" for name, i in found.items())
        raise TypeError(f"the gradients of one call must belong to one framework; got {where}")
    return _module(next(iter(found), "numpy"))


@cache
def _name(kind: type) -> str | None:
    """The backend's name: the first package among the type's bases that has one."""
    if issubclass(kind, int):  # bool too: refused as NumPy's integers are
        return "numpy"
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    builtin = "numpy" if kind in (float, complex) else None
    return next((root for root in roots if root in NAMES), builtin)


@cache
def _module(name: str) -> Backend:
    return cast(Backend, import_module(f"{__name__}.{name}"))


def _unknown(leaf: Any, path: str) -> str:
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    return (
        f"no backend for {kind} ({path or 'the root'}): gradients are arrays of {', '.join(sorted(NAMES))}, "
        "alone or nested in dicts, lists, tuples and namedtuples"
    )
