"""What a framework's module says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Array = Any


class Own(NamedTuple):
    """A function of the framework's own: (gradients, limit) → (clipped, norm or None), in the framework's arrays."""

    name: str
    call: Callable[[list[Array], float], tuple[list[Array], Any]]


class Framework(NamedTuple):
    """make: NumPy and the name of a type → the framework's array; read: back, as float64."""

    version: str
    make: Callable[[Array, str], Array]
    read: Callable[[Array], Array]
    own: dict[str, Own]
