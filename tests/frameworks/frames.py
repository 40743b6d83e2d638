"""What the conformance suite has to know of a framework: how its arrays are made and read, and how it runs functions."""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

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


FRAMES = {"torch": torch, "paddle": paddle}
