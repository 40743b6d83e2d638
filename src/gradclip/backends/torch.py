"""PyTorch. Plain CPU tensors go through the native core, and what becomes of them is decided on the host.

Accelerators, tracers, wrapper classes and tensors with a derivative to keep have no memory that may be read now: they stay with
torch's own kernels, and their norms on their device, in float64 where there is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import native, numpy as host
from ._torch_clamping import clamp as clamp, clamp_ as clamp_
from ._torch_norms import (
    aligned as aligned,
    fits as fits,
    lost as lost,
    peak as peak,
    powers as powers,
    root as root,
    unit_powers as unit_powers,
)
from ._torch_scaling import scale as scale, scale_ as scale_
from ._torch_shares import Opened
from ._torch_tensors import (
    Tensors,
    arrays as arrays,
    has_derivative,
    merged,
    precision,
    read,
    restore as restore,
    shared,
    some_wide,
    write,
)

Array = Any

floor = torch.floor
abs = torch.abs


def where(condition: Tensor, yes: Any, no: Any) -> Tensor:
    if isinstance(yes, float) and isinstance(no, Tensor) and no.is_floating_point() and no.shape == condition.shape:
        return no.masked_fill(condition, yes)  # one operation, where torch.where makes a tensor of the number first
    if isinstance(yes, Tensor) or isinstance(no, Tensor) or isinstance(yes, bool):
        return torch.where(condition, yes, no)
    return torch.where(condition, torch.full((), yes, dtype=precision(condition), device=condition.device), no)


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
    return read(lambda: np.float64(x.item()) if not x.ndim else x.double().cpu().numpy())


def truth(flag: Any) -> bool | None:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    return cast("bool | None", read(lambda: bool(flag)))


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
    on_host = isinstance(arrays([x.detach().to(precision(x))], lambda i: name, False), Tensors) and not has_derivative([x])
    return host.norms(name, x.detach().double().numpy()) if on_host else x.to(precision(x))


def field(x: Any, xs: Sequence[Tensor] = ()) -> Tensor:
    if isinstance(x, Tensor):
        return x
    device = xs[0].device if xs else torch.device("cpu")
    if device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.as_tensor(np.array(x))
    if getattr(x, "ndim", 0):
        return torch.as_tensor(x, dtype=precision(xs[0])).to(device, non_blocking=True)
    return torch.full((), x, dtype=torch.bool if isinstance(x, bool) else precision(xs[0]), device=device)


def sizes(xs: Sequence[Tensor], counts: Sequence[int]) -> Array:
    shares = xs.shares if isinstance(xs, Opened) else None
    if isinstance(xs, Tensors) and xs.memory.whole and len(counts) == 1 and shares is None:
        return np.array([xs.memory.lengths.sum()], np.float64)
    each = (x.numel() for x in xs) if shares is None else iter(shares.numels)
    found = [float(sum(islice(each, count))) for count in counts]
    return (
        np.array(found)
        if isinstance(xs, Tensors) or not xs
        else torch.tensor(found, dtype=precision(xs[0]), device=xs[0].device)
    )


def pick(xs: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    picked = [xs[i] for i in places]
    found = Tensors(picked, xs.memory.only(np.array(places, np.intp))) if isinstance(xs, Tensors) else picked
    return shared(found, xs.shares.of(places)) if isinstance(xs, Opened) and xs.shares is not None else found


def unit_axis(x: Tensor) -> int | None:
    return 0


def is_complex(x: Tensor) -> bool:
    return bool(x.is_complex())


def nonfinite(xs: Sequence[Tensor]) -> list[tuple[int, int]]:
    held = xs.memory.held.tolist() if isinstance(xs, Tensors) else [False] * len(xs)
    direct = iter(native.nonfinite(xs.memory) if isinstance(xs, Tensors) else [])
    return [next(direct) if found else (int(x.isnan().sum()), int(x.isinf().sum())) for x, found in zip(xs, held, strict=True)]


def working(xs: Sequence[Tensor], norm: Array) -> Array:
    wide = some_wide(xs)
    if isinstance(norm, Tensor):
        return norm.to(torch.float64 if wide else torch.float32)
    return host.as_working(norm, wide)


def widened(coef: Array, norm: Array) -> Array:
    return coef.to(norm.dtype).expand(norm.shape) if isinstance(coef, Tensor) else host.widened(coef, norm)


def zeros(xs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) for x in xs]


def zero_(xs: list[Tensor]) -> list[Tensor]:
    for x in xs:
        write(x, torch.zeros((), dtype=x.dtype, device=x.device))
    return merged(xs)


def keep(xs: Sequence[Tensor], finite: Tensor) -> list[Tensor]:
    return [torch.where(finite.to(x.device), x, torch.zeros((), dtype=x.dtype, device=x.device)) for x in xs]


def keep_(xs: list[Tensor], finite: Tensor) -> list[Tensor]:
    with torch.no_grad():
        stopped = ~finite
        for x in xs:
            x.masked_fill_(stopped.to(x.device), 0)
    return merged(xs)
