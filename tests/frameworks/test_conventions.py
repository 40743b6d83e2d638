"""`MaxNorm(…, like=NAME)` beside the function that the name stands for, row by row, given the same norm."""

from math import inf, nan
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import theirs
from theirs import THEIRS

from gradclip import MaxNorm, clip
from gradclip.conventions import CONVENTIONS

HALF, BRAIN, SINGLE, DOUBLE = np.float16, ml_dtypes.bfloat16, np.float32, np.float64


class Row(NamedTuple):
    """Values of each gradient, the limit, their types."""

    values: list
    limit: float
    dtypes: tuple = (SINGLE,)


ROWS = {
    "at the limit": Row([[3, 0], [0, 4]], 5.0),
    "(3, 4) to 1": Row([[3], [4]], 1.0),
    "(300, 400) to 1": Row([[300], [400]], 1.0),
    "(300, 400) at 500": Row([[300], [400]], 500.0),
    "below": Row([[0.03, 0.001], [0.007, 0.04]], 0.1),
    "below 41, whose reciprocal is not exact": Row([[1, 2, 3]], 41.0),
    "small, below": Row([[3e-7], [4e-7]], 1e-6),
    "small, at": Row([[6e-8], [8e-8]], 1e-7),
    "small, above": Row([[6e-8], [8e-8]], 1e-8),
    "a NaN": Row([[1, nan], [2, 2]], 1.0),
    "an inf": Row([[1, inf], [2, 2]], 1.0),
    "zeros": Row([[0, 0], [0]], 1.0),
    "no limit": Row([[3], [4]], inf),
    "squares too large": Row([[1e20] * 4], 1.0),
    "squares too small": Row([[1e-25] * 4], 1e-26),
    "float16, 1000 of 300": Row([[300] * 1000], 1.0, (HALF,)),
    "float16, 100 and 100 below 1000": Row([[100, 100]], 1000.0, (HALF,)),
    "bfloat16, 1000 of 300": Row([[300] * 1000], 1.0, (BRAIN,)),
    "float64": Row([[3], [4]], 1.0, (DOUBLE,)),
    "float16 and float32": Row([[3], [4]], 1.0, (HALF, SINGLE)),
    "many": Row([np.random.default_rng(0).standard_normal(10_007).tolist()], 0.7),
}


# Where theirs multiplies by the limit first, which overflows or loses what is small, or goes wrong otherwise: theirs, and ours.
DIFFERS = {
    ("clip_by_norm", "below"): ("scaled", "identity"),
    ("clip_by_norm", "squares too small"): ("zeros", "identity"),
    ("clip_by_norm", "float16, 100 and 100 below 1000"): ("overflow", "identity"),
    **{
        (f"clipnorm= on {backend}", name): kinds
        for backend in ("jax", "tensorflow", "torch")
        for name, kinds in (
            ("below", ("scaled", "identity")),
            ("squares too small", ("zeros", "identity")),
            ("float16, 100 and 100 below 1000", ("overflow", "identity")),
        )
    },
    ("clipnorm= on jax", "below 41, whose reciprocal is not exact"): ("scaled", "identity"),
    ("global_clipnorm= on torch", "float64"): ("scaled", "scaled"),  # Keras takes the coefficient in float32 there
    ("HybridParallelClipGrad", "float64"): ("scaled", "scaled"),  # it scales such gradients and does not count them
    ("ops.clip_by_global_norm", "below"): ("scaled", "identity"),
    ("ops.clip_by_global_norm", "squares too small"): ("zeros", "identity"),
    ("ops.clip_by_norm", "squares too small"): (
        "zeros or scaled",
        "scaled",
    ),  # subnormals, of which it makes now the one, now the other
    ("ops.clip_by_norm", "float64"): ("scaled", "scaled"),  # its reciprocal in float64 is 3 ulp off
}


def pytest_generate_tests(metafunc):
    if "function" in metafunc.fixturenames:
        there = THEIRS[metafunc.config.getoption("--framework")]()
        metafunc.parametrize("function", there, ids=[function.name for function in there])


def gradients(row):
    dtypes = row.dtypes * len(row.values)
    return [np.array(x, DOUBLE).astype(dtype) for x, dtype in zip(row.values, dtypes, strict=False)]


def probe(grads):
    """A power of two, so small that no norm shows it, and whose product with any coefficient is exact: it gives that away."""
    largest = max((float(np.max(np.abs(x.astype(DOUBLE)))) for x in grads), default=1.0)
    exponent = np.floor(np.log2(largest)) - 30 if 0 < largest < inf else -60
    return np.array([2.0**exponent]).astype(
        max({x.dtype for x in grads}, key=lambda dtype: (dtype.itemsize, dtype.kind != "V"))
    )


def ulps(a, b, dtype):
    """How many units in the last place lie between them, at most; NaN where only one of them is NaN."""
    info = ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(b), float(info.smallest_normal))))
        apart = np.abs(a - b) / (float(info.eps) * 2.0**exponent)
    return float(np.max(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, apart), initial=0.0))


def kind_of(before, after):
    """What became of the gradients: how they look from afar."""
    xs, ys = (np.concatenate([x.astype(DOUBLE).ravel() for x in each]) for each in (before, after))
    if np.array_equal(xs, ys, equal_nan=True):
        return "identity"
    if np.isnan(ys).all():
        return "nan"
    if np.isnan(ys).any():
        return (
            "zeros, and NaN of inf" if np.array_equal(np.isnan(ys), np.isinf(xs)) and not np.nansum(np.abs(ys)) else "some nan"
        )
    return ("scaled" if np.isfinite(ys).all() else "overflow") if ys.any() else "zeros"


def call(frame, function, grads, limit):
    """Theirs, and its norm, which is the framework's."""
    theirs, norm = function.call([frame.make(x) for x in grads], limit)
    return [frame.read(x) for x in theirs], norm


@pytest.mark.parametrize("name", ROWS)
def test_rows(frame, function, name):
    row = ROWS[name]
    grads = gradients(row)
    grads = [frame.read(frame.make(x)) for x in grads]  # float64 is float32 in JAX
    given = grads if function.scope == "tensor" else [*grads, probe(grads)]
    if not {x.dtype.type for x in grads} <= function.dtypes or (len(set(row.dtypes)) > 1 and not function.mixes):
        with pytest.raises(Exception):  # noqa: B017, PT011  # each framework has its own
            call(frame, function, given, row.limit)
        return
    theirs, norm = call(frame, function, given, row.limit)
    rule = MaxNorm(row.limit, like=function.like)
    done = clip([frame.make(x) for x in given], rule, scope=function.scope, norm=norm, nonfinite="keep")
    ours = [frame.read(x) for x in done.grads]
    kinds = kind_of(grads, theirs[: len(grads)]), kind_of(grads, ours[: len(grads)])
    if (function.name, name) in DIFFERS:
        theirs_may, ours_must = DIFFERS[function.name, name]
        assert kinds[0] in theirs_may.split(" or ")
        assert kinds[1] == ours_must
        return
    assert kinds[0] == kinds[1]
    for x, y, before in zip(ours, theirs, given, strict=True):
        assert x.dtype == before.dtype
        assert ulps(x.astype(DOUBLE), y.astype(DOUBLE), before.dtype) <= 2
    if function.scope == "global" and given[-1].dtype in (SINGLE, DOUBLE):
        np.testing.assert_array_equal(ours[-1], theirs[-1])  # the coefficient to the bit


@pytest.mark.parametrize("limit", [0.0, -1.0, nan], ids=str)
def test_what_is_refused_here(frame, function, limit):
    """Limits that make zeros, turn signs around, or make NaN there."""
    with pytest.raises(ValueError, match="max_norm must be a number > 0"):
        MaxNorm(limit, like=function.like)
    grads, answer = gradients(ROWS["(3, 4) to 1"]), function.answers[str(limit)]
    if isinstance(answer, type):
        with pytest.raises(answer):
            call(frame, function, grads, limit)
    else:
        theirs, _ = call(frame, function, grads, limit)
        assert [x.item() for x in theirs] == pytest.approx(answer, rel=1e-5, nan_ok=True)


def test_every_name_of_the_table_is_tested():
    """Each in its framework's environment; of MLX's test_mlx_like has more rows."""
    with open(theirs.__file__) as file:
        text = file.read()
    assert [name for name in CONVENTIONS if f'"{name}"' not in text] == []
