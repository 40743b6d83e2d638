"""optax: `clip(rule)` for a chain, and `skip(optimizer, rule)` around an optimizer. Their state says what they did.

>>> import jax.numpy as jnp, optax
>>> from gradclip import MaxNorm
>>> from gradclip.integrations.optax import clip
>>> optimizer = optax.chain(clip(MaxNorm(1.0)), optax.sgd(0.5))
>>> state = optimizer.init({"w": jnp.zeros(2)})
>>> updates, state = optimizer.update({"w": jnp.array([30.0, 40.0])}, state)
>>> updates["w"], optax.tree.get(state, "norm")
(Array([-0.3, -0.4], dtype=float32), Array(50., dtype=float32))
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..backends._jax_varying import joined
from ..call import resolve
from ..clip import clip as clip_gradients, init as init_state
from ..clipped import Clipped
from ..layout import Unit
from ..measure import Reduce
from ..rule import Rule, State

Array = Any
COUNT = jnp.int32


class ClipState(NamedTuple):
    """What became of the last step and of all so far, and what the rule remembers: arrays, whose shapes and types stay.

    `optax.tree.get(state, "norm")` finds an entry by its name in the state of a whole optimizer.
    """

    norm: Array  # of the last gradients, before clipping: 0-d, or one for each tensor, unit or group
    limit: Array  # the bound in force, shaped like the norm
    coef: Array | None  # what the gradients were multiplied by, likewise; None in the scope "element"
    steps: Array  # how many there were
    steps_clipped: Array  # in how many of those that were taken did anything change?
    steps_skipped: Array  # how many were left out?
    steps_nonfinite: Array  # in how many was a gradient NaN or inf?
    memory: State  # the rule's


class SkipState(NamedTuple):
    """The state of the optimizer that may be skipped, and of the clip before it."""

    inner_state: Any
    clip: ClipState


def clip(
    rule: Rule,
    scope: str | Unit | None = None,
    *,
    p: float = 2,
    nonfinite: str = "keep",
    reduce: Reduce | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """g · coef for every gradient g, as `gradclip.clip` does it; the state is a `ClipState`.

    Works eagerly, under jit and in every transformation; put it before the optimizer in an `optax.chain`, and the chain inside
    of `optax.MultiSteps`, so that the mean of the micro-batches is clipped. The gradients may be any pytree; a tensor's path
    is its keys and attributes joined by dots. Rules that compare with the weights need `params` in `update`.

    nonfinite: "keep" (NaN spreads), "zero" (every gradient becomes 0) or, where nothing is traced, "raise".
    axis_name: inside of shard_map the axes along which gradients vary are read from their types, and the norm is that of all
    devices' parts. Where they cannot be read (`check_vma=False`) name them; then every gradient has to vary along
    them, since one that all devices have would count once for each. reduce: in place of that, see `gradclip.clip`.

    ValueError for rules that skip and for nonfinite="skip", which have to reach around the optimizer: use `skip`.
    """
    reduce = _over(axis_name, reduce)
    if resolve(rule, scope, p, nonfinite, reduce).rule.can_skip or nonfinite == "skip":
        raise ValueError(f"{rule!r} with nonfinite={nonfinite!r} leaves whole steps out: use skip(optimizer, rule)")
    clipping = _Clipping(rule, scope, p, nonfinite, reduce)

    def update(updates: Any, state: ClipState, params: Any = None, **_: Any) -> tuple[Any, ClipState]:
        clipped = clipping(updates, params, state.memory)
        return _refilled(updates, clipped), _after(state, clipped)

    return optax.GradientTransformationExtraArgs(clipping.first, update)


def skip(
    inner: optax.GradientTransformation,
    rule: Rule,
    scope: str | Unit | None = None,
    *,
    p: float = 2,
    reduce: Reduce | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer with clipped gradients, and no step at all where a gradient is NaN or inf, or the rule says so.

    In a step that is left out the updates are 0, so that the parameters stay, and the optimizer's state is the old one;
    `steps_skipped` counts it. The state is a `SkipState`. `gradclip.Skip(rule)` leaves steps out whose norm is too large, any
    other rule clips them.
    """
    optimizer, reduce = optax.with_extra_args_support(inner), _over(axis_name, reduce)
    clipping = _Clipping(rule, scope, p, "skip", reduce)
    resolve(rule, scope, p, "skip", reduce)

    def init(params: Any) -> SkipState:
        return SkipState(optimizer.init(params), clipping.first(params))

    def update(updates: Any, state: SkipState, params: Any = None, **extra: Any) -> tuple[Any, SkipState]:
        clipped = clipping(updates, params, state.clip.memory)
        new, after = optimizer.update(_refilled(updates, clipped), state.inner_state, params, **extra)
        still = jax.tree.map(jnp.zeros_like, new)
        kept, inner_state = _chosen(clipped.skipped, (still, state.inner_state), (new, after))
        return kept, SkipState(inner_state, _after(state.clip, clipped))

    return optax.GradientTransformationExtraArgs(init, update)


def _over(axis_name: str | Sequence[str] | None, reduce: Reduce | None) -> Reduce | None:
    """The join over these axes of a mesh."""
    if axis_name is None:
        return reduce
    if reduce is not None:
        raise ValueError(f"both say how to join devices: leave out axis_name={axis_name!r}, or reduce=")
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    return lambda power, p: joined(power, p, axes)


class _Clipping(NamedTuple):
    """`gradclip.clip`, less its gradients and weights."""

    rule: Rule
    scope: str | Unit | None
    p: float
    nonfinite: str
    reduce: Reduce | None

    def __call__(self, updates: Any, params: Any, memory: State) -> Clipped:
        """The updates clipped, as one dict of paths."""
        return clip_gradients(
            _named(updates),
            self.rule,
            scope=self.scope,
            p=self.p,
            weights=_named(params) if self.rule.needs_weights and params is not None else None,
            state=memory,
            nonfinite=self.nonfinite,
            reduce=self.reduce,
        )

    def first(self, params: Any) -> ClipState:
        """The state before the first step, with the shapes and types that `update` will give it."""
        initial = init_state(_named(params), self.rule, self.scope)
        alike = self._replace(nonfinite="keep", reduce=None)
        shaped = jax.eval_shape(lambda params: alike(params, params, initial), params)
        memory = tuple(jnp.asarray(entry, kind.dtype) for entry, kind in zip(initial, shaped.state, strict=True))
        norm, count = jnp.zeros(shaped.norm.shape, shaped.norm.dtype), jnp.zeros((), COUNT)
        coef = None if shaped.coef is None else jnp.ones_like(norm)
        return ClipState(norm, jnp.full_like(norm, jnp.inf), coef, count, count, count, count, memory)


def _after(state: ClipState, clipped: Clipped) -> ClipState:
    """The state with one more step."""
    return ClipState(
        norm=clipped.norm,
        limit=clipped.limit,
        coef=clipped.coef,
        steps=state.steps + 1,
        steps_clipped=state.steps_clipped + (clipped.clipped & ~clipped.skipped).astype(COUNT),
        steps_skipped=state.steps_skipped + clipped.skipped.astype(COUNT),
        steps_nonfinite=state.steps_nonfinite + (~clipped.finite).astype(COUNT),
        memory=tuple(jnp.asarray(new, old.dtype) for new, old in zip(clipped.state, state.memory, strict=True)),
    )


def _named(tree: Any) -> OrderedDict[str, Array]:
    """The leaves of any pytree by their paths, in its order."""
    named: OrderedDict[str, Array] = OrderedDict()
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        while path in named:  # {"a.b": x, "a": {"b": y}}
            path += "'"
        named[path] = leaf
    return named


def _refilled(updates: Any, clipped: Clipped) -> Any:
    """The pytree with its leaves clipped."""
    return jax.tree.unflatten(jax.tree.structure(updates), clipped.grads.values())


def _chosen(flag: Array, yes: Any, no: Any) -> Any:
    """One of two trees that are alike."""
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), yes, no)
