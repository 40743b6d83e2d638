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


FRAMES = {"torch": torch, "jax": jax}
