"""Stand-ins for numbers that a graph has not computed yet; what is done to them is written down."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ...backends import mindspore as backend
from ._program import Apply, Cast, Constant, Function, Program, Stack

WHOLE = (ms.int32, ms.int64)
Maker = Callable[[tuple[int, ...]], nn.Cell]


class UntraceableError(TypeError):
    """A rule or schedule did what cannot be written down."""


def smaller(x: Any, y: Any) -> Any:
    """min(x, y), NaN kept."""
    return ops.where(x < y, x, ops.where(x != x, x, y))


def larger(x: Any, y: Any) -> Any:
    """max(x, y), NaN kept."""
    return ops.where(x > y, x, ops.where(x != x, x, y))


def raised_to(x: Any, exponent: Any) -> Any:
    """x ** exponent; `operator.pow` is not among the functions that the compiler knows."""
    return x**exponent


FUNCTIONS: dict[Any, Function] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.remainder: operator.mod,
    np.floor_divide: operator.floordiv,
    np.power: raised_to,
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
    """Stands for a number, or several: every operation on it is written down and gives another.

    `example` has its type and rank, `operands` and `make` say how it comes about. Operators and NumPy's elementwise functions
    work; a look at the value does not.
    """

    def __init__(self, tape: Tape, example: Tensor, operands: tuple[Value, ...] = (), make: Maker | None = None) -> None:
        self.tape = tape
        self.example = example
        self.operands = operands
        self.make = make

    @property
    def shape(self) -> tuple[int, ...]:
        """The example's shape: () where there is one number."""
        return tuple(self.example.shape)

    @property
    def dtype(self) -> Any:
        """The example's type."""
        return self.example.dtype

    def __array_ufunc__(self, function: Any, method: str, *operands: Any, **options: Any) -> Value:
        if method != "__call__":
            raise UntraceableError(f"numpy.{function.__name__}.{method} has no counterpart there")
        return self.tape.numpy(function, operands, options)

    def __array_function__(self, function: Any, types: Any, operands: Any, options: Any) -> Value:
        return self.tape.numpy(function, operands, options)

    def __getitem__(self, at: Any) -> Value:
        return self.tape.take(self, at)

    def __iter__(self) -> Any:
        raise UntraceableError("the entries of a norm cannot be listed there")

    def _look(self, *_: Any) -> Any:
        raise UntraceableError(
            "its value is looked at (an if, min, max, float, int or math function), and a graph has none yet"
        )

    __bool__ = __float__ = __int__ = __index__ = __array__ = _look


class Tape:
    """What was done, in order. It has the names that a rule may use (`Ops`) and those that a step asks of a backend."""

    def __init__(self, type_of_others: Any) -> None:
        self.type_of_others = type_of_others
        self.bounds: tuple[Any, Any] = (0.0, 0.0)
        self.go: Any = True
        self.inputs: list[Value] = []
        self.held: dict[int, tuple[Parameter, Value]] = {}
        self.steps: list[Value] = []

    def input(self, example: Tensor) -> Value:
        """A stand-in for what the program will be given."""
        self.inputs.append(Value(self, example))
        return self.inputs[-1]

    def apply(self, function: Function, *operands: Any) -> Value:
        """Writes down the call."""
        values = tuple(map(self._value, operands))
        example = function(*(x.example if isinstance(x, Value) else x for x in operands))
        return self._written(example, values, partial(Apply, function))

    def numpy(self, function: Any, operands: Sequence[Any], options: Any) -> Value:
        """Writes down what stands for NumPy's function."""
        known = FUNCTIONS.get(function) or OF_FLOATS.get(function)
        if known is None or options:
            raise UntraceableError(f"numpy.{function.__name__} has no counterpart there")
        if function in OF_FLOATS or any(map(_is_float, operands)):
            operands = [self._floating(x) for x in operands]
        return self.apply(known, *operands)

    def program(self, outputs: Sequence[Any]) -> Program:
        """A cell that does it all again, and gives these results."""
        results = [self._value(x) for x in outputs]
        parameters, stand_ins = zip(*self.held.values(), strict=True) if self.held else ((), ())
        place = {id(value): i for i, value in enumerate([*self.inputs, *stand_ins, *self.steps])}
        steps = [value.make(tuple(place[id(x)] for x in value.operands)) for value in self.steps if value.make]
        return Program(steps, tuple(place[id(x)] for x in results), parameters)

    def cast(self, x: Value, dtype: Any) -> Value:
        """The value in another type."""
        return self._written(x.example.astype(dtype), (x,), partial(Cast, dtype))

    def _floating(self, x: Any) -> Any:
        """The number in the type of norms where it is a whole one."""
        if not isinstance(x, Value):
            return x if isinstance(x, bool | np.bool_) else float(x)
        return self.cast(x, backend.norm_type()) if x.example.dtype in WHOLE else x

    def _value(self, x: Any) -> Value:
        if isinstance(x, Value):
            return x
        constant = x.item() if isinstance(x, np.ndarray | np.generic) else x
        example = Tensor(constant)
        return self._written(example, (), partial(Constant, example if isinstance(constant, bool) else constant))

    def _written(self, example: Tensor, operands: tuple[Value, ...], make: Maker) -> Value:
        self.steps.append(Value(self, example, operands, make))
        return self.steps[-1]

    # What rules may use.

    def where(self, condition: Any, yes: Any, no: Any) -> Value:
        return self.apply(backend.where, condition, yes, no)

    def abs(self, x: Any) -> Value:
        return self.apply(backend.abs, x)

    def floor(self, x: Any) -> Value:
        return self.numpy(np.floor, [x], {})

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

    def take(self, x: Any, place: Any) -> Value:
        return self.apply(backend.take, x, place)

    def stack(self, xs: Sequence[Any]) -> Value:
        values = tuple(map(self._value, xs))
        return self._written(ops.stack([x.example for x in values]), values, partial(Stack, None))

    def scalar(self, value: Any) -> Any:
        if isinstance(value, Parameter):
            return self.held.setdefault(id(value), (value, Value(self, Tensor(value.asnumpy()))))[1]
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
        return self.cast(norm, self.type_of_others)

    def widened(self, coef: Any, norm: Value) -> Any:
        return self.cast(coef, norm.example.dtype)

    def scale(self, xs: list[Any], coefs: Sequence[Any]) -> list[Any]:
        return xs

    def clamp(self, xs: list[Any], low: Any, high: Any, peaks: Any) -> tuple[list[Any], bool]:
        self.bounds = low, high
        return xs, False

    def zero(self, xs: list[Any]) -> list[Any]:
        return xs

    def keep(self, xs: list[Any], go: Any) -> list[Any]:
        self.go = go
        return xs


def _is_float(x: Any) -> bool:
    if isinstance(x, Value):
        return x.example.dtype not in (*WHOLE, ms.bool_)
    return isinstance(x, float | np.floating)
