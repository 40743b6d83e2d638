"""The cells that a training script names."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import Parameter

from ...rules import Rule
from ._clip import Clip
from ._measure import Grads


class ClipGradients(Clip):
    """x"""

    def __init__(
        self,
        rule: Rule,
        *,
        scope: str | None = None,
        p: float = 2,
        nonfinite: str = "keep",
        loss_scale: float = 1.0,
        parameters: Sequence[Parameter] | None = None,
    ) -> None:
        Clip.__init__(self, rule, scope, p, nonfinite, loss_scale, parameters)

    @ms.jit
    def construct(self, grads: Grads) -> Grads:
        return self.clip(grads)[0]
