"""MindSpore in PyNative mode. Plain CPU tensors are looked at as NumPy arrays on the same memory: `numpy.py` does the work.

Tensors on an accelerator, and those whose derivative is being taken, stay with MindSpore's own kernels and so do their norms.
`power`, `scaled`, `clamped` and their kin are also what `gradclip.integrations.mindspore` puts into a graph: MindSpore's
compiler reads their text, so that they are plain functions of tensors, with no branch on a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.common.api import _pynative_executor as executor

from . import numpy as host
from ._overlap import said

Array = Any
LAST = (2, 10)  # the last MindSpore known to be built against NumPy 1


def check_numpy(numpy: str, mindspore: str) -> None:
    """ImportError for a NumPy beside which MindSpore can be imported, and its first arithmetic fails."""
    release = tuple(int(part) for part in mindspore.split(".")[:2])
    if int(numpy.partition(".")[0]) >= 2 and release <= LAST:
        raise ImportError(
            f"MindSpore {mindspore} is built against NumPy 1, and its arithmetic fails beside NumPy {numpy}: "
            "pip install 'numpy<2', in an environment of its own where something else needs NumPy 2"
        )


check_numpy(np.__version__, ms.__version__)

DTYPES = {
    ms.float16: np.dtype(np.float16),
    ms.bfloat16: Tensor(0.0, ms.bfloat16).asnumpy().dtype,
    ms.float32: np.dtype(np.float32),
    ms.float64: np.dtype(np.float64),
    ms.complex64: np.dtype(np.complex64),
    ms.complex128: np.dtype(np.complex128),
}
SMALLEST, LARGEST = 1e-20, 1e36  # between them sums of float32 powers have not lost digits
COMPLEX = (ms.complex64, ms.complex128)

abs = ops.abs
floor = ops.floor
total = ops.reduce_sum


def where(condition: Tensor, yes: Any, no: Any) -> Tensor:
    return ops.where(condition, yes, no)


def isfinite(x: Tensor) -> Tensor:
    return ops.abs(x) < math.inf  # MindSpore's own has no kernel for every type


def any(x: Tensor) -> Tensor:
    return x.any()


def all(x: Tensor) -> Tensor:
    return x.all()


def like(x: Tensor, value: Any) -> Tensor:
    return ops.zeros_like(x) + value


def sort(x: Tensor) -> Tensor:
    return ops.gather_elements(x, 0, ops.sort(x, axis=0)[1])  # its values have been through float32


def put(window: Tensor, slot: Any, value: Tensor) -> Tensor:
    at = ops.arange(window.shape[0]).reshape((-1,) + (1,) * value.ndim) == slot
    return ops.where(at, value, window)


def take(x: Tensor, place: Any) -> Tensor:
    return ops.gather(x, ops.cast(place, ms.int32), 0)


def scalar(value: Any) -> Any:
    """As it is; a bfloat16, which the CPU has no comparisons for, as the same float32."""
    return value.astype(ms.float32) if isinstance(value, Tensor) and value.dtype == ms.bfloat16 else value


def choose(condition: Tensor, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
    """Both are computed: a look at the condition would wait for the device."""
    return yes()


def known(x: Any) -> Array | None:
    if isinstance(x, host.HOST):
        return x
    return None if _has_derivative([x]) else x.asnumpy().astype(np.float64)


def truth(flag: Any) -> bool:
    return bool(flag)


quiet = host.quiet


def stack(xs: Sequence[Array]) -> Array:
    return ops.stack(list(xs)) if isinstance(xs[0], Tensor) else host.stack(xs)


def unstack(x: Tensor) -> list[Tensor]:
    return list(ops.unbind(x))


def norms(name: str, x: Any) -> Array:
    if not isinstance(x, Tensor):
        return host.norms(name, x)
    if x.dtype in COMPLEX or x.dtype == ms.bool_:
        raise TypeError(f"{name} must be real numbers; got {x!r}")
    return x if _stays([x]) else host.norms(name, x.asnumpy())


def field(x: Any, xs: Sequence[Any] = ()) -> Tensor:
    return x if isinstance(x, Tensor) else Tensor.from_numpy(np.array(x))


def arrays(leaves: Sequence[Any], path: Callable[[int], str], writable: bool) -> list[Any]:
    if set(map(type, leaves)) != {Tensor} or not {x.dtype for x in leaves} <= DTYPES.keys():
        for i, leaf in enumerate(leaves):
            check(leaf, said(path(i)))
    if _stays(leaves):
        return list(leaves)
    return host.arrays([_view(x) for x in leaves], path, writable)


def check(x: Any, name: str) -> None:
    """TypeError for what is no gradient, with what to do."""
    if isinstance(x, Parameter):
        raise TypeError(
            f"{name} is a Parameter, and clipping it would scale the weights: pass its gradient, from "
            "mindspore.value_and_grad(forward, None, optimizer.parameters)"
        )
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}: sparse gradients of MindSpore are not clipped, use a dense embedding")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} is of {x.dtype}: gradients are of {', '.join(map(str, DTYPES))}")


def _stays(xs: Sequence[Tensor]) -> bool:
    """Must MindSpore's own kernels do the work, since there is no memory that may be read, or a derivative to keep?"""
    return {x.device for x in xs} - {"CPU"} != set() or _has_derivative(xs)


def _has_derivative(xs: Sequence[Tensor]) -> bool:
    """Is a derivative being taken, and of one of these?"""
    return bool(executor.requires_grad()) and True in {x._requires_grad for x in xs}


def _view(x: Tensor) -> Array:
    """A NumPy array on a tensor's memory, once it has been computed; it keeps the tensor alive."""
    dtype = DTYPES[x.dtype]
    interface = {
        "version": 3,
        "data": (x.data_ptr() or 8, False),
        "shape": x.shape,
        "strides": tuple(stride * dtype.itemsize for stride in x.stride()),
        "typestr": "|u2" if x.dtype == ms.bfloat16 else dtype.str,
    }
    array = np.asarray(SimpleNamespace(__array_interface__=interface, tensor=x))
    return array.view(dtype) if x.dtype == ms.bfloat16 else array


def restore(x: Any, leaf: Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else Tensor.from_numpy(np.ascontiguousarray(x).reshape(x.shape))


def powers(xs: Sequence[Any], counts: Sequence[int], p: float, divisors: Array = None) -> Array:
    if isinstance(xs, host.Arrays):
        return host.powers(xs, counts, p, divisors)
    each = iter([power(x, p, by).astype(norm_type()) for x, by in zip(xs, _repeated(divisors, counts), strict=True)])
    return ops.stack([_joined(list(islice(each, count)), p) for count in counts])


def _repeated(divisors: Array, counts: Sequence[int]) -> list[Any]:
    """One divisor for every array."""
    each = [None] * len(counts) if divisors is None else unstack(divisors)
    return [by for by, count in zip(each, counts, strict=True) for _ in range(count)]


def _joined(parts: list[Tensor], p: float) -> Tensor:
    """The power of several arrays from those of each."""
    if not parts:
        return ops.zeros((), norm_type())
    return largest(ops.stack(parts)) if p == math.inf else ops.stack(parts).sum()


def number(value: Any) -> Tensor:
    """A rule's number as a Tensor: flags and counts as they are, all else in the type of norms."""
    array = np.asarray(value)
    return Tensor(array, {"b": ms.bool_, "i": ms.int32}.get(array.dtype.kind, norm_type()))


def norm_type() -> Any:
    """What norms and coefficients are computed in: float64 where the device has it."""
    return ms.float32 if ms.get_context("device_target") == "Ascend" else ms.float64


def power(x: Tensor, p: float, divisor: Any = None) -> Tensor:
    """Σ|x / divisor|^p in float32 at least, its derivative 0 where x is 0; for p = inf the largest |x|."""
    size = ops.abs(widened_type(x))
    if x.size == 0:
        return ops.zeros((), size.dtype)  # MindSpore's sums of no elements are what the memory held
    if divisor is not None:
        by = divisor.astype(size.dtype)
        size = size / ops.where(by > 0, by, 1.0)  # a float64 tensor's peak may be 0 in float32
    return largest(size) if p == math.inf else raised(size, p).sum()


def raised(size: Tensor, p: float) -> Tensor:
    """Every |x|^p, its derivative 0 where x is 0."""
    if p == 1:
        return size
    if p == 2:
        return ops.square(size)
    some = size != 0
    return ops.where(some, ops.where(some, size, 1.0) ** p, 0.0)


def largest(x: Tensor) -> Tensor:
    """The largest entry; NaN where there is one, which MindSpore's maximum loses in some places."""
    return ops.where((x != x).any(), math.nan, x.max())


def widened_type(x: Tensor) -> Tensor:
    """In the precision that is computed in."""
    return x if x.dtype == ms.float64 else x.astype(ms.float32)


def unit_powers(xs: Sequence[Any], axes: Sequence[int | None], p: float, divisors: Array = None) -> Array:
    if isinstance(xs, host.Arrays):
        return host.unit_powers(xs, axes, p, divisors)
    found, first = [ops.zeros((0,), norm_type())], 0
    for x, axis in zip(xs, axes, strict=True):
        each = rows(x, -1 if axis is None else axis)
        by = None if divisors is None else divisors[first : first + len(each)]
        found.append(row_powers(each, p, by).astype(norm_type()))
        first += len(each)
    return ops.cat(found)


def rows(x: Tensor, axis: int) -> Tensor:
    """|x| as rows, one for every index along the axis; -1: x is one row."""
    size = ops.abs(widened_type(x))
    count = 1 if axis < 0 else x.shape[axis]
    if x.size == 0:
        return ops.zeros((count, 1), size.dtype)
    return (size if axis <= 0 else size.swapaxes(0, axis)).reshape((count, -1))


def row_powers(rows: Tensor, p: float, divisors: Any = None) -> Tensor:
    """Σ|x / divisor|^p of every row; for p = inf the largest |x|."""
    if divisors is not None:
        by = divisors.astype(rows.dtype)
        rows = rows / ops.where(by > 0, by, 1.0).reshape((-1, 1))
    if p == math.inf:
        return ops.where((rows != rows).any(axis=1), math.nan, rows.max(axis=1))
    return raised(rows, p).sum(axis=1)


def scaled_rows(x: Tensor, coef: Tensor, axis: int) -> Tensor:
    """x with every row times its own coefficient."""
    shape = (1,) * x.ndim if axis < 0 else (1,) * axis + (-1,) + (1,) * (x.ndim - axis - 1)
    return scaled(x, coef.reshape(shape))


def fits(xs: Sequence[Any], p: float) -> bool:
    return isinstance(xs, host.Arrays) and host.fits(xs, p)


def lost(powers: Array, p: float) -> Array:
    if not isinstance(powers, Tensor):
        return host.lost(powers, p)
    return ops.logical_not(ops.logical_and(powers > SMALLEST, powers < LARGEST))


def root(powers: Array, p: float) -> Array:
    if not isinstance(powers, Tensor) or p in (1, math.inf):
        return host.root(powers, p)
    some = powers > 0  # the root of 0 has no derivative
    return ops.where(some, ops.where(some, powers, 1.0) ** (1 / p), powers)


def peak(peaks: Array) -> Array:
    return largest(peaks) if isinstance(peaks, Tensor) else host.peak(peaks)


def sizes(xs: Sequence[Any], counts: Sequence[int]) -> Array:
    found = host.sizes(xs, counts)
    return found if isinstance(xs, host.Arrays) else Tensor(found, norm_type())


def pick(xs: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    return host.pick(xs, places) if isinstance(xs, host.Arrays) else [xs[i] for i in places]


def unit_axis(x: Any) -> int | None:
    return 0


def aligned(coef: Array, x: Any, axis: int | None) -> Array:
    return coef[0] if axis is None else coef.reshape(tuple(-1 if i == axis else 1 for i in range(x.ndim)))


def is_complex(x: Any) -> bool:
    return x.dtype in COMPLEX if isinstance(x, Tensor) else host.is_complex(x)


def nonfinite(xs: Sequence[Any]) -> list[tuple[int, int]]:
    return host.nonfinite(xs if isinstance(xs, host.Arrays) else [x.asnumpy() for x in xs])


def working(xs: Sequence[Any], norm: Array) -> Array:
    return norm if isinstance(norm, Tensor) else host.working(xs, norm)


def widened(coef: Array, norm: Array) -> Array:
    return coef if isinstance(coef, Tensor) else host.widened(coef, norm)


def scale(xs: Sequence[Any], coefs: Sequence[Any]) -> list[Any]:
    if isinstance(xs, host.Arrays):
        return host.scale(xs, coefs)
    return [x if isinstance(coef, float) else scaled(x, coef) for x, coef in zip(xs, coefs, strict=True)]


def scaled(x: Tensor, coef: Any) -> Tensor:
    """x · coef, formed in float32 at least."""
    wide = widened_type(x)
    return (wide * coef.astype(wide.dtype)).astype(x.dtype)


def scale_(xs: Sequence[Any], coefs: Sequence[Any]) -> list[Any]:
    return host.scale_(xs, coefs) if isinstance(xs, host.Arrays) else _written(xs, scale(xs, coefs))


def _written(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
    for x, y in zip(xs, ys, strict=True):
        x.copy_(y)
    return list(xs)


def clamp(xs: Sequence[Any], low: Any, high: Any, peaks: Array) -> tuple[list[Any], Any]:
    if isinstance(xs, host.Arrays):
        return host.clamp(xs, low, high, peaks)
    return [clamped(x, low, high) for x in xs], ops.stack([outside(x, low, high) for x in xs]).any()


def clamped(x: Tensor, low: Any, high: Any) -> Tensor:
    """low ≤ x ≤ high; NaN stays, which MindSpore's own clamp makes a bound of."""
    wide = widened_type(x)
    return ops.where(wide > high, high, ops.where(wide < low, low, wide)).astype(x.dtype)


def outside(x: Tensor, low: Any, high: Any) -> Tensor:
    """Does any value lie outside the bounds?"""
    if x.size == 0:
        return ops.zeros((), ms.bool_)
    wide = widened_type(x)
    return ops.logical_or(wide > high, wide < low).any()


def clamp_(xs: Sequence[Any], low: Any, high: Any, peaks: Array) -> tuple[list[Any], Any]:
    if isinstance(xs, host.Arrays):
        return host.clamp_(xs, low, high, peaks)
    new, changed = clamp(xs, low, high, peaks)
    return _written(xs, new), changed


def zeros(xs: Sequence[Any]) -> list[Any]:
    return host.zeros(xs) if isinstance(xs, host.Arrays) else [ops.zeros_like(x) for x in xs]


def zero_(xs: Sequence[Any]) -> list[Any]:
    return host.zero_(xs) if isinstance(xs, host.Arrays) else _written(xs, zeros(xs))


def keep(xs: Sequence[Tensor], finite: Tensor) -> list[Tensor]:
    return [kept(x, finite) for x in xs]


def kept(x: Tensor, finite: Tensor) -> Tensor:
    """x where the flag is set, else zeros, whatever it held."""
    return ops.where(finite, widened_type(x), 0.0).astype(x.dtype)


def keep_(xs: Sequence[Tensor], finite: Tensor) -> list[Tensor]:
    return _written(xs, keep(xs, finite))
