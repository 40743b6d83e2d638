"""`gradclip clip`: a file of gradients, clipped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from .. import clip as core
from ..call import resolve
from ..rule import Rule
from ..rules import Bounds, MaxNorm
from .errors import UserError, told
from .files import check_apart, check_source, common_format, replacing
from .report import Report
from .stdout import show

Scope: TypeAlias = Literal["element", "tensor", "global"]
Policy: TypeAlias = Literal["raise", "zero", "skip", "keep"]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def _option(help: str) -> Any:
    return typer.Option(parser=_number, metavar="NUMBER", help=help)


Number: TypeAlias = float | None
Source = Annotated[Path, typer.Argument(metavar="IN", readable=False, help="Gradients: .npz or .safetensors.")]
Target = Annotated[Path, typer.Option("-o", "--output", metavar="OUT", readable=False, help="Where to; of the same format.")]


def clip(
    source: Source,
    target: Target,
    scope: Annotated[
        Scope | None, typer.Option(help="What a norm is taken over; global, or element with --low, --high.")
    ] = None,
    max_norm: Annotated[Number, _option("The largest norm; with --scope element the largest value.")] = None,
    min_norm: Annotated[Number, _option("The least norm: a smaller one is raised to it.")] = None,
    low: Annotated[Number, _option("The least value of a gradient.")] = None,
    high: Annotated[Number, _option("The largest value of a gradient.")] = None,
    p: Annotated[float, _option("The norm's order: a number > 0, or inf.")] = 2.0,
    nonfinite: Annotated[Policy, typer.Option(help="What to do about NaN and inf.")] = "raise",
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Clip a file of gradients, and say what that did to each."""
    with told("cannot clip", (TypeError, ValueError)):
        rule = _rule(max_norm, min_norm, low, high)
        call = resolve(rule, scope, p, nonfinite)
    form = common_format(source, target)
    check_source(source)
    check_apart(source, target)
    with replacing(target) as temporary:
        grads, extra = form.read(source)
        with told(f"cannot clip {source}", (TypeError, ValueError, ArithmeticError)):
            clipped = core(grads, rule, scope=call.scope, p=p, nonfinite=nonfinite)
            report = Report.of(source, target, call.scope, p, grads, clipped)
        form.write(temporary, clipped.grads, extra)
        show(report.json() if as_json else report.table())


def _rule(max_norm: Number, min_norm: Number, low: Number, high: Number) -> Rule:
    norms, values = (max_norm, min_norm) != (None, None), (low, high) != (None, None)
    if norms == values:
        given = "both were given" if norms else "none was given"
        raise UserError(f"a bound on norms (--max-norm, --min-norm) or one on values (--low, --high) is needed; {given}")
    if values:
        return Bounds(-math.inf if low is None else low, math.inf if high is None else high)
    return MaxNorm(math.inf if max_norm is None else max_norm, min_norm=min_norm)
