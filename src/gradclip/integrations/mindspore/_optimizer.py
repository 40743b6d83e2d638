"""An optimizer that clips."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn, ops

from ...rule import Rule
from ._clip import Clip


def clipped(
    optimizer: nn.Optimizer,
    rule: Rule,
    *,
    scope: str | None = None,
    p: float = 2,
    nonfinite: str = "keep",
) -> nn.Optimizer:
    """An optimizer that clips its gradients and then steps as `optimizer` does, for `Model(network, loss_fn, optimizer)`.

    `.clip` has the Parameters of `ClipGradients`, for any callback to read, in a sunk epoch too; everything else is the given
    optimizer's. One that was built with `loss_scale=` unscales by itself: the rule sees the gradients unscaled all the same.
    Weight decay is added after clipping. Under nonfinite="skip" a step whose gradients are not finite is left out.
    """
    if not isinstance(optimizer, nn.Optimizer):
        raise TypeError(
            f"optimizer must be a mindspore.nn.Optimizer, and is a {type(optimizer).__name__}: "
            "in a loop of one's own, clip the gradients with ClipGradients"
        )
    return Clipped(optimizer, Clip(rule, scope, p, nonfinite, optimizer.loss_scale, optimizer.parameters))


class Clipped(nn.Optimizer):
    """An optimizer around another, which keeps the state and makes the step."""

    def __init__(self, inner: nn.Optimizer, clip: Clip) -> None:
        nn.Cell.__init__(self, auto_prefix=False)  # an optimizer's own state would be a second learning rate and step
        self.inner = inner
        self.clip = clip
        self.enable_tuple_broaden = True

    def construct(self, gradients: tuple[Tensor, ...]) -> Tensor:
        gradients, skipped = self.clip.clip(gradients)
        stepped = ops.logical_not(skipped)
        if not self.clip.skips or stepped:
            stepped = ops.depend(stepped, self.inner(gradients))
        return stepped

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Cell.__getattr__(self, name)
        except AttributeError:
            return getattr(nn.Cell.__getattr__(self, "inner"), name)
