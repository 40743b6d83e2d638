"""TensorFlow: against `tf.clip_by_global_norm`, eager and compiled. Tensors are values: every call clips the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tensorflow as tf

from gradclip import MaxNorm, clip

from .numpy import normal
from .timing import Row, Work

FAR = 1e9  # more than any norm here
SMALL = [(64, 64), (64,)] * 500


def rows(elements: int) -> Iterator[Callable[[], Row]]:
    """The rows, each made when its turn comes, so that only one holds memory."""
    size = f"2^{elements.bit_length() - 1} float32"
    yield partial(eager, f"{size}, nothing to clip, eager", [(elements,)], FAR, 4)
    yield partial(eager, f"{size}, clipping, eager", [(elements,)], 1.0)
    yield partial(compiled, f"{size}, nothing to clip, tf.function", [(elements,)], FAR)
    yield partial(compiled, f"{size}, clipping, tf.function", [(elements,)], 1.0)
    yield partial(eager, "1000 small float32, nothing to clip, eager", SMALL, FAR)


def eager(name: str, shapes: list[tuple[int, ...]], limit: float, at_least: float | None = None) -> Row:
    xs, rule = gradients(shapes), MaxNorm(limit)
    return Row(name, "tf.clip_by_global_norm", lambda: clip(xs, rule).grads, lambda: theirs(xs, limit), at_least=at_least)


def compiled(name: str, shapes: list[tuple[int, ...]], limit: float) -> Row:
    xs, rule = gradients(shapes), MaxNorm(limit)
    return Row(
        name,
        "the same, tf.function",
        ran(lambda grads: clip(grads, rule, nonfinite="keep").grads, xs),
        ran(lambda grads: theirs(grads, limit), xs),
    )


def gradients(shapes: list[tuple[int, ...]]) -> list[Any]:
    """Tensors of these shapes."""
    return [tf.constant(normal(tf.TensorShape(shape).num_elements()).reshape(shape)) for shape in shapes]


def theirs(grads: list[Any], limit: float) -> list[Any]:
    """TensorFlow's own, without the norm that it returns beside."""
    clipped: list[Any] = tf.clip_by_global_norm(grads, limit)[0]
    return clipped


def ran(work: Callable[[list[Any]], list[Any]], xs: list[Any]) -> Work:
    """The work as a graph."""
    graph = tf.function(work)
    return lambda: graph(xs)
