"""One framework in a process of its own: `python -m gradclip.cli.verify.worker NAME` prints what it found as JSON."""

from __future__ import annotations

import json
import math
import sys
from importlib import import_module
from typing import Any

import numpy as np

from ... import MaxNorm, clip, native
from .cases import SCOPES, Case, Truth, cases, truth, typed
from .frameworks._own import Framework, Own

Array = Any
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SMALLEST = {"float64": 2.0**-1074, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
NORM_ERROR = 1e-12
OURS = {"float64": 4.0, "float32": 1.0, "float16": 1.0, "bfloat16": 1.0}  # units in the last place that a product may be off
CLOSE = 4.0  # units within which a framework's own result agrees
ROUNDED = 1e-3  # relative, within which it is only less exact


def main() -> None:
    """Everything on standard output, in one line, after whatever the framework itself may print."""
    name = sys.argv[1]
    framework: Framework = import_module(f"{__package__}.frameworks.{name}").FRAMEWORK
    rows = [_row(framework, case, scope) for case in cases() for scope in SCOPES]
    print("\n" + json.dumps({"framework": name, "version": framework.version, "core": native.core(), "rows": rows}))


def _row(framework: Framework, case: Case, scope: str) -> dict[str, Any]:
    wanted = truth(case, scope)
    own = framework.own.get(scope)
    return {
        "case": case.name,
        "scope": scope,
        "ours": _ours(framework, case, scope, wanted),
        "own": None if own is None else _own(framework, own, case, wanted),
    }


def _ours(framework: Framework, case: Case, scope: str, wanted: Truth) -> dict[str, Any]:
    try:
        grads = [framework.make(x, case.dtype) for x in typed(case)]
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        return {"ok": True, "kind": "absent", "said": f"{case.dtype}: {_line(error)}"}
    try:
        clipped = clip(grads, MaxNorm(case.limit), scope=scope, nonfinite="keep")
        units = _units([framework.read(x) for x in clipped.grads], wanted.grads, case.dtype)
        norms = np.ravel(np.asarray(clipped.norm, np.float64)).tolist() if wanted.norms else []
        off = max((_relative(a, b) for a, b in zip(norms, wanted.norms, strict=True)), default=0.0)
    except Exception as error:  # whatever it is, it is ours
        return {"ok": False, "kind": "raises", "said": _line(error)}
    return {
        "ok": units <= OURS[case.dtype] and off <= NORM_ERROR,
        "kind": "agrees",
        "units": units,
        "norm_error": off,
        "said": "",
    }


def _own(framework: Framework, own: Own, case: Case, wanted: Truth) -> dict[str, Any]:
    found: dict[str, Any] = {"function": own.name}
    try:
        grads, _ = own.call([framework.make(x, case.dtype) for x in typed(case)], case.limit)
        got = [framework.read(x) for x in grads]
    except Exception as error:  # a framework's own errors are of many kinds
        return found | {"kind": "raises", "units": None, "said": _line(error)}
    units = _units(got, wanted.grads, case.dtype)
    kind = "agrees" if units <= CLOSE else "rounds" if units * EPSILON[case.dtype] <= ROUNDED else "differs"
    return found | {"kind": kind, "units": units if np.isfinite(units) else None, "said": _said(got, wanted.grads)}


def _units(got: list[Array], wanted: list[Array], dtype: str) -> float:
    """The largest difference in units in the last place of that type; inf where NaN, inf or the shapes differ."""
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        if np.shape(a) != np.shape(b) or not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return math.inf
        ours, theirs = a[np.isfinite(b)], b[np.isfinite(b)]
        unit = np.maximum(EPSILON[dtype] * 2.0 ** np.floor(np.log2(np.maximum(np.abs(theirs), 5e-324))), SMALLEST[dtype])
        worst = max(worst, float(np.max(np.abs(ours - theirs) / unit, initial=0.0)))
    return worst


def _said(got: list[Array], wanted: list[Array]) -> str:
    """The first value that differs most, as got and as wanted."""
    a, b = (np.concatenate([np.ravel(x) for x in side]) for side in (got, wanted))
    if a.shape != b.shape or not a.size:
        return ""
    with np.errstate(all="ignore"):
        off = np.where(np.isfinite(a) == np.isfinite(b), np.abs(np.nan_to_num(a) - np.nan_to_num(b)), math.inf)
    i = int(np.argmax(off))
    return f"{a[i]:.6g} for {b[i]:.6g}"


def _relative(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) and b else math.inf


def _line(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:160]


if __name__ == "__main__":
    main()
