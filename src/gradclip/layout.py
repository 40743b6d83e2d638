"""Which arrays share a norm: all, each its own, some by a pattern, or the slices of each along an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from .backends import Gradients, host, on_host
from .rule import Rule

Array = Any


@dataclass(frozen=True)
class Unit:
    """The scope "unit": every slice of an array along `axis` has a norm of its own.

    axis: an int, or a function (path, array) → int or None, where None makes the array one unit. Left out, it is the axis of
    the outputs in the framework's layout: the last in JAX and TensorFlow; in Paddle the last of a matrix and the first of
    a convolution; else the first. Arrays of no or one axis are one unit.
    """

    axis: int | Callable[[str, Array], int | None] | None = None

    def of(self, path: str, x: Array, default: int | None) -> int | None:
        """The axis of this array; ValueError for one that it does not have."""
        axis = self.axis(path, x) if callable(self.axis) else default if self.axis is None else self.axis
        dimensions = len(x.shape)
        if axis is None or (dimensions < 2 and not callable(self.axis)):
            return None
        if not isinstance(axis, int) or isinstance(axis, bool) or not -dimensions <= axis < dimensions:
            raise ValueError(f"{path or 'the gradient'} has {dimensions} axes, and none that is {axis!r}: see Unit(axis=…)")
        return axis % dimensions


class Layout(NamedTuple):
    """The arrays of each norm, in order: `counts` of them, picked in the order `places` where there is one.

    one: there is one norm, 0-d. axes: the scope is "unit", and every array has as many norms as `counts` says.
    """

    opened: Gradients
    counts: Sequence[int]
    one: bool = False
    places: Sequence[int] | None = None
    axes: Sequence[int | None] | None = None

    def powers(self, p: float, divisors: Array = None) -> Array:
        """Σ|g|^p of each norm's arrays."""
        backend, xs = self.opened.backend, self.opened.arrays()
        if self.axes is not None:
            return backend.unit_powers(xs, self.axes, p, divisors)
        return self.shaped(backend.powers(self._picked(), self.counts, p, divisors))

    def sizes(self) -> Array:
        """How many elements each norm is taken over."""
        backend = self.opened.backend
        if self.axes is None:
            return self.shaped(backend.sizes(self._picked(), self.counts))
        each = backend.sizes(self.opened.arrays(), [1] * len(self.counts))
        return backend.stack([size / count for size, count in zip(each, self.counts, strict=True) for _ in range(count)])

    def each(self, coef: Array) -> list[Array]:
        """The coefficient of every array: a number, or for units an array that broadcasts with it."""
        backend, xs = self.opened.backend, self.opened.arrays()
        if self.one:
            return [float(coef) if on_host(coef) else coef] * len(xs)
        if self.axes is not None:
            ends = pairwise(accumulate(self.counts, initial=0))
            return [
                backend.aligned(coef[start:stop], x, axis) for (start, stop), x, axis in zip(ends, xs, self.axes, strict=True)
            ]
        coefs = coef.tolist() if on_host(coef) else backend.unstack(coef)
        if self.places is None:
            return [c for c, count in zip(coefs, self.counts, strict=True) for _ in range(count)]
        found: list[Array] = [1.0] * len(xs)
        groups = (c for c, count in zip(coefs, self.counts, strict=True) for _ in range(count))
        for place, c in zip(self.places, groups, strict=True):
            found[place] = c
        return found

    def shape(self) -> tuple[int, ...]:
        """The norms' shape."""
        return () if self.one else (sum(self.counts) if self.axes is not None else len(self.counts),)

    def zero(self) -> Array:
        """NumPy zeros of that shape."""
        return 0.0 * host.norms("zero", [0.0] * self.shape()[0]) if self.shape() else host.norms("zero", 0.0)[()]

    def shaped(self, values: Array) -> Array:
        """One value for each norm: 0-d where there is one norm."""
        return values[0] if self.one else values

    def _picked(self) -> Sequence[Array]:
        xs = self.opened.arrays()
        return xs if self.places is None else self.opened.backend.pick(xs, self.places)


def layout_of(opened: Gradients, scope: str, unit: Unit | None = None, rule: Rule | None = None) -> Layout:
    """The layout that a scope and a rule ask for; a None has a norm of its own in the scope "tensor", and it is 0."""
    if not opened.complete and (scope == "tensor" or (rule is not None and rule.needs_size)):
        what = f"scope {scope!r}" if rule is None else f"{rule!r} in scope {scope!r}"
        raise ValueError(
            f"processes have different tensors: {what} needs the same ones on all, since it looks at each or counts elements"
        )
    if scope == "tensor":
        return Layout(opened, [0 if x is None else 1 for x in opened.xs] if opened.gaps else [1] * len(opened.xs))
    if scope == "unit":
        return _units(opened, unit or Unit())
    if rule is not None and rule.grouped:
        return _groups(opened, rule)
    return Layout(opened, [len(opened.arrays())], one=True)


def _units(opened: Gradients, unit: Unit) -> Layout:
    present = [(path, x) for path, x in zip(opened.paths(), opened.xs, strict=True) if x is not None]
    axes = [unit.of(path, x, opened.backend.unit_axis(x)) for path, x in present]
    counts = [1 if axis is None else x.shape[axis] for (_, x), axis in zip(present, axes, strict=True)]
    return Layout(opened, counts, axes=axes)


def _groups(opened: Gradients, rule: Rule) -> Layout:
    leaves = [(path, x is not None) for path, x in zip(opened.paths(), opened.xs, strict=True)]
    members = rule.members(leaves, opened.complete)
    return Layout(opened, [len(places) for places in members], places=[place for places in members for place in places])
