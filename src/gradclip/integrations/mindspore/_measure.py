"""Norms in a graph: functions that the compiler reads, mapped over gradients, of which there may be thousands.

A loop over gradients is a chain of calls to MindSpore's compiler, which gives up at some 350 of them; `Map` is none.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from ...backends.mindspore import clamped, kept, largest, lost, norm_type, outside, power, root, scaled

Grads = tuple[Tensor, ...]


def power_of(p: float, x: Tensor) -> Tensor:
    """Σ|x|^p."""
    return power(x, p)


def peak_of(x: Tensor) -> Tensor:
    """The largest |x|."""
    return power(x, math.inf)


def divided_power(p: float, divisor: Tensor, x: Tensor) -> Tensor:
    """Σ|x / divisor|^p."""
    return power(x, p, divisor)


def cast_to(dtype: int, x: Tensor) -> Tensor:
    """x in that type."""
    return ops.cast(x, dtype)


def size_of(dtype: int, x: Tensor) -> Tensor:
    """How many elements x has."""
    return ops.full((), float(x.size), dtype=dtype)


def scaled_by(coef: Tensor, x: Tensor) -> Tensor:
    """x · coef."""
    return scaled(x, coef)


def clamped_to(low: Tensor, high: Tensor, x: Tensor) -> Tensor:
    """x between the bounds."""
    return clamped(x, low, high)


def outside_of(low: Tensor, high: Tensor, x: Tensor) -> Tensor:
    """Does any value lie outside the bounds?"""
    return outside(x, low, high)


def unscaled(scale: Tensor, x: Tensor) -> Tensor:
    """x / scale, as MindSpore's own step divides."""
    return x * ops.cast(ops.reciprocal(scale), x.dtype)


def overflow_of(x: Tensor) -> Tensor:
    """Is any value NaN or inf?"""
    return ops.logical_not((ops.abs(ops.cast(x, ms.float32)) < math.inf).all())


def kept_where(finite: Tensor, x: Tensor) -> Tensor:
    """x where the flag is set, else zeros."""
    return kept(x, finite)


class Measure(nn.Cell):
    """The norm of all gradients, or of each; the powers in float32, and once more in its range where they have left it."""

    def __init__(self, scope: str, p: float) -> None:
        super().__init__(auto_prefix=False)
        self.each = scope == "tensor"
        self.p = math.inf if scope == "element" else p
        self.type = norm_type()
        self.map = ops.Map()

    def construct(self, grads: Grads) -> Tensor:
        if self.p == math.inf:
            return self.peaks(grads)
        powers = self.joined(self.map(ops.partial(power_of, self.p), grads))
        norm = root(powers, self.p)
        gone = lost(powers, self.p)
        if gone.any():
            norm = ops.where(gone, self.rescaled(grads), norm)
        return norm

    def joined(self, parts: Grads) -> Tensor:
        """One power for each group."""
        powers = self.stacked(parts)
        return powers if self.each else powers.sum()

    def stacked(self, parts: Grads) -> Tensor:
        """The parts as one vector, in the type of norms."""
        return ops.stack(self.map(ops.partial(cast_to, self.type), parts))

    def peaks(self, grads: Grads) -> Tensor:
        """The largest |g| of each group, NaN kept."""
        peaks = self.stacked(self.map(peak_of, grads))
        return peaks if self.each else largest(peaks)

    def rescaled(self, grads: Grads) -> Tensor:
        """The norm, by powers of g divided by the largest |g|."""
        peaks = self.peaks(grads)
        usable = ops.logical_and(peaks > 0, peaks < math.inf)
        powers = self.joined(self.divided(ops.where(usable, peaks, 1.0), grads))
        return ops.where(usable, peaks * root(powers, self.p), peaks)

    def divided(self, divisors: Tensor, grads: Grads) -> Any:
        """The powers of g divided by its group's divisor."""
        if self.each:
            return self.map(ops.partial(divided_power, self.p), ops.unstack(divisors), grads)
        return self.map(ops.partial(divided_power, self.p, divisors), grads)

    def sizes(self, grads: Grads) -> Tensor:
        """How many elements each norm is taken over."""
        return self.joined(self.map(ops.partial(size_of, self.type), grads))


class Scale(nn.Cell):
    """Every gradient times one coefficient."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.map = ops.Map()

    def construct(self, grads: Grads, results: tuple[Tensor, ...], loss_scale: float) -> tuple[Grads, Tensor]:
        return self.map(ops.partial(scaled_by, results[4]), grads), results[2]

    def coefficient(self, coef: Tensor) -> Tensor:
        """What is remembered of it."""
        return coef


class ScaleEach(nn.Cell):
    """Every gradient times its own coefficient."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.map = ops.Map()

    def construct(self, grads: Grads, results: tuple[Tensor, ...], loss_scale: float) -> tuple[Grads, Tensor]:
        return self.map(scaled, grads, ops.unstack(results[4])), results[2]

    def coefficient(self, coef: Tensor) -> Tensor:
        """The smallest."""
        return -largest(-coef)


class Clamp(nn.Cell):
    """Every value between two bounds."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.map = ops.Map()
        self.one = Tensor(1.0, norm_type())

    def construct(self, grads: Grads, results: tuple[Tensor, ...], loss_scale: float) -> tuple[Grads, Tensor]:
        low, high = results[4] * loss_scale, results[5] * loss_scale
        changed = ops.stack(self.map(ops.partial(outside_of, low, high), grads)).any()
        return self.map(ops.partial(clamped_to, low, high), grads), changed

    def coefficient(self, low: Tensor) -> Tensor:
        """There is none."""
        return self.one
