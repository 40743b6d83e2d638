"""Arrays inside of shard_map, whose types say along which axes of the mesh they differ: the norm is that of all devices' parts.

An array that k devices hold alike counts 1/k on each of them, and one sum over all the axes gives the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

Array = Any


class Varying(list[Array]):
    """Arrays of one call, of which some differ from device to device."""

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """All axes along which any of them varies."""
        return tuple(dict.fromkeys(axis for x in self for axis in sorted(axes(x))))

    @cached_property
    def weights(self) -> list[float]:
        """1 / how many devices along the axes hold each alike."""
        return [1 / _devices(set(self.axes) - axes(x)) for x in self]

    @cached_property
    def parts(self) -> list[int]:
        """In how many parts the whole of each lies."""
        return [_devices(axes(x)) for x in self]

    def reduce(self, power: Array, p: float) -> Array:
        """The power of the whole from each device's, the same on all."""
        return joined(power, p, self.axes)


def joined(power: Array, p: float, names: tuple[str, ...]) -> Array:
    """The sum over devices along these axes, for p = inf the largest."""
    return largest(power, names) if p == math.inf else jax.lax.psum(power, names)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def largest(power: Array, names: tuple[str, ...]) -> Array:
    """The maximum over devices, with the derivative that JAX does not give it: that of those who have it, in equal parts."""
    return jax.lax.pmax(power, names)


def _derivative(names: tuple[str, ...], primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    found = largest(primals[0], names)
    have = primals[0] == found
    share = jnp.where(have, tangents[0], 0) / jax.lax.psum(have.astype(found.dtype), names)
    return found, jax.lax.psum(share, names)


largest.defjvp(_derivative)


def axes(x: Array) -> frozenset[str]:
    """The axes of the mesh along which an array varies; none outside of shard_map, nor where it does not check them."""
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", kind)  # a type of its own since JAX 0.10
    return frozenset(getattr(manual, "varying", None) or getattr(kind, "vma", None) or ())


def opened(xs: Sequence[Array]) -> list[Array]:
    """The arrays, joined over the devices if any of them varies."""
    return Varying(xs) if any(map(axes, xs)) else list(xs)


def _devices(names: Iterable[str]) -> int:
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[name] for name in names)
