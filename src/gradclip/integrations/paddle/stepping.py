"""Whose step is it? Paddle hands an optimizer's gradients over, but not the optimizer."""

from __future__ import annotations

import sys
from typing import Any

from paddle.optimizer import Optimizer

NEAR = 8  # frames between a clip and the optimizer's own; farther out is the caller's business


def stepping() -> Optimizer | None:
    """The optimizer that is taking a step, found on the stack; None where a person calls."""
    frame = sys._getframe(1)
    for _ in range(NEAR):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if "self" in frame.f_code.co_varnames and isinstance(frame.f_locals.get("self"), Optimizer):
            return frame.f_locals["self"]
    return None


def groups_of(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """Its parameter groups; none where it has a plain list of parameters."""
    return [group for group in getattr(optimizer, "_param_groups", None) or [] if isinstance(group, dict)]


def parameters_of(optimizer: Optimizer | None) -> list[Any]:
    """Its parameters, of all groups."""
    groups = groups_of(optimizer)
    if groups:
        return [p for group in groups for p in group["params"]]
    return list(getattr(optimizer, "_parameter_list", None) or [])


def overflowed(optimizer: Optimizer | None) -> bool:
    """Has `GradScaler` found gradients that are not finite? Then the optimizer is going to leave this step out."""
    return optimizer is not None and bool(optimizer._get_auxiliary_var("found_inf"))
