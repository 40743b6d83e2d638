"""paddle.nn's gradient clips."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from ._own import Array, Framework, Own


def _clipped(clip: Any, grads: list[Array]) -> tuple[list[Array], None]:
    pairs = []
    for x in grads:
        p = paddle.create_parameter(x.shape, x.dtype)
        pairs.append((p, x.clone()))
    return [grad for _, grad in clip(pairs)], None


def by_value(grads: list[Array], limit: float) -> tuple[list[Array], None]:
    return _clipped(paddle.nn.ClipGradByValue(limit), grads)


def by_norm(grads: list[Array], limit: float) -> tuple[list[Array], None]:
    return _clipped(paddle.nn.ClipGradByNorm(limit), grads)


def by_global_norm(grads: list[Array], limit: float) -> tuple[list[Array], None]:
    return _clipped(paddle.nn.ClipGradByGlobalNorm(limit), grads)


FRAMEWORK = Framework(
    paddle.__version__,
    lambda x, dtype: paddle.to_tensor(x.astype(np.float32 if dtype == "bfloat16" else x.dtype)).cast(dtype),
    lambda x: x.cast("float64").numpy(),
    {
        "element": Own("ClipGradByValue", by_value),
        "tensor": Own("ClipGradByNorm", by_norm),
        "global": Own("ClipGradByGlobalNorm", by_global_norm),
    },
)
