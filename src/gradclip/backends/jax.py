"""JAX. Arrays in the CPU's memory go through the native core, and what becomes of them is decided on the host.

Under a transformation (jit, grad, vmap, scan, shard_map), on accelerators and where an array lies on several devices there is
no memory that may be read now: those stay with XLA, and their norms on their device, in float64 where x64 is enabled, else in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import chain, islice, repeat
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from . import numpy as host
from ._jax_varying import Varying, opened
from ._overlap import said

Array = Any
WIDE = {"float64", "complex128"}
NARROWEST = "float16"
ALIGNED = 64  # bytes; XLA takes memory over without a copy where it begins at a multiple of it
SMALLEST, LARGEST = 1e-22, 1e36  # between them a float32 power has lost no digits, of up to 1e10 elements
SMALLEST_COEF, LARGEST_COEF = 1e-37, 1e37  # between them lies what float32 holds exactly

with ThreadPoolExecutor(1) as elsewhere:  # another thread is under no transformation, even if this one is
    AT_REST = elsewhere.submit(get_opaque_trace_state).result()

abs = jnp.abs
floor = jnp.floor
isfinite = jnp.isfinite
where = jnp.where
any = jnp.any
all = jnp.all
total = jnp.sum


def quiet() -> AbstractContextManager[Any]:
    return cast("AbstractContextManager[Any]", host.quiet())


def sort(x: Array) -> Array:
    return jnp.sort(x, axis=0)


def put(window: Array, slot: Array, value: Array) -> Array:
    return window.at[jnp.asarray(slot, int)].set(value)


def take(x: Array, place: Array) -> Array:
    return jnp.take(x, jnp.asarray(place, int), axis=0)


def like(x: Array, value: Any) -> Array:
    return jnp.broadcast_to(jnp.asarray(value, x.dtype), x.shape)


def scalar(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else host.scalar(value)


def choose(condition: Array, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
    """A branch on the device in what is compiled; elsewhere it would be compiled anew at every call.

    There it is chosen by its value, or on an accelerator, where a look at that would wait, both are computed.
    """
    if not isinstance(condition, Tracer) and next(iter(condition.devices())).platform != "cpu":
        return yes()
    flag = truth(condition)
    if flag is None:
        return jax.lax.cond(condition, yes, no)
    return yes() if flag else no()


def known(x: Any) -> Array | None:
    if isinstance(x, host.HOST):
        return x
    return None if isinstance(x, Tracer) else np.asarray(x, np.float64)[()]


def truth(flag: Any) -> bool | None:
    try:
        return bool(flag)
    except jax.errors.ConcretizationTypeError:
        return None


def stack(xs: Sequence[Array]) -> Array:
    return jnp.stack(xs) if isinstance(xs[0], jax.Array) else host.stack(xs)


def unstack(x: Array) -> list[Array]:
    return list(x)


def norms(name: str, x: Any) -> Array:
    if not isinstance(x, jax.Array) or readable([x]):
        return host.norms(name, x)
    if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise TypeError(f"{name} must be real numbers; got {x!r}")
    return x.astype(_wide())


def field(x: Any, xs: Sequence[Array] = ()) -> Array:
    if isinstance(x, jax.Array):
        return x
    if not xs and not _canonical(x):
        return np.asarray(x)  # for reduce=, which may need a range that JAX's float32 does not have
    return jnp.asarray(np.asarray(x))


def _canonical(x: Any) -> bool:
    return bool(jax.dtypes.canonicalize_dtype(np.asarray(x).dtype) == np.asarray(x).dtype)


class Held(host.Arrays):
    """NumPy's view of arrays in the CPU's memory; what is made of them begins where XLA can take it over."""

    def empty(self, x: Array) -> Array:
        memory = np.empty(x.nbytes + ALIGNED, np.uint8)
        first = -memory.ctypes.data % ALIGNED
        return memory[first : first + x.nbytes].view(x.dtype).reshape(x.shape)


def ordered(tree: Any) -> Any:
    """The tree, its dicts in the order of their keys, as every function of JAX returns them: that is the order of the norms."""
    return jax.tree.map(lambda leaf: leaf, tree, is_leaf=lambda node: node is None)


def arrays(leaves: Sequence[Any], path: Callable[[int], str], writable: bool) -> list[Array]:
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, jax.Array) or leaf.dtype.name not in host.DTYPES:
            raise TypeError(f"{said(path(i))} is {_described(leaf)}: gradients are jax arrays of {', '.join(host.DTYPES)}")
    if writable and leaves:
        raise TypeError(f"{said(path(0))} is a jax array, which cannot be written: use clip()")
    return Held(map(np.asarray, leaves)) if readable(leaves) else opened(leaves)


def alone(xs: Sequence[Array]) -> list[Array]:
    """The arrays as this device has them, for a reduce= that the caller brings."""
    return list(xs)


def _described(leaf: Any) -> str:
    return f"of {leaf.dtype}" if isinstance(leaf, jax.Array) else f"a {type(leaf).__name__}"


def readable(xs: Sequence[Array]) -> bool:
    """May the memory of these arrays be read now, and does what becomes of it matter to no transformation?"""
    if True in {isinstance(x, Tracer) for x in xs} or get_opaque_trace_state() != AT_REST:
        return False
    places = {device for sharding in {x.sharding for x in xs} for device in _devices(sharding)}
    return places <= {"cpu"}


def _devices(sharding: Any) -> Iterator[str]:
    """The platform; of an array on several devices, whose memory is not one, none that there is."""
    one = len(sharding.device_set) == 1
    return (device.platform if one else "several" for device in sharding.device_set)


def restore(x: Array, leaf: Array) -> Array:
    if isinstance(x, jax.Array):
        return x
    return jax.device_put(x, leaf.sharding if leaf.committed else None)


def powers(xs: Sequence[Array], counts: Sequence[int], p: float, divisors: Array = None) -> Array:
    if isinstance(xs, Held):
        return host.powers(xs, counts, p, divisors)
    each = repeat(None) if divisors is None else chain.from_iterable(map(repeat, divisors, counts))
    parts = (_weighted(_power(_size(x, by), p), weight) for x, by, weight in zip(xs, each, _weights(xs, p), strict=False))
    return jnp.stack([_joined(list(islice(parts, count)), p) for count in counts])


def _weights(xs: Sequence[Array], p: float) -> Iterable[float]:
    """What each counts, where other devices have it too."""
    return xs.weights if isinstance(xs, Varying) and p != math.inf else repeat(1.0)


def _weighted(power: Array, weight: float) -> Array:
    return power if weight == 1 else power * weight


def _wide() -> Any:
    """The precision that norms are computed in."""
    return jax.dtypes.canonicalize_dtype(np.float64)


def _size(x: Array, divisor: Array | None) -> Array:
    """|x|, or for a real x its own value, in the norm's precision."""
    size = (jnp.abs(x) if is_complex(x) else x).astype(_wide())
    if divisor is None:
        return size
    nearer_one = _nearer_one(divisor)
    return (size * nearer_one) / (divisor * nearer_one)


def _nearer_one(divisor: Array) -> Array:
    """A power of 2 that brings the divisor to where its reciprocal is normal, by which XLA multiplies, and its square too."""
    edge, far = (2.0**60, 2.0**70) if divisor.dtype == np.float32 else (2.0**400, 2.0**600)
    return jnp.where(divisor > edge, 1 / far, jnp.where(divisor < 1 / edge, far, 1.0)).astype(divisor.dtype)


def _power(x: Array, p: float, axes: Sequence[int] | None = None) -> Array:
    """Σ|x|^p, its derivative 0 where x is 0."""
    if p == math.inf:
        return jnp.max(x * jnp.sign(x), axes, initial=0.0)  # |x|, whose derivative at 0 JAX takes for 1
    if p == 2:
        return jnp.sum(jnp.square(x), axes)
    if p == 1:
        return jnp.sum(x * jnp.sign(x), axes)
    some = x != 0
    return jnp.sum(jnp.where(some, jnp.abs(jnp.where(some, x, 1.0)) ** p, 0.0), axes)


def _joined(parts: list[Array], p: float) -> Array:
    if not parts:
        return jnp.zeros((), _wide())
    if len(parts) == 1:
        return parts[0]
    return jnp.max(jnp.stack(parts)) if p == math.inf else jnp.sum(jnp.stack(parts))


def unit_powers(xs: Sequence[Array], axes: Sequence[int | None], p: float, divisors: Array = None) -> Array:
    if isinstance(xs, Held):
        return host.unit_powers(xs, axes, p, divisors)
    if isinstance(xs, Varying):
        raise ValueError(
            'scope "unit" has a norm for every slice, and in shard_map each device has parts of arrays: use scope "tensor" or '
            '"global", clip outside of shard_map, or bring a reduce= that joins the slices'
        )
    found, first = [jnp.zeros(0, _wide())], 0
    for x, axis in zip(xs, axes, strict=True):
        count = 1 if axis is None else x.shape[axis]
        by = None if divisors is None else aligned(divisors[first : first + count], x, axis)
        others = [i for i in range(x.ndim) if i != axis]
        found.append(_power(_size(x, by), p, others).reshape(count))
        first += count
    return jnp.concatenate(found)


def fits(xs: Sequence[Array], p: float) -> bool:
    if isinstance(xs, Held):
        return host.fits(xs, p)
    types = {x.dtype.name for x in xs}
    if _wide() == np.float64:
        return WIDE.isdisjoint(types) and host.SMALLEST_P <= p <= host.LARGEST_P
    return types <= {NARROWEST} and 1 <= p <= 2


def lost(powers: Array, p: float) -> Array:
    if isinstance(powers, host.HOST) or powers.dtype == np.float64:
        return host.lost(powers, p)
    return ~((powers > SMALLEST) & (powers < LARGEST))


def root(powers: Array, p: float) -> Array:
    if isinstance(powers, host.HOST) or p in (1, math.inf):
        return host.root(powers, p)
    some = powers > 0  # the root of 0 has no derivative
    safe = jnp.where(some, powers, 1.0)
    return jnp.where(some, jnp.sqrt(safe) if p == 2 else safe ** (1 / p), powers)


def peak(peaks: Array) -> Array:
    return host.peak(peaks) if isinstance(peaks, host.HOST) else jnp.max(peaks, initial=0.0)


def sizes(xs: Sequence[Array], counts: Sequence[int]) -> Array:
    if isinstance(xs, Varying):
        each = iter([x.size * parts for x, parts in zip(xs, xs.parts, strict=True)])
        return jnp.asarray(np.array([sum(islice(each, count)) for count in counts], np.float64))
    found = host.sizes(xs, counts)
    return found if isinstance(xs, Held) else jnp.asarray(found)


def pick(xs: Sequence[Array], places: Sequence[int]) -> Sequence[Array]:
    picked = [xs[i] for i in places]
    return type(xs)(picked) if isinstance(xs, Held | Varying) else picked


def unit_axis(x: Array) -> int | None:
    return cast(int, x.ndim) - 1


def aligned(coef: Array, x: Array, axis: int | None) -> Array:
    return host.aligned(coef, x, axis)


def is_complex(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.complexfloating))


def nonfinite(xs: Sequence[Array]) -> list[tuple[int, int]]:
    return host.nonfinite(xs) if isinstance(xs, Held) else [(int(jnp.isnan(x).sum()), int(jnp.isinf(x).sum())) for x in xs]


def working(xs: Sequence[Array], norm: Array) -> Array:
    if isinstance(norm, host.HOST):
        return host.working(xs, norm)
    return norm.astype(np.float32) if WIDE.isdisjoint({x.dtype.name for x in xs}) else norm


def widened(coef: Array, norm: Array) -> Array:
    return host.widened(coef, norm) if isinstance(norm, host.HOST) else like(norm, coef)


def _on_host(xs: Iterable[Any]) -> bool:
    return True not in {isinstance(x, jax.Array) for x in xs}


def scale(xs: Sequence[Array], coefs: Sequence[Any]) -> list[Array]:
    if _on_host(xs) and _on_host(coefs):
        return host.scale(xs, coefs)
    return [_product(x, coef) for x, coef in zip(xs, coefs, strict=True)]


def _product(x: Array, coef: Any) -> Array:
    """x · coef formed in float32 at least; where coef is 1 the bits of x, also those that XLA takes for 0."""
    if isinstance(coef, float):
        return x if coef == 1 else _constant_product(x, coef)
    factor = coef.astype(np.float64 if x.dtype.name in WIDE else np.float32)
    if is_complex(x):
        product = jax.lax.complex(jnp.real(x) * factor, jnp.imag(x) * factor)
    else:
        product = (x.astype(factor.dtype) * factor).astype(x.dtype)
    return jnp.where(coef == 1, x, product)


def _constant_product(x: Array, coef: float) -> Array:
    """x by a number that is known before anything is compiled; by two where float32 does not hold it."""
    if coef == 0 or not math.isfinite(coef) or SMALLEST_COEF < coef < LARGEST_COEF:
        return _product(x, np.asarray(coef))
    half = jax.lax.optimization_barrier(jnp.asarray(math.sqrt(coef)))  # else XLA makes one constant of the two
    return _product(_product(x, half), half)


def clamp(xs: Sequence[Array], low: Any, high: Any, peaks: Array | None) -> tuple[list[Array], Any]:
    if isinstance(xs, Held) and _on_host((low, high)):
        return host.clamp(xs, low, high, peaks)
    found = [_clamped(x, low, high) for x in xs]
    changed = jnp.any(jnp.stack([changed for _, changed in found])) if found else jnp.asarray(False)
    return [y for y, _ in found], changed if not isinstance(xs, Varying) else xs.reduce(changed.astype(np.int32), 1) > 0


def _clamped(x: Array, low: Any, high: Any) -> tuple[Array, Array]:
    """x between the bounds, as its type holds them, and did anything change?"""
    if is_complex(x):
        size = jnp.abs(x)
        above = size > high
        return jnp.where(above, _product(x, high / jnp.where(above, size, 1.0)), x), jnp.any(above)
    low, high = (jnp.asarray(bound).astype(x.dtype) for bound in (low, high))
    outside = (x > high) | (x < low)
    return jnp.where(outside, jnp.where(x > 0, high, low), x), jnp.any(outside)  # max and min would take subnormals for 0


def zeros(xs: Sequence[Array]) -> list[Array]:
    return [host.zeros([x])[0] if isinstance(x, np.ndarray) else jnp.zeros_like(x) for x in xs]


def keep(xs: Sequence[Array], finite: Array) -> list[Array]:
    return [jnp.where(finite, x, jnp.zeros((), x.dtype)) for x in xs]


scale_, clamp_, zero_, keep_ = scale, clamp, zeros, keep  # never called: `arrays` refuses what is to be written
