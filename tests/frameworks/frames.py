"""What the conformance suite has to know of a framework: how its arrays are made and read, and how it runs functions."""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import ml_dtypes
import numpy as np

from gradclip.backends import flatten


class Frame(NamedTuple):
    """make and read: NumPy to the framework's array and back. modes: ways of running a function of arrays."""

    make: Callable[[Any], Any]
    read: Callable[[Any], Any]
    modes: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]
    traced: frozenset[str] = frozenset()  # the modes in which norms stay with the framework
    readable: frozenset[str] = frozenset({"eager"})  # the modes in which a value can be looked at, where it is asked for
    unit_axis: Any = 0  # the axis of the outputs, in this framework's layout of a matrix and of three axes; or as for Unit
    dtypes: tuple[Any, ...] = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


def torch() -> Frame:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    def make(x):
        x = np.array(x)
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.astype(np.float32)).bfloat16()
        return torch.from_numpy(x)

    def read(x):
        x = x.detach().resolve_conj()
        return x.float().numpy().astype(ml_dtypes.bfloat16) if x.dtype is torch.bfloat16 else x.numpy()

    def compiled(f):
        torch._dynamo.reset()
        return torch.compile(f, fullgraph=True, backend="aot_eager")

    class Watching(TorchDispatchMode):  # sends plain CPU tensors the way of an accelerator's
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def watched(f):
        def work(*given):
            with Watching():
                return f(*given)

        return work

    modes = {"eager": lambda f: f, "compile": compiled, "watched": watched}
    return Frame(make, read, modes, frozenset({"compile", "watched"}), readable=frozenset({"eager", "watched"}))


def mlx() -> Frame:
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

    def make(x):
        return mx.array(x, mx.float64) if np.asarray(x).dtype == np.float64 else mx.array(x)

    def read(x):
        return np.asarray(x.astype(mx.float32)).astype(ml_dtypes.bfloat16) if x.dtype == mx.bfloat16 else np.array(x)

    def arrays(tree):
        """NumPy's arrays in it as MLX's, which is what mx.compile takes."""
        return tree_map(lambda x: make(x) if isinstance(x, np.ndarray | np.generic | int) else x, tree)

    def compiled(f):
        work = mx.compile(f)
        return lambda *given: work(*map(arrays, given))

    def derived(f):
        """Under a derivative with respect to something else, so that the whole tree is to be differentiated."""

        def work(*given):
            kept = []

            def through(one):
                kept.append(
                    f(*(tree_map(lambda x: x * one.astype(x.dtype) if isinstance(x, mx.array) else x, g) for g in given))
                )
                return one

            mx.grad(through)(mx.array(1.0))
            return kept[0]

        return work

    def accelerated(f):
        """As if the default device were a GPU, whose norms stay in float32; float64, which no GPU has, stays on the CPU."""

        def work(*given):
            wide = any(x.dtype == mx.float64 for _, x in tree_flatten(given) if isinstance(x, mx.array))
            with patch("gradclip.backends.mlx._on_cpu", lambda: wide):
                return f(*given)

        return work

    modes = {"eager": lambda f: f, "compile": compiled, "grad": derived, "gpu": accelerated}
    return Frame(make, read, modes, frozenset({"compile", "grad", "gpu"}), readable=frozenset({"eager", "grad", "gpu"}))


def jax() -> Frame:
    import jax
    import jax.numpy as jnp

    def scanned(f):
        @jax.jit
        def work(*given):
            found = jax.lax.scan(lambda carry, one: (carry, f(*one)), 0, jax.tree.map(lambda x: x[None], given))[1]
            return jax.tree.map(lambda x: x[0], found)

        return work

    def differentiated(f):
        return jax.jit(lambda *given: jax.jvp(f, given, jax.tree.map(tangent, given))[0])

    def tangent(x):
        return x if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)

    def mapped(f):
        @jax.jit
        def work(*given):
            found = jax.vmap(f)(*jax.tree.map(lambda x: jnp.stack([x * 0, x]), given))
            return jax.tree.map(lambda x: x[1], found)

        return work

    modes = {"eager": lambda f: f, "jit": jax.jit, "scan": scanned, "jvp": differentiated, "vmap": mapped}
    traced = frozenset(modes) - {"eager"}
    dtypes = (np.float32, np.float16, ml_dtypes.bfloat16)  # and float64 where x64 is enabled, which has tests of its own
    return Frame(jnp.asarray, np.asarray, modes, traced, dtypes=dtypes, unit_axis=-1)


def mindspore() -> Frame:
    import mindspore as ms

    from gradclip.backends import flatten

    def make(x):
        x = np.array(x)
        if x.dtype == ml_dtypes.bfloat16:
            return ms.Tensor(x.astype(np.float32)).astype(ms.bfloat16)
        return ms.Tensor(x)

    def read(x):
        return x.astype(ms.float32).asnumpy().astype(ml_dtypes.bfloat16) if x.dtype == ms.bfloat16 else x.asnumpy()

    def differentiated(f):  # MindSpore's own kernels do the work, as on an accelerator
        def work(grads, *others):
            leaves, rebuild = flatten(grads)
            found = []

            def loss(*xs):
                each = iter(xs)
                try:
                    found.append(f(rebuild(None if x is None else next(each) for x in leaves), *others))
                except Exception as error:  # which inside of it would leave MindSpore differentiating for ever
                    found.append(error)
                return xs[0].astype(ms.float32).sum()

            try:
                ms.grad(loss)(*(x for x in leaves if x is not None))
            finally:
                if found and isinstance(found[0], Exception):
                    raise found[0]
            return found[0]

        return work

    def captured(f):
        return ms.jit(f, capture_mode="bytecode")

    modes = {"eager": lambda f: f, "differentiated": differentiated, "jit bytecode": captured}
    return Frame(make, read, modes, frozenset({"differentiated"}), frozenset(modes))


def paddle() -> Frame:
    import paddle
    from paddle.static import Executor, Program, program_guard

    import_module("gradclip.integrations.paddle")  # which tells to_static(full_graph=True) not to rewrite our text

    def make(x):
        x = np.array(x)
        if x.dtype == ml_dtypes.bfloat16:
            return paddle.to_tensor(x.astype(np.float32)).astype("bfloat16")
        return paddle.to_tensor(x)

    def read(x):
        return x.numpy().view(ml_dtypes.bfloat16) if x.dtype == paddle.bfloat16 else x.numpy()

    def to_static(f):
        trees = SimpleNamespace()  # of what goes in and comes out, for Paddle hands tuples over as lists

        def flat(leaves):
            outputs, trees.outgoing = flatten(f(*trees.incoming(leaves)))
            return outputs

        traced = paddle.jit.to_static(flat, full_graph=True)

        def work(*given):
            leaves, trees.incoming = flatten(given)
            outputs = traced(leaves)
            return trees.outgoing(outputs)

        return work

    def sot(f):
        return paddle.jit.to_static(f, full_graph=False)

    def static(f):
        def work(*given):
            leaves, rebuild = flatten(given)
            tensors = {f"x{i}": x if isinstance(x, paddle.Tensor) else make(x) for i, x in enumerate(leaves) if x is not None}
            feed = {name: x.numpy() for name, x in tensors.items()}
            shapes = {name: (x.shape, x.dtype) for name, x in tensors.items()}
            paddle.enable_static()
            try:
                with program_guard(program := Program(), Program()):
                    data = {name: paddle.static.data(name, *shape) for name, shape in shapes.items()}
                    outputs, refill = flatten(f(*rebuild(data.get(f"x{i}") for i in range(len(leaves)))))
                    executor = Executor()
                    found = executor.run(program, feed, [x for x in outputs if x is not None], return_numpy=False)
            finally:
                paddle.disable_static()
            each = iter(found)
            return refill(None if x is None else paddle.to_tensor(next(each)) for x in outputs)

        return work

    def axis(path, x):
        return (None, None, 1, 0)[x.ndim]

    traced = {"to_static", "static"}
    modes = {"eager": lambda f: f, "to_static": to_static, "sot": sot, "static": static}
    return Frame(make, read, modes, frozenset(traced), readable=frozenset({"eager", "sot"}), unit_axis=axis)


def tensorflow() -> Frame:
    import tensorflow as tf

    def taped(f):
        def work(*given):
            with tf.GradientTape():
                return f(*given)

        return work

    modes = {
        "eager": lambda f: f,
        "tape": taped,
        "function": tf.function,
        "xla": lambda f: tf.function(f, jit_compile=True),
    }
    traced = frozenset(modes) - {"eager"}
    return Frame(tf.constant, lambda x: np.asarray(x.numpy()), modes, traced, frozenset({"eager", "tape"}), unit_axis=-1)


def keras() -> Frame:
    """Keras hands out the arrays of its backend, which has a session of its own: here they are only seen to arrive."""
    import keras

    backend = {"tensorflow": tensorflow, "jax": jax, "torch": torch}[keras.backend.backend()]()
    return backend._replace(modes={"eager": lambda f: f}, traced=frozenset(), readable=frozenset({"eager"}))


FRAMES = {
    "jax": jax,
    "keras": keras,
    "mindspore": mindspore,
    "mlx": mlx,
    "paddle": paddle,
    "tensorflow": tensorflow,
    "torch": torch,
}
