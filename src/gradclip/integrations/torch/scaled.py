"""Gradients that an optimizer divides by a scale itself: what `GradScaler` hands to a fused optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...call import scope_of
from ...clip import clip_, decide, norm
from ...clipped import Clipped
from ...clipper import Clipper
from ...nonfinite import NonFiniteError

ABSENT = object()
Grads = dict[str, Any]


@dataclass
class Scale:
    """What a fused optimizer's `grad_scale` and `found_inf` were when the step began, and what was written in its place."""

    optimizer: Optimizer
    value: Any
    found_inf: Any
    written: Any = ABSENT

    @classmethod
    def of(cls, optimizer: Optimizer) -> Scale:
        """As `GradScaler`, or the user, has set them."""
        return cls(optimizer, getattr(optimizer, "grad_scale", ABSENT), getattr(optimizer, "found_inf", None))

    @property
    def factor(self) -> Any:
        """What the gradients have been multiplied by; 1 where nothing was said."""
        return 1.0 if self._plain() else self.value

    def overflowed(self) -> bool:
        """Has the scaler found a gradient that is not finite, so that the optimizer will leave this step out?"""
        return self.found_inf is not None and bool(self.found_inf)

    def write(self, value: Any) -> None:
        """The scale for this step."""
        self.optimizer.grad_scale = self.written = value

    def restore(self) -> None:
        """As it was, unless somebody else has written since: after a step that raised, a scaler may have."""
        if self.written is ABSENT or getattr(self.optimizer, "grad_scale", ABSENT) is not self.written:
            return
        if self.value is ABSENT:
            del self.optimizer.grad_scale
        else:
            self.optimizer.grad_scale = self.value

    def clip(self, clipper: Clipper, grads: Grads, weights: Grads | None, fold: bool) -> Clipped:
        """Clips what the gradients are once they are divided by the scale; they hold that when the step is over."""
        if fold and self._foldable(clipper, grads):
            return self._folded(clipper, grads, weights)
        return clipper.by(clip_, grads, weights) if self._plain() else self._unscaled(clipper, grads, weights)

    def _plain(self) -> bool:
        return self.value is ABSENT or self.value is None

    def _foldable(self, clipper: Clipper, grads: Grads) -> bool:
        """Will the optimizer divide, and by what float32 holds, and is there one coefficient for all gradients?"""
        fused = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        wide = any(grad.dtype is torch.float64 for grad in grads.values() if grad is not None)
        one = scope_of(clipper.rule, clipper.scope) == "global" and not clipper.rule.grouped
        return fused and one and not wide and clipper.nonfinite != "zero"

    def _folded(self, clipper: Clipper, grads: Grads, weights: Grads | None) -> Clipped:
        """Nothing is written now: the optimizer divides by scale / coef as it reads the gradients."""
        measured = norm(grads, clipper.p)
        clipped = clipper.by(decide, grads, weights, norm=measured / self.factor)
        coef: Tensor = clipped.coef
        if not coef.is_cpu or float(coef) != 1.0:
            self.write((self.factor / coef).to(torch.float32))
        return clipped

    def _unscaled(self, clipper: Clipper, grads: Grads, weights: Grads | None) -> Clipped:
        """The gradients are divided first, as `GradScaler.unscale_` would have done."""
        dense = [grad for grad in grads.values() if grad is not None]
        factor = torch.as_tensor(self.value, dtype=torch.float32)
        torch._foreach_mul_(dense, factor.double().reciprocal().float())
        try:
            clipped = clipper.by(clip_, grads, weights)
        except NonFiniteError:
            torch._foreach_mul_(dense, factor)
            raise
        self.write(None)
        return clipped
