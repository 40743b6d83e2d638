"""Gradients times their coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import native
from ._torch_tensors import Tensors, distinct, fusible, memory_of, merged, repeats, some_wide, write

Array = Any


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
    return merged(xs)


def _scale_units_(xs: Tensors, coefs: Sequence[Any]) -> list[Tensor]:
    for x, coef, done in zip(xs, coefs, xs.again, strict=True):
        if np.any(coef != 1) and not done:
            _by_units(x, coef, x)
    return merged(xs)


def _by_units(x: Tensor, coef: Array, y: Tensor) -> Tensor:
    write(y, x.detach().to(_double(x)) * torch.as_tensor(coef))
    return y


def _scale_into(xs: Tensors, coefs: Sequence[float], ys: list[Tensor], which: Sequence[bool]) -> None:
    """Writes x · coef into every y that is asked for: the product in float64, rounded once."""
    if True not in which:
        return
    targets = xs.memory if ys is xs else memory_of(ys)
    direct = xs.memory.held & targets.held & np.array(which)
    native.scale(xs.memory.only(direct), targets.only(direct), np.array(coefs, np.float64)[direct])
    for i in np.flatnonzero(np.array(which) & ~direct).tolist():
        write(ys[i], xs[i].detach().to(_double(xs[i])) * coefs[i])
    if ys is xs:
        increment_version(list(compress(ys, direct.tolist())))


def _double(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def _products(xs: Sequence[Tensor], coefs: Sequence[Tensor]) -> list[Tensor]:
    """x · coef by torch's kernels, formed in float32 at least; one call for all where that is right."""
    if not fusible(xs) or len(set(map(id, coefs))) > 1:
        return [_product(x, coef) for x, coef in zip(xs, coefs, strict=True)]
    scaled = torch._foreach_mul(list(xs), _for(xs, coefs[0])) if xs else []
    return [y.to(x.dtype) for x, y in zip(xs, scaled, strict=True)]  # a 0-d tensor takes the type of the coefficient


def _products_(xs: list[Tensor], coefs: Sequence[Tensor]) -> list[Tensor]:
    ys, by = distinct(xs), [coef for coef, done in zip(coefs, repeats(xs), strict=True) if not done]
    with torch.no_grad():
        if fusible(ys) and len(set(map(id, by))) == 1:
            torch._foreach_mul_(ys, _for(ys, by[0]))
        else:
            for x, coef in zip(ys, by, strict=True):
                x.copy_(_product(x, coef))
    return merged(xs)


def _for(xs: Sequence[Tensor], coef: Any) -> Any:
    """The coefficient in the precision of the product, so that the fused kernels take it."""
    narrow = isinstance(coef, Tensor) and not some_wide(xs)
    return coef.to(torch.float32) if narrow else coef


def _product(x: Tensor, coef: Any) -> Tensor:
    """x · coef, formed in the norm's own precision and rounded once; a coefficient may lie outside float32's range."""
    if not isinstance(coef, Tensor):
        return x * coef
    wide = torch.promote_types(coef.dtype, x.dtype)
    return (x.to(wide) * coef.to(x.device)).to(x.dtype)
