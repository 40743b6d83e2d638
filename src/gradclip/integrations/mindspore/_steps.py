"""One training step as a cell: MindSpore's own two, with a clip between the gradients and the optimizer."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from ...rule import Rule
from ._clip import Clip, positive
from ._measure import overflow_of, unscaled


class ScaledLoss(nn.Cell):
    """(scale, *inputs) → (loss · scale, loss): one run of the network for the gradients and for the loss."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, scale: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
        loss = self.network(*inputs)
        return loss * ops.cast(scale, loss.dtype), loss


class TrainOneStepCell(nn.TrainOneStepCell):
    """`mindspore.nn.TrainOneStepCell` that clips, once the gradients have been reduced over all devices.

    Returns the loss, as the stock cell does; for the rest read `.clip`: `norm`, `coef`, `clipped`, `counts` and the others of
    `ClipGradients`. `sens` scales the loss: the rule sees the gradients without it, the optimizer with it, as it expects them.
    Under nonfinite="skip" the optimizer does not run in a step whose gradients are not finite.

    For a loop of one's own, and for `Model(step)`; not `Model(step, optimizer=…)`, which would step twice.
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: nn.Cell,
        rule: Rule,
        *,
        scope: str | None = None,
        p: float = 2,
        nonfinite: str = "keep",
        sens: float = 1.0,
    ) -> None:
        nn.TrainOneStepCell.__init__(self, network, optimizer, positive("sens", sens))
        self.clip = Clip(rule, scope, p, nonfinite, sens, optimizer.parameters)
        self.scale = Tensor(sens, ms.float32)
        self.forward = ops.value_and_grad(ScaledLoss(network), None, weights=self.weights, has_aux=True)

    def construct(self, *inputs: Any) -> Tensor:
        (_, loss), grads = self.forward(self.scale, *inputs)
        grads = self.grad_reducer(grads)
        grads, skipped = self.clip.clip(grads)
        if not self.clip.skips or not skipped:
            loss = ops.depend(loss, self.optimizer(grads))
        return loss


class TrainOneStepWithLossScaleCell(nn.TrainOneStepWithLossScaleCell):
    """`mindspore.nn.TrainOneStepWithLossScaleCell` that clips the gradients once they have been reduced and unscaled.

    Returns (loss, overflow, loss scale), as the stock cell does. A step that overflows is left out: neither the optimizer runs
    nor the rule, and `.clip` (as in `TrainOneStepCell`) tells of the last step that was taken. Runs on the CPU too, where the
    stock cell has no kernel for the check.
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: nn.Cell,
        scale_sense: nn.Cell | Tensor,
        rule: Rule,
        *,
        scope: str | None = None,
        p: float = 2,
        nonfinite: str = "keep",
    ) -> None:
        nn.TrainOneStepWithLossScaleCell.__init__(self, network, optimizer, scale_sense)
        self.clip = Clip(rule, scope, p, nonfinite, 1.0, optimizer.parameters)
        self.on_cpu = ms.get_context("device_target") == "CPU"
        self.forward = ops.value_and_grad(ScaledLoss(network), None, weights=self.weights, has_aux=True)

    def construct(self, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        scale = self.scale_sense.value()
        status = Tensor([0] * 8, ms.int32)
        (_, loss), grads = self.forward(scale, *inputs)
        grads = self.hyper_map(ops.partial(unscaled, scale), grads)
        grads = self.grad_reducer(grads)
        overflow = self.overflow(status, grads)
        if not self.process_loss_scale(overflow):
            grads, _ = self.clip.clip(grads)
            loss = ops.depend(loss, self.optimizer(grads))
        return loss, overflow, scale

    def overflow(self, status: Tensor, grads: tuple[Tensor, ...]) -> Tensor:
        """Has a gradient left the range? The check has no kernel on the CPU."""
        if self.on_cpu:
            return ops.stack(self.hyper_map(overflow_of, grads)).any()
        return self.get_overflow_status(status, grads)
