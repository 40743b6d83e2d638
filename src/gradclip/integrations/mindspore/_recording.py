"""A rule, written down once as the few operations that it is made of, for a graph to repeat.

MindSpore's compiler reads the text of functions and follows little of Python. So a rule is not given to it: the rule runs once,
in Python, with stand-ins for the norm and its state, by the same `traced.clipped` as in every other framework. What is done to
them becomes a `Program`, a cell with no Python in it. A rule that looks at a value cannot be written down, and is told so.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from mindspore import Tensor

from ... import traced
from ...backends import Backend, Gradients, mindspore as backend
from ...call import Call
from ...layout import Layout
from ...rule import Measured, Rule, State
from ...step import Step, Writer
from ._program import Program
from ._tape import Tape, UntraceableError


def recorded(call: Call, zero: Any, state: State, working: Any) -> Program:
    """(norm, …, *state, *held) → (limit, finite, changed, skipped, go, low, high, *state).

    low: the coefficient, where there is one; go: not to be zeroed. `zero` is shaped like the norm. Between the norm and the
    state stand the norm of the weights and the size, where the rule asks for them. `working` is the type that another
    framework would compute its coefficient in.
    """
    tape, rule = Tape(working), call.rule
    norm, weights, size = (tape.input(Tensor(zero, backend.norm_type())) if asked else None for asked in asks(call))
    before = tuple(tape.input(backend.number(x)) for x in state)
    opened = Gradients(cast(Backend, tape), [], [], [], False, tuple, list)
    layout = Layout(opened, [], one=not np.ndim(zero))
    writer = Writer(tape.scale, tape.clamp, tape.zero, tape.keep)
    step = Step(layout, call, Measured(norm, weights, size), before, writer, tape)
    try:
        found = traced.clipped(step)
    except UntraceableError as error:
        raise TypeError(untraceable(rule, error)) from None
    low, high = tape.bounds if found.coef is None else (found.coef, found.coef)
    return tape.program([found.limit, found.finite, found.clipped, found.skipped, tape.go, low, high, *found.state])


def asks(call: Call) -> tuple[bool, bool, bool]:
    """Which a rule asks for: the norm, always; that of the weights; the number of elements."""
    return True, call.rule.needs_weights, call.rule.needs_size or call.rule.formula(call.scope) is not None


def untraceable(rule: Rule, error: UntraceableError) -> str:
    """What to do about a rule that cannot be written down."""
    return (
        f"{rule!r} cannot be put into a graph: {error}. Compute with operators, the names of ops, numpy.where and NumPy's "
        "elementwise functions; or clip outside of the graph with gradclip.Clipper, in PyNative mode"
    )
