"""How large are the gradients? Powers of every group, then norms; right whatever the values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from . import backends
from .backends import Backend, Gradients, on_host
from .layout import Layout
from .rule import Measured

Array = Any
Reduce: TypeAlias = Callable[[Array, float], Array]
SMALLEST, LARGEST = 1e-270, 1e300  # between them a float64 coefficient has not lost digits


def measure(layout: Layout, p: float, reduce: Reduce | None = None) -> Measured:
    """Every norm of the layout."""
    opened, reduce = _joined(layout.opened, reduce)
    layout, backend = layout._replace(opened=opened), opened.backend

    def power(p: float, divisors: Array = None) -> Array:
        return _reduced(layout.powers(p, divisors), p, reduce, backend)

    powers = power(p)
    norm = backend.root(powers, p)
    alike = reduce is not None and on_host(powers)  # then all processes have to come to the same branch, whatever they hold
    if p != math.inf and (alike or not backend.fits(layout.opened.arrays(), p)):
        norm = _in_range(norm, backend.lost(powers, p), power, p, backend)
    return Measured(norm)


def measure_elements(opened: Gradients, reduce: Reduce | None = None) -> Measured:
    """The largest |g|, and that of every array."""
    opened, reduce = _joined(opened, reduce)
    backend, xs = opened.backend, opened.arrays()
    peaks = backend.powers(xs, [1] * len(xs), math.inf)
    return Measured(_reduced(backend.peak(peaks), math.inf, reduce, backend), peaks=peaks)


def _joined(opened: Gradients, reduce: Reduce | None) -> tuple[Gradients, Reduce | None]:
    """How powers are joined with those of other processes: as the arrays themselves know, or as the caller says."""
    if reduce is None or opened.reduce is None:
        return opened, reduce or opened.reduce
    alone = getattr(opened.backend, "alone", None)
    if alone is None:
        raise ValueError("these gradients know the processes that they are spread over: reduce= would count them twice")
    return opened._replace(present=alone(opened.present)), reduce


def _in_range(norm: Array, lost: Array, power: Callable[..., Array], p: float, backend: Backend) -> Array:
    """The norm, where its power has left the range by powers of g divided by the largest |g|."""
    ops = backends.ops_for(norm)

    def rescaled() -> Array:
        peaks = power(math.inf)
        usable = ops.isfinite(peaks) & (peaks > 0)
        divisors = ops.where(usable, peaks, 1.0)
        found = ops.where(usable, peaks * backend.root(power(p, divisors if len(divisors.shape) else divisors[None]), p), peaks)
        return ops.where(lost, found, norm)

    return ops.choose(ops.any(lost), rescaled, lambda: norm)


def _reduced(power: Array, p: float, reduce: Reduce | None, backend: Backend) -> Array:
    """The power over all processes; a maximum loses NaN, so that it travels as a second entry."""
    if reduce is None:
        return power
    ops = backends.ops_for(power)
    if p == math.inf:
        nan = power != power
        none, one = ops.like(power, 0.0), ops.like(power, 1.0)
        sent = backend.stack([ops.where(nan, none, power), ops.where(nan, one, none)])
        found = _returned(reduce(backend.field(sent, []), p), sent, backend)
        return ops.where(found[1] > 0, math.nan, found[0])  # by index: TensorFlow's graph does not unpack
    return _returned(reduce(backend.field(power, []), p), power, backend)


def _returned(reduced: Array, sent: Array, backend: Backend) -> Array:
    """What reduce= gave back, if it can be what it should."""
    known = backend.norms("reduce=", reduced)
    if known.shape != sent.shape:
        raise ValueError(f"reduce= must return an array shaped like the one that it got, {sent.shape}; got {known.shape}")
    if on_host(known) and (known < 0).any():
        raise ValueError(f"reduce= must return powers, which are not negative; got {reduced!r}")
    return known[()]


def given(layout: Layout, norm: Array) -> Measured:
    """The norm that the caller knows already."""
    known, wanted = layout.opened.backend.norms("norm=", norm), layout.shape()
    if tuple(known.shape) != wanted:
        raise ValueError(f"norm= must have the shape {wanted}, one number for each norm; got {tuple(known.shape)}")
    if on_host(known) and (known < 0).any():
        raise ValueError(f"norm= must not be negative; got {norm!r}")
    return Measured(known)
