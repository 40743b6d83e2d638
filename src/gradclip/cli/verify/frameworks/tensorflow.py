"""tf.clip_by_*."""

from __future__ import annotations

import tensorflow as tf

from ._own import Framework, Own

FRAMEWORK = Framework(
    tf.__version__,
    lambda x, dtype: tf.cast(tf.constant(x), dtype),
    lambda x: tf.cast(x, tf.float64).numpy(),
    {
        "element": Own("tf.clip_by_value", lambda grads, limit: ([tf.clip_by_value(x, -limit, limit) for x in grads], None)),
        "tensor": Own("tf.clip_by_norm", lambda grads, limit: ([tf.clip_by_norm(x, limit) for x in grads], None)),
        "global": Own("tf.clip_by_global_norm", lambda grads, limit: tf.clip_by_global_norm(grads, limit)),
    },
)
