"""PaddlePaddle: `ClipGrad` beside Paddle's own, through the same door, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import paddle
from paddle import Tensor

from gradclip import MaxNorm
from gradclip.integrations.paddle import ClipGrad

from .numpy import normal
from .timing import Row

FAR = 1e9
Pairs = list[tuple[Tensor, Tensor]]


def rows(elements: int) -> Iterator[Callable[[], Row]]:
    """The rows, each made when its turn comes, so that only one holds memory."""
    large = f"2^{elements.bit_length() - 1} float32"
    yield partial(row, large, [elements], "global", paddle.nn.ClipGradByGlobalNorm, 5)
    yield partial(row, large, [elements], "tensor", paddle.nn.ClipGradByNorm, None)
    yield partial(row, large, [elements], "element", paddle.nn.ClipGradByValue, None)
    yield partial(row, "1000 small float32", [4096, 64] * 500, "global", paddle.nn.ClipGradByGlobalNorm, None)


def row(name: str, sizes: list[int], scope: str, theirs: Callable[[float], Any], at_least: float | None) -> Row:
    """Nothing to clip; theirs multiplies by 1 in place, or makes new tensors."""
    own, other = ClipGrad(MaxNorm(FAR), scope), theirs(FAR)
    ours, copies = pairs(sizes), pairs(sizes)
    what = f"{name} by {scope} norm" if scope != "element" else f"{name} by value"
    return Row(f"{what}, nothing to clip", theirs.__name__, lambda: own(ours), lambda: other(copies), at_least=at_least)


def pairs(sizes: list[int]) -> Pairs:
    """Parameters and their gradients, as an optimizer has them."""
    grads = [paddle.to_tensor(normal(size)) for size in sizes]
    return [(paddle.create_parameter([1], "float32"), grad) for grad in grads]
