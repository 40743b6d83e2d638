"""`clipped`: an optimizer like the given one, whose steps clip."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import keras

from ...layout import Unit
from ...rule import Rule
from .clipper import VariableClipper
from .saving import loaded, saved

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
        scope, p: as there. Tensors are called by the paths of their variables, "sequential/dense/kernel"; units lie along the
            last axis.
        nonfinite: "keep" spreads NaN; "zero" takes the step with gradients of 0; "raise" only where nothing is compiled.

    Returns: the optimizer. Its `.clipper` has `norm`, `limit` and `coef`, Keras variables, and `counts`. It is saved and loaded
    with the model; who loads it imports this module first.

    Raises: TypeError for what is no optimizer; ValueError for one that clips already, and for rules and policies that skip,
    since a Keras optimizer cannot leave out a step. `build` raises under a tf.distribute strategy of several replicas.

    >>> import gradclip, keras
    >>> optimizer = clipped(keras.optimizers.SGD(1.0), gradclip.MaxNorm(2.5))
    >>> weight = keras.Variable([0.0, 0.0])
    >>> optimizer.apply([keras.ops.array([3.0, 4.0])], [weight])
    >>> keras.ops.convert_to_numpy(weight).tolist(), optimizer.clipper.counts.clipped
    ([-1.5, -2.0], 1)
    """
    _check(optimizer, rule, nonfinite)
    clipper = VariableClipper(rule, scope, p, nonfinite)
    kind = _kind(type(optimizer))  # type: ignore[arg-type]
    made: ClippedOptimizer = super(ClippedOptimizer, kind).from_config(optimizer.get_config())  # type: ignore[misc]
    made.clipper = clipper
    made.origin = keras.saving.serialize_keras_object(optimizer)
    _carry_over(optimizer, made)
    return made


def _carry_over(optimizer: keras.optimizers.Optimizer, made: ClippedOptimizer) -> None:
    """What a config does not tell: where there is no weight decay, and the state of an optimizer that has been used."""
    for name in WEIGHT_DECAY:
        if hasattr(optimizer, name):
            setattr(made, name, getattr(optimizer, name))
    if optimizer.built:
        made.build(optimizer._trainable_variables)
        for ours, theirs in zip(made.variables, optimizer.variables, strict=False):  # the clipper's come last
            ours.assign(theirs)


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


@keras.saving.register_keras_serializable("gradclip")
class ClippedOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """What `clipped` mixes into the class of an optimizer."""

    clipper: VariableClipper
    origin: dict[str, Any]  # what it was made from, as Keras says it

    def build(self, variables: Sequence[Any]) -> None:
        """The optimizer's variables, and after them the clipper's."""
        strategy = getattr(self, "_distribution_strategy", None)
        if strategy is not None and strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"under {type(strategy).__name__} Keras clips each replica's gradients before it adds them up, so "
                "that no norm is that of the step: add them up in a loop of your own, and take gradclip.clip"
            )
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
    return keras.saving.register_keras_serializable("gradclip")(kind)  # type: ignore[no-any-return]
