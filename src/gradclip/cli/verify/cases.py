"""The same inputs for every framework, and what float64 makes of them: written out, without the library."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

Array = Any
SCOPES = ("element", "tensor", "global")


class Case(NamedTuple):
    """Gradients as float64, the type that they have, and a limit."""

    name: str
    grads: list[Array]
    dtype: str
    limit: float


class Truth(NamedTuple):
    """The clipped gradients, and the norm of each scope: one number, or one for each tensor."""

    grads: list[Array]
    norms: list[float]


def cases() -> list[Case]:
    """Plain ones in every type, then those that frameworks answer differently."""
    random = np.random.default_rng(0)
    plain = [random.standard_normal(shape) for shape in ((64, 32), (128,), (4, 3, 5))]
    found = [Case(f"random {dtype}", plain, dtype, 0.7) for dtype in ("float64", "float32", "float16", "bfloat16")]
    return [
        *found,
        Case("below the limit", plain, "float32", 1e3),
        Case("(3, 0), (0, 4) at its norm, 5", _list([3, 0], [0, 4]), "float32", 5.0),
        Case("(6e-8, 8e-8) at its norm", _list([6e-8, 8e-8]), "float32", 1e-7),
        Case("(3e-7, 4e-7) below 1e-6", _list([3e-7, 4e-7]), "float32", 1e-6),
        Case("41 times (0.01, 0.02), below", _list([0.01, 0.02]), "float32", 41.0),
        Case("zeros", _list([0, 0], [0]), "float32", 1.0),
        Case("100 of 1e20", _list([1e20] * 100), "float32", 1.0),
        Case("4 of 1e-25", _list([1e-25] * 4), "float32", 1e-26),
        Case("1000 of 300, float16", _list([300] * 1000), "float16", 1.0),
        Case("1000 of 60000, float16", _list([60000] * 1000), "float16", 1.0),
        Case("1000 of 300, bfloat16", _list([300] * 1000), "bfloat16", 1.0),
        Case("2^22 of 0.1", _list(np.full(1 << 22, 0.1)), "float32", 1.0),
        Case("a NaN", _list([3, math.nan], [4]), "float32", 1.0),
        Case("an inf", _list([3, math.inf], [4]), "float32", 1.0),
        Case("an empty tensor", _list([], [3, 4]), "float32", 1.0),
    ]


def typed(case: Case) -> list[Array]:
    """The gradients in the case's type; bfloat16 as float32 that it holds."""
    if case.dtype == "bfloat16":
        return [rounded_to_bfloat16(x) for x in case.grads]
    return [x.astype(case.dtype) for x in case.grads]


def truth(case: Case, scope: str) -> Truth:
    """g · min(1, limit / norm), or the clamp, in float64; NaN spreads, and a norm of inf makes 0 of what is finite."""
    grads = [x.astype(np.float64) for x in typed(case)]
    with np.errstate(all="ignore"):
        if scope == "element":
            return Truth([np.clip(x, -case.limit, case.limit) for x in grads], [])
        if scope == "tensor":
            norms = [_norm([x]) for x in grads]
            return Truth([_scaled(x, norm, case.limit) for x, norm in zip(grads, norms, strict=True)], norms)
        norm = _norm(grads)
        return Truth([_scaled(x, norm, case.limit) for x in grads], [norm])


def _list(*values: Any) -> list[Array]:
    return [np.array(x, np.float64) for x in values]


def _norm(grads: list[Array]) -> float:
    squares = np.concatenate([np.square(x).ravel() for x in grads])
    return math.sqrt(math.fsum(squares)) if np.isfinite(squares).all() else float(np.sqrt(np.sum(squares)))


def _scaled(x: Array, norm: float, limit: float) -> Array:
    return x if norm <= limit or norm == 0 else x * (limit / norm)


def rounded_to_bfloat16(x: Array) -> Array:
    """float32 numbers that bfloat16 holds, the nearest ones."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
