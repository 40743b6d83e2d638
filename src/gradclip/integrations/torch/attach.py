"""`attach`: an optimizer whose `step()` clips, through torch's public hooks alone."""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ...backends._torch_shares import local
from ...clipped import Clipped
from ...clipper import Clipper, Counts
from ...layout import Unit
from ...nonfinite import NonFiniteError
from ...rule import Rule
from .diagnosis import Report
from .layout import Joined, Layout, spread
from .partial import add_up_
from .scaled import Scale

MARK = "_gradclip"
PATIENCE = 10  # steps without any gradient before it is said


def attach(
    optimizer: Optimizer,
    rule: Rule,
    *,
    scope: str | Unit | None = None,
    p: float = 2,
    nonfinite: str = "raise",
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    layout: Layout | None = None,
    fold: bool = True,
) -> Attached:
    """From now on `optimizer.step()` clips the gradients of the optimizer's parameters before it takes the step.

    Right in any loop: once per step under accumulation, one norm over all parameter groups, after `GradScaler` has unscaled,
    inside a closure after each of its evaluations. A step that the scaler leaves out reaches neither state nor counts.

    Args:
        optimizer: any of torch's, or of your own on `torch.optim.Optimizer`. A copied or unpickled one has lost its hooks.
        rule, scope, p: as for `gradclip.clip`.
        nonfinite: "raise" names the parameters; "skip" leaves parameters and optimizer state as they are; "zero"; "keep".
        named_parameters: `model.named_parameters()`, for the names; else those that the optimizer was made with, else
            param_groups[i].params[j].
        layout: what DTensors do not show of how parameters are spread over processes. Without it plain tensors are each
            process's own business, and DTensors are joined as their placements say; then all processes have to step together.
        fold: a fused optimizer divides gradients by its `grad_scale` as it reads them. With one coefficient for all
            gradients that is used to clip without a pass of its own: at most 1 ulp from the product. False: the exact
            product, written first.

    Returns: what was attached: `.clipper`, `.last`, `.counts`, `.state_dict()`, `.detach()`.

    Raises: ValueError where something is attached already, or for nonfinite="skip" with LBFGS, which evaluates several times
        in a step; TypeError for what is no optimizer with hooks. At the first step ValueError for plain tensors beside
        DTensors without a layout, and for a scope or rule that parts of tensors cannot serve.

    >>> import gradclip
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> attached = attach(optimizer, gradclip.MaxNorm(1.0))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> optimizer.step(); weight.data
    tensor([-0.6000, -0.8000])
    >>> attached.last
    norm 5.0 → 1.0 (×0.2), 1 tensor, clipped
    """
    _check(optimizer, rule, nonfinite)
    return Attached(optimizer, Clipper(rule, scope, p, nonfinite), named_parameters, layout, fold)


def _check(optimizer: Any, rule: Any, nonfinite: str) -> None:
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = "; it wraps one: pass its .optimizer" if isinstance(getattr(optimizer, "optimizer", None), Optimizer) else ""
        raise TypeError(f"attach needs a torch.optim.Optimizer with step hooks; got {type(optimizer).__name__}{inner}")
    if hasattr(optimizer, MARK):
        raise ValueError("this optimizer clips already: call .detach() on what attach returned, or replace its .clipper.rule")
    if (nonfinite == "skip" or getattr(rule, "can_skip", False)) and isinstance(optimizer, LBFGS):
        raise ValueError(
            "a step of LBFGS cannot be left out, since it evaluates its closure several times: use no rule that skips, and "
            'nonfinite="raise", "zero" or "keep"'
        )


class Attached:
    """An optimizer's clipper, and the hooks that call it."""

    def __init__(
        self,
        optimizer: Optimizer,
        clipper: Clipper,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        layout: Layout | None,
        fold: bool,
    ) -> None:
        self.optimizer = optimizer
        self.clipper = clipper
        self.layout = layout
        self._joined: Joined | None = None
        self._given = {id(p): name for name, p in named_parameters or []}
        self._named: dict[str, Tensor] = {}
        self._fold = fold
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._scale: Scale | None = None
        self._barren = 0
        setattr(optimizer, MARK, self)
        self._seen: list[tuple[Any, int]] | None = None
        hooks = map(torch.compiler.disable, (self._before, self._after))  # a compiled step calls them outside of its graph
        before, after = hooks
        self._hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    @property
    def last(self) -> Clipped | None:
        """What the last clip did."""
        return self.clipper.last

    @property
    def counts(self) -> Counts:
        """What came of all clips."""
        return self.clipper.counts

    @property
    def report(self) -> Report | None:
        """How processes fitted together at the last step; None without `Layout(diagnose=True)`."""
        return None if self._joined is None else self._joined.report

    def state_dict(self) -> dict[str, Any]:
        """The clipper's state and counts, for JSON; save it beside the optimizer's."""
        return self.clipper.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Goes on where `state_dict` was made."""
        self.clipper.load_state_dict(saved)

    def detach(self) -> None:
        """The optimizer is as it was; what the clipper knows stays."""
        self._restore()
        for hook in self._hooks:
            hook.remove()
        if getattr(self.optimizer, MARK, None) is self:
            delattr(self.optimizer, MARK)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._seen is not None and self._seen == self._versions():
            return None  # the step of a subclass that calls its base's, or one that raised and is tried again
        self._restore()  # in case the last step raised
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._clip()
            self._seen = self._versions()
            return None
        wrapped = self._clipping(closure)
        return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": wrapped})

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()
        self._seen = None

    def _versions(self) -> list[tuple[Any, int]]:
        """The gradients, hidden ones too, and how often each was written."""
        hidden = dict(self._hidden_by_id())
        found = [hidden.get(id(p), p.grad) for p in self._named.values()]
        return [(id(grad), 0 if grad is None else grad._version) for grad in found]

    def _hidden_by_id(self) -> Iterator[tuple[int, Tensor]]:
        return ((id(p), grad) for p, grad in self._hidden)

    def _clipping(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluated() -> Any:
            self._restore()  # what an earlier evaluation in this step may have left
            loss = closure()
            self._clip()
            return loss

        return evaluated

    def _clip(self) -> None:
        with torch.no_grad():
            self._clip_gradients()

    def _clip_gradients(self) -> None:
        named = self._parameters()
        if self._none(named) and self._joined is None:  # whose gradients others have has to join them
            return
        self._scale = scale = Scale.of(self.optimizer)
        if scale.overflowed():
            return
        clipped = self._clipped(scale, named)
        if (self.clipper.nonfinite == "skip" or self.clipper.rule.can_skip) and bool(clipped.skipped):
            self._hide(named.values())

    def _clipped(self, scale: Scale, named: dict[str, Tensor]) -> Clipped:
        weighed, joined = self.clipper.rule.needs_weights, self._joined
        if joined is None:
            grads = {name: p.grad for name, p in named.items()}
            weights = {name: p.detach() for name, p in named.items()} if weighed else None
            return scale.clip(self.clipper, grads, grads, weights, self._fold)
        add_up_(named.values())
        here = {name: local(p.grad) for name, p in named.items()}
        try:
            return scale.clip(self.clipper, here, joined.opened(here), joined.weights() if weighed else None, self._fold)
        except NonFiniteError as error:
            raise joined.told(error) from None

    def _none(self, named: dict[str, Tensor]) -> bool:
        """Is there no gradient at all? If that was so from the first step on, something is wrong."""
        if any(p.grad is not None for p in named.values()):
            self._barren = -1
            return False
        if self._barren >= 0:
            self._barren += 1
        if self._barren == PATIENCE:
            warnings.warn(_why(list(named.values())), stacklevel=7)
        return True

    def _parameters(self) -> dict[str, Tensor]:
        """The optimizer's parameters by name, each once; looked up anew only when they have changed."""
        params = list(dict.fromkeys(p for group in self.optimizer.param_groups for p in group["params"]))
        known = self._named.values()
        if len(params) != len(known) or not all(map(operator.is_, params, known)):
            self._named = self._uniquely_named()
            self._joined = spread(self._named, self.layout)
            self.clipper.grow(self._joined.weights() if self._joined else {name: p.detach() for name, p in self._named.items()})
        return self._named

    def _uniquely_named(self) -> dict[str, Tensor]:
        """Two models may have the same names: those are told apart by their place."""
        triples = list(self._names())
        times = Counter(name for name, _, _ in triples)
        return {(name if times[name] == 1 else f"{name} ({place})"): p for name, place, p in triples}

    def _names(self) -> Iterator[tuple[str, str, Tensor]]:
        seen: set[int] = set()
        for i, group in enumerate(self.optimizer.param_groups):
            own = group.get("param_names")
            for j, p in enumerate(group["params"]):
                place = f"param_groups[{i}].params[{j}]"
                if id(p) not in seen:
                    yield self._given.get(id(p)) or (own[j] if own else place), place, p
                    seen.add(id(p))

    def _hide(self, params: Iterable[Tensor]) -> None:
        """Optimizers leave parameters without a gradient alone, and their state."""
        self._hidden = [(p, p.grad) for p in params if p.grad is not None]
        for p, _ in self._hidden:
            p.grad = None

    def _unhide(self) -> None:
        for p, grad in self._hidden:
            if p.grad is None:
                p.grad = grad
        self._hidden = []

    def _restore(self) -> None:
        self._unhide()
        if self._scale is not None:
            self._scale.restore()
            self._scale = None


def _why(params: list[Tensor]) -> str:
    if not params:
        reason = "it has no parameters"
    elif not any(p.requires_grad for p in params):
        reason = f"none of its {len(params)} parameters requires one: are they all frozen?"
    else:
        reason = "backward() has not reached them, or zero_grad() ran between it and step(): are they another model's?"
    return (
        f"gradclip is attached to an optimizer that has had no gradient in {PATIENCE} steps, so nothing was clipped: {reason}"
    )
