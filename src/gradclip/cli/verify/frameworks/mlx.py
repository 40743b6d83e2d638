"""mlx.core and mlx.optimizers."""

from __future__ import annotations

from importlib.metadata import version

import mlx.core as mx
import numpy as np
from mlx.optimizers import clip_grad_norm

from ._own import Framework, Own

FRAMEWORK = Framework(
    version("mlx"),
    lambda x, dtype: mx.array(x, getattr(mx, dtype)),
    lambda x: np.array(x.astype(mx.float32), np.float64) if x.dtype == mx.bfloat16 else np.array(x, np.float64),
    {
        "element": Own("mx.clip", lambda grads, limit: ([mx.clip(x, -limit, limit) for x in grads], None)),
        "global": Own("optimizers.clip_grad_norm", lambda grads, limit: clip_grad_norm(grads, limit)),
    },
)
