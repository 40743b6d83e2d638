"""What the conformance suite has to know of a framework: how its arrays are made and read, and how it runs functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class Frame(NamedTuple):
    """make and read: NumPy to the framework's array and back. modes: ways of running a function of arrays."""

    make: Callable[[Any], Any]
    read: Callable[[Any], Any]
    modes: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]
    traced: frozenset[str] = frozenset()  # the modes in which norms stay with the framework
    readable: frozenset[str] = frozenset({"eager"})  # the modes in which a value can be looked at, where it is asked for
    unit_axis: int = 0  # the axis of the outputs, in this framework's layout of a matrix and of three axes
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


FRAMES = {"mindspore": mindspore, "torch": torch}
