"""`torch.nn.utils`' clipping functions, right: the same names, arguments and convention, so that changing the import is all.

They differ where torch's are wrong. The norm is accurate and neither overflows nor underflows; a parameter listed twice counts
once; a sparse gradient works; a zero-size one works with the infinity norm; no gradients at all is no error; a negative or NaN
threshold and a p that is not > 0 are refused. `foreach` is accepted and changes nothing: the native core does the work.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ...backends import Gradients, open_gradients
from ...backends._torch_shares import is_spread
from ...clip import clip_, decide, norm
from ...conventions import CONVENTIONS, Formula
from ...nonfinite import NonFiniteError
from ...rule import Bound, Measured, Rule, State
from ...rules import MaxNorm
from .layout import Joined, Layout, spread

Tensors: TypeAlias = Tensor | Iterable[Tensor]


@dataclass(frozen=True)
class AtMost(Rule):
    """norm ≤ limit with torch's coefficient, and 0 allowed, which makes all gradients 0."""

    limit: float

    scopes = ("global",)

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        return Bound(0.0, self.limit), state

    def formula(self, scope: str) -> Formula | None:
        return CONVENTIONS["torch"].formulas[scope]


def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Multiplies every p.grad in place by min(1, max_norm / (norm + 1e-6)), and returns the norm.

    Args:
        parameters: one, or any iterable of them; a generator is consumed once. Those without a gradient are left out.
        max_norm: a number ≥ 0; inf only measures.
        norm_type: a number > 0 or "inf".
        error_if_nonfinite: raise where a gradient is NaN or inf, with nothing changed; else NaN spreads as in torch.
        foreach: ignored.

    Returns: the norm before clipping, 0-d, on the first gradient's device, of the promoted type of all gradients, at least
        float32; 0 where there is none.

    Raises: NonFiniteError, a RuntimeError that names the parameters; ValueError for a threshold or an order that is refused.

    Source: torch.nn.utils.clip_grad_norm_ of torch 2.13.

    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> p.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([p, p], max_norm=1.0), p.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    return _clipped(_opened(parameters), _limit("max_norm", max_norm), norm_type, error_if_nonfinite)


def clip_grads_with_norm_(parameters: Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None) -> None:
    """Multiplies every p.grad in place by min(1, max_norm / (total_norm + 1e-6)): the second half of `clip_grad_norm_`."""
    given = _opened(parameters, measures=False)
    total = total_norm.full_tensor() if is_spread(total_norm) else total_norm  # type: ignore[attr-defined]
    _clipped(given, _limit("max_norm", max_norm), 2.0, False, total)


def get_total_norm(
    tensors: Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """(Σ|t|^p)^(1/p) over all tensors, gradients as a rule: the first half of `clip_grad_norm_`, which says more.

    >>> get_total_norm([torch.full((1000,), 60000.0, dtype=torch.float16)])
    tensor(1897366.6250)
    """
    given, order = [tensors] if isinstance(tensors, Tensor) else list(tensors), _order(norm_type)
    with torch.no_grad():
        opened = open_gradients(given)
        total = norm(opened, order)
    if error_if_nonfinite and not total.isfinite():
        raise _nonfinite({f"tensor {i}": x for i, x in enumerate(given)}, order)
    return _as_gradients(total, opened)


def clip_grad_value_(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    """min(max(g, -clip_value), clip_value) in place for every value g of every p.grad; NaN stays, a complex g by its modulus.

    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> p.grad = torch.tensor([3.0, -0.5])
    >>> clip_grad_value_(p, 1.0); p.grad
    tensor([ 1.0000, -0.5000])
    """
    limit, opened = _limit("clip_value", clip_value), _opened(parameters, measures=False).opened
    with opened.backend.quiet():
        opened.backend.clamp_(opened.arrays(), -limit, limit, None)  # no norm is asked for, so one look at each gradient does


def clip_grad_norm(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The old name of `clip_grad_norm_`, which says that it writes in place."""
    warnings.warn("clip_grad_norm is deprecated: use clip_grad_norm_", FutureWarning, stacklevel=2)
    return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


class Given(NamedTuple):
    """Parameters, each once, and their gradients, ready to be written."""

    parameters: list[Tensor]
    opened: Gradients
    joined: Joined | None = None


def _opened(parameters: Tensors, measures: bool = True) -> Given:
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not given and isinstance(parameters, types.GeneratorType):
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur: it may have been used up before; "
            "pass a list, or call model.parameters() again",
            stacklevel=3,
        )
    if True in set(map(is_spread, given)):
        return _spread(list(dict.fromkeys(given)), measures)
    opened = open_gradients([p.grad for p in given], writable=True)
    if True not in getattr(opened.present, "again", ()):
        return Given(given, opened)
    given = list(dict.fromkeys(given))  # only what is listed twice lies where another lies
    return Given(given, open_gradients([p.grad for p in given], writable=True))


def _spread(given: list[Tensor], measures: bool) -> Given:
    """DTensors, of which other processes have parts too; plain ones may be among them where no norm is taken."""
    joined = spread(_named(given), None if measures else Layout())
    return Given(given, cast(Joined, joined).gradients(), joined)


def _named(xs: Iterable[Tensor]) -> dict[str, Tensor]:
    return {f"parameter {i}": x for i, x in enumerate(xs)}


def _clipped(given: Given, limit: float, norm_type: Any, strict: bool, total_norm: Tensor | None = None) -> Tensor:
    order, opened = _order(norm_type), given.opened
    try:
        clipped = clip_(opened, AtMost(limit), p=order, nonfinite="raise" if strict else "keep", norm=total_norm)
    except NonFiniteError as error:
        raise _told(error, given, order) from None
    return _as_gradients(clipped.norm, opened)


def _told(error: NonFiniteError, given: Given, order: float) -> NonFiniteError:
    if given.joined is not None:
        return _in_torchs_words(given.joined.told(error).cause, order)
    return _nonfinite({name: p.grad for name, p in _named(given.parameters).items()}, order)


def _nonfinite(grads: dict[str, Tensor | None], order: float) -> NonFiniteError:
    """The error in torch's words, then in ours."""
    cause = "the norm is not finite"
    try:
        decide(grads, MaxNorm(math.inf), p=order)
    except NonFiniteError as error:
        cause = error.cause
    return _in_torchs_words(cause, order)


def _in_torchs_words(cause: str, order: float) -> NonFiniteError:
    return NonFiniteError(
        f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be clipped: {cause}. "
        "Nothing was changed; error_if_nonfinite=False lets NaN spread"
    )


def _as_gradients(norm: Any, opened: Gradients) -> Tensor:
    """The norm in the promoted type of the gradients, float32 at least; of no gradients it is NumPy's."""
    return torch.as_tensor(opened.backend.working(opened.arrays(), norm))


def _limit(name: str, value: Any) -> float:
    limit = float(value)
    if not limit >= 0:
        raise ValueError(f"{name} must be a number >= 0, or inf to measure only; got {value!r}")
    return limit


def _order(norm_type: Any) -> float:
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type must be a number > 0 or 'inf'; got {norm_type!r}")
    return order
