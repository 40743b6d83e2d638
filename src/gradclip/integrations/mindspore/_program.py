"""A few operations, one after another, as a cell that MindSpore's compiler can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Parameter, Tensor, nn, ops

Values = tuple[Any, ...]
Function = Callable[..., Any]


class Constant(nn.Cell):
    """A number."""

    def __init__(self, value: Any, places: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.value = value

    def construct(self, values: Values) -> Any:
        return self.value


class Cast(nn.Cell):
    """A value in another type."""

    def __init__(self, dtype: Any, places: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.dtype = dtype
        self.place = places[0]

    def construct(self, values: Values) -> Any:
        return ops.cast(values[self.place], self.dtype)


class Apply(nn.Cell):
    """A function of some of the values before."""

    def __init__(self, function: Function, places: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.function = function
        self.places = places
        self.count = len(places)

    def construct(self, values: Values) -> Any:
        if self.count == 1:
            return self.function(values[self.places[0]])
        if self.count == 2:
            return self.function(values[self.places[0]], values[self.places[1]])
        return self.function(values[self.places[0]], values[self.places[1]], values[self.places[2]])


class Program(nn.Cell):
    """Steps in order, each of which sees the inputs and the results before it.

    The last inputs are the values of `held`: Parameters are read outside, since what PyNative mode has compiled does not see
    `set_data` (MindSpore 2.10, its own optimizers included).
    """

    def __init__(self, steps: Sequence[nn.Cell], outputs: tuple[int, ...], held: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.steps = nn.CellList(steps, auto_prefix=False)
        self.outputs = outputs
        self.held = tuple(held)

    def construct(self, inputs: Values) -> tuple[Tensor, ...]:
        values = inputs
        for step in self.steps:
            values += (step(values),)
        results: Values = ()
        for place in self.outputs:
            results += (values[place],)
        return results
