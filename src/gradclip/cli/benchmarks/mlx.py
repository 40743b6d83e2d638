"""MLX: beside its own function, eager and compiled. Arrays are values there, so that every call clips the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.optimizers import clip_grad_norm

from gradclip import MaxNorm, clip

from .timing import Row

Grads = list[Any]
FAR = 1e9
SMALL = [(64, 64), (64,)] * 500


def rows(elements: int) -> Iterator[Callable[[], Row]]:
    """The rows, each made when its turn comes, so that only one holds memory."""
    size = f"2^{elements.bit_length() - 1} float32"
    yield partial(by_norm, f"{size}, nothing to clip", [(elements,)], FAR, 1.2)
    yield partial(by_norm, f"{size}, clipping", [(elements,)], 1.0)
    yield partial(compiled, f"{size}, clipping, mx.compile", [(elements,)], 1.0)
    yield partial(by_norm, "1000 small float32, nothing to clip", SMALL, FAR)
    yield partial(by_norm, "1000 small float32, clipping", SMALL, 1.0)


def normal(shapes: list[tuple[int, ...]]) -> Grads:
    """Evaluated arrays of these shapes."""
    keys = mx.random.split(mx.random.key(0), len(shapes))
    xs = [mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True)]
    mx.eval(xs)
    return xs


def by_norm(name: str, shapes: list[tuple[int, ...]], limit: float, at_least: float | None = None) -> Row:
    xs, rule = normal(shapes), MaxNorm(limit)
    return Row(
        name,
        "mlx.optimizers.clip_grad_norm",
        lambda: evaluated(clip(xs, rule).grads),
        lambda: evaluated(clip_grad_norm(xs, limit)[0]),
        at_least=at_least,
    )


def compiled(name: str, shapes: list[tuple[int, ...]], limit: float) -> Row:
    xs, rule = normal(shapes), MaxNorm(limit)
    ours = mx.compile(lambda grads: clip(grads, rule, nonfinite="keep").grads)
    theirs = mx.compile(lambda grads: clip_grad_norm(grads, limit)[0])
    return Row(name, "clip_grad_norm, mx.compile", lambda: evaluated(ours(xs)), lambda: evaluated(theirs(xs)))


def evaluated(grads: Grads) -> Grads:
    """The gradients, computed: MLX is lazy."""
    mx.eval(grads)
    return grads
