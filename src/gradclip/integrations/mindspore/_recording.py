"""A rule, written down once as the few operations that it is made of, for a graph to repeat.

MindSpore's compiler reads the text of functions and follows little of Python. So a rule is not given to it: the rule runs once,
in Python, with stand-ins for the norm and its state, by the same `traced.clipped` as in every other framework. What is done to
them becomes a `Program`, a cell with no Python in it. A rule that looks at a value cannot be written down, and is told so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ... import traced
from ...backends import Backend, Gradients
from ...backends import mindspore as backend
from ...call import Call
from ...rules import Measured, Rule, State
from ...step import Step, Writer

Function = Callable[..., Any]


class UntraceableError(TypeError):
    """A rule or schedule looked at a value that a graph has not computed yet."""


def smaller(x: Any, y: Any) -> Any:
    """min(x, y), NaN kept."""
    return ops.where(x < y, x, ops.where(x != x, x, y))


def larger(x: Any, y: Any) -> Any:
    """max(x, y), NaN kept."""
    return ops.where(x > y, x, ops.where(x != x, x, y))


def entry(x: Any, at: Any) -> Any:
    """x[at] along the first axis."""
    return ops.gather(x, ops.cast(at, ms.int32), 0)


def recorded(call: Call, state: State, working: Any) -> Program:
    """(norm, …, *state) → (limit, finite, changed, skipped, low, high, *state); low is the coefficient where there is one.

    Between the norm and the state stand the norm of the weights and the size, where the rule asks for them. `working` is the
    type that another framework would compute its coefficient in.
    """
    tape, rule = Tape(working), call.rule
    zero = Tensor(np.zeros(2 if call.scope == "tensor" else ()), backend.norm_type())
    norm = tape.input(zero)
    weights = tape.input(zero) if rule.needs_weights else None
    size = tape.input(zero) if rule.needs_size or rule.formula(call.scope) else None
    before = tuple(tape.input(Tensor(x)) for x in state)
    opened = Gradients(cast(Backend, tape), [], [], [], False, tuple, list)
    writer = Writer(tape.scale, tape.clamp, tape.zero, tape.keep)
    step = Step(opened, call, Measured(norm, weights, size), before, writer, tape)
    try:
        found = traced.clipped(step)
    except UntraceableError as error:
        raise TypeError(untraceable(rule, error)) from None
    low, high = tape.bounds if found.coef is None else (found.coef, found.coef)
    return tape.program([found.limit, found.finite, found.clipped, found.skipped, low, high, *found.state])


def untraceable(rule: Rule, error: UntraceableError) -> str:
    """What to do about a rule that cannot be written down."""
    return (
        f"{rule!r} cannot be put into a graph: {error}. Compute with operators, the names of ops, numpy.where and NumPy's "
        "elementwise functions; or clip outside of the graph with gradclip.Clipper, in PyNative mode"
    )


FUNCTIONS: dict[Any, Function] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.remainder: operator.mod,
    np.floor_divide: operator.floordiv,
    np.power: operator.pow,
    np.negative: operator.neg,
    np.absolute: ops.abs,
    np.less: operator.lt,
    np.less_equal: operator.le,
    np.greater: operator.gt,
    np.greater_equal: operator.ge,
    np.equal: operator.eq,
    np.not_equal: operator.ne,
    np.bitwise_and: ops.logical_and,
    np.bitwise_or: ops.logical_or,
    np.invert: ops.logical_not,
    np.minimum: smaller,
    np.maximum: larger,
    np.where: backend.where,
}
OF_FLOATS: dict[Any, Function] = {
    np.divide: operator.truediv,
    np.floor: ops.floor,
    np.sqrt: ops.sqrt,
    np.exp: ops.exp,
    np.log: ops.log,
    np.sin: ops.sin,
    np.cos: ops.cos,
    np.tanh: ops.tanh,
}


class Value(np.lib.mixins.NDArrayOperatorsMixin):
    """What stands for a number of the graph: every operation on it is written down, and gives another.

    `example` has its type and rank. Operators and NumPy's elementwise functions work; a look at the value does not.
    """

    def __init__(self, tape: Tape, place: int, example: Tensor) -> None:
        self.tape = tape
        self.place = place
        self.example = example

    @property
    def shape(self) -> tuple[int, ...]:
        """The example's shape: () where there is one number."""
        return tuple(self.example.shape)

    def __array_ufunc__(self, function: Any, method: str, *operands: Any, **options: Any) -> Value:
        if method != "__call__":
            raise UntraceableError(f"numpy.{function.__name__}.{method} has no counterpart there")
        return self.tape.numpy(function, operands, options)

    def __array_function__(self, function: Any, types: Any, operands: Any, options: Any) -> Value:
        return self.tape.numpy(function, operands, options)

    def __getitem__(self, at: Any) -> Value:
        return self.tape.apply(entry, self, at)

    def __iter__(self) -> Any:
        raise UntraceableError("the entries of a norm cannot be listed in a graph")

    def _look(self, *_: Any) -> Any:
        raise UntraceableError(
            "its value is looked at (an if, min, max, float, int or math function), and a graph has none yet"
        )

    __bool__ = __float__ = __int__ = __index__ = __array__ = _look


class Tape:
    """What was done, in order; it has the names that a rule may use (`Ops`) and those that a step asks of a backend."""

    def __init__(self, type_of_others: Any) -> None:
        self.type_of_others = type_of_others
        self.steps: list[nn.Cell] = []
        self.bounds: tuple[Any, Any] = (0.0, 0.0)
        self.inputs = 0

    def input(self, example: Tensor) -> Value:
        """A stand-in for what the program will be given; all inputs come first."""
        self.inputs += 1
        return Value(self, self.inputs - 1, example)

    def apply(self, function: Function, *operands: Any) -> Value:
        """Writes down the call."""
        places = tuple(self._value(x).place for x in operands)
        example = function(*(x.example if isinstance(x, Value) else x for x in operands))
        return self._written(Apply(function, places), example)

    def numpy(self, function: Any, operands: Sequence[Any], options: Any) -> Value:
        """Writes down what stands for NumPy's function."""
        if not options and function in FUNCTIONS:
            return self.apply(FUNCTIONS[function], *operands)
        if not options and function in OF_FLOATS:
            return self.apply(OF_FLOATS[function], *map(self._floating, operands))
        raise UntraceableError(f"numpy.{function.__name__} has no counterpart there")

    def _floating(self, x: Any) -> Any:
        """The number in the type of norms where it is a whole one."""
        if not isinstance(x, Value):
            return float(x)
        return self._cast(x, backend.norm_type()) if x.example.dtype in (ms.int32, ms.int64) else x

    def _cast(self, x: Value, dtype: Any) -> Value:
        return self._written(Cast(x.place, dtype), x.example.astype(dtype))

    def _value(self, x: Any) -> Value:
        if isinstance(x, Value):
            return x
        if isinstance(x, Parameter):
            return self._written(Held(x), Tensor(x.asnumpy()))
        constant = x.item() if isinstance(x, np.ndarray | np.generic) else x
        example = Tensor(constant)
        return self._written(Constant(example if isinstance(constant, bool) else constant), example)

    def _written(self, step: nn.Cell, example: Tensor) -> Value:
        self.steps.append(step)
        return Value(self, self.inputs + len(self.steps) - 1, example)

    def program(self, outputs: Sequence[Any]) -> Program:
        """A cell that does it all again, and gives these results."""
        places = tuple(self._value(x).place for x in outputs)
        return Program(self.steps, places)

    # What rules may use.

    def where(self, condition: Any, yes: Any, no: Any) -> Value:
        return self.apply(backend.where, condition, yes, no)

    def abs(self, x: Any) -> Value:
        return self.apply(backend.abs, x)

    def floor(self, x: Any) -> Value:
        return self.apply(backend.floor, x)

    def isfinite(self, x: Any) -> Value:
        return self.apply(backend.isfinite, x)

    def any(self, x: Any) -> Value:
        return self.apply(backend.any, x)

    def all(self, x: Any) -> Value:
        return self.apply(backend.all, x)

    def choose(self, condition: Any, yes: Function, no: Function) -> Value:
        return self.where(condition, yes(), no())

    def like(self, x: Any, value: Any) -> Value:
        return self.apply(backend.like, x, value)

    def total(self, x: Any) -> Value:
        return self.apply(backend.total, x)

    def sort(self, x: Any) -> Value:
        return self.apply(backend.sort, x)

    def put(self, window: Any, slot: Any, value: Any) -> Value:
        return self.apply(backend.put, window, slot, value)

    def scalar(self, value: Any) -> Any:
        if isinstance(value, Parameter):
            return self._value(value)
        if isinstance(value, Tensor):
            raise TypeError(
                "a graph takes a Tensor for a constant and would not see it change: for a threshold pass a number, or "
                "mindspore.Parameter(value, requires_grad=False), which may change"
            )
        return value

    # What a step asks of its backend, besides the bulk arithmetic, which is the cell's.

    def truth(self, flag: Any) -> None:
        return None

    def field(self, x: Any, xs: Sequence[Any]) -> Any:
        return x

    def unstack(self, x: Any) -> list[Any]:
        return []

    def working(self, xs: Sequence[Any], norm: Value) -> Value:
        return self._cast(norm, self.type_of_others)

    def widened(self, coef: Any, norm: Value) -> Any:
        return self._cast(coef, norm.example.dtype)

    def scale(self, xs: list[Any], coefs: Sequence[Any]) -> list[Any]:
        return xs

    def clamp(self, xs: list[Any], low: Any, high: Any, peaks: Any) -> tuple[list[Any], bool]:
        self.bounds = low, high
        return xs, False

    def zero(self, xs: list[Any]) -> list[Any]:
        return xs

    def keep(self, xs: list[Any], finite: Any) -> list[Any]:
        return xs


class Constant(nn.Cell):
    """A number."""

    def __init__(self, value: Any) -> None:
        super().__init__(auto_prefix=False)
        self.value = value

    def construct(self, values: tuple[Any, ...]) -> Any:
        return self.value


class Held(nn.Cell):
    """A Parameter's value now."""

    def __init__(self, parameter: Parameter) -> None:
        super().__init__(auto_prefix=False)
        self.parameter = parameter

    def construct(self, values: tuple[Any, ...]) -> Any:
        return self.parameter.value()


class Cast(nn.Cell):
    """A value in another type."""

    def __init__(self, place: int, dtype: Any) -> None:
        super().__init__(auto_prefix=False)
        self.place = place
        self.type = dtype

    def construct(self, values: tuple[Any, ...]) -> Any:
        return ops.cast(values[self.place], self.type)


class Apply(nn.Cell):
    """A function of some of the values before."""

    def __init__(self, function: Function, places: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.function = function
        self.places = places
        self.count = len(places)

    def construct(self, values: tuple[Any, ...]) -> Any:
        if self.count == 1:
            return self.function(values[self.places[0]])
        if self.count == 2:
            return self.function(values[self.places[0]], values[self.places[1]])
        return self.function(values[self.places[0]], values[self.places[1]], values[self.places[2]])


class Program(nn.Cell):
    """Steps in order, each of which sees the inputs and the results before it."""

    def __init__(self, steps: Sequence[nn.Cell], outputs: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.steps = nn.CellList(steps, auto_prefix=False)
        self.outputs = outputs

    def construct(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        values = inputs
        for step in self.steps:
            values += (step(values),)
        results: tuple[Any, ...] = ()
        for place in self.outputs:
            results += (values[place],)
        return results
