"""TensorFlow. Eager tensors on the CPU go through the native core, and what becomes of them is decided on the host.

In a `tf.function`, on accelerators and where a tape records there is no memory that may be read now: those stay with
TensorFlow's own operations. Their norms are float64, of parts that are added up in float32. TensorFlow takes float32 values
below 1e-38 for 0, and so do these paths; where nothing is clipped they leave them as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain, islice, repeat
from typing import Any, cast

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record

from . import numpy as host
from ._overlap import said

Array = Any
EAGER = tf.__internal__.EagerTensor
WIDE = {"float64", "complex128"}
SPARSE = tf.IndexedSlices
ALIGNED = 64  # bytes; TensorFlow takes memory over without a copy, and may end the process where it does not begin so
ROW = 4096  # values that are added up in float32, one after another under XLA
SMALLEST, LARGEST = 1e-22, 1e36  # between them a float32 power has lost no digits, of up to 1e10 elements
SMALLEST_COEF, LARGEST_COEF = 1.2e-38, 3.4e38  # between them float32 holds a coefficient

abs = tf.abs
floor = tf.floor
isfinite = tf.math.is_finite
any = tf.reduce_any
all = tf.reduce_all
total = tf.reduce_sum


def quiet() -> AbstractContextManager[Any]:
    return cast("AbstractContextManager[Any]", host.quiet())


def where(condition: Array, yes: Any, no: Any) -> Array:
    dtype = next((x.dtype for x in (yes, no) if tf.is_tensor(x)), tf.bool if isinstance(yes, bool) else tf.float64)
    return tf.where(condition, tf.convert_to_tensor(yes, dtype), tf.convert_to_tensor(no, dtype))


def like(x: Array, value: Any) -> Array:
    return tf.broadcast_to(tf.cast(value, x.dtype), tf.shape(x))


def sort(x: Array) -> Array:
    return tf.sort(x, axis=0)


def put(window: Array, slot: Array, value: Array) -> Array:
    return tf.tensor_scatter_nd_update(window, [[tf.cast(slot, tf.int32)]], value[None])


def take(x: Array, place: Array) -> Array:
    return tf.gather(x, tf.cast(place, tf.int32))


def scalar(value: Any) -> Any:
    if getattr(value, "shape", None) != () or isinstance(value, host.HOST):
        return host.scalar(value)
    value = tf.convert_to_tensor(value)
    return tf.cast(value, tf.float64) if value.dtype.is_floating or value.dtype.is_integer else str(value)


def choose(condition: Array, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
    return tf.cond(condition, yes, no)


def known(x: Any) -> Array | None:
    if isinstance(x, host.HOST):
        return x
    x = tf.convert_to_tensor(x)  # a variable, where a state is kept in one
    return np.asarray(x, np.float64)[()] if _readable([x]) else None


def truth(flag: Any) -> bool | None:
    return bool(flag) if isinstance(flag, EAGER) and tf.executing_eagerly() else None


def stack(xs: Sequence[Array]) -> Array:
    return host.stack(xs) if _held(xs) else tf.stack(xs)


def unstack(x: Array) -> list[Array]:
    return list(tf.unstack(x))


def norms(name: str, x: Any) -> Array:
    if not tf.is_tensor(x):
        return host.norms(name, x)
    x = tf.convert_to_tensor(x)
    if not (x.dtype.is_floating or x.dtype.is_integer):
        raise TypeError(f"{name} must be real numbers; got {x!r}")
    wide = tf.cast(x, tf.float64)  # NumPy cannot read a single bfloat16
    return host.norms(name, np.asarray(wide)) if _readable([x]) else wide


def field(x: Any, xs: Sequence[Array] = ()) -> Array:
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return tf.convert_to_tensor(x) if dtype == tf.bool else tf.cast(x, tf.float64)


class Held(host.Arrays):
    """NumPy's view of tensors in the CPU's memory; what is made of them begins where TensorFlow can take it over."""

    def empty(self, x: Array) -> Array:
        memory = np.empty(x.nbytes + ALIGNED, np.uint8)
        first = -memory.ctypes.data % ALIGNED
        return memory[first : first + x.nbytes].view(x.dtype).reshape(x.shape)


def arrays(leaves: Sequence[Any], path: Callable[[int], str], writable: bool) -> list[Array]:
    for i, leaf in enumerate(leaves):
        _check(leaf, i, path)
    if writable and leaves:
        raise TypeError(f"{said(path(0))} is TensorFlow's, whose tensors cannot be written: use clip()")
    xs = [leaf if isinstance(leaf, EAGER) else _values(leaf) for leaf in leaves]
    return Held(map(_view, xs)) if _readable(xs) else xs


def _view(x: Any) -> Array:
    """NumPy's view of the memory; of a single bfloat16, for which NumPy finds none, a copy."""
    return np.asarray(x if len(x.shape) or x.dtype != tf.bfloat16 else x.numpy())


def _check(leaf: Any, i: int, path: Callable[[int], str]) -> None:
    if not isinstance(leaf, tf.Tensor | tf.Variable | SPARSE):
        raise TypeError(f"{said(path(i))} is a {type(leaf).__name__}: gradients are dense tensors or tf.IndexedSlices")
    if leaf.dtype.name not in host.DTYPES:
        raise TypeError(f"{said(path(i))} is of {leaf.dtype.name}: gradients are of {', '.join(host.DTYPES)}")


def _values(leaf: Any) -> Array:
    """A tensor; of a sparse gradient its values, rows that occur twice added up."""
    if not isinstance(leaf, SPARSE):
        return tf.convert_to_tensor(leaf)
    rows, places = tf.unique(leaf.indices)
    return tf.math.unsorted_segment_sum(leaf.values, places, tf.size(rows))


def _readable(xs: Sequence[Any]) -> bool:
    """May the memory of these tensors be read now, and does nobody record what becomes of it?"""
    if set(map(type, xs)) - {EAGER} or record.could_possibly_record() or not tf.executing_eagerly():
        return False
    return {x.backing_device.rpartition("/")[2][:10] for x in xs} <= {"device:CPU"}


def _held(xs: Sequence[Any]) -> bool:
    return isinstance(xs, Held) or (len(xs) > 0 and isinstance(xs[0], host.HOST))


def restore(x: Array, leaf: Any) -> Any:
    values = _tensor(x) if isinstance(x, np.ndarray) else x
    return SPARSE(values, tf.unique(leaf.indices)[0], leaf.dense_shape) if isinstance(leaf, SPARSE) else values


def _tensor(x: Array) -> Array:
    """A tensor on the memory of a NumPy array that nobody else writes."""
    if x.__array_interface__["data"][0] % ALIGNED or not x.flags.c_contiguous:
        return tf.constant(x)
    if x.dtype.name == "bfloat16":  # which DLPack and NumPy do not agree on
        return tf.bitcast(_tensor(x.view(np.float16)), tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(x.__dlpack__())


def powers(xs: Sequence[Array], counts: Sequence[int], p: float, divisors: Array = None) -> Array:
    if _held(xs):
        return host.powers(xs, counts, p, divisors)
    each = repeat(None) if divisors is None else chain.from_iterable(map(repeat, unstack(divisors), counts))
    wide = _wide(xs)
    parts = (_power(_size(x, wide, by), p) for x, by in zip(xs, each, strict=False))
    return tf.stack([_joined(list(islice(parts, count)), p) for count in counts])


def _joined(parts: list[Array], p: float) -> Array:
    if not parts:
        return tf.constant(0.0, tf.float64)
    if len(parts) == 1:
        return parts[0]
    return _largest(tf.stack(parts)) if p == math.inf else tf.reduce_sum(tf.stack(parts))


def _wide(xs: Sequence[Array]) -> Any:
    """The precision in which gradients are squared and multiplied."""
    return tf.float32 if WIDE.isdisjoint({x.dtype.name for x in xs}) else tf.float64


def _size(x: Array, wide: Any, divisor: Array | None) -> Array:
    """|x| of a complex x, else x, in this precision."""
    size = tf.cast(tf.abs(x) if x.dtype.is_complex else x, wide)
    return size if divisor is None else size / tf.cast(divisor, wide)


def _power(x: Array, p: float) -> Array:
    """Σ|x|^p in float64, its derivative 0 where x is 0."""
    if p == math.inf:
        return tf.cast(_largest(tf.abs(x)), tf.float64)
    return _sum(_raised(x, p))


def _raised(x: Array, p: float) -> Array:
    if p == 1 or p == 2:
        return tf.abs(x) if p == 1 else tf.square(x)
    some = x != 0
    return tf.where(some, tf.abs(tf.where(some, x, tf.ones_like(x))) ** tf.cast(p, x.dtype), tf.zeros_like(x))


def _sum(x: Array) -> Array:
    """Σx in float64: rows in the precision of x, and then the rows."""
    size = x.shape.num_elements()
    if x.dtype == tf.float64 or (size is not None and size <= 2 * ROW):
        return tf.cast(tf.reduce_sum(x), tf.float64)
    line = tf.reshape(x, [-1])
    whole = (tf.size(line) if size is None else size) // ROW * ROW
    rows = tf.reduce_sum(tf.reshape(line[:whole], [-1, ROW]), 1)
    return tf.reduce_sum(tf.cast(rows, tf.float64)) + tf.cast(tf.reduce_sum(line[whole:]), tf.float64)


def _largest(x: Array, axes: Sequence[int] | None = None) -> Array:
    """The largest of numbers that are not negative, 0 of none; NaN, which XLA would lose, where there is one."""
    peak = tf.reduce_max(x, axes)
    peak = tf.where(peak < 0, tf.zeros_like(peak), peak)
    return tf.where(tf.reduce_any(tf.math.is_nan(x), axes), tf.cast(math.nan, x.dtype), peak)


def unit_powers(xs: Sequence[Array], axes: Sequence[int | None], p: float, divisors: Array = None) -> Array:
    if _held(xs):
        return host.unit_powers(xs, axes, p, divisors)
    counts = [1 if axis is None else x.shape[axis] for x, axis in zip(xs, axes, strict=True)]
    each = repeat(None) if divisors is None else tf.split(divisors, counts)
    wide = _wide(xs)
    found = [_units(x, axis, p, wide, by) for x, axis, by in zip(xs, axes, each, strict=False)]
    return tf.concat([tf.zeros(0, tf.float64), *found], 0)


def _units(x: Array, axis: int | None, p: float, wide: Any, divisors: Array | None) -> Array:
    x = _size(x, wide, None if divisors is None else aligned(divisors, x, axis))
    if axis is None:
        return tf.reshape(_power(x, p), [1])
    others = [i for i in range(len(x.shape)) if i != axis]
    found = _largest(tf.abs(x), others) if p == math.inf else tf.reduce_sum(_raised(x, p), others)
    return tf.cast(found, tf.float64)


def fits(xs: Sequence[Array], p: float) -> bool:
    return _held(xs) and host.fits(xs, p)


def lost(powers: Array, p: float) -> Array:
    if isinstance(powers, host.HOST):
        return host.lost(powers, p)
    return ~((powers > SMALLEST) & (powers < LARGEST)) | (p < host.SMALLEST_P)


def root(powers: Array, p: float) -> Array:
    if isinstance(powers, host.HOST) or p in (1, math.inf):
        return host.root(powers, p)
    some = powers > 0  # the root of 0 has no derivative
    safe = where(some, powers, 1.0)
    return tf.where(some, tf.sqrt(safe) if p == 2 else safe ** (1 / p), powers)


def peak(peaks: Array) -> Array:
    return host.peak(peaks) if isinstance(peaks, host.HOST) else _largest(peaks)


def sizes(xs: Sequence[Array], counts: Sequence[int]) -> Array:
    if _held(xs):
        return host.sizes(xs, counts)
    each = (tf.size(x, tf.int64) for x in xs)
    return tf.stack([tf.cast(tf.add_n([tf.constant(0, tf.int64), *islice(each, count)]), tf.float64) for count in counts])


def pick(xs: Sequence[Array], places: Sequence[int]) -> Sequence[Array]:
    picked = [xs[i] for i in places]
    return Held(picked) if isinstance(xs, Held) else picked


def unit_axis(x: Array) -> int | None:
    if not isinstance(x, host.HOST) and not x.shape.is_fully_defined():
        raise ValueError(
            f'scope "unit" has to know every shape when it is traced; one is {x.shape}: set_shape, or input_signature'
        )
    return len(x.shape) - 1


def aligned(coef: Array, x: Array, axis: int | None) -> Array:
    if isinstance(coef, host.HOST) or axis is None:
        return host.aligned(coef, x, axis)
    return tf.reshape(coef, [-1 if i == axis else 1 for i in range(len(x.shape))])


def is_complex(x: Array) -> bool:
    return host.is_complex(x) if isinstance(x, host.HOST) else bool(x.dtype.is_complex)


def nonfinite(xs: Sequence[Array]) -> list[tuple[int, int]]:
    if _held(xs):
        return host.nonfinite(xs)
    sizes = [tf.abs(x) for x in xs]
    return [(_count(tf.math.is_nan(size)), _count(tf.math.is_inf(size))) for size in sizes]


def _count(flags: Array) -> int:
    return int(tf.math.count_nonzero(flags))


def working(xs: Sequence[Array], norm: Array) -> Array:
    return host.working(xs, norm) if isinstance(norm, host.HOST) else tf.cast(norm, _wide(xs))


def widened(coef: Array, norm: Array) -> Array:
    return host.widened(coef, norm) if isinstance(norm, host.HOST) else like(norm, coef)


def scale(xs: Sequence[Array], coefs: Sequence[Any]) -> list[Array]:
    if _held(xs):
        return host.scale(xs, coefs)
    if not xs:
        return []
    each = {id(coef): tf.cast(coef, tf.float64) for coef in coefs}
    factors = [each[id(coef)] for coef in coefs]
    how = _how(tf.concat([tf.reshape(factor, [-1]) for factor in each.values()], 0), _wide(xs))
    ways = (lambda: list(xs), lambda: _products(xs, factors, tf.float32), lambda: _products(xs, factors, tf.float64))
    return cast("list[Array]", tf.switch_case(how, ways))


def _how(coefs: Array, wide: Any) -> Array:
    """0: nothing changes, 1: products in float32, 2: in float64, since float32 does not hold a gradient or a coefficient."""
    changed = tf.cast(tf.reduce_any(coefs != 1), tf.int32)
    if wide == tf.float64:
        return 2 * changed
    extreme = ((coefs < SMALLEST_COEF) & (coefs > 0)) | ((coefs > LARGEST_COEF) & isfinite(coefs))
    return changed + tf.cast(tf.reduce_any(extreme), tf.int32)


def _products(xs: Sequence[Array], coefs: Sequence[Array], wide: Any) -> list[Array]:
    """x · coef formed in this precision and rounded once; where one coefficient of several is 1 the bits of x."""
    each = {id(coef): tf.cast(coef, wide) for coef in coefs}
    products = [_product(x, each[id(coef)], wide) for x, coef in zip(xs, coefs, strict=True)]
    if len(each) == 1:
        return products
    return [tf.where(coef == 1, x, product) for x, coef, product in zip(xs, coefs, products, strict=True)]


def _product(x: Array, factor: Array, wide: Any) -> Array:
    if not x.dtype.is_complex:
        return tf.cast(tf.cast(x, wide) * factor, x.dtype)
    return tf.cast(tf.complex(*(tf.cast(part, wide) * factor for part in (tf.math.real(x), tf.math.imag(x)))), x.dtype)


def scale_(xs: Sequence[Array], coefs: Sequence[Any]) -> list[Array]:
    raise NotImplementedError


def clamp(xs: Sequence[Array], low: Any, high: Any, peaks: Array | None) -> tuple[list[Array], Any]:
    if _held(xs):
        return host.clamp(xs, low, high, peaks)
    found = [_clamped(x, low, high) for x in xs]
    return [y for y, _ in found], tf.reduce_any(tf.stack([tf.constant(False), *(changed for _, changed in found)]))


def _clamped(x: Array, low: Any, high: Any) -> tuple[Array, Array]:
    """x between the bounds, as its type holds them, and did anything change?"""
    if x.dtype.is_complex:
        return _clamped_modulus(x, high)
    low, high = (tf.cast(bound, x.dtype) for bound in (low, high))
    above, below = x > high, x < low
    return tf.where(above, high, tf.where(below, low, x)), tf.reduce_any(above | below)


def _clamped_modulus(x: Array, high: Any) -> tuple[Array, Array]:
    size = tf.abs(x)
    high = tf.cast(high, size.dtype)
    above = size > high
    factor = high / tf.where(above, size, tf.ones_like(size))
    return tf.where(above, tf.complex(tf.math.real(x) * factor, tf.math.imag(x) * factor), x), tf.reduce_any(above)


clamp_ = clamp


def zeros(xs: Sequence[Array]) -> list[Array]:
    return host.zeros(xs) if _held(xs) else [tf.zeros_like(x) for x in xs]


def keep(xs: Sequence[Array], finite: Array) -> list[Array]:
    return [tf.where(finite, x, tf.zeros_like(x)) for x in xs]


zero_, keep_ = zeros, keep
