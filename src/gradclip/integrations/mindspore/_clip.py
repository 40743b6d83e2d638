"""`clip` as a cell, the same for a graph and for PyNative mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ...backends.mindspore import largest, number
from ...call import resolve
from ...clipper import Counts
from ...rule import Rule
from ._measure import Clamp, Grads, Measure, Scale, ScaleEach, kept_where
from ._recording import asks, recorded

KINDS: dict[str, Any] = {"element": Clamp, "tensor": ScaleEach, "global": Scale}


class Clip(nn.Cell):
    """(g, …) → ((g · coef, …), skipped), and what came of it in Parameters; see `ClipGradients`."""

    def __init__(
        self, rule: Rule, scope: str | None, p: float, nonfinite: str, loss_scale: float, parameters: Sequence[Parameter] | None
    ) -> None:
        super().__init__(auto_prefix=False)
        call = resolve(rule, scope, p, nonfinite)
        zero = zero_for(rule, call.scope, parameters)
        state = rule.init(zero)
        self.measure = Measure(call.scope, call.p)
        self.decide = recorded(call, zero, state, working_type(parameters))
        self.change = KINDS[call.scope]()
        self.map = ops.Map()
        self.stops = nonfinite in ("zero", "skip")
        self.skips = nonfinite == "skip"
        self.loss_scale = positive("loss_scale", loss_scale)
        _, self.needs_weights, self.needs_size = asks(call)
        self.state = ParameterTuple([held(f"state{i}", x) for i, x in enumerate(state)])
        self.given = ParameterTuple([*self.decide.held, *weights_of(rule, parameters)])
        self.others = len(self.given)
        self.bounds = len(self.decide.held)
        self.norm = held("norm", 0.0)
        self.limit = held("limit", 0.0)
        self.coef = held("coef", 1.0)
        self.clipped = held("clipped", False)
        self.finite = held("finite", True)
        self.skipped = held("skipped", False)
        self.counts = held("counts", np.zeros(len(Counts._fields), np.int32))
        # Without this the compiler takes a tuple of gradients from Python for a constant, and starts anew at every step.
        self.enable_tuple_broaden = True

    def clip(self, grads: Grads) -> tuple[Grads, Tensor]:
        """The gradients, and whether not to step; what is set from outside is read here, outside of what PyNative compiles."""
        if not isinstance(grads, tuple):
            raise TypeError("gradients must be a tuple, as mindspore.value_and_grad gives them: pass tuple(grads)")
        given: Grads = grads
        for parameter in self.given:
            given += (parameter,)
        new: tuple[Grads, Tensor] = self.compute(given)
        return new

    @ms.jit
    def compute(self, given: Grads) -> tuple[Grads, Tensor]:
        """The same, of gradients, thresholds and weights in one tuple: with two of them PyNative's compiled code goes wrong."""
        count = len(given) - self.others
        grads, thresholds, weights = given[:count], given[count : count + self.bounds], given[count + self.bounds :]
        norm = self.measure(grads) / self.loss_scale
        results = self.decide(self.inputs(grads, norm, weights) + thresholds)
        new, changed = self.change(grads, results, self.loss_scale)
        if self.stops:
            new = self.map(ops.partial(kept_where, results[1]), new)
        self.remember(norm, ops.logical_or(changed, results[2]), results)
        return new, results[3]

    def inputs(self, grads: Grads, norm: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the rule is given: the norm, what else it asks for, its state."""
        values: tuple[Tensor, ...] = (norm,)
        if self.needs_weights:
            values += (self.measure(weights),)
        if self.needs_size:
            values += (self.measure.sizes(grads),)
        for parameter in self.state:
            values += (parameter.value(),)
        return values

    def remember(self, norm: Tensor, changed: Tensor, results: tuple[Tensor, ...]) -> None:
        """Into the Parameters: the largest norm and limit, the smallest coefficient, the flags, the counts, the state."""
        limit, finite, _, skipped, low = results[:5]
        ops.assign(self.norm, largest(norm))
        ops.assign(self.limit, largest(limit))
        ops.assign(self.coef, self.change.coefficient(low))
        ops.assign(self.clipped, changed)
        ops.assign(self.finite, finite)
        ops.assign(self.skipped, skipped)
        flags = ops.stack([ops.ones_like(finite), changed, skipped, ops.logical_not(finite)])
        ops.assign_add(self.counts, ops.cast(flags, ms.int32))
        for i, parameter in enumerate(self.state):
            ops.assign(parameter, ops.cast(results[6 + i], parameter.dtype))


def zero_for(rule: Rule, scope: str, parameters: Sequence[Parameter] | None) -> Any:
    """What a rule's first state is made of, shaped like the norm."""
    if scope != "tensor":
        return 0.0
    if parameters is None and any(np.ndim(x) for x in rule.init(np.zeros(2))):
        raise ValueError(f"{type(rule).__name__} remembers each tensor's norm: pass parameters=optimizer.parameters")
    return np.zeros(2 if parameters is None else len(parameters))


def weights_of(rule: Rule, parameters: Sequence[Parameter] | None) -> list[Parameter]:
    """The parameters whose norm the rule asks for."""
    if not rule.needs_weights:
        return []
    if parameters is None:
        raise ValueError(f"{type(rule).__name__} compares gradients with weights: pass parameters=optimizer.parameters")
    return list(parameters)


def working_type(parameters: Sequence[Parameter] | None) -> Any:
    """What a framework computes in; float32 where the gradients' types are not known."""
    return ms.float64 if ms.float64 in [x.dtype for x in parameters or ()] else ms.float32


def held(name: str, value: Any) -> Parameter:
    """A Parameter that no optimizer trains, for what is to be read between steps."""
    return Parameter(number(value), name=f"gradclip.{name}", requires_grad=False)


def positive(name: str, value: Any) -> float:
    """A loss scale as a float; TypeError or ValueError where it is no number that can be divided by."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number > 0; got {value!r} ({type(value).__name__})")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be a number > 0; got {value!r}")
    return float(value)
