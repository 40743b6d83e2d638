"""NumPy: against a plain read of the same bytes, `numpy.linalg.norm`, and the code that people write themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import gradclip

from ...native import threads
from .timing import Row, Work

Array = Any


def rows(elements: int) -> Iterator[Callable[[], Row]]:
    """The rows, each made when its turn comes, so that only one holds memory."""
    for dtype, limit in ((np.float32, 1.3), (ml_dtypes.bfloat16, 1.25), (np.float16, 1.25)):
        yield partial(against_read, elements, dtype, limit)
    yield partial(against_linalg, elements)
    yield partial(against_by_norm, elements)
    yield small_measured
    yield small_clipped


def normal(elements: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(0).standard_normal(elements, np.float32).astype(dtype)


def plain_read(x: Array) -> Work:
    """The least that reading x can cost: the largest of its bytes' float32, by as many threads as we use."""
    ones = np.ones(x.nbytes // 4, np.float32)
    pool = ThreadPoolExecutor(threads())
    parts = np.array_split(ones, threads())
    return lambda: max(pool.map(np.max, parts))


def against_read(elements: int, dtype: Any, limit: float) -> Row:
    x = normal(elements, dtype)
    name = f"{_count(elements)} {np.dtype(dtype).name} measured"
    return Row(name, "reading the bytes once", lambda: gradclip.norm(x), plain_read(x), at_most=limit)


def against_linalg(elements: int) -> Row:
    x = normal(elements)
    name = f"{_count(elements)} float32 measured"
    return Row(name, "numpy.linalg.norm", lambda: gradclip.norm(x), lambda: np.linalg.norm(x))


def by_norm(grad: Array, max_norm: float) -> Array:
    norm = np.sqrt(np.sum(np.square(np.array(grad))))
    return grad * max_norm / norm if norm > max_norm else grad


def against_by_norm(elements: int) -> Row:
    x = normal(elements)
    y = x.copy()
    limit = shrinking(float(gradclip.norm(x)))
    return Row(
        f"{_count(elements)} float32 clipped by its norm, in place",
        "sqrt(sum(square(g))), g * c / norm",
        lambda: gradclip.clip_(x, gradclip.MaxNorm(next(limit)), scope="tensor"),
        lambda: by_norm(y, 1.0),
        at_least=6,
    )


def small() -> list[Array]:
    return [normal(size).reshape(shape) for shape in ((64, 64), (64,)) for size in [int(np.prod(shape))] * 500]


def by_norms(grads: list[Array], max_norm: float) -> list[Array]:
    clipped = []
    for grad in grads:
        norm = np.sqrt(np.sum(np.square(grad)))
        clipped.append(grad * (max_norm / norm) if norm > max_norm else grad)
    return clipped


def small_measured() -> Row:
    xs = small()
    return Row(
        "1000 small float32 measured",
        "a loop of sqrt(sum(square(g)))",
        lambda: gradclip.norm(xs),
        lambda: sum(float(np.sqrt(np.sum(np.square(x)))) ** 2 for x in xs),
        at_least=3,
    )


def small_clipped() -> Row:
    xs, ys = small(), small()
    limit = shrinking(float(gradclip.norm(xs)))
    return Row(
        "1000 small float32 clipped, in place",
        "the same loop, and g * coef",
        lambda: gradclip.clip_(xs, gradclip.MaxNorm(next(limit))),
        lambda: by_norms(ys, 0.1),
        at_least=3,
    )


def shrinking(norm: float) -> Iterator[float]:
    """Limits of which each clips what the last one left."""
    while True:
        norm *= 0.999
        yield norm


def _count(elements: int) -> str:
    power = elements.bit_length() - 1
    return f"2^{power}" if elements == 1 << power else str(elements)
