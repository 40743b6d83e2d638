"""Gradient clipping under `mindspore.train.Model`: a step that clips, or an optimizer that does.

    python examples/mindspore_model.py

The features are large, so that the gradients are: without clipping every step overshoots by more than the one before.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Callback, Model

from gradclip import MaxNorm
from gradclip.integrations.mindspore import TrainOneStepCell, clipped

STEPS = 100


def data() -> Any:
    """Inputs of ten times the usual size, and what a linear layer makes of them, in batches of 32."""
    draw = np.random.default_rng(0)
    x = 10 * draw.standard_normal((32 * STEPS, 8))
    y = x @ draw.standard_normal((8, 1))
    return NumpySlicesDataset((x.astype(np.float32), y.astype(np.float32)), shuffle=False).batch(32)


def network() -> nn.Cell:
    """A linear layer that knows nothing yet."""
    return nn.Dense(8, 1, weight_init="zeros", bias_init="zeros")


def sgd(net: nn.Cell) -> nn.Optimizer:
    """Plain steps down the gradient."""
    return nn.SGD(net.trainable_params(), learning_rate=0.05)


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_step_end(self, run_context: Any) -> None:
        self.seen.append(float(run_context.original_args().net_outputs))


def trained(model: Model) -> list[float]:
    """The loss of every step."""
    losses = Losses()
    model.train(1, data(), callbacks=[losses], dataset_sink_mode=True)  # which a CPU cannot, and does not, without a word
    return losses.seen


def plain() -> list[float]:
    """Without clipping."""
    net = network()
    return trained(Model(net, nn.MSELoss(), sgd(net)))


def by_optimizer() -> tuple[list[float], nn.Optimizer]:
    """The least change to a script: the optimizer clips."""
    net = network()
    optimizer = clipped(sgd(net), MaxNorm(1.0))
    return trained(Model(net, nn.MSELoss(), optimizer)), optimizer


def by_step() -> tuple[list[float], TrainOneStepCell]:
    """A step of one's own, here each tensor by its own norm; Model gets it alone, for with an optimizer it would step twice."""
    net = network()
    step = TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), sgd(net), MaxNorm(1.0), scope="tensor")
    return trained(Model(step)), step


def described(losses: list[float]) -> str:
    """From where to where, and whether it got lost."""
    lost = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    return f"loss {losses[0]:.0f} → {losses[-1]:.3g}" + ("" if lost is None else f", not finite from step {lost}")


def main() -> None:
    """Trains in every way and prints what came of it."""
    print(f"{'not clipped':24}", described(plain()))
    for name, (losses, owner) in (("an optimizer that clips", by_optimizer()), ("a step that clips", by_step())):
        steps, times = owner.clip.counts.asnumpy().tolist()[:2]
        print(f"{name:24}", described(losses), f"({times} of {steps} clipped, the last norm {float(owner.clip.norm):.3g})")


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE)
    main()
