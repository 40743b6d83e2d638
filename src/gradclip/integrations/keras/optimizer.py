"""`clipped`: an optimizer like the given one, whose steps clip."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import keras
import numpy as np

from ...backends import open_gradients
from ...call import resolve
from ...clip import clip, init
from ...clipper import Counts
from ...layout import Unit, layout_of
from ...rule import Rule
from .saving import live, loaded, saved, variables

Tensor = Any
BUILT_IN = ("clipnorm", "clipvalue", "global_clipnorm")
WEIGHT_DECAY = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")


def clipped(
    optimizer: keras.optimizers.Optimizer,
    rule: Rule,
    *,
    scope: str | Unit | None = None,
    p: float = 2,
    nonfinite: str = "keep",
) -> ClippedOptimizer:
    """An optimizer like this one, with its settings and its state, that clips the gradients of every step it takes.

    On the TensorFlow, JAX and torch backends, in `fit`, compiled or not, and in a loop of your own. Gradients are clipped after
    they have been unscaled (`loss_scale_factor`, `LossScaleOptimizer`) and averaged (`gradient_accumulation_steps`, once for
    each step that is taken), before weight decay. A step that `LossScaleOptimizer` leaves out reaches neither state nor counts.

    Args:
        optimizer: any of Keras's but LossScaleOptimizer, which takes what this returns; the given one is not changed.
        rule: as for `gradclip.clip`. A threshold that changes is a `keras.Variable(1.0, trainable=False)`, or a function of the
            step; the state of a rule that remembers is kept in variables of the optimizer.
        scope, p: as there. Tensors go by the paths of their variables, "sequential/dense/kernel"; units are along the last
            axis.
        nonfinite: "keep" spreads NaN; "zero" takes the step with gradients of 0; "raise" only where nothing is compiled.

    Returns: the optimizer. Its `.clipper` has `norm`, `limit` and `coef`, Keras variables, and `counts`. It is saved and loaded
    with the model; who loads it imports this module first.

    Raises: TypeError for what is no optimizer; ValueError for one that clips already, for rules and policies that skip: a Keras
    optimizer cannot leave out a step.

    >>> import gradclip, keras
    >>> optimizer = clipped(keras.optimizers.SGD(1.0), gradclip.MaxNorm(1.0))
    >>> weight = keras.Variable([0.0, 0.0])
    >>> optimizer.apply([keras.ops.array([3.0, 4.0])], [weight])
    >>> weight.numpy().round(2).tolist(), optimizer.clipper.counts.clipped
    ([-0.6, -0.8], 1)
    """
    _check(optimizer, rule, nonfinite)
    clipper = VariableClipper(rule, scope, p, nonfinite)
    kind = _kind(type(optimizer))  # type: ignore[arg-type]
    made: ClippedOptimizer = super(ClippedOptimizer, kind).from_config(optimizer.get_config())  # type: ignore[misc]
    made.clipper = clipper
    made.origin = keras.saving.serialize_keras_object(optimizer)
    for name in WEIGHT_DECAY:
        if hasattr(optimizer, name):
            setattr(made, name, getattr(optimizer, name))
    if optimizer.built:
        made.build(optimizer._trainable_variables)
        for ours, theirs in zip(made.variables, optimizer.variables, strict=False):
            ours.assign(theirs)
    return made


def _check(optimizer: Any, rule: Any, nonfinite: str) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"clipped needs an optimizer of Keras, keras.optimizers.Adam() for one; got {optimizer!r}")
    if isinstance(optimizer, ClippedOptimizer):
        raise ValueError("this optimizer clips already: take Both(rule, rule) for two rules at once")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError("pass the optimizer that is scaled: LossScaleOptimizer(clipped(optimizer, rule))")
    if type(optimizer).apply is not keras.optimizers.Optimizer.apply:
        raise ValueError(f"{type(optimizer).__name__} has an apply() of its own, which may not come to clip: wrap what it uses")
    for name in BUILT_IN:
        if getattr(optimizer, name) is not None:
            raise ValueError(f"the optimizer clips already, by {name}={getattr(optimizer, name)!r}: leave that out")
    if nonfinite == "skip" or (isinstance(rule, Rule) and rule.can_skip):
        raise ValueError(
            "an optimizer of Keras cannot leave out a step: what it is given moves its moments and counts its iterations. Take "
            'the rule without Skip and nonfinite="zero", or a training step of your own that looks at gradclip.clip(…).skipped'
        )


class ClippedOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """What `clipped` mixes into the class of an optimizer."""

    clipper: VariableClipper
    origin: dict[str, Any]  # what it was made from, as Keras says it

    def build(self, variables: Sequence[Any]) -> None:
        """The optimizer's variables, and after them the clipper's."""
        super().build(variables)
        self.clipper.build(self, variables)

    def _backend_apply_gradients(self, grads: Sequence[Tensor], trainable_variables: Sequence[Any]) -> None:
        self.clipper.present = [self._var_key(variable) for variable in trainable_variables]
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: Sequence[Tensor]) -> list[Tensor]:
        return self.clipper(grads)

    def get_config(self) -> dict[str, Any]:
        """What `from_config` needs, for JSON."""
        own = self.clipper
        return {
            "optimizer": self.origin | {"config": super().get_config()},
            "rule": saved(own.rule),
            "scope": saved(own.scope),
            "p": saved(own.p),
            "nonfinite": own.nonfinite,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> ClippedOptimizer:
        """The optimizer that a config describes, without state."""
        optimizer = keras.optimizers.deserialize(config["optimizer"], custom_objects)
        rule, scope, p = (loaded(config[name]) for name in ("rule", "scope", "p"))
        return clipped(optimizer, rule, scope=scope, p=p, nonfinite=config["nonfinite"])


@cache
def _kind(base: type[keras.optimizers.Optimizer]) -> type[ClippedOptimizer]:
    """The class of a clipping optimizer: all are registered by one name, since the config says what it is made of."""
    kind = type(ClippedOptimizer.__name__, (ClippedOptimizer, base), {"__doc__": base.__doc__, "__module__": __name__})
    return keras.saving.register_keras_serializable("gradclip", ClippedOptimizer.__name__)(kind)  # type: ignore[no-any-return]


class VariableClipper:
    """`gradclip.clip` with the rule's state, the last norm, limit and coefficient and the counts in Keras variables."""

    norm: keras.Variable
    limit: keras.Variable
    coef: keras.Variable | None = None

    def __init__(self, rule: Rule, scope: str | Unit | None, p: float, nonfinite: str) -> None:
        self._call = resolve(rule, scope, p, nonfinite)
        self.rule = rule
        self.scope = scope
        self.p = p
        self.nonfinite = nonfinite
        self.present: list[Any] = []

    @property
    def counts(self) -> Counts:
        """How many steps there were, and what came of them."""
        steps, changed, nonfinite = keras.ops.convert_to_numpy(self._counts).tolist()
        return Counts(steps, changed, 0, nonfinite)

    def build(self, optimizer: ClippedOptimizer, weights: Sequence[Any]) -> None:
        """Variables for what is to be known of each step, as the optimizer's own."""
        self._weights = {optimizer._var_key(weight): weight for weight in weights}
        self._names = dict(zip(self._weights, _names(self._weights.values()), strict=True))
        shapes = {self._names[key]: np.broadcast_to(np.float32(0), weight.shape) for key, weight in self._weights.items()}
        shape = layout_of(open_gradients(shapes), self._call.scope, self._unit, self.rule).shape()

        def variable(name: str, value: Any) -> keras.Variable:
            value = np.asarray(value, np.int32 if name == "counts" else np.float32)
            start = keras.initializers.Constant(value)
            return optimizer.add_variable(value.shape, start, dtype=value.dtype.name, name=f"clip_{name}")

        self.norm, self.limit = variable("norm", np.zeros(shape)), variable("limit", np.full(shape, np.inf))
        if self._call.scope != "element":
            self.coef = variable("coef", np.ones(shape))
        self._counts = variable("counts", np.zeros(3))
        initial = init(shapes, self.rule, self._scope)
        self._state = [variable(f"state_{i}", entry) for i, entry in enumerate(initial)]
        for threshold in variables(self.rule):
            optimizer._track_variable(threshold)

    @property
    def _unit(self) -> Unit | None:
        """Keras has the outputs last, whatever its backend."""
        unit = self._call.unit or Unit()
        return unit if unit.axis is not None else Unit(-1)

    @property
    def _scope(self) -> str | Unit:
        return self._unit if self._call.scope == "unit" else str(self._call.scope)  # type: ignore[return-value]

    def __call__(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the variables that are present, clipped."""
        tree: dict[str, Tensor] = dict.fromkeys(self._names.values())
        tree |= {self._names[key]: self._opened(grad) for key, grad in zip(self.present, grads, strict=True)}
        weights = None
        if self.rule.needs_weights:
            weights = {self._names[key]: keras.ops.stop_gradient(weight) for key, weight in self._weights.items()}
        state = tuple(map(keras.ops.convert_to_tensor, self._state))
        done = clip(tree, live(self.rule), scope=self._scope, p=self.p, nonfinite=self.nonfinite, weights=weights, state=state)
        self._record(done)
        return [done.grads[self._names[key]] for key in self.present]

    def _opened(self, grad: Tensor) -> Tensor:
        """The gradient; a sparse one as a dense one where every row has its place."""
        whole = self._call.scope == "unit" or self.rule.needs_weights
        return keras.ops.convert_to_tensor(grad) + 0 if whole and type(grad).__name__ == "IndexedSlices" else grad

    def _record(self, done: Any) -> None:
        for variable, value in [(self.norm, done.norm), (self.limit, done.limit), *zip(self._state, done.state, strict=True)]:
            variable.assign(keras.ops.cast(value, variable.dtype))
        if self.coef is not None:
            self.coef.assign(keras.ops.cast(done.coef, self.coef.dtype))
        flags = (True, done.clipped, keras.ops.logical_not(done.finite))
        self._counts.assign_add(keras.ops.stack([keras.ops.cast(flag, "int32") for flag in flags]))


def _names(weights: Any) -> list[str]:
    """The paths of variables, each once."""
    names: list[str] = []
    for weight in weights:
        name = base = getattr(weight, "path", None) or weight.name
        while name in names:
            name = f"{base}#{names.count(base) + 1}"
            base = name
        names.append(name)
    return names
