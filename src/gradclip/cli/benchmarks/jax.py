"""JAX: against `optax.clip_by_global_norm`, as it is called and as XLA compiles it, where there is nothing to clip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradclip
from gradclip.integrations.optax import clip

from .numpy import normal
from .timing import Row, Work

FAR = 1e9  # more than any norm here


def rows(elements: int) -> Iterator[Callable[[], Row]]:
    """The rows, each made when its turn comes, so that only one holds memory."""
    yield partial(eager_against_eager, elements)
    yield partial(eager_against_compiled, elements)
    yield partial(compiled_against_compiled, elements)


def eager_against_eager(elements: int) -> Row:
    grads = {"w": jnp.asarray(normal(elements))}
    return Row(
        f"2^{elements.bit_length() - 1} float32, nothing to clip, eager",
        "optax.clip_by_global_norm, eager",
        lambda: gradclip.clip(grads, gradclip.MaxNorm(FAR)).grads,
        updated(optax.clip_by_global_norm(FAR), grads, lambda update: update),
        at_least=20,
    )


def eager_against_compiled(elements: int) -> Row:
    grads = {"w": jnp.asarray(normal(elements))}
    return Row(
        f"2^{elements.bit_length() - 1} float32, nothing to clip, eager",
        "optax.clip_by_global_norm under jit",
        lambda: gradclip.clip(grads, gradclip.MaxNorm(FAR)).grads,
        updated(optax.clip_by_global_norm(FAR), grads, jax.jit),
        at_least=3,
    )


def compiled_against_compiled(elements: int) -> Row:
    grads = {"w": jnp.asarray(normal(elements))}
    return Row(
        f"2^{elements.bit_length() - 1} float32, nothing to clip, under jit",
        "optax.clip_by_global_norm under jit",
        updated(clip(gradclip.MaxNorm(FAR)), grads, jax.jit),
        updated(optax.clip_by_global_norm(FAR), grads, jax.jit),
    )


def updated(transformation: optax.GradientTransformation, grads: Any, run: Callable[..., Any]) -> Work:
    """A transformation's update, awaited."""
    state, update = transformation.init(grads), run(transformation.update)
    return lambda: jax.block_until_ready(update(grads, state)[0])
