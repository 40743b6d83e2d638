"""mindspore.ops and mindspore.nn."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ._own import Array, Framework, Own

ms.runtime.launch_blocking()  # else an error shows at a later call


def by_value(grads: list[Array], limit: float) -> tuple[list[Array], None]:
    return list(ops.clip_by_value(grads, ms.Tensor(-limit, grads[0].dtype), ms.Tensor(limit, grads[0].dtype))), None


def by_norm(grads: list[Array], limit: float) -> tuple[list[Array], None]:
    clip = nn.ClipByNorm()
    return [clip(x, ms.Tensor(limit, x.dtype)) for x in grads], None


def by_global_norm(grads: list[Array], limit: float) -> tuple[list[Array], None]:
    return list(ops.clip_by_global_norm(tuple(grads), limit)), None


FRAMEWORK = Framework(
    ms.__version__,
    lambda x, dtype: ms.Tensor(x.astype(np.float32 if dtype == "bfloat16" else dtype)).astype(getattr(ms, dtype)),
    lambda x: x.astype(ms.float32).asnumpy().astype(np.float64) if x.dtype == ms.bfloat16 else x.asnumpy().astype(np.float64),
    {
        "element": Own("ops.clip_by_value", by_value),
        "tensor": Own("nn.ClipByNorm", by_norm),
        "global": Own("ops.clip_by_global_norm", by_global_norm),
    },
)
