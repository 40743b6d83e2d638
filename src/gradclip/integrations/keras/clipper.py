"""`VariableClipper`: `gradclip.clip` that remembers in Keras variables."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from ...backends import open_gradients
from ...call import resolve
from ...clip import clip, init
from ...clipped import Clipped
from ...clipper import Counts
from ...layout import Unit, layout_of
from ...rule import Rule
from .saving import live, variables

Tensor = Any


class VariableClipper:
    """The rule of an optimizer, its state, and what the last step was, in variables of the optimizer.

    norm, limit, coef: Keras variables, float32, 0-d or one entry for each of `paths` (scope "tensor"), unit or group; coef is
    None in the scope "element". Under JAX they hold what the last `fit` left, or what a callback finds that reads them through
    `self.model.optimizer`.
    """

    norm: keras.Variable
    limit: keras.Variable
    coef: keras.Variable | None = None

    def __init__(self, rule: Rule, scope: str | Unit | None, p: float, nonfinite: str) -> None:
        call = resolve(rule, scope, p, nonfinite)
        self.rule = rule
        self.scope = _last_axis(call.unit) if call.scope == "unit" else call.scope
        self.p = call.p
        self.nonfinite = nonfinite
        self.present: Sequence[Any] = ()  # keys of the variables that the gradients of this step belong to
        self._weights: dict[Any, Any] = {}
        self._paths: dict[Any, str] = {}
        self._state: list[keras.Variable] = []

    @property
    def paths(self) -> list[str]:
        """The variables' paths, in the order of the norms in the scope "tensor"."""
        return list(self._paths.values())

    @property
    def counts(self) -> Counts:
        """How many steps were taken, and what came of them."""
        steps, changed, nonfinite = self._counts.numpy().tolist()
        return Counts(steps, changed, 0, nonfinite)

    def build(self, optimizer: Any, weights: Sequence[Any]) -> None:
        """Variables of the optimizer for the state and for what a step was."""
        self._weights = {optimizer._var_key(weight): weight for weight in weights}
        self._paths = dict(zip(self._weights, _paths(self._weights.values()), strict=True))
        zeros = self._tree({key: np.broadcast_to(np.float32(0), weight.shape) for key, weight in self._weights.items()})
        shape = self._shape(zeros)
        self.norm = _variable(optimizer, "norm", np.zeros(shape, np.float32))
        self.limit = _variable(optimizer, "limit", np.full(shape, np.inf, np.float32))
        if self.scope != "element":
            self.coef = _variable(optimizer, "coef", np.ones(shape, np.float32))
        self._counts = _variable(optimizer, "counts", np.zeros(3, np.int32))
        start = init(zeros, self.rule, self.scope)
        self._state = [_variable(optimizer, f"state_{i}", np.asarray(entry, np.float32)) for i, entry in enumerate(start)]
        for threshold in variables(self.rule):
            optimizer._track_variable(threshold)  # so that what JAX compiles sees it change

    def _shape(self, zeros: Any) -> tuple[int, ...]:
        call = resolve(self.rule, self.scope, self.p, self.nonfinite)
        return layout_of(open_gradients(zeros), call.scope, call.unit, self.rule).shape()

    def _tree(self, tensors: dict[Any, Tensor]) -> dict[str, Tensor]:
        """Tensors by their path, in the order of the variables, which JAX would change in a plain dict."""
        return OrderedDict((path, tensors.get(key)) for key, path in self._paths.items())

    def __call__(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the variables that are present, clipped."""
        done = clip(
            self._tree(dict(zip(self.present, map(self._whole, grads), strict=True))),
            live(self.rule),
            scope=self.scope,
            p=self.p,
            weights=self._weights_now() if self.rule.needs_weights else None,
            state=tuple(map(keras.ops.convert_to_tensor, self._state)),
            nonfinite=self.nonfinite,
        )
        self._keep(done)
        return [done.grads[self._paths[key]] for key in self.present]

    def _weights_now(self) -> dict[str, Tensor]:
        return self._tree({key: keras.ops.stop_gradient(weight) for key, weight in self._weights.items()})

    def _whole(self, grad: Tensor) -> Tensor:
        """A sparse gradient as a dense one, where its rows are held against those of the weights."""
        if type(grad).__name__ == "IndexedSlices" and (self.rule.needs_weights or isinstance(self.scope, Unit)):
            return keras.ops.add(grad, 0.0)
        return grad

    def _keep(self, done: Clipped) -> None:
        fields = [(self.norm, done.norm), (self.limit, done.limit), *zip(self._state, done.state, strict=True)]
        if self.coef is not None:
            fields.append((self.coef, done.coef))
        for variable, value in fields:
            variable.assign(keras.ops.cast(value, variable.dtype))
        flags = (True, done.clipped, keras.ops.logical_not(done.finite))
        self._counts.assign_add(keras.ops.stack([keras.ops.cast(flag, "int32") for flag in flags]))


def _last_axis(unit: Unit | None) -> Unit:
    """Keras has the outputs last, whatever its backend's own layout."""
    return unit if unit is not None and unit.axis is not None else Unit(-1)


def _variable(optimizer: Any, name: str, start: Any) -> keras.Variable:
    initial = keras.initializers.Constant(start)
    return optimizer.add_variable(start.shape, initial, dtype=start.dtype.name, name=f"clip_{name}")


def _paths(weights: Iterable[Any]) -> list[str]:
    """The paths of variables, a number behind one that is there already."""
    paths = [getattr(weight, "path", None) or weight.name for weight in weights]
    seen: Counter[str] = Counter()
    for i, path in enumerate(paths):
        seen[path] += 1
        if seen[path] > 1:
            paths[i] = f"{path}#{seen[path]}"
    return paths
