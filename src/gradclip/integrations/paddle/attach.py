"""`attach`: the optimizer that you have clips from now on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paddle.optimizer import LBFGS, Optimizer

from ...layout import Unit
from ...rule import Rule
from .clip_grad import ClipGrad
from .named import named
from .stepping import groups_of, parameters_of


def attach(
    optimizer: Optimizer,
    rule: Rule,
    *,
    scope: str | Unit | None = None,
    p: float = 2,
    nonfinite: str | None = None,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
) -> Attached:
    """From now on `optimizer.step()` and `minimize()` clip first: one norm over all of the optimizer's parameter groups.

    Args:
        optimizer: any of Paddle's that has no `grad_clip` yet.
        rule, scope, p, nonfinite: as for `ClipGrad`.
        named_parameters: `net.named_parameters()`, for the names; else Paddle's own, `linear_0.w_0`.

    Returns: what was attached: a `ClipGrad` with `.clipper`, `.last`, `.counts`, `.state_dict()` and `.detach()`.

    Raises: ValueError where the optimizer clips already, or never would (LBFGS); TypeError for what is no optimizer.

    >>> import paddle, gradclip
    >>> net = paddle.nn.Linear(2, 2)
    >>> groups = [{"params": [net.weight]}, {"params": [net.bias], "learning_rate": 0.1}]
    >>> optimizer = paddle.optimizer.SGD(0.1, groups)
    >>> attached = attach(optimizer, gradclip.MaxNorm(1.0))
    >>> net(paddle.to_tensor([[2.0, 2.0]])).sum().backward()
    >>> optimizer.step()
    >>> attached.last
    norm 4.24 → 1.0 (×0.236), 2 tensors, clipped
    """
    _check(optimizer)
    return Attached(optimizer, rule, scope, p, nonfinite, named_parameters)


class Attached(ClipGrad):
    """A `ClipGrad` that knows its optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        rule: Rule,
        scope: str | Unit | None,
        p: float,
        nonfinite: str | None,
        named_parameters: Iterable[tuple[str, Any]] | None,
    ) -> None:
        super().__init__(rule, scope, p=p, nonfinite=nonfinite)
        self.optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in named_parameters or []}
        self._set(self)

    def detach(self) -> None:
        """The optimizer is as it was; what the clipper knows stays."""
        if self.optimizer._grad_clip is self:
            self._set(None)

    def _set(self, clip: ClipGrad | None) -> None:
        self.optimizer._grad_clip = clip
        for group in groups_of(self.optimizer):
            group["grad_clip"] = clip

    def _sharing(self, optimizer: Optimizer | None) -> dict[str, Any]:
        return named((self._names.get(id(p), p.name), p) for p in parameters_of(self.optimizer))


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        inner = "; it wraps one: pass its inner optimizer" if hasattr(optimizer, "_inner_opt") else ""
        raise TypeError(f"attach needs a paddle.optimizer.Optimizer; got {type(optimizer).__name__}{inner}")
    if isinstance(optimizer, LBFGS):
        raise ValueError("Paddle's LBFGS never calls its grad_clip: clip in your closure, with gradclip.clip_")
    clips = [optimizer._grad_clip, *(group.get("grad_clip") for group in groups_of(optimizer))]
    if any(clip is not None for clip in clips):
        raise ValueError(
            "this optimizer clips already: make it without grad_clip=, or call .detach() on what attach returned, or replace "
            "its .clipper.rule"
        )
