"""optax's transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._own import Array, Framework, Own

jax.config.update("jax_enable_x64", True)


def _updated(transformation: Any, grads: list[Array]) -> tuple[list[Array], None]:
    return transformation.update(grads, transformation.init(grads))[0], None


FRAMEWORK = Framework(
    f"{jax.__version__}, optax {optax.__version__}",
    lambda x, dtype: jnp.asarray(x, dtype),
    lambda x: np.asarray(x, np.float64),
    {
        "element": Own("optax.clip", lambda grads, limit: _updated(optax.clip(limit), grads)),
        "global": Own("optax.clip_by_global_norm", lambda grads, limit: _updated(optax.clip_by_global_norm(limit), grads)),
    },
)
