"""Gradients that an optimizer divides by a scale itself: what `GradScaler` hands to a fused optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...call import scope_of
from ...clip import clip_, decide, norm
from ...clipped import Clipped
from ...clipper import Clipper
from ...rules import MaxNorm

ABSENT = object()
FEW, MANY = 1e-37, 1e37  # between them a float32 scale has not lost digits
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
        if not divides(optimizer):
            return cls(optimizer, ABSENT, None)
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

    def clip(self, clipper: Clipper, grads: Grads, given: Any, weights: Any, fold: bool) -> Clipped:
        """Clips what the gradients are once they are divided by the scale; they hold that when the step is over.

        given: the gradients as `clip_` takes them, which may be opened already.
        """
        if fold and self._foldable(clipper, grads):
            return self._folded(clipper, grads, given, weights)
        return clipper.by(clip_, given, weights) if self._plain() else self._unscaled(clipper, grads, given, weights)

    def _plain(self) -> bool:
        return self.value is ABSENT or self.value is None

    def _foldable(self, clipper: Clipper, grads: Grads) -> bool:
        """Will the optimizer divide, and by what float32 holds, and is there one coefficient for all gradients?"""
        wide = any(grad.dtype is torch.float64 for grad in grads.values() if grad is not None)
        one = scope_of(clipper.rule, clipper.scope) == "global" and not clipper.rule.grouped
        return divides(self.optimizer) and one and not wide and clipper.nonfinite != "zero"

    def _folded(self, clipper: Clipper, grads: Grads, given: Any, weights: Any) -> Clipped:
        """Nothing is written now: the optimizer divides by scale / coef as it reads the gradients."""
        measured = norm(given, clipper.p)
        clipped = clipper.by(decide, given, weights, norm=measured / self.factor)
        coef: Tensor = clipped.coef
        if coef.is_cpu and float(coef) == 1.0:
            return clipped
        divisor = self.factor / coef
        if coef.is_cpu and not FEW <= float(divisor) <= MANY and math.isfinite(float(coef)):
            _multiply(grads, 1.0 / divisor)
            divisor = torch.ones_like(divisor)
        self.write(divisor.to(torch.float32))
        return clipped

    def _unscaled(self, clipper: Clipper, grads: Grads, given: Any, weights: Any) -> Clipped:
        """The gradients are divided first, as `GradScaler.unscale_` would have done."""
        if clipper.nonfinite == "raise":
            decide(given, MaxNorm(math.inf))  # which raises before anything is written
        _multiply(grads, 1.0 / self.factor)
        clipped = clipper.by(clip_, given, weights)
        if bool(clipped.skipped):
            _multiply(grads, self.factor)
        else:
            self.write(None)
        return clipped


def divides(optimizer: Optimizer) -> bool:
    """Does its step divide by `grad_scale` itself? torch's own fused ones do; a step of one's own cannot be known to."""
    steps = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    return steps.__module__.startswith("torch.optim") and getattr(optimizer, "_step_supports_amp_scaling", False)


def _multiply(grads: Grads, factor: Any) -> None:
    for grad in grads.values():
        if grad is not None:
            grad.copy_(grad.double() * factor)
