"""What to do about NaN and inf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends import Gradients

POLICIES = ("raise", "zero", "skip", "keep")
SHOWN = 5


class NonFiniteError(FloatingPointError, RuntimeError):
    """A gradient is NaN or inf. Nothing was changed: neither gradients nor state."""

    cause = ""  # which gradients, and how many values of each

    @classmethod
    def of(cls, opened: Gradients, norm: Any) -> NonFiniteError:
        """The error that names these gradients, and what to do next."""
        cause = _cause(opened, norm)
        error = cls(
            f"{cause}. Nothing was changed. Look for the operation that made them, or lower the learning rate; to train on, "
            'pass nonfinite="skip" (leave this step out), "zero" or "keep"'
        )
        error.cause = cause
        return error


def _cause(opened: Gradients, norm: Any) -> str:
    names = [path for path, x in zip(opened.paths(), opened.xs, strict=True) if x is not None]
    arrays = opened.arrays()
    counts = opened.backend.nonfinite(arrays)
    sizes = opened.backend.sizes(arrays, [1] * len(arrays))
    found = [
        f"{path or 'the gradient'} ({_counted(nan, inf)} of {int(size)})"
        for path, size, (nan, inf) in zip(names, sizes, counts, strict=True)
        if nan or inf
    ]
    if not found:
        return f"the norm is {norm}, though every gradient here is finite: too large for float64, given so, or reduced to it"
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"gradients are not finite: {', '.join(found[:SHOWN])}{more}"


def _counted(nan: int, inf: int) -> str:
    return ", ".join(f"{count} {name}" for count, name in ((nan, "NaN"), (inf, "inf")) if count)
