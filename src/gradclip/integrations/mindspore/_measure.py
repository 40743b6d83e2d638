"""Which gradients share a norm, in a graph: what the compiler reads, mapped over gradients, of which there may be thousands.

A loop over gradients is a chain of calls to MindSpore's compiler, which gives up at some 350 of them; `Map` is none. (Nor is
`HyperMap`, but given closures of one function it takes the second for the first, MindSpore 2.10.)
"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ...backends.mindspore import (
    clamped,
    kept,
    largest,
    lost,
    norm_type,
    outside,
    power,
    root,
    row_powers,
    rows,
    scaled,
    scaled_rows,
)
from ...layout import Layout

Grads = tuple[Tensor, ...]
LOW = 5  # where the coefficient, or the lower bound, stands in what was recorded


def power_of(p: float, x: Tensor) -> Tensor:
    """Σ|x|^p."""
    return power(x, p)


def divided_power(p: float, divisor: Tensor, x: Tensor) -> Tensor:
    """Σ|x / divisor|^p."""
    return power(x, p, divisor)


def unit_powers(p: float, x: Tensor, axis: int) -> Tensor:
    """Σ|x|^p of every unit."""
    return row_powers(rows(x, axis), p)


def divided_unit_powers(p: float, divisors: Tensor, x: Tensor, axis: int) -> Tensor:
    """Σ|x / divisor|^p of every unit by its own."""
    return row_powers(rows(x, axis), p, divisors)


def part(values: Tensor, start: int, stop: int) -> Tensor:
    """Some of the values."""
    return values[start:stop]


def cast_to(dtype: int, x: Tensor) -> Tensor:
    """x in that type."""
    return ops.cast(x, dtype)


def size_of(dtype: int, x: Tensor) -> Tensor:
    """How many elements x has."""
    return ops.full((), float(x.size), dtype=dtype)


def scaled_by(coef: Tensor, x: Tensor) -> Tensor:
    """x · coef."""
    return scaled(x, coef)


def unscaled(scale: Tensor, x: Tensor) -> Tensor:
    """x / scale, as MindSpore's own step divides."""
    return x * ops.cast(ops.reciprocal(scale), x.dtype)


def overflow_of(x: Tensor) -> Tensor:
    """Is any value NaN or inf?"""
    if x.size == 0:
        return ops.zeros((), ms.bool_)
    return ops.logical_not((ops.abs(ops.cast(x, ms.float32)) < math.inf).all())


def clamped_to(low: Tensor, high: Tensor, x: Tensor) -> Tensor:
    """x between the bounds."""
    return clamped(x, low, high)


def outside_of(low: Tensor, high: Tensor, x: Tensor) -> Tensor:
    """Does any value lie outside the bounds?"""
    return outside(x, low, high)


def kept_where(finite: Tensor, x: Tensor) -> Tensor:
    """x where the flag is set, else zeros."""
    return kept(x, finite)


def row_joined(powers: Tensor, p: float) -> Tensor:
    """The power of each row together."""
    if p != math.inf:
        return powers.sum(axis=1)
    return ops.where((powers != powers).any(axis=1), math.nan, powers.max(axis=1))


class Parts(nn.Cell):
    """The power of every gradient, as a vector in the type of norms."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.map = ops.Map()
        self.type = norm_type()

    def powers(self, grads: Grads, p: float) -> Tensor:
        """Σ|g|^p; for p = inf the largest |g|, NaN kept."""
        return self.stacked(self.map(ops.partial(power_of, p), grads))

    def divided(self, grads: Grads, divisors: Grads, p: float) -> Tensor:
        """The same of gradients divided each by its own divisor."""
        return self.stacked(self.map(ops.partial(divided_power, p), divisors, grads))

    def divided_by(self, grads: Grads, divisor: Tensor, p: float) -> Tensor:
        """The same of gradients divided all by one. (A tuple of it, times their number, is a chain of calls too.)"""
        return self.stacked(self.map(ops.partial(divided_power, p, divisor), grads))

    def sizes(self, grads: Grads) -> Tensor:
        """How many elements there are."""
        return self.stacked(self.map(ops.partial(size_of, self.type), grads))

    def stacked(self, parts: Grads) -> Tensor:
        """Numbers as a vector."""
        return ops.stack(self.map(ops.partial(cast_to, self.type), parts))


class Whole(nn.Cell):
    """One norm for all gradients. (The compiler takes a function for a method of the same name: none may share one.)"""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.parts = Parts()
        self.map = ops.Map()

    def powers(self, grads: Grads, p: float) -> Tensor:
        """Σ|g|^p for every norm; for p = inf the largest |g|, NaN kept."""
        powers = self.parts.powers(grads, p)
        return largest(powers) if p == math.inf else powers.sum()

    def divided(self, grads: Grads, divisors: Tensor, p: float) -> Tensor:
        """The same, for p < inf, of gradients divided by their norm's divisor."""
        return self.parts.divided_by(grads, divisors, p).sum()

    def times(self, grads: Grads, coef: Tensor) -> Any:
        """The gradients times their norm's coefficient."""
        return self.map(ops.partial(scaled_by, coef), grads)

    def sizes(self, grads: Grads) -> Tensor:
        """How many elements every norm is taken over."""
        return self.parts.sizes(grads).sum()


class Each(nn.Cell):
    """A norm for every gradient."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.parts = Parts()
        self.map = ops.Map()

    def powers(self, grads: Grads, p: float) -> Tensor:
        return self.parts.powers(grads, p)

    def divided(self, grads: Grads, divisors: Tensor, p: float) -> Tensor:
        return self.parts.divided(grads, ops.unstack(divisors), p)

    def times(self, grads: Grads, coef: Tensor) -> Any:
        return self.map(scaled, grads, ops.unstack(coef))

    def sizes(self, grads: Grads) -> Tensor:
        return self.parts.sizes(grads)


class Grouped(nn.Cell):
    """A norm for every group; a gradient in none of them has no norm, and the coefficient 1."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(auto_prefix=False)
        owners = np.full(len(layout.opened.xs), len(layout.counts))
        owners[list(layout.places or ())] = np.repeat(np.arange(len(layout.counts)), layout.counts)
        self.parts = Parts()
        self.map = ops.Map()
        self.owners = Tensor(owners, ms.int32)
        self.members = Tensor(owners == np.arange(len(layout.counts))[:, None])
        self.one = Tensor(np.ones(1), norm_type())
        self.constant = Tensor(np.array(layout.sizes()), norm_type())

    def powers(self, grads: Grads, p: float) -> Tensor:
        return row_joined(ops.where(self.members, self.parts.powers(grads, p), 0.0), p)

    def divided(self, grads: Grads, divisors: Tensor, p: float) -> Tensor:
        powers = self.parts.divided(grads, self.spread(divisors), p)
        return row_joined(ops.where(self.members, powers, 0.0), p)

    def times(self, grads: Grads, coef: Tensor) -> Any:
        return self.map(scaled, grads, self.spread(coef))

    def spread(self, values: Tensor) -> Any:
        """Each gradient's value, of those for every group."""
        return ops.unstack(ops.gather(ops.cat((values, self.one)), self.owners, 0))

    def sizes(self, grads: Grads) -> Tensor:
        return self.constant


class Units(nn.Cell):
    """A norm for every slice along an axis of each gradient."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(auto_prefix=False)
        self.map = ops.Map()
        self.type = norm_type()
        self.axes = tuple(-1 if axis is None else axis for axis in layout.axes or ())
        self.stops = tuple(int(stop) for stop in np.cumsum(layout.counts))
        self.starts = (0, *self.stops[:-1])
        self.constant = Tensor(np.array(layout.sizes()), norm_type())

    def powers(self, grads: Grads, p: float) -> Tensor:
        return self.joined(self.map(ops.partial(unit_powers, p), grads, self.axes))

    def divided(self, grads: Grads, divisors: Tensor, p: float) -> Tensor:
        return self.joined(self.map(ops.partial(divided_unit_powers, p), self.spread(divisors), grads, self.axes))

    def times(self, grads: Grads, coef: Tensor) -> Any:
        return self.map(scaled_rows, grads, self.spread(coef), self.axes)

    def spread(self, values: Tensor) -> Any:
        """Each gradient's values."""
        return self.map(ops.partial(part, values), self.starts, self.stops)

    def joined(self, powers: Any) -> Tensor:
        """All units in one vector, in the type of norms."""
        return ops.cat(self.map(ops.partial(cast_to, self.type), powers))

    def sizes(self, grads: Grads) -> Tensor:
        return self.constant


class Measure(nn.Cell):
    """Every norm; the powers in float32, and once more in its range where they have left it."""

    def __init__(self, norms: nn.Cell, p: float) -> None:
        super().__init__(auto_prefix=False)
        self.norms = norms
        self.p = p

    def construct(self, grads: Grads) -> Tensor:
        powers = self.norms.powers(grads, self.p)
        if self.p == math.inf:
            return powers
        norm = root(powers, self.p)
        gone = lost(powers, self.p)
        if gone.any():
            norm = ops.where(gone, self.rescaled(grads), norm)
        return norm

    def rescaled(self, grads: Grads) -> Tensor:
        """The norm, by powers of g divided by the largest |g|."""
        peaks = self.norms.powers(grads, math.inf)
        usable = ops.logical_and(peaks > 0, peaks < math.inf)
        powers = self.norms.divided(grads, ops.where(usable, peaks, 1.0), self.p)
        return ops.where(usable, peaks * root(powers, self.p), peaks)


class Scale(nn.Cell):
    """Every gradient times the coefficient of its norm."""

    def __init__(self, norms: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.norms = norms

    def construct(self, grads: Grads, results: tuple[Tensor, ...], loss_scale: float) -> tuple[Grads, Tensor]:
        return self.norms.times(grads, results[LOW]), results[2]

    def coefficient(self, coef: Tensor) -> Tensor:
        """The smallest, NaN kept."""
        return -largest(-coef)


class Clamp(nn.Cell):
    """Every value between two bounds."""

    def __init__(self, norms: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.map = ops.Map()
        self.one = Tensor(1.0, norm_type())

    def construct(self, grads: Grads, results: tuple[Tensor, ...], loss_scale: float) -> tuple[Grads, Tensor]:
        low, high = results[LOW] * loss_scale, results[LOW + 1] * loss_scale
        changed = ops.stack(self.map(ops.partial(outside_of, low, high), grads)).any()
        return self.map(ops.partial(clamped_to, low, high), grads), changed

    def coefficient(self, low: Tensor) -> Tensor:
        """There is none."""
        return self.one
