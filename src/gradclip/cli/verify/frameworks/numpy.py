"""The code that people write for NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ._own import Array, Framework, Own


def by_norm(grads: list[Array], limit: float) -> tuple[list[Array], None]:
    return [_by_norm(x, limit) for x in grads], None


def _by_norm(grad: Array, limit: float) -> Array:
    norm = np.sqrt(np.sum(np.square(grad)))
    return grad * limit / norm if norm > limit else grad


def by_global_norm(grads: list[Array], limit: float) -> tuple[list[Array], Array]:
    norm = np.sqrt(sum(np.sum(np.square(grad)) for grad in grads))
    return [grad * limit / norm for grad in grads] if norm > limit else grads, norm


FRAMEWORK = Framework(
    np.__version__,
    lambda x, dtype: x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype),
    lambda x: x.astype(np.float64),
    {
        "element": Own("numpy.clip", lambda grads, limit: ([np.clip(x, -limit, limit) for x in grads], None)),
        "tensor": Own("g * c / sqrt(sum(square(g)))", by_norm),
        "global": Own("the same over all", by_global_norm),
    },
)
