"""Gradient clipping in a training loop of one's own, by MindSpore's customary codes: 0 by value, 1 by norm, else none.

    python examples/mindspore_loop.py

The features are large, so that the gradients are: without clipping every step overshoots by more than the one before.
"""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from gradclip import MaxNorm
from gradclip.integrations.mindspore import ClipGradients, TrainOneStepCell

CLIP_VALUE = 1.0
STEPS = 100


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs of ten times the usual size, and what a linear layer makes of them."""
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((8, 1))
    inputs = [10 * draw.standard_normal((32, 8)) for _ in range(steps)]
    return [(Tensor(x, ms.float32), Tensor(x @ weight, ms.float32)) for x in inputs]


def network() -> nn.Cell:
    """A linear layer that knows nothing yet."""
    return nn.Dense(8, 1, weight_init="zeros", bias_init="zeros")


def by_hand(clip_type: int) -> list[float]:
    """Gradients, clip, optimizer, each by its own call; the loss of every step."""
    net, loss_fn = network(), nn.MSELoss()
    optimizer = nn.SGD(net.trainable_params(), learning_rate=0.05)
    clip = ClipGradients.from_type(clip_type, CLIP_VALUE)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(net(x), y)

    # optimizer.parameters, since the optimizer may have put them into another order
    gradients = ms.value_and_grad(forward, None, optimizer.parameters)
    losses = []
    for x, y in batches(STEPS):
        loss, grads = gradients(x, y)
        optimizer(clip(grads))
        losses.append(float(loss))
    return losses


def by_cell() -> list[float]:
    """The same in one cell, by the norm of all gradients together."""
    net = network()
    optimizer = nn.SGD(net.trainable_params(), learning_rate=0.05)
    step = TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, MaxNorm(CLIP_VALUE))
    return [float(step(x, y)) for x, y in batches(STEPS)]


def described(losses: list[float]) -> str:
    """From where to where, and whether it got lost."""
    lost = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    return f"loss {losses[0]:.0f} → {losses[-1]:.3g}" + ("" if lost is None else f", not finite from step {lost}")


def main() -> None:
    """Trains in every way and prints what came of it."""
    for name, clip_type in (("not clipped", 2), ("clipped by value", 0), ("clipped by norm", 1)):
        print(f"{name:24}", described(by_hand(clip_type)))
    print(f"{'clipped by global norm':24}", described(by_cell()))


if __name__ == "__main__":
    main()
