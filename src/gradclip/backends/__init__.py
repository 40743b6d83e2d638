"""Which backend owns an array, found by the name of its type's package: no framework is imported to ask."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, ValuesView
from importlib import import_module
from pkgutil import iter_modules
from types import NoneType
from typing import Any, NamedTuple, cast

from . import numpy as host
from ._protocol import Backend, Ops
from ._tree import Rebuild, flatten, paths

__all__ = ["Backend", "Gradients", "Ops", "flatten", "host", "on_host", "open_gradients", "ops_for", "paths", "settled"]

NAMES = frozenset(module.name for module in iter_modules(__path__) if not module.name.startswith("_")) - {"native"}

_found: dict[type, str | None] = {}
_loaded: dict[str, Backend] = {}


class Gradients(NamedTuple):
    """A tree of gradients, opened: `xs` has an array or None for every leaf."""

    backend: Backend
    leaves: list[Any]
    xs: list[Any]
    present: list[Any]  # the arrays alone, as the backend opened them: it may know more of them than a list does
    gaps: bool  # is any leaf None?
    rebuild: Rebuild
    paths: Callable[[], list[str]]

    def arrays(self) -> list[Any]:
        """The arrays alone."""
        return self.present

    @property
    def reduce(self) -> Callable[[Any, float], Any] | None:
        """How norms over these become norms over all processes, for arrays that are spread over several and know it."""
        return getattr(self.present, "reduce", None)

    @property
    def complete(self) -> bool:
        """Are these all leaves that there are, or have other processes others?"""
        return getattr(self.present, "complete", True)

    def only(self, kept: list[bool]) -> Gradients:
        """The same with None for those of the leaves that are not kept."""
        places = [k for k, keep in enumerate(keep for keep, x in zip(kept, self.xs, strict=True) if x is not None) if keep]
        xs = [x if keep else None for keep, x in zip(kept, self.xs, strict=True)]
        present = cast("list[Any]", self.backend.pick(self.present, places))
        return self._replace(xs=xs, present=present, gaps=any(x is None for x in xs))

    def replaced(self, new: list[Any]) -> Any:
        """The tree with new arrays, one for each of `arrays()`; a leaf whose array stayed the same is itself."""
        if all(map(operator.is_, new, self.arrays())):
            return self.rebuild(self.leaves)
        fresh, restore = iter(new), self.backend.restore
        ys = [None if x is None else next(fresh) for x in self.xs]
        return self.rebuild(leaf if y is x else restore(y, leaf) for leaf, x, y in zip(self.leaves, self.xs, ys, strict=True))


def open_gradients(tree: Any, *, writable: bool = False) -> Gradients:
    """The leaves of a tree as arrays of the one framework that they belong to; one that was opened already is itself.

    TypeError, naming the leaf, for anything but floating or complex arrays; ValueError for one that cannot be written.
    """
    if isinstance(tree, Gradients):
        return tree
    tree = settled(tree)
    leaves, rebuild = flatten(tree)
    if writable:
        rebuild = lambda _: tree  # noqa: E731
    kinds = set(map(type, leaves))
    gaps = NoneType in kinds
    backend = _common(kinds - {NoneType}, leaves, tree)
    if hasattr(backend, "ordered"):  # a framework that returns dicts in an order of its own, which is that of the norms
        tree = backend.ordered(tree)
        leaves, rebuild = flatten(tree)
    if gaps:
        places = [i for i, leaf in enumerate(leaves) if leaf is not None]
        present = backend.arrays([leaves[i] for i in places], lambda k: paths(tree)[places[k]], writable)
        each = iter(present)
        xs = [None if leaf is None else next(each) for leaf in leaves]
    else:
        xs = present = backend.arrays(leaves, lambda k: paths(tree)[k], writable)
    return Gradients(backend, leaves, xs, present, gaps, rebuild, lambda: paths(tree))


def settled(tree: Any) -> Any:
    """The tree, an iterator as a list."""
    return list(tree) if isinstance(tree, Iterator | ValuesView) else tree


def on_host(x: Any) -> bool:
    """Is it a NumPy number, whose value can be looked at?"""
    return isinstance(x, host.HOST)


def ops_for(x: Any) -> Ops:
    """The operations for norms of this kind."""
    kind: type = type(x)
    return cast(Ops, _module(_name(kind) or "numpy"))


def _common(kinds: set[type], leaves: list[Any], tree: Any) -> Backend:
    """The backend of all kinds of leaves; NumPy's where there are none."""
    names = {kind: _name(kind) for kind in kinds}
    first = {kind: next(i for i, leaf in enumerate(leaves) if type(leaf) is kind) for kind in kinds}
    for kind, name in names.items():
        if name is None:
            raise TypeError(_unknown(leaves[first[kind]], paths(tree)[first[kind]]))
    if len(set(names.values())) > 1:
        found = {names[kind]: first[kind] for kind in sorted(kinds, key=first.__getitem__, reverse=True)}
        where = " and ".join(f"{name} ({paths(tree)[i] or 'the root'})" for name, i in reversed(found.items()))
        raise TypeError(f"the gradients of one call must belong to one framework; got {where}")
    return _module(next((name for name in names.values() if name), "numpy"))


def _name(kind: type) -> str | None:
    """The backend's name, looked up once for every type; in a dict, which tracers follow, unlike `functools.cache`."""
    if kind not in _found:
        _found[kind] = _search(kind)
    return _found[kind]


def _search(kind: type) -> str | None:
    """The first package among the type's bases that has a backend."""
    if issubclass(kind, int):  # bool too: refused as NumPy's integers are
        return "numpy"
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    builtin = "numpy" if kind in (float, complex) else None
    return next((root for root in roots if root in NAMES), builtin)


def _module(name: str) -> Backend:
    if name == "torch":
        return _torch()
    if name not in _loaded:
        _loaded[name] = cast(Backend, import_module(f"{__name__}.{name}"))
    return _loaded[name]


def _torch() -> Backend:
    from . import torch  # torch.compile follows the statement, not import_module

    return cast(Backend, torch)


def _unknown(leaf: Any, path: str) -> str:
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    return (
        f"no backend for {kind} ({path or 'the root'}): gradients are arrays of {', '.join(sorted(NAMES))}, "
        "alone or nested in dicts, lists, tuples and namedtuples"
    )
