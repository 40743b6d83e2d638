"""`clip` as a cell, the same for a graph and for PyNative mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, cast

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ...backends import Backend, Gradients, mindspore as backend
from ...backends.mindspore import largest, number
from ...call import Call, resolve
from ...clipper import Counts
from ...layout import Layout, Unit, layout_of
from ...rule import Rule, State
from ._measure import LOW, Clamp, Each, Grads, Grouped, Measure, Scale, Units, Whole, kept_where
from ._recording import asks, recorded

GO, STATE = 4, 7  # where they, too, stand in what was recorded


class Clip(nn.Cell):
    """(g, …) → ((g · coef, …), skipped), and what came of it in Parameters; see `ClipGradients`."""

    def __init__(
        self,
        rule: Rule,
        scope: str | Unit | None,
        p: float,
        nonfinite: str,
        loss_scale: float,
        parameters: Sequence[Parameter] | None,
    ) -> None:
        super().__init__(auto_prefix=False)
        call = resolve(rule, scope, p, nonfinite)
        layout = None if parameters is None else laid_out(call, list(parameters))
        zero = zero_for(call) if layout is None else layout.zero()
        state = rule.init(zero)
        self.norms = norms_of(call, layout)
        self.measure = Measure(self.norms, math.inf if call.scope == "element" else call.p)
        self.change = Clamp(self.norms) if call.scope == "element" else Scale(self.norms)
        self.decide = recorded(call, zero, state, working_type(parameters))
        self.map = ops.Map()
        self.skips = nonfinite == "skip" or rule.can_skip
        self.stops = self.skips or nonfinite == "zero"
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
            new = self.map(ops.partial(kept_where, results[GO]), new)
        self.remember(norm, ops.logical_or(changed, results[2]), results)
        return new, results[3]

    def inputs(self, grads: Grads, norm: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the rule is given: the norm, what else it asks for, its state."""
        values: tuple[Tensor, ...] = (norm,)
        if self.needs_weights:
            values += (self.measure(weights),)
        if self.needs_size:
            values += (self.norms.sizes(grads),)
        for parameter in self.state:
            values += (parameter.value(),)
        return values

    def remember(self, norm: Tensor, changed: Tensor, results: tuple[Tensor, ...]) -> None:
        """Into the Parameters: the largest norm and limit, the smallest coefficient, the flags, the counts, the state."""
        limit, finite, _, skipped, _, low = results[: LOW + 1]
        ops.assign(self.norm, largest(norm))
        ops.assign(self.limit, largest(limit))
        ops.assign(self.coef, self.change.coefficient(low))
        ops.assign(self.clipped, changed)
        ops.assign(self.finite, finite)
        ops.assign(self.skipped, skipped)
        taken = ops.logical_and(changed, ops.logical_not(skipped))
        flags = ops.stack([ops.ones_like(finite), taken, skipped, ops.logical_not(finite)])
        ops.assign_add(self.counts, ops.cast(flags, ms.int32))
        for i, parameter in enumerate(self.state):
            ops.assign(parameter, ops.cast(results[STATE + i], parameter.dtype))


def laid_out(call: Call, parameters: list[Parameter]) -> Layout:
    """Which of the parameters' gradients share a norm; a pattern of `Groups` is one of parameters' names."""
    opened = Gradients(
        cast(Backend, backend), parameters, parameters, parameters, False, list, lambda: [x.name for x in parameters]
    )
    return layout_of(opened, call.scope, call.unit, call.rule)


def zero_for(call: Call) -> Any:
    """What a rule's first state is made of, shaped like the norm, of gradients that nothing is known of."""
    rule, name = call.rule, type(call.rule).__name__
    if call.scope == "unit" or rule.grouped:
        raise ValueError(
            f"{name} in this scope has to know the gradients' names and shapes: pass parameters=optimizer.parameters"
        )
    if call.scope != "tensor":
        return np.float64(0.0)
    if shapes(rule.init(np.zeros(2))) != shapes(rule.init(np.zeros(3))):
        raise ValueError(f"{name} remembers each tensor's norm: pass parameters=optimizer.parameters")
    return np.zeros(2)


def norms_of(call: Call, layout: Layout | None) -> nn.Cell:
    """The cell that measures what the scope and the rule ask for."""
    if layout is not None and layout.axes is not None:
        return Units(layout)
    if layout is not None and layout.places is not None:
        return Grouped(layout)
    return Each() if call.scope == "tensor" else Whole()


def shapes(state: State) -> list[tuple[int, ...]]:
    """The shape of every entry."""
    return [np.shape(x) for x in state]


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
