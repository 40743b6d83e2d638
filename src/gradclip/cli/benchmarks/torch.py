"""PyTorch: the drop-in functions beside torch's own, a fused step with and without a clip, and a plain read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter, utils

import gradclip
from gradclip import MaxNorm
from gradclip.integrations.torch import attach, clip_grad_norm_, clip_grad_value_

from .numpy import shrinking
from .timing import Row, Work

Shapes = list[tuple[int, ...]]
BLOCK = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
GPT2: Shapes = [(50257, 768), (1024, 768), *(BLOCK * 12), (768,), (768,)]
SMALL: Shapes = [(64, 64), (64,)] * 500
LAYERS: Shapes = [(768, 3072)] * 40
FAR = 1e9


class Pair(NamedTuple):
    """The same gradients twice: each side writes its own."""

    ours: list[Tensor]
    theirs: list[Tensor]

    @property
    def norm(self) -> float:
        """The norm of either."""
        return float(gradclip.norm(grads(self.ours)))


def rows(elements: int) -> Iterator[Callable[[], Row]]:
    """The rows, each made when its turn comes, so that only one holds memory."""
    yield partial(by_norm, "GPT-2 float32", GPT2, torch.float32, False, 2.5)
    yield partial(by_norm, "GPT-2 float32", GPT2, torch.float32, True, 1.4)
    yield partial(by_norm, "GPT-2 bfloat16", GPT2, torch.bfloat16, False, 5.0)
    yield partial(by_norm, "GPT-2 float16", GPT2, torch.float16, False, 6.0)
    yield partial(by_norm, "1000 small float32", SMALL, torch.float32, False, 3.5)
    yield small_clip
    yield partial(by_value, False, 2.0)
    yield partial(by_value, True, 1.7)
    yield partial(fused_step, attached_step, "the step alone", 1.35)
    yield partial(fused_step, attached_step, "clip_grad_norm_ and the step", None)
    for dtype, limit in ((torch.float32, 1.3), (torch.bfloat16, 1.25), (torch.float16, 1.25)):
        yield partial(against_dot, elements, dtype, limit)


def parameters(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters of these shapes, each with a gradient."""
    random = torch.Generator().manual_seed(0)
    made = [Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for p in made:
        p.grad = torch.randn(p.shape, generator=random).to(dtype)
    return made


def pair(shapes: Shapes, dtype: torch.dtype = torch.float32) -> Pair:
    return Pair(parameters(shapes, dtype), parameters(shapes, dtype))


def grads(params: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in params]


def limits(norm: float, clipping: bool) -> Iterator[float]:
    """Limits of which each clips what the last one left, or none does."""
    return shrinking(norm) if clipping else iter(lambda: FAR, None)


def by_norm(name: str, shapes: Shapes, dtype: torch.dtype, clipping: bool, at_least: float) -> Row:
    ours, theirs = both = pair(shapes, dtype)
    a, b = limits(both.norm, clipping), limits(both.norm, clipping)
    return Row(
        f"{name} by norm, {_said(clipping)}",
        "torch clip_grad_norm_",
        lambda: clip_grad_norm_(ours, next(a)),
        lambda: utils.clip_grad_norm_(theirs, next(b)),
        at_least=at_least,
    )


def small_clip() -> Row:
    ours, theirs = pair(SMALL)
    tree = grads(ours)
    return Row(
        "1000 small float32 by gradclip.clip, nothing to clip",
        "torch clip_grad_norm_",
        lambda: gradclip.clip(tree, MaxNorm(FAR)),
        lambda: utils.clip_grad_norm_(theirs, FAR),
        at_least=3.0,
    )


def by_value(clipping: bool, at_least: float) -> Row:
    ours, theirs = pair(GPT2)
    a, b = limits(2.0, clipping), limits(2.0, clipping)
    return Row(
        f"GPT-2 float32 by value, {_said(clipping)}",
        "torch clip_grad_value_",
        lambda: clip_grad_value_(ours, next(a)),
        lambda: utils.clip_grad_value_(theirs, next(b)),
        at_least=at_least,
    )


def fused_step(ours: Callable[[Pair], Work], against: str, at_most: float | None) -> Row:
    both = pair(LAYERS)
    theirs = plain_step(both) if at_most else torch_step(both)
    name = "40 layers of 768×3072, fused AdamW step that clips, folded"
    return Row(name, against, ours(both), theirs, at_most=at_most)


def attached_step(both: Pair) -> Work:
    optimizer, limit = torch.optim.AdamW(both.ours, fused=True), shrinking(both.norm)
    attached = attach(optimizer, MaxNorm(next(limit)))

    def step() -> None:
        attached.clipper.rule = MaxNorm(next(limit))
        optimizer.step()

    return step


def plain_step(both: Pair) -> Work:
    optimizer = torch.optim.AdamW(both.theirs, fused=True)
    return lambda: optimizer.step()


def torch_step(both: Pair) -> Work:
    optimizer, limit = torch.optim.AdamW(both.theirs, fused=True), shrinking(both.norm)

    def step() -> None:
        utils.clip_grad_norm_(both.theirs, next(limit))
        optimizer.step()

    return step


def against_dot(elements: int, dtype: torch.dtype, limit: float) -> Row:
    """The yardstick reads the same bytes once."""
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(dtype)
    ones = torch.ones(x.numel() * x.element_size() // 4)
    name = f"2^{elements.bit_length() - 1} {str(dtype).removeprefix('torch.')} measured"
    return Row(name, "torch.dot, the bytes once", lambda: gradclip.norm(x), lambda: torch.dot(ones, ones), at_most=limit)


def _said(clipping: bool) -> str:
    return "clipping" if clipping else "nothing to clip"
