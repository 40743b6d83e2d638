"""PaddlePaddle. Plain CPU tensors go through the native core, and what becomes of them is decided on the host.

Values of a static graph, tensors of an accelerator and those with a derivative to keep stay with Paddle's own kernels, and
their norms with them, in float64. Rows of a sparse gradient (SelectedRows) are merged first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import compress, islice
from typing import Any, cast

import numpy as np
import paddle
from paddle import Tensor
from paddle.pir import Value

from . import _blocks, native, numpy as host
from ._paddle_norms import (
    fits as fits,
    lost as lost,
    magnitudes,
    peak as peak,
    powers as powers,
    root as root,
    unit_powers as unit_powers,
)
from ._paddle_tensors import (
    COMPLEX,
    OURS,
    Tensors,
    arrays as arrays,
    as_numpy,
    empty_like,
    has_derivative,
    memory_of,
    numpy_view,
    put_back,
    restore as restore,
    some_wide,
    tell_written,
    tensor,
    where as where,
)

Array = Any

abs = paddle.abs
floor = paddle.floor


def isfinite(x: Array) -> Array:
    return x.abs() < math.inf


def any(x: Array) -> Array:
    return x.any()


def all(x: Array) -> Array:
    return x.all()


def like(x: Array, value: Any) -> Array:
    return tensor(value, x.dtype).astype(x.dtype).expand(x.shape)


def total(x: Array) -> Array:
    return x.sum()


def sort(x: Array) -> Array:
    return paddle.sort(x, axis=0)


def put(window: Array, slot: Any, value: Array) -> Array:
    places = paddle.arange(window.shape[0]).reshape([-1] + [1] * value.ndim)
    return where(places == _whole(slot), value, window)


def take(x: Array, place: Any) -> Array:
    return paddle.gather(x, _whole(place).reshape([1]))[0]


def _whole(x: Any) -> Array:
    return x.astype(paddle.int64) if isinstance(x, OURS) else paddle.full([], int(x), paddle.int64)


def scalar(value: Any) -> Any:
    """In float64; an eager tensor that meets a graph under construction, which takes none, as the number it holds."""
    if isinstance(value, Tensor) and not paddle.in_dynamic_mode():
        return value.item()
    return value.astype(paddle.float64) if isinstance(value, OURS) else value


def choose(condition: Array, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
    """Both are computed: a look at the condition would wait for the device."""
    return yes()


def known(x: Any) -> Array | None:
    if isinstance(x, host.HOST):
        return x
    return None if isinstance(x, Value) or has_derivative([x]) else x.astype(paddle.float64).numpy()[()]


def truth(flag: Array) -> bool | None:
    return None if isinstance(flag, Value) else bool(flag)


def quiet() -> AbstractContextManager[Any]:
    return cast("AbstractContextManager[Any]", host.quiet())


def stack(xs: Sequence[Array]) -> Array:
    return paddle.stack(list(xs)) if isinstance(xs[0], OURS) else host.stack(xs)


def unstack(x: Array) -> list[Array]:
    return list(paddle.unbind(x))


def norms(name: str, x: Any) -> Array:
    if not isinstance(x, OURS):
        return host.norms(name, x)
    if x.dtype in COMPLEX or x.dtype == paddle.bool:
        raise TypeError(f"{name} must be real numbers; got {x!r}")
    if isinstance(x, Value) or has_derivative([x]) or not x.place.is_cpu_place():
        return x.astype(paddle.float64)
    return host.norms(name, x.astype(paddle.float64).numpy())


def field(x: Any, xs: Sequence[Array] = ()) -> Array:
    if isinstance(x, OURS):
        return x
    place = xs[0].place if xs and isinstance(xs[0], Tensor) else None
    return paddle.to_tensor(np.array(x), place=place)


def sizes(xs: Sequence[Array], counts: Sequence[int]) -> Array:
    if isinstance(xs, Tensors) and xs.memory.whole and len(counts) == 1:
        return np.array([xs.memory.lengths.sum()], np.float64)
    each = (math.prod(x.shape) for x in xs)
    found = np.array([sum(islice(each, count)) for count in counts], np.float64)
    return found if isinstance(xs, Tensors) or not xs else field(found, xs)


def pick(xs: Sequence[Array], places: Sequence[int]) -> list[Array]:
    picked = [xs[i] for i in places]
    return Tensors(picked, xs.memory.only(np.array(places, np.intp))) if isinstance(xs, Tensors) else picked


def unit_axis(x: Array) -> int | None:
    return 1 if len(x.shape) == 2 else 0


def aligned(coef: Array, x: Array, axis: int | None) -> Array:
    return coef[0] if axis is None else coef.reshape([-1 if i == axis else 1 for i in range(len(x.shape))])


def is_complex(x: Array) -> bool:
    return x.dtype in COMPLEX


def nonfinite(xs: Sequence[Tensor]) -> list[tuple[int, int]]:
    memory = xs.memory if isinstance(xs, Tensors) else native.nowhere(len(xs))
    direct = iter(native.nonfinite(memory))
    return [
        next(direct) if held else _blocks.nonfinite(as_numpy(x.cpu())) for x, held in zip(xs, memory.held.tolist(), strict=True)
    ]


def working(xs: Sequence[Array], norm: Array) -> Array:
    wide = some_wide(xs)
    if isinstance(norm, OURS):
        return norm.astype(paddle.float64 if wide else paddle.float32)
    return np.atleast_1d(norm).astype(np.float64 if wide else np.float32)


def widened(coef: Array, norm: Array) -> Array:
    return coef.astype(norm.dtype).expand(norm.shape) if isinstance(coef, OURS) else host.widened(coef, norm)


def scale(xs: Sequence[Array], coefs: Sequence[Any]) -> list[Array]:
    if not isinstance(xs, Tensors):
        return [_product(x, coef) for x, coef in zip(xs, coefs, strict=True)]
    out = [empty_like(x) if np.any(coef != 1) else x for x, coef in zip(xs, coefs, strict=True)]
    _scale_into(xs, coefs, out, [y is not x for x, y in zip(xs, out, strict=True)])
    return out


def scale_(xs: list[Array], coefs: Sequence[Any]) -> list[Array]:
    if not isinstance(xs, Tensors):
        return _written(xs, scale(xs, coefs))
    which = [bool(np.any(coef != 1)) and not done for coef, done in zip(coefs, xs.again, strict=True)]
    _scale_into(xs, coefs, xs, which)
    return put_back(xs, which)


def _scale_into(xs: Tensors, coefs: Sequence[Any], ys: list[Tensor], which: Sequence[bool]) -> None:
    """Writes x · coef into every y that is asked for: the product in float64, rounded once."""
    if True not in which:
        return
    targets = xs.memory if ys is xs else memory_of(ys)
    numbers = np.array([not np.ndim(coef) for coef in coefs])
    direct = xs.memory.held & targets.held & numbers & np.array(which)
    factors = np.array(list(compress(coefs, direct.tolist())), np.float64)
    native.scale(xs.memory.only(direct), targets.only(direct), factors)
    for i in np.flatnonzero(np.array(which) & ~direct).tolist():
        numpy_view(ys[i])[...] = numpy_view(_product(xs[i], coefs[i]))
    tell_written(ys, which)


def _product(x: Array, coef: Any) -> Array:
    """x · coef, formed in float64 and rounded once; a coefficient may lie outside float32's range."""
    if isinstance(coef, np.ndarray):
        coef = paddle.to_tensor(coef)
    if x.dtype in COMPLEX:
        return paddle.complex(*(part.astype(paddle.float64) * coef for part in (x.real(), x.imag()))).astype(x.dtype)
    return (x.astype(paddle.float64) * coef).astype(x.dtype)


def clamp(xs: Sequence[Array], low: Any, high: Any, peaks: Any) -> tuple[list[Array], Any]:
    if not isinstance(xs, Tensors):
        return [_clamped(x, low, high) for x in xs], _outside(xs, low, high)
    bounds = _bounds(xs, low, high)
    doubtful = _blocks.doubtful(bounds, peaks)
    out = [empty_like(x) if doubt else x for x, doubt in zip(xs, doubtful, strict=True)]
    changed = _clamp_into(xs, bounds, out, doubtful)
    return [y if hit else x for x, y, hit in zip(xs, out, changed, strict=True)], True in changed


def clamp_(xs: list[Array], low: Any, high: Any, peaks: Any) -> tuple[list[Array], Any]:
    if not isinstance(xs, Tensors):
        new, changed = clamp(xs, low, high, peaks)
        return _written(xs, new), changed
    bounds = _bounds(xs, low, high)
    doubtful = [doubt and not done for doubt, done in zip(_blocks.doubtful(bounds, peaks), xs.again, strict=True)]
    hit = _clamp_into(xs, bounds, xs, doubtful)
    return put_back(xs, hit), True in hit


def _bounds(xs: Sequence[Tensor], low: float, high: float) -> list[tuple[float, float]]:
    """The bounds as each tensor's type rounds them."""
    rounded = {dtype: _rounded(low, high, dtype) for dtype in {x.dtype for x in xs}}
    return list(rounded.values()) * len(xs) if len(rounded) == 1 else [rounded[x.dtype] for x in xs]


def _rounded(low: float, high: float, dtype: Any) -> tuple[float, float]:
    """The bounds as the type rounds them; those of a modulus have no such type."""
    least, most = (_held(bound, dtype) for bound in (low, high))
    return float(least), float(most)


def _held(bound: Any, dtype: Any) -> Array:
    """A bound as the type rounds it, in float64."""
    wide = tensor(bound, paddle.float64)
    return wide if dtype in COMPLEX else wide.astype(dtype).astype(paddle.float64)


def _clamp_into(xs: Tensors, bounds: list[tuple[float, float]], ys: list[Tensor], which: Sequence[bool]) -> list[bool]:
    """Writes x between its bounds into every y that is asked for; which changed?"""
    changed = np.zeros(len(xs), np.bool_)
    if True not in which:
        return cast("list[bool]", changed.tolist())
    targets = xs.memory if ys is xs else memory_of(ys)
    direct = xs.memory.held & targets.held & np.array(which)
    changed[direct] = native.clamp(xs.memory.only(direct), targets.only(direct), np.array(bounds).reshape(-1, 2)[direct])
    for i in np.flatnonzero(np.array(which) & ~direct).tolist():
        changed[i] = bool(_outside([xs[i]], *bounds[i]))
        if changed[i]:
            numpy_view(ys[i])[...] = numpy_view(_clamped(xs[i], *bounds[i]))
    found: list[bool] = changed.tolist()
    tell_written(ys, found)
    return found


def _clamped(x: Array, low: Any, high: Any) -> Array:
    least, most = _held(low, x.dtype), _held(high, x.dtype)
    if x.dtype not in COMPLEX:
        wide = x.astype(paddle.float64)
        return where(wide > most, most, where(wide < least, least, wide)).astype(x.dtype)
    size = magnitudes(x)
    above = size > most
    return _product(x, where(above, most / where(above, size, 1.0), 1.0))


def _outside(xs: Sequence[Array], low: Any, high: Any) -> Array:
    """Does any value lie outside the bounds?"""
    flags = [_outside_one(x, _held(low, x.dtype), _held(high, x.dtype)) for x in xs]
    return paddle.stack(flags).any() if flags else paddle.zeros([], paddle.bool)


def _outside_one(x: Array, least: Array, most: Array) -> Array:
    if x.dtype in COMPLEX:
        return (magnitudes(x) > most).any()
    wide = x.astype(paddle.float64)
    return ((wide < least) | (wide > most)).any()


def zeros(xs: Sequence[Array]) -> list[Array]:
    return [paddle.zeros(x.shape, x.dtype) for x in xs]


def zero_(xs: list[Array]) -> list[Array]:
    if not isinstance(xs, Tensors):
        return _written(xs, zeros(xs))
    for x in xs:
        numpy_view(x)[...] = 0
    which = [True] * len(xs)
    tell_written(xs, which)
    return put_back(xs, which)


def keep(xs: Sequence[Array], finite: Array) -> list[Array]:
    return [where(finite, x, 0.0) for x in xs]


def keep_(xs: list[Array], finite: Array) -> list[Array]:
    return _written(xs, keep(xs, finite))


def _written(xs: list[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
    if xs and isinstance(xs[0], Value):
        raise TypeError("the values of a static graph cannot be written: use clip()")
    with paddle.no_grad():
        for x, y in zip(xs, ys, strict=True):
            x.set_value(y)
    return xs
