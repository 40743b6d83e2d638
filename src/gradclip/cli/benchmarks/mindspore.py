"""MindSpore: beside its own `clip_by_global_norm`, in PyNative mode on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

import gradclip
from gradclip import MaxNorm

from .numpy import normal
from .timing import Row

FAR = 1e9


def rows(elements: int) -> Iterator[Callable[[], Row]]:
    """The rows, each made when its turn comes, so that only one holds memory."""
    yield partial(nothing_to_clip, elements)
    yield small_clipped


def nothing_to_clip(elements: int) -> Row:
    name = f"2^{elements.bit_length() - 1} float32, nothing to clip"
    return against(name, (Tensor(normal(elements)),), FAR, at_least=50)


def small_clipped() -> Row:
    sizes = [(64, 64), (64,)] * 50
    grads = tuple(Tensor(normal(int(np.prod(size))).reshape(size)) for size in sizes)
    return against("100 small float32, clipped", grads, 1.0)


def against(name: str, grads: tuple[Tensor, ...], limit: float, at_least: float | None = None) -> Row:
    """Both to the end: MindSpore returns before its kernels do."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return Row(
        name,
        "mindspore.ops.clip_by_global_norm",
        lambda: finished(gradclip.clip(grads, MaxNorm(limit)).grads),
        lambda: finished(ops.clip_by_global_norm(grads, limit)),
        at_least=at_least,
    )


def finished(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients, once they are there."""
    for grad in grads:
        grad.data_ptr()
    return grads
