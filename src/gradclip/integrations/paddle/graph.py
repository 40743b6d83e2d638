"""A clip that becomes part of a static graph, the state of its rule with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle.nn.initializer import Assign
from paddle.pir import Value

from ...clip import clip, init
from ...clipped import Clipped
from ...clipper import Clipper
from ...rule import State
from .named import Pairs, chosen, weights


def clip_in_graph(clipper: Clipper, nonfinite: str, pairs: Pairs) -> tuple[Pairs, Clipped | None]:
    """The pairs with clipped gradients, and values that can be fetched."""
    rule, named = clipper.rule, chosen(pairs, {})
    if nonfinite == "skip" or rule.can_skip:
        raise ValueError(
            'a static graph cannot leave out a step: pass nonfinite="keep" or "zero", and a rule that does not skip; or train '
            "in dynamic graph"
        )
    if not named:
        return pairs, None
    grads = {name: grad for name, (_, grad) in named.items()}
    state = tuple(map(_kept, init(grads, rule, clipper.scope)))
    clipped = clip(
        grads,
        rule,
        scope=clipper.scope,
        p=clipper.p,
        weights=weights(named) if rule.needs_weights else None,
        state=state,
        nonfinite=nonfinite,
    )
    _keep(state, clipped.state)
    new = {id(named[name][0]): grad for name, grad in clipped.grads.items()}
    return [(p, new.get(id(p), grad)) for p, grad in pairs], clipped


def _kept(initial: Any) -> Value:
    """A variable of the program, which lives from run to run and is saved with it."""
    start = np.asarray(initial)
    start = start.astype(np.int32) if start.dtype.kind == "i" else start  # the one kind of count that Paddle initialises
    attr = paddle.ParamAttr(trainable=False)
    return paddle.create_parameter(list(start.shape), str(start.dtype), attr=attr, default_initializer=Assign(start))


def _keep(state: State, new: State) -> None:
    for variable, value in zip(state, new, strict=True):
        paddle.assign(value.astype(variable.dtype), output=variable)
