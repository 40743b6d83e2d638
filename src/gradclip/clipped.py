"""What a clip did."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .backends import flatten, host, paths

Array = Any


class Clipped(NamedTuple):
    """The result of a clip: arrays of the gradients' framework, so that it passes through a traced function.

    >>> import gradclip
    >>> gradclip.clip([3.0, 4.0], gradclip.MaxNorm(1.0)).to_dict()
    {'norm': 5.0, 'limit': 1.0, 'coef': 0.2, 'clipped': True, 'finite': True, 'skipped': False}
    """

    grads: Any  # the same nesting and types as before
    norm: Array  # before clipping: 0-d "global", [n] "tensor" (0 for None), 0-d the largest |g| "element"
    limit: Array  # the bound in force, shaped like the norm; inf: none
    coef: Array | None  # what the gradients were multiplied by, shaped like the norm; None for "element"
    clipped: Array  # did anything change?
    finite: Array  # were all gradients finite?
    skipped: Array  # should the caller not step?
    state: tuple[Array, ...]  # for the next call

    def to_dict(self) -> dict[str, Any]:
        """Everything but the gradients, JSON-safe: numbers, {path: number} per tensor, None where not finite."""
        measured = {name: self._numbers(getattr(self, name)) for name in ("norm", "limit", "coef")}
        return measured | {name: bool(getattr(self, name)) for name in ("clipped", "finite", "skipped")}

    def _numbers(self, values: Array | None) -> Any:
        if values is None:
            return None
        if not len(values.shape):
            return _finite(values)
        return self._named([_finite(value) for value in values])

    def _named(self, numbers: list[float | None]) -> Any:
        return dict(zip(paths(self.grads), numbers, strict=True))

    def __repr__(self) -> str:
        count = sum(leaf is not None for leaf in flatten(self.grads)[0])
        tensors = f"{count} tensor" if count == 1 else f"{count} tensors"
        try:
            with host.quiet():
                return ", ".join([self._change(), tensors, *self._flags()])
        except (TypeError, ValueError, RuntimeError):  # a tracer has no value to show
            return f"Clipped({tensors}, traced)"

    def _flags(self) -> list[str]:
        flags = {"clipped": bool(self.clipped), "skipped": bool(self.skipped), "not finite": not bool(self.finite)}
        return [name for name, on in flags.items() if on]

    def _change(self) -> str:
        before, after = self._largest(self.norm), self._largest(self._after())
        name = ("largest value" if self.coef is None else "norm") if not len(self.norm.shape) else "largest norm"
        times = "" if self.coef is None or len(self.coef.shape) else f" (×{_short(float(self.coef))})"
        changed = bool(self.clipped) and (before < after or before > after)
        return f"{name} {_short(before)}" + (f" → {_short(after)}{times}" if changed else "")

    def _after(self) -> Array:
        return self.norm * self.coef if self.coef is not None else self._bounded()

    def _bounded(self) -> Array:
        return self.limit if bool(self.norm > self.limit) else self.norm

    def _largest(self, values: Array) -> float:
        numbers = [float(value) for value in (values if len(values.shape) else [values])]
        return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=0.0)


class Listed(Clipped):
    """The result of a clip by units or by groups: its norms have no leaf of their own, so that `to_dict` lists them."""

    __slots__ = ()

    def _named(self, numbers: list[float | None]) -> Any:
        return numbers


def _finite(value: Array) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _short(number: float) -> str:
    return repr(float(f"{number:.3g}"))
