"""How large are the gradients? Powers of every group, then norms; right whatever the values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from . import backends
from .backends import Backend, Gradients
from .rules import Measured

Array = Any
Reduce: TypeAlias = Callable[[Array, float], Array]
SMALLEST_P = 1e-3  # below it the root multiplies an error of the power too much
SMALLEST, LARGEST = 1e-270, 1e300  # between them neither Σ|g|^p nor a coefficient has lost digits


def measure(opened: Gradients, p: float, scope: str, reduce: Reduce | None = None) -> Measured:
    """The norm of every group of the scope, and how many elements it was taken over."""
    if scope == "element":
        return _measure_elements(opened, reduce)
    backend, groups = opened.backend, groups_of(opened, scope)

    def power(picked: list[list[Array]], p: float, divisors: Array = None) -> Array:
        return _reduced(shaped(backend.powers(picked, p, None, divisors), scope), p, reduce, backend)

    powers = power(groups, p)
    norm = backend.root(powers, p)
    ops = backends.ops_for(powers)
    lost = ~((powers > SMALLEST) & (powers < LARGEST)) | (p < SMALLEST_P)
    if p != math.inf and lost.any():
        norm = ops.where(lost, _rescaled(power, groups, p, lost, backend), norm)
    return Measured(norm, None, shaped(backend.sizes(groups), scope))


def _measure_elements(opened: Gradients, reduce: Reduce | None) -> Measured:
    backend, xs = opened.backend, opened.arrays()
    peaks = backend.powers([[x] for x in xs], math.inf)
    return Measured(_reduced(backend.peak(peaks), math.inf, reduce, backend), None, backend.sizes([xs])[0], peaks)


def _rescaled(power: Callable[..., Array], groups: list[list[Array]], p: float, lost: Array, backend: Backend) -> Array:
    """The norms whose powers have left the range, by powers of g divided by the largest of them."""
    picked = [group if out else [] for group, out in zip(groups, lost.reshape(-1), strict=True)]
    peaks = power(picked, math.inf)
    ops = backends.ops_for(peaks)
    usable = ops.isfinite(peaks) & (peaks > 0)
    picked = [group if use else [] for group, use in zip(picked, usable.reshape(-1), strict=True)]
    divisors = ops.where(usable, peaks, 1.0)
    return ops.where(usable, peaks * backend.root(power(picked, p, divisors.reshape(-1)), p), peaks)


def _reduced(power: Array, p: float, reduce: Reduce | None, backend: Backend) -> Array:
    """The power over all processes; a maximum loses NaN, so that it travels as a second entry."""
    if reduce is None:
        return power
    ops = backends.ops_for(power)
    if p == math.inf:
        nan = power != power
        sent = backend.stack([ops.where(nan, 0.0, power), ops.where(nan, 1.0, 0.0)])
        peak, lost = _returned(reduce(sent, p), sent, backend)
        return ops.where(lost > 0, math.nan, peak)
    return _returned(reduce(backend.field(power), p), power, backend)


def _returned(reduced: Array, sent: Array, backend: Backend) -> Array:
    """What reduce= gave back, if it can be what it should."""
    known = backend.norms("reduce=", reduced)
    if known.shape != sent.shape:
        raise ValueError(f"reduce= must return an array shaped like the one that it got, {sent.shape}; got {known.shape}")
    if (known < 0).any():
        raise ValueError(f"reduce= must return powers, which are not negative; got {reduced!r}")
    return known[()]


def given(opened: Gradients, norm: Array, scope: str) -> Measured:
    """The norm that the caller knows already."""
    sizes = shaped(opened.backend.sizes(groups_of(opened, scope)), scope)
    known = opened.backend.norms("norm=", norm)
    if known.shape != sizes.shape:
        raise ValueError(f"norm= must have the shape {sizes.shape} of scope {scope!r}; got {known.shape}")
    if (known < 0).any():
        raise ValueError(f"norm= must not be negative; got {norm!r}")
    return Measured(known, None, sizes)


def groups_of(opened: Gradients, scope: str) -> list[list[Array]]:
    """The arrays that share a norm; a None has one of its own in the scope "tensor", and it is 0."""
    return [[] if x is None else [x] for x in opened.xs] if scope == "tensor" else [opened.arrays()]


def shaped(values: Array, scope: str) -> Array:
    """One value for each group, as the norm's shape is: 0-d where there is one norm."""
    return values if scope == "tensor" else values[0]
