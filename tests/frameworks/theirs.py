"""The frameworks' own clipping functions, one signature for all: (gradients, limit) → (clipped gradients, norm)."""

from collections.abc import Callable
from math import nan
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

ALL = frozenset({np.float16, ml_dtypes.bfloat16, np.float32, np.float64})
TURNED = {"0.0": [0, 0], "-1.0": [-0.6, -0.8], "nan": [nan, nan]}


class Function(NamedTuple):
    """One of a framework's functions; `call` takes and gives its arrays, and the norm, one for each tensor in that scope."""

    name: str
    like: str
    call: Callable[[list[Any], float], tuple[list[Any], Any]]
    scope: str = "global"
    dtypes: frozenset[Any] = ALL
    mixes: bool = True  # may the types of the gradients differ?
    answers: dict[str, Any] = TURNED  # to limits that are refused here, of (3, 4); an exception that it is refused with there


def torch() -> list[Function]:
    import torch

    def clip_grad_norm_(grads, limit):
        parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
        for parameter, g in zip(parameters, grads, strict=True):
            parameter.grad = g.clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        return [parameter.grad for parameter in parameters], norm

    return [Function("clip_grad_norm_", "torch", clip_grad_norm_)]


def paddle() -> list[Function]:
    import paddle
    from paddle import _C_ops
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import hybrid_parallel_optimizer as hybrid

    def parameters(grads):
        for g in grads:
            parameter = paddle.create_parameter(g.shape, g.dtype)
            parameter.stop_gradient = False
            yield parameter, g.clone()

    def by(clip, norm):
        def call(grads, limit):
            return [g for _, g in clip(limit)(list(parameters(grads)))], norm(grads)

        return call

    def squares(g):
        return _C_ops.squared_l2_norm(g).reshape([])

    def whole(grads):
        return paddle.sqrt(
            paddle.add_n([squares(g).astype("float64" if paddle.float64 in types(grads) else "float32") for g in grads])
        )

    def types(grads):
        return {g.dtype for g in grads}

    def each(grads):
        return [paddle.sqrt((g * g).sum()) for g in grads]

    def utils(grads, limit):
        pairs = list(parameters(grads))
        for parameter, g in pairs:
            parameter.grad = g
        norm = paddle.nn.utils.clip_grad_norm_([p for p, _ in pairs], limit)
        return [p.grad for p, _ in pairs], norm

    def fleet(limit):
        alone = SimpleNamespace(
            get_data_parallel_world_size=lambda: 1,
            get_model_parallel_world_size=lambda: 1,
            get_pipe_parallel_world_size=lambda: 1,
            get_sharding_parallel_world_size=lambda: 1,
            get_check_parallel_group=lambda *_: None,
        )
        return hybrid.HybridParallelClipGrad(paddle.nn.ClipGradByGlobalNorm(limit), alone)

    wide = frozenset({np.float32, np.float64})
    refused = dict.fromkeys(("0.0", "-1.0", "nan"), Exception)
    return [
        Function("ClipGradByGlobalNorm", "paddle", by(paddle.nn.ClipGradByGlobalNorm, whole), dtypes=wide),
        Function(
            "ClipGradByNorm", "paddle", by(paddle.nn.ClipGradByNorm, each), "tensor", frozenset({np.float32}), answers=refused
        ),
        Function("clip_grad_norm_", "paddle.utils", utils, dtypes=wide, mixes=False),
        Function("HybridParallelClipGrad", "paddle.fleet", by(fleet, whole), dtypes=wide),
    ]


def tensorflow() -> list[Function]:
    import tensorflow as tf

    def clip_by_norm(grads, limit):
        return [tf.clip_by_norm(g, limit) for g in grads], tf.stack(
            [tf.cast(tf.sqrt(tf.reduce_sum(g * g)), tf.float64) for g in grads]
        )

    untouched = TURNED | {"-1.0": [3, 4]}
    return [
        Function("clip_by_global_norm", "tensorflow", tf.clip_by_global_norm, mixes=False, answers=untouched),
        Function("clip_by_norm", "tensorflow", clip_by_norm, "tensor", answers=TURNED | {"-1.0": [0, 0]}),
    ]


def keras() -> list[Function]:
    import keras

    def global_clipnorm(grads, limit):
        norm = keras.src.optimizers.base_optimizer.global_norm(grads)
        return keras.optimizers.SGD(global_clipnorm=limit)._clip_gradients(grads), norm

    def clipnorm(grads, limit):
        wide = "float64" if "float64" in map(keras.backend.standardize_dtype, (g.dtype for g in grads)) else "float32"
        norms = keras.ops.stack([keras.ops.cast(keras.ops.sqrt(keras.ops.sum(keras.ops.square(g))), wide) for g in grads])
        return keras.optimizers.SGD(clipnorm=limit)._clip_gradients(grads), norms

    unclipped, name = {"0.0": [3, 4], "-1.0": [3, 4], "nan": [3, 4]}, keras.backend.backend()
    return [
        Function(f"global_clipnorm= on {name}", "keras", global_clipnorm, mixes=name != "tensorflow", answers=unclipped),
        Function(f"clipnorm= on {name}", "keras", clipnorm, "tensor", answers=unclipped),
    ]


def jax() -> list[Function]:
    import jax
    import optax

    def by(run):
        def call(grads, limit):
            clip = optax.clip_by_global_norm(limit)
            return run(lambda grads: clip.update(grads, clip.init(grads))[0])(grads), run(optax.tree.norm)(grads)

        return call

    return [
        Function("clip_by_global_norm", "optax", by(lambda f: f)),
        Function("clip_by_global_norm, jit", "optax", by(jax.jit)),
    ]


def mlx() -> list[Function]:
    from mlx.optimizers import clip_grad_norm

    return [Function("clip_grad_norm", "mlx", clip_grad_norm, answers=TURNED | {"-1.0": ValueError})]


def mindspore() -> list[Function]:
    from mindspore import Tensor, nn, ops

    def norm(grads):
        return ops.sqrt(sum(ops.cast(ops.reduce_sum(ops.square(g)), grads[-1].dtype) for g in grads))

    def by(function):
        return lambda grads, limit: (list(function(grads, limit)), norm(grads))

    def added_up(g):  # one after the other, as its kernel does
        with np.errstate(over="ignore"):
            return np.sqrt(np.cumsum(np.square(g.asnumpy().astype(np.float32).ravel()), dtype=np.float32)[-1])

    def clip_by_norm(grads, limit):
        clip = nn.ClipByNorm()
        return [clip(g, Tensor(limit, g.dtype)) for g in grads], Tensor(np.stack([added_up(g) for g in grads]))

    refused = dict.fromkeys(("0.0", "-1.0", "nan"), ValueError)
    narrow, known = frozenset({np.float16, np.float32}), ALL - {ml_dtypes.bfloat16}
    return [
        Function(
            "ops.clip_by_norm",
            "mindspore.clip_by_norm",
            by(ops.clip_by_norm),
            dtypes=known,
            mixes=False,
            answers=TURNED | {"nan": [3, 4]},
        ),
        Function(
            "ops.clip_by_global_norm",
            "mindspore.clip_by_global_norm",
            by(ops.clip_by_global_norm),
            dtypes=known,
            answers=refused,
        ),
        Function("nn.ClipByNorm", "mindspore.ClipByNorm", clip_by_norm, "tensor", narrow, answers=TURNED | {"-1.0": [-1, -1]}),
    ]


THEIRS = {
    "jax": jax,
    "keras": keras,
    "mindspore": mindspore,
    "mlx": mlx,
    "paddle": paddle,
    "tensorflow": tensorflow,
    "torch": torch,
}
