"""`ClipGrad`: what a Paddle optimizer takes as its `grad_clip=`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import paddle
from paddle.jit.sot import psdb
from paddle.nn import ClipGradByNorm
from paddle.nn.clip import ClipGradBase
from paddle.optimizer import Optimizer

from ...clip import clip_
from ...clipped import Clipped
from ...clipper import Clipper, Counts
from ...layout import Unit
from ...rule import Rule
from .graph import clip_in_graph
from .named import Pairs, chosen, named, needs_clip, weights
from .stepping import groups_of, overflowed, parameters_of, stepping


class Ahead(NamedTuple):
    """Parameters whose gradients are clipped already, before Paddle has come to their group."""

    optimizer: Optimizer | None = None
    parameters: frozenset[int] = frozenset()
    skipped: bool = False


class ClipGrad(ClipGradByNorm):  # type: ignore[misc]  # of this kind since hapi's AMP level O2 refuses any other
    """Clips the gradients of an optimizer, in place, before it takes its step: `SGD(…, grad_clip=ClipGrad(MaxNorm(1.0)))`.

    Works in dynamic graph, in static graph, under `paddle.jit.to_static` and in `paddle.Model.fit`; sees gradients after
    `GradScaler` has unscaled them. Parameters with `need_clip=False` are left out of the norm and stay as they are. Sparse
    gradients (`Embedding(sparse=True)`) are clipped with their repeated rows merged. One `ClipGrad` serves one optimizer.

    Args:
        rule, scope, p: as for `gradclip.clip`.
        parameters: `net.parameters()`, or `net.named_parameters()` for the names. With them the norm is one over all of the
            optimizer's parameter groups, each of which Paddle clips by itself.
        nonfinite: "raise" names the parameters; "skip" hands back no gradients, so that parameters and optimizer state stay
            as they are; "zero"; "keep". None: "raise", and in a static graph, where no value can be looked at, "keep". A step
            that `GradScaler` is going to leave out reaches neither state nor counts.

    Raises, before anything is changed: NonFiniteError; ValueError where the optimizer has several groups and `parameters` is
    not given or lacks one of its parameters, or for a step that a static graph cannot leave out.
    Source: paddle.nn.ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue.

    >>> import gradclip
    >>> net = paddle.nn.Linear(2, 1, bias_attr=False)
    >>> clip = ClipGrad(gradclip.MaxNorm(1.0))
    >>> optimizer = paddle.optimizer.SGD(0.1, net.parameters(), grad_clip=clip)
    >>> net(paddle.to_tensor([[3.0, 4.0]])).backward()
    >>> optimizer.step()
    >>> clip.last
    norm 5.0 → 1.0 (×0.2), 1 tensor, clipped
    """

    def __init__(
        self,
        rule: Rule,
        scope: str | Unit | None = None,
        parameters: Iterable[Any] | None = None,
        *,
        p: float = 2,
        nonfinite: str | None = None,
    ) -> None:
        ClipGradBase.__init__(self)
        self.clipper = Clipper(rule, scope, p, nonfinite or "raise")
        self._policy = nonfinite or "keep"  # in a static graph
        self._fetched: Clipped | None = None
        self._parameters = None if parameters is None else named(parameters)
        self._ahead = Ahead()

    def __str__(self) -> str:
        return f"ClipGrad({self.clipper.rule!r})"

    @property
    def last(self) -> Clipped | None:
        """What the last clip did; of a static graph, values to fetch: `fetch_list=[loss, clip.last.norm]`."""
        return self._fetched or self.clipper.last

    @property
    def counts(self) -> Counts:
        """What came of all clips in dynamic graph."""
        return self.clipper.counts

    def state_dict(self) -> dict[str, Any]:
        """The clipper's state and counts, for JSON; save it beside the optimizer's. A static program saves its own."""
        return self.clipper.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Goes on where `state_dict` was made."""
        self.clipper.load_state_dict(saved)

    def _dygraph_clip(self, params_grads: Pairs) -> Pairs:
        psdb.fallback(recursive=True)  # to_static's symbolic mode runs this, which must have no `with`, and all it calls as is
        optimizer = stepping()
        if overflowed(optimizer):
            return params_grads
        return [] if self._skipped(optimizer, params_grads) else params_grads

    def _pir_clip(self, params_grads: Pairs) -> Pairs:
        pairs, self._fetched = clip_in_graph(self.clipper, self._policy, params_grads)
        return pairs

    def _static_clip(self, params_grads: Pairs) -> Pairs:
        raise NotImplementedError("ClipGrad needs Paddle's new static graph: FLAGS_enable_pir_api=1, the default")

    def _sharing(self, optimizer: Optimizer | None) -> dict[str, Any] | None:
        """The parameters that share a norm, by name; None: those that Paddle passes."""
        return self._parameters

    def _skipped(self, optimizer: Optimizer | None, pairs: Pairs) -> bool:
        with paddle.no_grad():
            return self._clip_group(optimizer, pairs)

    def _clip_group(self, optimizer: Optimizer | None, pairs: Pairs) -> bool:
        """Clips what Paddle passes, and with its first group all the others. Is the step to be left out?"""
        sharing = self._sharing(optimizer)
        if sharing is None:
            _refuse_groups(optimizer, self)
            return self._clip(pairs, {})
        given, ahead = frozenset(id(p) for p, _ in pairs), self._ahead
        if optimizer is not ahead.optimizer or not given <= ahead.parameters:
            ahead = self._clip_all(optimizer, sharing, pairs)
        self._ahead = ahead._replace(parameters=ahead.parameters - given)
        return ahead.skipped

    def _clip_all(self, optimizer: Optimizer | None, sharing: dict[str, Any], pairs: Pairs) -> Ahead:
        names = {id(p): name for name, p in sharing.items()}
        _refuse_strangers([p for p, _ in pairs] + parameters_of(optimizer), names)
        given = {id(p) for p, _ in pairs}
        others = [(p, p.grad) for p in sharing.values() if id(p) not in given and not p.stop_gradient]
        everything = pairs + [(p, grad) for p, grad in others if grad is not None]
        return Ahead(optimizer, frozenset(id(p) for p, _ in everything), self._clip(everything, names))

    def _clip(self, pairs: Pairs, names: dict[int, str]) -> bool:
        to_clip = chosen(pairs, names)
        if not to_clip:
            return False
        grads = {name: grad for name, (_, grad) in to_clip.items()}
        clipped = self.clipper.by(clip_, grads, weights(to_clip) if self.clipper.rule.needs_weights else None)
        return bool(clipped.skipped)


def _refuse_groups(optimizer: Optimizer | None, clip: ClipGrad) -> None:
    """ValueError where one norm is asked for and Paddle would have one for each group."""
    count = sum(group.get("grad_clip") is clip for group in groups_of(optimizer))
    if count > 1:
        raise ValueError(
            f"the optimizer has {count} parameter groups, and Paddle clips each by itself. For one norm over all of them use "
            "gradclip.integrations.paddle.attach(optimizer, rule), or ClipGrad(rule, parameters=net.parameters()); for a "
            "norm of each give every group a ClipGrad of its own, {'params': …, 'grad_clip': ClipGrad(rule)}"
        )


def _refuse_strangers(parameters: list[Any], names: dict[int, str]) -> None:
    """ValueError for a parameter that the optimizer has and `parameters=` has not."""
    strangers = [p.name for p in parameters if id(p) not in names and needs_clip(p) and not p.stop_gradient]
    if strangers:
        raise ValueError(
            f"the optimizer has parameters that parameters= has not, {', '.join(dict.fromkeys(strangers))}: pass them all, or "
            "use gradclip.integrations.paddle.attach(optimizer, rule)"
        )
