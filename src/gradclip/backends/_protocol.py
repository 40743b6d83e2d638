"""What a backend supplies: a module with these names, and no others that `clip` would use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

Array = Any


class Ops(Protocol):
    """The names that a rule may use besides operators. Norms are 0-d or [k]."""

    def where(self, condition: Array, yes: Array, no: Array, /) -> Array: ...
    def abs(self, x: Array, /) -> Array: ...
    def floor(self, x: Array, /) -> Array: ...
    def isfinite(self, x: Array, /) -> Array: ...
    def any(self, x: Array, /) -> Array: ...
    def all(self, x: Array, /) -> Array: ...
    def choose(self, condition: Array, yes: Callable[[], Array], no: Callable[[], Array], /) -> Array:
        """One of two ways to compute a norm; both, where the framework cannot choose by a value."""

    def like(self, x: Array, value: Any, /) -> Array:
        """The value, shaped like x."""

    def total(self, x: Array, /) -> Array:
        """The sum of all entries, 0-d."""

    def sort(self, x: Array, /) -> Array:
        """Ascending along axis 0."""

    def put(self, window: Array, slot: Array, value: Array, /) -> Array:
        """The window with window[slot] = value; `window` itself stays as it is."""

    def take(self, x: Array, place: Array, /) -> Array:
        """x[place] along axis 0; `place` is a whole number that may have no value yet."""

    def stack(self, xs: Sequence[Array], /) -> Array:
        """Norms of one shape, along a new first axis."""

    def scalar(self, value: Array, /) -> Array:
        """A threshold as a number that can be compared with norms."""


class Backend(Ops, Protocol):
    """The bulk arithmetic of one framework. `xs` are arrays as `arrays` gives them; None is not among them."""

    def arrays(self, leaves: Sequence[Any], paths: Any, writable: bool, /) -> list[Array]:
        """The leaves as arrays, checked: TypeError or ValueError with the leaf's path."""

    def restore(self, x: Array, leaf: Any, /) -> Any:
        """An array as the kind of object that the leaf was."""

    def powers(self, xs: Sequence[Array], counts: Sequence[int], p: float, divisors: Array = None, /) -> Array:
        """Σ|x|^p of each group, [k]; the largest |x| for p = inf, NaN kept; 0 for an empty group.

        counts: how many of the arrays, in order, each group has. divisors: [k], what each group is divided by first, so that
        no power leaves the range. Float64 on the host; the framework's own where no value may be looked at now.
        """

    def unit_powers(self, xs: Sequence[Array], axes: Sequence[int | None], p: float, divisors: Array = None, /) -> Array:
        """The same for every index along an axis of each array, all in one vector [u]; None: the array is one unit."""

    def fits(self, xs: Sequence[Array], p: float, /) -> bool:
        """Is it known that no power of a finite value leaves the range?"""

    def lost(self, powers: Array, p: float, /) -> Array:
        """Which powers may have left the range, and so lost digits."""

    def known(self, x: Array, /) -> Array | None:
        """A norm as NumPy float64, read from its device; None where it has no value yet, or a derivative to keep."""

    def truth(self, flag: Array, /) -> bool | None:
        """A flag's value; None where it has none yet."""

    def quiet(self) -> AbstractContextManager[Any]:
        """A context in which norms that are not finite warn of nothing."""

    def root(self, powers: Array, p: float, /) -> Array:
        """powers ** (1 / p); the powers themselves for p = inf."""

    def peak(self, peaks: Array, /) -> Array:
        """The largest of all, 0-d; NaN where there is one, 0 of none."""

    def sizes(self, xs: Sequence[Array], counts: Sequence[int], /) -> Array:
        """The number of elements of each group, [k]."""

    def pick(self, xs: Sequence[Array], places: Sequence[int], /) -> Sequence[Array]:
        """Some of the arrays, in this order."""

    def unit_axis(self, x: Array, /) -> int | None:
        """The axis of the outputs, in the framework's layout of weights."""

    def aligned(self, coef: Array, x: Array, axis: int | None, /) -> Array:
        """One coefficient for every index along the axis, as an array that broadcasts with x; 0-d for None."""

    def is_complex(self, x: Array, /) -> bool:
        """Is its type complex?"""

    def nonfinite(self, xs: Sequence[Array], /) -> list[tuple[int, int]]:
        """How many NaN and how many inf each array holds."""

    def unstack(self, x: Array, /) -> list[Array]:
        """The entries of [k], each 0-d."""

    def norms(self, name: str, x: Any, /) -> Array:
        """Norms that a caller gives, as those of `powers` are; TypeError, with the name, for what are no numbers."""

    def field(self, x: Any, xs: Sequence[Array], /) -> Array:
        """A norm, coefficient or flag as an array of the framework, on the device of the gradients xs, for `Clipped`."""

    def working(self, xs: Sequence[Array], norm: Array, /) -> Array:
        """The norm in the precision that a framework would compute its coefficient in, at least 1-d."""

    def widened(self, coef: Array, norm: Array, /) -> Array:
        """Such a coefficient as `coefficient` gives it, shaped like the norm."""

    def scale(self, xs: Sequence[Array], coefs: Sequence[Any], /) -> list[Array]:
        """x · coef, rounded once; the very same array where coef is 1. A coef may be an array that broadcasts with x."""

    def scale_(self, xs: Sequence[Array], coefs: Sequence[Any], /) -> list[Array]:
        """The same, written into x; every stretch of memory once."""

    def clamp(self, xs: Sequence[Array], low: Any, high: Any, peaks: Array | None, /) -> tuple[list[Array], Any]:
        """low ≤ x ≤ high, NaN kept, |x| ≤ high for complex x; did anything change? The very same array where it did not.

        peaks: the largest |x| of each, where it is known, which spares those that lie inside another look.
        """

    def clamp_(self, xs: Sequence[Array], low: Any, high: Any, peaks: Array | None, /) -> tuple[list[Array], Any]:
        """The same, written into x."""

    def zeros(self, xs: Sequence[Array], /) -> list[Array]:
        """New arrays of zeros."""

    def zero_(self, xs: Sequence[Array], /) -> list[Array]:
        """Zeros written into x, whatever it held."""

    def keep(self, xs: Sequence[Array], finite: Array, /) -> list[Array]:
        """x where the flag is set, else zeros, whatever it held."""

    def keep_(self, xs: Sequence[Array], finite: Array, /) -> list[Array]:
        """The same, written into x."""
