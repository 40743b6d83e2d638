"""PyTorch. Plain CPU tensors go through the native core, and what becomes of them is decided on the host.

Accelerators, tracers, wrapper classes and tensors with a derivative to keep have no memory that may be read now: they stay with
torch's own kernels, and their norms on their device, in float64 where there is float64.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress, islice
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from . import _powers, native
from . import numpy as host
from ._blocks import BLOCK
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

floor = torch.floor
abs = torch.abs


def where(condition: Tensor, yes: Any, no: Any) -> Tensor:
    if isinstance(yes, float) and isinstance(no, Tensor) and no.is_floating_point() and no.shape == condition.shape:
        return no.masked_fill(condition, yes)  # one operation, where torch.where makes a tensor of the number first
    if isinstance(yes, Tensor) or isinstance(no, Tensor) or isinstance(yes, bool):
        return torch.where(condition, yes, no)
    return torch.where(condition, torch.full((), yes, dtype=_wide(condition), device=condition.device), no)


def isfinite(x: Tensor) -> Tensor:
    return x.abs() < math.inf


def any(x: Tensor) -> Tensor:
    return x.any() if x.ndim else x


def all(x: Tensor) -> Tensor:
    return x.all() if x.ndim else x


def like(x: Tensor, value: Any) -> Tensor:
    return value.to(x).expand(x.shape) if isinstance(value, Tensor) else torch.full_like(x, value)


def total(x: Tensor) -> Tensor:
    return x.sum()


def sort(x: Tensor) -> Tensor:
    return x.sort(dim=0).values


def put(window: Tensor, slot: Tensor, value: Tensor) -> Tensor:
    return window.index_copy(0, torch.as_tensor(slot, device=window.device).long().reshape(1), value[None])


def take(x: Tensor, place: Tensor) -> Tensor:
    return x.index_select(0, place.long().reshape(1))[0]


def scalar(value: Any) -> Any:
    return value


def choose(condition: Tensor, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
    """Both are computed: a look at the condition would wait for the device."""
    return yes()


def known(x: Any) -> Array | None:
    if isinstance(x, host.HOST):
        return x
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or x.requires_grad or forward_ad._current_level >= 0:
        return None
    return _read(lambda: np.float64(x.item()) if not x.ndim else x.double().cpu().numpy())


def truth(flag: Any) -> bool | None:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    return cast("bool | None", _read(lambda: bool(flag)))


def _read(look: Callable[[], Any]) -> Any:
    """The value, or None where there is none: on the meta device, in a fake tensor, under vmap."""
    try:
        return look()
    except (RuntimeError, NotImplementedError):
        return None


def quiet() -> AbstractContextManager[Any]:
    return nullcontext() if torch.compiler.is_compiling() else host.quiet()


def stack(xs: Sequence[Array]) -> Array:
    return torch.stack(list(xs)) if isinstance(xs[0], Tensor) else host.stack(xs)


def unstack(x: Tensor) -> list[Tensor]:
    return list(x.unbind())


def norms(name: str, x: Any) -> Array:
    if not isinstance(x, Tensor):
        return host.norms(name, x)
    if x.is_complex() or x.dtype is torch.bool:
        raise TypeError(f"{name} must be real numbers; got {x!r}")
    on_host = isinstance(arrays([x.detach().to(_wide(x))], lambda i: name, False), Tensors) and not _derived([x])
    return host.norms(name, x.detach().double().numpy()) if on_host else x.to(_wide(x))


def field(x: Any, xs: Sequence[Tensor] = ()) -> Tensor:
    if isinstance(x, Tensor):
        return x
    device = xs[0].device if xs else torch.device("cpu")
    if device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.as_tensor(np.array(x))
    if getattr(x, "ndim", 0):
        return torch.as_tensor(x, dtype=_wide(xs[0])).to(device, non_blocking=True)
    return torch.full((), x, dtype=torch.bool if isinstance(x, bool) else _wide(xs[0]), device=device)


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
    stays = not plain or (not writable and _derived(leaves)) or _traced()
    memory = None if stays or True in set(map(Tensor.is_neg, leaves)) else _opened(leaves)
    if memory is not None and memory.whole:  # plain memory of a type that the core knows: there is nothing to check
        return _once(Tensors(leaves, memory), path) if writable else Tensors(leaves, memory)
    for i, leaf in enumerate(leaves):
        _check(leaf, i, path)
    values = [_values(x.detach() if writable and x.requires_grad else x) for x in leaves]
    unmerged = [(x, y) for x, y in zip(leaves, values, strict=True) if x.is_sparse and not x.is_coalesced()]
    if stays or not _reachable(values):
        return _elsewhere(values, unmerged, path) if writable else values
    xs = Tensors(values, _memory(values))
    xs.unmerged = unmerged
    return _once(xs, path) if writable else xs


def shared(xs: Sequence[Tensor], shares: Shares) -> Opened:
    """The same tensors, as those of which other processes have a part."""
    found = xs if isinstance(xs, Opened) else Elsewhere(xs)
    found.shares = shares
    return found


def _derived(xs: Sequence[Tensor]) -> bool:
    """Is there a derivative to keep, backward or forward?"""
    return forward_ad._current_level >= 0 or (torch.is_grad_enabled() and True in {x.requires_grad for x in xs})


def _elsewhere(xs: list[Tensor], unmerged: list[tuple[Tensor, Tensor]], path: Callable[[int], str]) -> list[Tensor]:
    """Ready to be written, each stretch of memory once; told by addresses, and where there are none by the objects."""
    found = Elsewhere(xs)
    found.unmerged = unmerged
    if torch.compiler.is_compiling() or _read(lambda: [x.data_ptr() for x in xs]) is None or {x.is_meta for x in xs} != {False}:
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
    return False not in {x.is_cpu for x in xs} and _read(lambda: 0 not in [x.data_ptr() for x in xs if x.numel()]) is True


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


def _memory(xs: Sequence[Tensor]) -> native.Memory:
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


def _blocks_of(x: Tensor) -> Iterator[Array]:
    """The elements as dense NumPy blocks."""
    for block in x.detach().resolve_conj().resolve_neg().contiguous().view(-1).split(BLOCK):
        yield (block.float() if block.dtype is torch.bfloat16 else block).numpy()


def powers(xs: Sequence[Tensor], counts: Sequence[int], p: float, divisors: Array = None) -> Array:
    if p != math.inf and isinstance(xs, Opened) and xs.shares is not None:
        return _weighted(xs, counts, p, divisors, xs.shares.weights)
    return _powers_here(xs, counts, p, divisors)


def _weighted(xs: Opened, counts: Sequence[int], p: float, divisors: Array, weights: list[float]) -> Array:
    """What is this process's part of the powers, where others have copies of the same elements."""
    if len(set(weights)) <= 1:
        return _powers_here(xs, counts, p, divisors) * sum(weights[:1])
    each = None if divisors is None else _repeated(divisors, counts)
    found = _powers_here(xs, [1] * len(xs), p, each)
    if isinstance(found, np.ndarray):
        parts = iter((found * weights).tolist())
        return np.array([_powers.total(islice(parts, count)) for count in counts])
    scaled = torch.stack(torch._foreach_mul(list(found.unbind()), weights))  # numbers need not travel to the device
    return torch.stack([group.sum() for group in scaled.split(list(counts))])


def _repeated(values: Array, counts: Sequence[int]) -> Array:
    """Every group's value once for each of its tensors."""
    if isinstance(values, np.ndarray):
        return np.repeat(values, counts)
    return torch.cat([value.expand(count) for value, count in zip(values.unbind(), counts, strict=True)])


def _powers_here(xs: Sequence[Tensor], counts: Sequence[int], p: float, divisors: Array) -> Array:
    if isinstance(xs, Tensors):
        return _powers.joined(xs.memory, counts, p, divisors, lambda i: _blocks_of(xs[i]))
    parts = _stacked(xs, p, divisors, counts)
    if len(counts) == len(xs) and set(counts) == {1}:
        return parts
    if len(counts) == 1 and p != math.inf:
        return parts.sum(0, keepdim=True)
    groups = parts.split(list(counts))
    return torch.stack([(_largest(group) if p == math.inf else group.sum()) for group in groups])


def _stacked(xs: Sequence[Tensor], p: float, divisors: Tensor | None, counts: Sequence[int]) -> Tensor:
    """Σ|x|^p of every tensor, on the first one's device."""
    if not xs:
        return torch.zeros(0, dtype=torch.float64)
    if divisors is not None:
        each = [by for by, count in zip(divisors.unbind(), counts, strict=True) for _ in range(count)]
        xs = [_size(x) / by.to(x.device) for x, by in zip(xs, each, strict=True)]
    parts = _fused(xs, p) if _fusible(xs) else [_power(x, p) for x in xs]
    return torch.stack([part if part.device == parts[0].device else part.to(parts[0].device) for part in parts])


def _fusible(xs: Sequence[Tensor]) -> bool:
    """Is there neither a derivative nor a graph to keep simple? Then one call does for all tensors."""
    if torch.compiler.is_compiling() or not xs or True in {x.is_complex() for x in xs}:
        return False
    if _read(lambda: [x.data_ptr() for x in xs]) is None:  # vmap, which knows no such call
        return False
    return not _derived(xs)


def _fused(xs: Sequence[Tensor], p: float) -> list[Tensor]:
    wide = _wide(xs[0])
    if p != math.inf:
        return list(torch._foreach_powsum(xs, p, dtype=wide))
    full = [x for x in xs if x.numel()]
    each = iter(torch._foreach_norm(full, p, dtype=wide) if full else [])
    return [next(each) if x.numel() else torch.zeros((), dtype=wide, device=x.device) for x in xs]


def _power(x: Tensor, p: float) -> Tensor:
    """Σ|x|^p, its derivative 0 where x is 0."""
    size = _size(x)
    if p == math.inf:
        return _largest(size.abs())
    if p == 1:
        return size.abs().sum()
    if p == 2:
        return size.square().sum()
    some = size != 0
    return torch.where(some, torch.where(some, size, 1.0).abs() ** p, 0.0).sum()


def _largest(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.sum()


def _wide(x: Tensor) -> torch.dtype:
    """The precision that norms are computed in."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def unit_powers(xs: Sequence[Tensor], axes: Sequence[int | None], p: float, divisors: Array = None) -> Array:
    if isinstance(xs, Opened) and xs.shares is not None:
        raise ValueError(
            'scope "unit" has a norm for every slice, and this process has parts of tensors: use scope "tensor" or "global"'
        )
    if isinstance(xs, Tensors):
        return host.unit_powers([_plain(x) for x in xs], axes, p, divisors)
    counts = [1 if axis is None else x.shape[axis] for x, axis in zip(xs, axes, strict=True)]
    if divisors is not None:
        parts = zip(xs, divisors.split(counts), axes, strict=True)
        xs = [_size(x) / aligned(part, x, axis).to(x.device) for x, part, axis in parts]
    found = [_unit_powers(_size(x), axis, p) for x, axis in zip(xs, axes, strict=True)]
    return torch.cat([part.to(found[0].device) for part in found]) if found else torch.zeros(0, dtype=torch.float64)


def _plain(x: Tensor) -> Array:
    """As NumPy's, without a copy where torch allows that."""
    x = x.detach().resolve_conj().resolve_neg()
    return (x.float() if x.dtype is torch.bfloat16 else x).numpy()


def _unit_powers(x: Tensor, axis: int | None, p: float) -> Tensor:
    if axis is None:
        return _power(x, p).reshape(1)
    rows = x.movedim(axis, 0).reshape(x.shape[axis], -1)
    return torch.stack([_power(row, p) for row in rows.unbind()]) if p not in (1, 2) else _rows(rows, p)


def _rows(rows: Tensor, p: float) -> Tensor:
    return (rows.abs() if p == 1 else rows.square()).sum(1)


def _size(x: Tensor) -> Tensor:
    """|x| for complex x, in the norm's precision."""
    return (x.abs() if x.is_complex() else x).to(_wide(x))


def fits(xs: Sequence[Tensor], p: float) -> bool:
    exact = isinstance(xs, Tensors) or not xs or _wide(xs[0]) is torch.float64
    return exact and not _some_wide(xs) and host.SMALLEST_P <= p <= host.LARGEST_P


def _some_wide(xs: Sequence[Tensor]) -> bool:
    """Is a gradient of float64 among them, or of complex numbers of two?"""
    if isinstance(xs, Tensors) and xs.memory.whole:
        return not xs.memory.dtypes.all()  # float64's code is 0
    return not WIDE.isdisjoint({x.dtype for x in xs})


def lost(powers: Array, p: float) -> Array:
    if isinstance(powers, Tensor) and powers.dtype is torch.float32:
        return ~((powers > 1e-30) & (powers < 1e36))
    return host.lost(powers, p)


def root(powers: Array, p: float) -> Array:
    if not isinstance(powers, Tensor) or p in (1, math.inf):
        return host.root(powers, p)
    if not powers.requires_grad:
        return powers.sqrt() if p == 2 else powers ** (1 / p)
    some = powers > 0  # the root of 0 has no derivative
    return torch.where(some, torch.where(some, powers, 1.0) ** (1 / p), powers)


def peak(peaks: Array) -> Array:
    return _largest(peaks) if isinstance(peaks, Tensor) else host.peak(peaks)


def sizes(xs: Sequence[Tensor], counts: Sequence[int]) -> Array:
    shares = xs.shares if isinstance(xs, Opened) else None
    if isinstance(xs, Tensors) and xs.memory.whole and len(counts) == 1 and shares is None:
        return np.array([xs.memory.lengths.sum()], np.float64)
    each = (x.numel() for x in xs) if shares is None else iter(shares.numels)
    found = [float(sum(islice(each, count))) for count in counts]
    return (
        np.array(found) if isinstance(xs, Tensors) or not xs else torch.tensor(found, dtype=_wide(xs[0]), device=xs[0].device)
    )


def pick(xs: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    picked = [xs[i] for i in places]
    found = Tensors(picked, xs.memory.only(np.array(places, np.intp))) if isinstance(xs, Tensors) else picked
    return shared(found, xs.shares.of(places)) if isinstance(xs, Opened) and xs.shares is not None else found


def unit_axis(x: Tensor) -> int | None:
    return 0


def aligned(coef: Array, x: Tensor, axis: int | None) -> Array:
    return coef[0] if axis is None else coef.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


def is_complex(x: Tensor) -> bool:
    return bool(x.is_complex())


def nonfinite(xs: Sequence[Tensor]) -> list[tuple[int, int]]:
    held = xs.memory.held.tolist() if isinstance(xs, Tensors) else [False] * len(xs)
    direct = iter(native.nonfinite(xs.memory) if isinstance(xs, Tensors) else [])
    return [next(direct) if found else (int(x.isnan().sum()), int(x.isinf().sum())) for x, found in zip(xs, held, strict=True)]


def working(xs: Sequence[Tensor], norm: Array) -> Array:
    wide = _some_wide(xs)
    if isinstance(norm, Tensor):
        return norm.to(torch.float64 if wide else torch.float32)
    return host.as_working(norm, wide)


def widened(coef: Array, norm: Array) -> Array:
    return coef.to(norm.dtype).expand(norm.shape) if isinstance(coef, Tensor) else host.widened(coef, norm)


def scale(xs: Sequence[Tensor], coefs: Sequence[Any]) -> list[Tensor]:
    kinds = set(map(type, coefs))
    if not isinstance(xs, Tensors) or Tensor in kinds:
        return _products(xs, coefs)
    if np.ndarray in kinds:
        return [_by_units(x, coef, torch.empty_like(x)) if np.any(coef != 1) else x for x, coef in zip(xs, coefs, strict=True)]
    out = [x if coef == 1 else torch.empty_like(x) for x, coef in zip(xs, coefs, strict=True)]
    _scale_into(xs, coefs, out, [coef != 1 for coef in coefs])
    return out


def scale_(xs: list[Tensor], coefs: Sequence[Any]) -> list[Tensor]:
    kinds = set(map(type, coefs))
    if not isinstance(xs, Tensors) or Tensor in kinds:
        return _products_(xs, coefs)
    if np.ndarray in kinds:
        return _scale_units_(xs, coefs)
    _scale_into(xs, coefs, xs, [coef != 1 and not done for coef, done in zip(coefs, xs.again, strict=True)])
    return _merged(xs)


def _scale_units_(xs: Tensors, coefs: Sequence[Any]) -> list[Tensor]:
    for x, coef, done in zip(xs, coefs, xs.again, strict=True):
        if np.any(coef != 1) and not done:
            _by_units(x, coef, x)
    return _merged(xs)


def _by_units(x: Tensor, coef: Array, y: Tensor) -> Tensor:
    _write(y, x.detach().to(_double(x)) * torch.as_tensor(coef))
    return y


def _scale_into(xs: Tensors, coefs: Sequence[float], ys: list[Tensor], which: Sequence[bool]) -> None:
    """Writes x · coef into every y that is asked for: the product in float64, rounded once."""
    if True not in which:
        return
    targets = xs.memory if ys is xs else _memory(ys)
    direct = xs.memory.held & targets.held & np.array(which)
    native.scale(xs.memory.only(direct), targets.only(direct), np.array(coefs, np.float64)[direct])
    for i in np.flatnonzero(np.array(which) & ~direct).tolist():
        _write(ys[i], xs[i].detach().to(_double(xs[i])) * coefs[i])
    if ys is xs:
        increment_version(list(compress(ys, direct.tolist())))


def _write(y: Tensor, value: Tensor) -> None:
    with torch.inference_mode() if y.is_inference() else torch.no_grad():
        y.copy_(value)


def _double(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def _products(xs: Sequence[Tensor], coefs: Sequence[Tensor]) -> list[Tensor]:
    """x · coef by torch's kernels, formed in float32 at least; one call for all where that is right."""
    if not _fusible(xs) or len(set(map(id, coefs))) > 1:
        return [_product(x, coef) for x, coef in zip(xs, coefs, strict=True)]
    scaled = torch._foreach_mul(list(xs), _for(xs, coefs[0])) if xs else []
    return [y.to(x.dtype) for x, y in zip(xs, scaled, strict=True)]  # a 0-d tensor takes the type of the coefficient


def _products_(xs: list[Tensor], coefs: Sequence[Tensor]) -> list[Tensor]:
    ys, by = _first(xs), [coef for coef, done in zip(coefs, _again(xs), strict=True) if not done]
    with torch.no_grad():
        if _fusible(ys) and len(set(map(id, by))) == 1:
            torch._foreach_mul_(ys, _for(ys, by[0]))
        else:
            for x, coef in zip(ys, by, strict=True):
                x.copy_(_product(x, coef))
    return _merged(xs)


def _again(xs: Sequence[Tensor]) -> Sequence[bool]:
    return (isinstance(xs, Opened) and xs.again) or [False] * len(xs)


def _first(xs: Sequence[Tensor]) -> list[Tensor]:
    """Those that do not lie where an earlier one does."""
    return [x for x, done in zip(xs, _again(xs), strict=True) if not done]


def _for(xs: Sequence[Tensor], coef: Any) -> Any:
    """The coefficient in the precision of the product, so that the fused kernels take it."""
    narrow = isinstance(coef, Tensor) and not _some_wide(xs)
    return coef.to(torch.float32) if narrow else coef


def _product(x: Tensor, coef: Any) -> Tensor:
    """x · coef, formed in the norm's own precision and rounded once; a coefficient may lie outside float32's range."""
    if not isinstance(coef, Tensor):
        return x * coef
    wide = torch.promote_types(coef.dtype, x.dtype)
    return (x.to(wide) * coef.to(x.device)).to(x.dtype)


def clamp(xs: Sequence[Tensor], low: Any, high: Any, peaks: Any) -> tuple[list[Tensor], Any]:
    if not isinstance(xs, Tensors):
        return [_clamped(x, low, high) for x in xs], _outside(xs, low, high, peaks)
    doubtful = _doubtful(xs, low, high, peaks)
    out = [torch.empty_like(x) if doubt else x for x, doubt in zip(xs, doubtful, strict=True)]
    changed = _clamp_into(xs, low, high, out, doubtful)
    return [y if hit else x for x, y, hit in zip(xs, out, changed, strict=True)], True in changed


def clamp_(xs: list[Tensor], low: Any, high: Any, peaks: Any) -> tuple[list[Tensor], Any]:
    if not isinstance(xs, Tensors):
        return _clamped_(xs, low, high, peaks)
    doubtful = [doubt and not done for doubt, done in zip(_doubtful(xs, low, high, peaks), xs.again, strict=True)]
    changed = _clamp_into(xs, low, high, xs, doubtful)
    return (_merged(xs) if True in changed else xs), True in changed


def _doubtful(xs: Sequence[Tensor], low: float, high: float, peaks: Array | None) -> list[bool]:
    """May a value lie outside? Said by the largest |x|; a NaN hides the others."""
    if peaks is None:
        return [True] * len(xs)
    bounds = {dtype: _rounded(low, high, dtype) for dtype in {x.dtype for x in xs}}
    least = [min(-a, b) for a, b in (bounds[x.dtype] for x in xs)]
    return [not peak <= bound for peak, bound in zip(peaks.tolist(), least, strict=True)]


def _rounded(low: Any, high: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The bounds as the type rounds them; those of a modulus have no such type, and those on a device stay there."""
    if dtype.is_complex or isinstance(low, Tensor) or isinstance(high, Tensor):
        return low, high
    if torch.compiler.is_compiling():  # they may be symbols, whose digits cannot be looked at
        low, high = (torch.full((), bound, dtype=torch.float64).to(dtype) for bound in (low, high))
        return low, high
    return _nearest(low, dtype), _nearest(high, dtype)


def _nearest(bound: float, dtype: torch.dtype) -> float:
    """The number of that type that lies nearest."""
    if not math.isfinite(bound):
        return bound
    info = torch.finfo(dtype)
    step = info.eps * max(info.tiny, math.ldexp(1.0, math.frexp(bound)[1] - 1))
    nearest = round(bound / step) * step
    return nearest if -info.max <= nearest <= info.max else math.copysign(math.inf, bound)


def _clamp_into(xs: Tensors, low: float, high: float, ys: list[Tensor], which: Sequence[bool]) -> list[bool]:
    """Writes x between the bounds into every y that is asked for; which changed?"""
    changed = np.zeros(len(xs), np.bool_)
    if True not in which:
        return cast("list[bool]", changed.tolist())
    targets = xs.memory if ys is xs else _memory(ys)
    direct = xs.memory.held & targets.held & np.array(which)
    each = [_rounded(low, high, x.dtype) for x in compress(xs, direct.tolist())]
    changed[direct] = native.clamp(xs.memory.only(direct), targets.only(direct), np.array(each).reshape(-1, 2))
    if ys is xs:
        increment_version(list(compress(ys, (direct & changed).tolist())))
    for i in np.flatnonzero(np.array(which) & ~direct).tolist():
        changed[i] = bool(_outside([xs[i]], low, high, None))
        if changed[i]:
            _write(ys[i], _clamped(xs[i].detach(), low, high))
    return cast("list[bool]", changed.tolist())


def _clamped(x: Tensor, low: Any, high: Any) -> Tensor:
    if not x.is_complex():
        return x.clamp(*_rounded(low, high, x.dtype)).to(x.dtype)  # a 0-d tensor takes the type of a 0-d bound
    size = x.abs()
    above = size > high
    return torch.where(above, x * (high / torch.where(above, size, 1.0)), x)


def _clamped_(xs: list[Tensor], low: Any, high: Any, peaks: Any) -> tuple[list[Tensor], Any]:
    """Two calls for all tensors of a type."""
    with torch.no_grad():
        changed = False if peaks is None else _outside(xs, low, high, peaks)  # without peaks nobody asks
        for dtype in {x.dtype for x in xs}:
            same, (least, most) = [x for x in _first(xs) if x.dtype == dtype], _rounded(low, high, dtype)
            if not _fusible(same) or isinstance(least, Tensor) or isinstance(most, Tensor):
                for x in same:
                    x.copy_(_clamped(x, low, high))
            else:
                torch._foreach_clamp_min_(same, least)
                torch._foreach_clamp_max_(same, most)
    return _merged(xs), changed


def _outside(xs: Sequence[Tensor], low: Any, high: Any, peaks: Any) -> Tensor:
    """Does any value lie outside the bounds? Told by the largest |x| of each where they are alike and of one type."""
    dtypes = {x.dtype for x in xs}
    symbols = torch.compiler.is_compiling() or isinstance(low, Tensor) or isinstance(high, Tensor)
    if isinstance(peaks, Tensor) and len(dtypes) == 1 and not symbols and low == -high:
        return (peaks > _rounded(low, high, *dtypes)[1]).any()
    flags = []
    for x in xs:
        least, most = _rounded(low, high, x.dtype)
        flags.append((x.abs() > most).any() if x.is_complex() else ((x < least) | (x > most)).any())
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any() if flags else torch.zeros((), dtype=torch.bool)


def zeros(xs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) for x in xs]


def zero_(xs: list[Tensor]) -> list[Tensor]:
    for x in xs:
        _write(x, torch.zeros((), dtype=x.dtype, device=x.device))
    return _merged(xs)


def keep(xs: Sequence[Tensor], finite: Tensor) -> list[Tensor]:
    return [torch.where(finite.to(x.device), x, torch.zeros((), dtype=x.dtype, device=x.device)) for x in xs]


def keep_(xs: list[Tensor], finite: Tensor) -> list[Tensor]:
    with torch.no_grad():
        stopped = ~finite
        for x in xs:
            x.masked_fill_(stopped.to(x.device), 0)
    return _merged(xs)


def _merged(xs: list[Tensor]) -> list[Tensor]:
    """Written back where the values stood for a sparse tensor whose rows had not been merged."""
    with torch.no_grad():
        for sparse, values in xs.unmerged if isinstance(xs, Opened) else []:
            sparse.copy_(restore(values, sparse))
    return xs
