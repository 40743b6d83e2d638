"""Each framework's own arithmetic, as (norm, limit) → coefficient.

The frameworks clip with nine slightly different formulas. `MaxNorm(1.0, like="torch")` uses torch's, for a person who moves a
model from one framework to another and compares the two step by step. Operators and `where` only, so that the working
precision is the caller's: NaN and inf come out as they do in the framework, an infinite limit that gives NaN there too.
What differs: limits that are no number > 0 are refused; and where TensorFlow, Keras and MindSpore multiply by the limit before
they divide, and so overflow or lose small gradients, the product here does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

Array = Any


class Formula(Protocol):
    """(norm, limit, ops) → coefficient."""

    def __call__(self, norm: Array, limit: Array, ops: Any, /) -> Array: ...


class Convention(NamedTuple):
    """The functions that a name stands for, and their formula in each scope that they have."""

    functions: str
    formulas: dict[str, Formula]


def at_most_one(coef: Array, ops: Any) -> Array:
    """min(coef, 1), NaN kept."""
    return ops.where(coef >= 1.0, 1.0, coef)


def larger(norm: Array, limit: Array, ops: Any) -> Array:
    """max(norm, limit), NaN kept."""
    return ops.where(norm <= limit, limit, norm)


def reciprocal_times(norm: Array, limit: Array, ops: Any) -> Array:
    """min(1 / (norm + 1e-6) · limit, 1)."""
    return at_most_one((1.0 / (norm + 1e-6)) * limit, ops)


def reciprocal_times_if_smaller(norm: Array, limit: Array, ops: Any) -> Array:
    """1 / (norm + 1e-6) · limit where that is below 1, else 1: a NaN norm clips nothing."""
    coef = (1.0 / (norm + 1e-6)) * limit
    return ops.where(coef < 1.0, coef, 1.0)


def divided(norm: Array, limit: Array, ops: Any) -> Array:
    """min(limit / (norm + 1e-6), 1)."""
    return at_most_one(limit / (norm + 1e-6), ops)


def divided_by_larger(norm: Array, limit: Array, ops: Any) -> Array:
    """The limit / max(norm, limit): an infinite limit gives NaN."""
    return limit / larger(norm, limit, ops)


def divided_by_larger_plus(norm: Array, limit: Array, ops: Any) -> Array:
    """The limit / (max(norm, limit) + 1e-6): below 1 even where the norm is within the limit."""
    return limit / (larger(norm, limit, ops) + 1e-6)


def masked(norm: Array, limit: Array, ops: Any) -> Array:
    """[norm ≤ limit] + [norm > limit] · limit / norm, the norm raised by 1e-6 where it is below 1e-30."""
    above = ops.where(norm <= limit, 0.0 * norm, 1.0)
    safe = norm + ops.where(norm <= 1e-30, 1e-6, 0.0)
    return (1.0 - above) + above * (limit / safe)


def smaller_reciprocal(norm: Array, limit: Array, ops: Any) -> Array:
    """The limit · min(1 / norm, 1 / limit) + (norm - norm): NaN for every norm that is not finite."""
    ours, theirs = 1.0 / norm, 1.0 / (limit + 0.0 * norm)
    return limit * ops.where(ours <= theirs, ours, theirs) + (norm - norm)


def divided_if_reached(norm: Array, limit: Array, ops: Any) -> Array:
    """The limit / norm where norm ≥ limit, else limit / limit: a NaN norm clips nothing, an infinite limit gives NaN."""
    return limit / ops.where(norm >= limit, norm, limit + 0.0 * ops.where(norm >= limit, norm, 0.0))


def divided_unless_below(norm: Array, limit: Array, ops: Any) -> Array:
    """1 where norm < limit, else 1 / norm · limit."""
    below = norm < limit
    return ops.where(below, 1.0, (1.0 / ops.where(below, 1.0, norm)) * limit)


def floored(norm: Array, limit: Array, ops: Any) -> Array:
    """The limit / n where n > limit, else 1, with n = max(norm, 1e-3)."""
    raised = larger(norm, 1e-3, ops)
    return ops.where(raised > limit, limit / raised, 1.0)


CONVENTIONS = {
    "torch": Convention("torch.nn.utils.clip_grad_norm_", {"global": reciprocal_times}),
    "paddle": Convention("paddle.nn.ClipGradByGlobalNorm, ClipGradByNorm", {"global": divided_by_larger, "tensor": masked}),
    "paddle.utils": Convention("paddle.nn.utils.clip_grad_norm_", {"global": divided}),
    "paddle.fleet": Convention("paddle's HybridParallelClipGrad", {"global": divided_by_larger_plus}),
    "tensorflow": Convention(
        "tf.clip_by_global_norm, tf.clip_by_norm", {"global": smaller_reciprocal, "tensor": divided_by_larger}
    ),
    "keras": Convention(
        "a Keras optimizer's global_clipnorm=, clipnorm=", {"global": smaller_reciprocal, "tensor": divided_by_larger}
    ),
    "optax": Convention("optax.clip_by_global_norm", {"global": divided_unless_below}),
    "mindspore.clip_by_norm": Convention("mindspore.ops.clip_by_norm", {"global": reciprocal_times_if_smaller}),
    "mindspore.clip_by_global_norm": Convention("mindspore.ops.clip_by_global_norm", {"global": divided_if_reached}),
    "mindspore.ClipByNorm": Convention("mindspore.nn.ClipByNorm", {"tensor": floored}),
    "mlx": Convention("mlx.optimizers.clip_grad_norm", {"global": divided}),
}
