"""A call's tensors: which of them lie in memory that the core may read, and which stay with torch's kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import native
from ._overlap import said, written_once
from ._torch_shares import ByPlacement, Opened, Shares, is_spread, local, rewrapped

Array = Any
EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)
TEAM = native.find_team()
TYPES = {torch.float64: "f8", torch.float32: "f4", torch.bfloat16: "u2", torch.float16: "f2"} | {
    torch.complex64: "c8",
    torch.complex128: "c16",
}
WIDE = {torch.float64, torch.complex128}


class Tensors(Opened):
    """Plain CPU tensors that know where they lie."""

    def __init__(self, xs: Sequence[Tensor], memory: native.Memory) -> None:
        super().__init__(xs)
        self.memory = memory
        self.again = [False] * len(self)


class Elsewhere(Opened):
    """Tensors that stay with torch's kernels."""


def arrays(leaves: Sequence[Any], path: Callable[[int], str], writable: bool) -> list[Tensor]:
    plain = set(map(type, leaves)) <= {Tensor}
    if not plain and not torch.compiler.is_compiling() and True in set(map(is_spread, leaves)):
        return shared(arrays([local(x) for x in leaves], path, writable), ByPlacement(leaves, path))
    stays = not plain or (not writable and has_derivative(leaves)) or _traced()
    memory = None if stays or True in set(map(Tensor.is_neg, leaves)) else _opened(leaves)
    if memory is not None and memory.whole:  # plain memory of a type that the core knows: there is nothing to check
        return _once(Tensors(leaves, memory), path) if writable else Tensors(leaves, memory)
    for i, leaf in enumerate(leaves):
        _check(leaf, i, path)
    values = [_values(x.detach() if writable and x.requires_grad else x) for x in leaves]
    unmerged = [(x, y) for x, y in zip(leaves, values, strict=True) if x.is_sparse and not x.is_coalesced()]
    if stays or not _reachable(values):
        return _elsewhere(values, unmerged, path) if writable else values
    xs = Tensors(values, memory_of(values))
    xs.unmerged = unmerged
    return _once(xs, path) if writable else xs


def shared(xs: Sequence[Tensor], shares: Shares) -> Opened:
    """The same tensors, as those of which other processes have a part."""
    found = xs if isinstance(xs, Opened) else Elsewhere(xs)
    found.shares = shares
    return found


def has_derivative(xs: Sequence[Tensor]) -> bool:
    """Is there a derivative to keep, backward or forward?"""
    return forward_ad._current_level >= 0 or (torch.is_grad_enabled() and True in {x.requires_grad for x in xs})


def _elsewhere(xs: list[Tensor], unmerged: list[tuple[Tensor, Tensor]], path: Callable[[int], str]) -> list[Tensor]:
    """Ready to be written, each stretch of memory once; told by addresses, and where there are none by the objects."""
    found = Elsewhere(xs)
    found.unmerged = unmerged
    if torch.compiler.is_compiling() or read(lambda: [x.data_ptr() for x in xs]) is None or {x.is_meta for x in xs} != {False}:
        seen: set[int] = set()
        found.again = []
        for x in xs:
            found.again.append(id(x) in seen)
            seen.add(id(x))
    else:
        nowhere = native.nowhere(len(xs))
        found.again = written_once(len(xs), lambda i: _shadow(xs[i]), *nowhere.bounds(), ~nowhere.held, path)
    return found


def _reachable(xs: Sequence[Tensor]) -> bool:
    """Do they lie in the CPU's memory? Under vmap, or without storage, they do not lie anywhere."""
    return False not in {x.is_cpu for x in xs} and read(lambda: 0 not in [x.data_ptr() for x in xs if x.numel()]) is True


def _traced() -> bool:
    """Is somebody watching the operations, who would see nothing of what the core does?"""
    return bool(torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch.jit.is_tracing())


def _check(x: Any, i: int, path: Callable[[int], str]) -> None:
    name = said(path(i))
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}: gradients are tensors, p.grad of each parameter")
    if isinstance(x, torch.nn.Parameter):
        raise TypeError(
            f"{name} is a Parameter, and clipping it would scale the weights: pass its gradient, p.grad; or all parameters to "
            "gradclip.integrations.torch.clip_grad_norm_(parameters, max_norm)"
        )
    if x.dtype not in TYPES:
        raise TypeError(f"{name} is of {x.dtype}: gradients are of {', '.join(str(dtype) for dtype in TYPES)}")
    if x.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(f"{name} is of layout {x.layout}: gradients are dense, or sparse of layout torch.sparse_coo")


def _values(x: Tensor) -> Tensor:
    """The values of a sparse gradient, rows that occur twice merged."""
    return x.coalesce().values() if x.is_sparse else x


def memory_of(xs: Sequence[Tensor]) -> native.Memory:
    """Where they lie; those whose bits torch reads with another sign lie nowhere."""
    memory = _opened(xs) or native.nowhere(len(xs))
    memory.dtypes[[x.is_neg() for x in xs]] = native.NOT_HELD
    return memory


def _opened(xs: Sequence[Tensor]) -> native.Memory | None:
    return native.open_tensors(xs, EXCHANGE, torch.get_num_threads(), TEAM)


def _once(xs: Tensors, path: Callable[[int], str]) -> Tensors:
    """Ready to be written, each stretch of memory once; ValueError for what shares only a part of it."""
    xs.again = written_once(len(xs), lambda i: _shadow(xs[i]), *xs.memory.bounds(), ~xs.memory.held, path)
    return xs


def _shadow(x: Tensor) -> Array:
    """A NumPy array on a tensor's memory, whatever torch makes of its bits."""
    size = x.element_size()
    interface = {
        "version": 3,
        "data": (x.data_ptr() or 8, False),
        "shape": tuple(x.shape),
        "strides": tuple(stride * size for stride in x.stride()),
        "typestr": f"{'<' if sys.byteorder == 'little' else '>'}{TYPES[x.dtype]}",
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def restore(x: Tensor, leaf: Tensor) -> Tensor:
    if is_spread(leaf):
        return rewrapped(x, leaf)
    if not leaf.is_sparse:
        return x
    return torch.sparse_coo_tensor(leaf.coalesce().indices(), x, leaf.shape, is_coalesced=True, check_invariants=False)


def merged(xs: list[Tensor]) -> list[Tensor]:
    """Written back where the values stood for a sparse tensor whose rows had not been merged."""
    with torch.no_grad():
        for sparse, values in xs.unmerged if isinstance(xs, Opened) else []:
            sparse.copy_(restore(values, sparse))
    return xs


def read(look: Callable[[], Any]) -> Any:
    """The value, or None where there is none: on the meta device, in a fake tensor, under vmap."""
    try:
        return look()
    except (RuntimeError, NotImplementedError):
        return None


def fusible(xs: Sequence[Tensor]) -> bool:
    """Is there neither a derivative nor a graph to keep simple? Then one call does for all tensors."""
    if torch.compiler.is_compiling() or not xs or True in {x.is_complex() for x in xs}:
        return False
    if read(lambda: [x.data_ptr() for x in xs]) is None:  # vmap, which knows no such call
        return False
    return not has_derivative(xs)


def repeats(xs: Sequence[Tensor]) -> Sequence[bool]:
    return (isinstance(xs, Opened) and xs.again) or [False] * len(xs)


def distinct(xs: Sequence[Tensor]) -> list[Tensor]:
    """Those that do not lie where an earlier one does."""
    return [x for x, done in zip(xs, repeats(xs), strict=True) if not done]


def write(y: Tensor, value: Tensor) -> None:
    with torch.inference_mode() if y.is_inference() else torch.no_grad():
        y.copy_(value)


def precision(x: Tensor) -> torch.dtype:
    """The precision that norms are computed in."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def some_wide(xs: Sequence[Tensor]) -> bool:
    """Is a gradient of float64 among them, or of complex numbers of two?"""
    if isinstance(xs, Tensors) and xs.memory.whole:
        return not xs.memory.dtypes.all()  # float64's code is 0
    return not WIDE.isdisjoint({x.dtype for x in xs})
