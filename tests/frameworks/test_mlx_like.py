"""`MaxNorm(…, like="mlx")` beside `mlx.optimizers.clip_grad_norm` row by row, given the same norm; values beside `mx.clip`."""

from math import inf, nan
from typing import NamedTuple

import ml_dtypes
import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from gradclip import Bounds, MaxNorm, clip

HALF, BRAIN, SINGLE, DOUBLE = mx.float16, mx.bfloat16, mx.float32, mx.float64
WAYS = {"eager": lambda f: f, "compiled": mx.compile}


class Row(NamedTuple):
    """Values, or (value, how often), for each gradient; its types; the limit; what MLX makes of it."""

    values: list
    limit: float
    kind: str
    dtypes: tuple = (SINGLE,)


ROWS = {
    "at the threshold": Row([[3, 0], [0, 4]], 5.0, "scaled"),
    "(3, 4) to 1": Row([[3], [4]], 1.0, "scaled"),
    "(300, 400) to 1": Row([[300], [400]], 1.0, "scaled"),
    "(300, 400) at 500": Row([[300], [400]], 500.0, "identity"),
    "below": Row([[0.03, 0.001], [0.007, 0.04]], 0.1, "identity"),
    "41 below": Row([[0.01, 0.02, 0.03]], 41.0, "identity"),
    "small, below": Row([[3e-7], [4e-7]], 1e-6, "scaled"),
    "small, at": Row([[6e-8], [8e-8]], 1e-7, "scaled"),
    "small, above": Row([[6e-8], [8e-8]], 1e-8, "scaled"),
    "float16, 1000 of 300": Row([[300] * 1000], 1.0, "scaled", (HALF,)),
    "float16, 1000 of 60000": Row([[60000] * 1000], 1.0, "scaled", (HALF,)),
    "float16, 4 of 1e-4": Row([[1e-4] * 4], 1e-4, "scaled", (HALF,)),
    "bfloat16, 1000 of 300": Row([[300] * 1000], 1.0, "scaled", (BRAIN,)),
    "bfloat16, 1000 numbers": Row([[1]] * 1000, 1.0, "scaled", (BRAIN,)),
    "bfloat16 and float32": Row([[3], [4]], 1.0, "scaled", (BRAIN, SINGLE)),
    "a NaN": Row([[1, nan], [2, 2]], 1.0, "nan"),
    "an inf": Row([[1, inf], [2, 2]], 1.0, "zeros, and NaN of inf"),
    "zeros": Row([[0, 0], [0]], 1.0, "identity"),
    "no limit": Row([[3], [4]], inf, "identity"),
    "squares too large": Row([[1e20] * 4], 1.0, "zeros"),
    "squares too small": Row([[1e-25] * 4], 1e-26, "scaled"),
    "float64": Row([[3], [4]], 1.0, "scaled", (DOUBLE,)),
    "float16 and float32": Row([[3], [4]], 1.0, "scaled", (HALF, SINGLE)),
    "float32 and float64": Row([[3], [4]], 1.0, "scaled", (SINGLE, DOUBLE)),
    "an empty one": Row([[], [3, 4]], 1.0, "scaled"),
    "one of no axes": Row([3, 4], 1.0, "scaled"),
    "many": Row([np.random.default_rng(0).standard_normal(10_007).tolist()], 0.7, "scaled"),
}


def gradients(row):
    dtypes = row.dtypes * len(row.values)
    return [mx.array(np.array(x, np.float64), DOUBLE).astype(dtype) for x, dtype in zip(row.values, dtypes, strict=False)]


def probe(grads):
    """A power of two, so small that no norm shows it, and whose product with any coefficient is exact: it gives that away."""
    largest = max((float(mx.max(mx.abs(x))) for x in grads if x.size), default=1.0)
    exponent = np.floor(np.log2(largest)) - 30 if 0 < largest < inf else -100
    widest = DOUBLE if DOUBLE in [x.dtype for x in grads] else BRAIN if {x.dtype for x in grads} == {BRAIN} else SINGLE
    return mx.array(2.0**exponent, DOUBLE).astype(widest)


def read(x):
    return np.array(x.astype(mx.float32)).astype(ml_dtypes.bfloat16) if x.dtype == BRAIN else np.array(x)


def wide(x):
    return read(x).astype(np.float64)


def ulps(a, b, dtype):
    """How many units in the last place lie between them, at most; NaN where only one of them is NaN."""
    info = ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(b), float(info.smallest_normal))))
        apart = np.abs(a - b) / (float(info.eps) * 2.0**exponent)
    return float(np.max(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, apart), initial=0.0))


def kind_of(before, after):
    pairs = [(wide(x), wide(y)) for x, y in zip(before, after, strict=True)]
    xs, ys = (np.concatenate([pair[i].ravel() for pair in pairs]) for i in (0, 1))
    if np.array_equal(xs, ys):
        return "identity"
    if np.isnan(ys).all():
        return "nan"
    if np.isnan(ys).any():
        return "zeros, and NaN of inf" if np.array_equal(np.isnan(ys), np.isinf(xs)) and not np.nansum(np.abs(ys)) else "?"
    return "scaled" if ys.any() else "zeros"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ROWS)
def test_rows(name, way):
    row = ROWS[name]
    grads = gradients(row)
    given = [*grads, probe(grads)]
    theirs, norm = optim.clip_grad_norm(given, row.limit)
    ours = WAYS[way](lambda g, n: clip(g, MaxNorm(row.limit, like="mlx"), norm=n, nonfinite="keep"))(given, norm)
    assert kind_of(grads, theirs[:-1]) == row.kind
    assert kind_of(grads, ours.grads[:-1]) == row.kind
    for x, y in zip(ours.grads, theirs, strict=True):
        assert x.dtype == y.dtype
        assert ulps(wide(x), wide(y), read(y).dtype) <= 2
    # MLX's coefficient of bfloat16 alone is one too, where ours is a float32
    working = np.dtype(np.float64 if DOUBLE in row.dtypes else ml_dtypes.bfloat16 if set(row.dtypes) == {BRAIN} else np.float32)
    coef = wide(ours.coef).astype(working)
    assert working == ml_dtypes.bfloat16 or np.array_equal(coef, wide(ours.coef), equal_nan=True)
    assert np.array_equal(coef * wide(given[-1]).astype(working), read(theirs[-1]).astype(working), equal_nan=True)


def test_the_test_of_the_coefficient_can_fail():
    """Another framework's formula, torch's, gives other bits for the same norm."""
    x = mx.array(2.0**-30)
    theirs, norm = optim.clip_grad_norm([mx.array([3.0, 4.0]), x], 5.0)
    ours = clip([mx.array([3.0, 4.0]), x], MaxNorm(5.0, like="torch"), norm=norm)
    assert wide(theirs[-1]) / wide(x) != ours.coef.item()


@pytest.mark.parametrize(
    ("limit", "theirs"), [(0.0, [0.0, 0.0]), (-1.0, ValueError), (nan, [nan, nan])], ids=["zero", "negative", "nan"]
)
def test_what_is_refused_here(limit, theirs):
    """A limit of 0 makes zeros in MLX, and NaN makes NaN; a negative one is refused there too."""
    grads = [mx.array([3.0, 4.0])]
    if theirs is ValueError:
        with pytest.raises(ValueError, match="max_norm should be >=0"):
            optim.clip_grad_norm(grads, limit)
    else:
        assert np.array_equal(read(optim.clip_grad_norm(grads, limit)[0][0]), theirs, equal_nan=True)
    with pytest.raises(ValueError, match="max_norm must be a number > 0"):
        MaxNorm(limit, like="mlx")


@pytest.mark.parametrize(
    ("grads", "theirs"),
    [([10j], [1 + 1e-7j]), ([1 + 0j, 1j], [1 + 0j, 1j])],
)
def test_complex_gradients_differ(grads, theirs):
    """MLX 0.32 adds g² where it means |g|²: a norm that is no number turns the phase, or clips nothing."""
    x = mx.array(grads)
    np.testing.assert_allclose(read(optim.clip_grad_norm([x], 1.0)[0][0]), theirs, rtol=1e-6)
    ours = clip([x], MaxNorm(1.0, like="mlx"))
    np.testing.assert_allclose(read(ours.grads[0]), np.array(grads) / np.linalg.norm(grads), rtol=2e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [SINGLE, HALF, BRAIN, DOUBLE])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-inf, inf), (-0.1, 0.3), (-0.0, 1e6)])
def test_values_are_those_of_mx_clip(way, dtype, low, high):
    """To the bit: NaN stays NaN, infinities become bounds. What MLX accepts and we do not: low > high, both of one sign."""
    x = mx.array([nan, inf, -inf, 3.0, -4.0, 0.05, -0.2, 0.0, 0.1]).astype(dtype)
    ours = WAYS[way](lambda x: clip(x, Bounds(low, high), nonfinite="keep").grads)(x)
    theirs = mx.clip(x, low, high)
    assert ours.dtype == theirs.dtype == dtype
    assert np.array_equal(wide(ours), wide(theirs), equal_nan=True)
    for bad in ((1.0, -1.0), (1.0, 2.0)):
        with pytest.raises(ValueError, match="bounds must have low <= 0 <= high"):
            Bounds(*bad)
