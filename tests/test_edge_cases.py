"""Where the frameworks disagree or fail, our answer: the same table for "global" and "tensor", and one for values.

The cases are those on which torch, Paddle, MindSpore, TensorFlow, Keras, optax and MLX give different answers today.
"""

from math import inf, nan

import ml_dtypes
import numpy as np
import pytest

import gradclip
from gradclip import Bounds, MaxNorm, NonFiniteError, clip

BF16 = ml_dtypes.bfloat16


def f32(*values):
    return np.array(values, np.float32)


def f16(*values):
    return np.array(values, np.float16)


def values(tree):
    return [np.asarray(x, np.float64).ravel().tolist() for x in tree]


GLOBAL = {
    "exactly at the limit": ([f32(3, 0), f32(0, 4)], 5.0, [[3, 0], [0, 4]]),
    "above": ([f32(3), f32(4)], 1.0, [[0.6], [0.8]]),
    "far above": ([f32(300), f32(400)], 1.0, [[0.6], [0.8]]),
    "below": ([f32(0.03, 0.001), f32(0.007, 0.04)], 0.1, None),
    "a tiny norm below": ([f32(3e-7), f32(4e-7)], 1e-6, None),
    "a tiny norm at the limit": ([f32(6e-8), f32(8e-8)], 1.0000000000001e-7, None),
    "a tiny norm above": ([f32(6e-8), f32(8e-8)], 1e-8, [[6e-9], [8e-9]]),
    "float16, the sum of squares overflows": ([f16(*[300] * 1000)], 1.0, [[1000**-0.5] * 1000]),
    "float16, the norm overflows": ([f16(*[60000] * 1000)], 1.0, [[1000**-0.5] * 1000]),
    "float16, the squares underflow": ([f16(*[1e-4] * 4)], 1e-4, [[5e-5] * 4]),
    "bfloat16": ([np.full(1000, 300, BF16)], 1.0, [[1000**-0.5] * 1000]),
    "bfloat16, many tensors": ([np.ones(1, BF16)] * 1000, 1.0, [[1000**-0.5]] * 1000),
    "zeros": ([f32(0, 0)], 1.0, None),
    "float32, the squares overflow": ([f32(*[1e20] * 4)], 1.0, [[0.5] * 4]),
    "float32, the squares underflow": ([f32(*[1e-25] * 4)], 1e-26, [[5e-27] * 4]),
    "float64": ([np.array([3.0, 4.0])], 1.0, [[0.6, 0.8]]),
    "float16 beside float32": ([f16(3), f32(4)], 1.0, [[0.6], [0.8]]),
    "float32 beside float64": ([f32(3), np.array([4.0])], 1.0, [[0.6], [0.8]]),
    "float64 below, beside float32": ([f32(0.3), np.array([0.4])], 1.0, None),
    "0-size": ([f32(), f32(3, 4)], 1.0, [[], [0.6, 0.8]]),
    "0-d": ([np.float32(3), np.array(4, np.float32)], 1.0, [[0.6], [0.8]]),
    "no limit": ([f32(3), f32(4)], inf, None),
    "a limit whose reciprocal is inexact": ([f32(1, 2, 3)], 41.0, None),
    "large values far below the limit": ([f32(1e30, 1e30)], 1e38, None),
    "small values below the limit": ([f32(1e-25, 1e-25)], 1e-15, None),
    "near the largest float32": ([f32(3e38), f32(3e38)], 1.0, [[0.5**0.5], [0.5**0.5]]),
    "the same array twice": ([same := f32(3, 4), same], 1.0, [[0.3 * 2**0.5, 0.4 * 2**0.5]] * 2),
    "complex": ([np.array([3 + 4j], np.complex64)], 10.0, None),
}
RTOL = {"float16": 1e-3, "bfloat16": 1e-2}


@pytest.mark.parametrize("name", GLOBAL)
def test_global(name):
    grads, limit, want = GLOBAL[name]
    clipped = clip(grads, MaxNorm(limit))
    if want is None:
        assert all(new is old for new, old in zip(clipped.grads, grads, strict=True))
        return
    rtol = max(RTOL.get(x.dtype.name, 1e-6) for x in grads)
    for got, expected in zip(values(clipped.grads), want, strict=True):
        assert got == pytest.approx(expected, rel=rtol)
    assert [x.dtype for x in clipped.grads] == [x.dtype for x in grads]
    assert [x.shape for x in clipped.grads] == [x.shape for x in grads]


NORMS = {
    "float16 300 × 1000": (f16(*[300] * 1000), 90000000**0.5),
    "float16 60000 × 1000": (f16(*[60000] * 1000), 60000 * 1000**0.5),
    "bfloat16 300 × 1000": (np.full(1000, 300, BF16), 90000000**0.5),
    "1000 scalars of bfloat16": ([np.ones(1, BF16)] * 1000, 1000**0.5),
    "float32 1e20": (f32(*[1e20] * 4), 2 * float(np.float32(1e20))),
    "float32 1e-25": (f32(*[1e-25] * 4), 2 * float(np.float32(1e-25))),
    "float64 1e200": (np.full(4, 1e200), 2e200),
    "40 million ones": (np.ones(40_000_000, np.float32), 40_000_000**0.5),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    grads, want = NORMS[name]
    assert float(gradclip.norm(grads)) == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize(
    ("p", "grads", "want"),
    [
        (1, np.ones(40_000_000, np.float32), 4e7),
        (3, np.ones(40_000_000, np.float32), 4e7 ** (1 / 3)),
        (1, [f32(10, -10)], 20),
        (1, [f32(-3, -4)], 7),
        (3, [f32(1, -2)], 9 ** (1 / 3)),
        (2.5, [f32(-3, 4)], (3**2.5 + 4**2.5) ** 0.4),
        (1, [f16(*[300] * 1000)], 3e5),
        (inf, [f32(3, -4), f32(), f32(2)], 4),
    ],
)
def test_other_norms(p, grads, want):
    assert float(gradclip.norm(grads, p)) == pytest.approx(want, rel=1e-12)


TENSOR = {
    "each by its own": ([f32(3), f32(4)], 1.0, [[1], [1]]),
    "below": ([f32(0.007), f32(0.04)], 0.1, None),
    "tiny and below": ([f32(3e-7), f32(4e-7)], 1e-6, None),
    "float16 below": ([f16(100, 100)], 1000.0, None),
    "float16 overflow": ([f16(*[300] * 1000)], 1.0, [[1000**-0.5] * 1000]),
    "zeros": ([f32(0), f32(0, 0)], 1.0, None),
    "squares underflow": ([f32(*[1e-25] * 4)], 1e-26, [[5e-27] * 4]),
    "no limit": ([f32(3), f32(4)], inf, None),
    "smaller than 1e-3": ([f32(3e-5, 4e-5)], 1e-4, None),
}


@pytest.mark.parametrize("name", TENSOR)
def test_tensor(name):
    grads, limit, want = TENSOR[name]
    clipped = clip(grads, MaxNorm(limit), scope="tensor")
    if want is None:
        assert all(new is old for new, old in zip(clipped.grads, grads, strict=True))
        return
    for got, expected in zip(values(clipped.grads), want, strict=True):
        assert got == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_what_is_not_finite_is_an_error_unless_asked_otherwise(scope, bad):
    with pytest.raises(NonFiniteError):
        clip([f32(1, bad), f32(2, 2)], MaxNorm(1.0), scope=scope)


def test_kept_nan_and_inf_in_a_global_norm():
    assert np.isnan(np.concatenate(clip([f32(1, nan), f32(2, 2)], MaxNorm(1.0), nonfinite="keep").grads)).all()
    out = np.concatenate(clip([f32(1, inf), f32(2, 2)], MaxNorm(1.0), nonfinite="keep").grads)
    assert np.array_equal(out, [0, nan, 0, 0], equal_nan=True)


def test_kept_nan_in_one_tensor_leaves_the_others_alone():
    out = clip([f32(1, nan), f32(2, 2)], MaxNorm(1.0), scope="tensor", nonfinite="keep").grads
    assert np.isnan(out[0]).all()
    assert out[1] == pytest.approx([0.5**0.5] * 2)


@pytest.mark.parametrize("limit", [0, 0.0, -1, -1.0, nan, -inf, np.float32(0)])
def test_a_limit_that_is_no_positive_number_is_refused(limit):
    for make in (MaxNorm, lambda x: MaxNorm(inf, min_norm=x), lambda x: gradclip.clip_by_value([f32(3, 4)], x)):
        with pytest.raises(ValueError, match="must be a number > 0"):
            make(limit)


@pytest.mark.parametrize("limit", [True, "1", None, [1.0], 1j, np.array([1.0]), np.bool_(True)])
def test_a_limit_that_is_no_number_is_refused(limit):
    with pytest.raises(TypeError, match="max_norm must be a number"):
        clip(f32(3), MaxNorm(limit))


ELEMENT = {
    "inside": (f32(0.5, -1, 1), 1.0, None),
    "outside": (f32(3, -4, 0.5), 1.0, [1, -1, 0.5]),
    "no limit": (f32(3, -4), inf, None),
    "float16 and a limit beyond it": (f16(3, -4), 1e6, None),
    "float16": (f16(3, -4), 0.1, [float(np.float16(0.1)), -float(np.float16(0.1))]),
    "bfloat16": (np.array([3, -4], BF16), 0.1, [float(BF16(0.1)), -float(BF16(0.1))]),
    "a limit that the type rounds": (f32(0.1), 0.1, None),
    "zeros keep their sign": (f32(0.0, -0.0), 1.0, None),
    "0-size": (f32(), 1.0, None),
}


@pytest.mark.parametrize("name", ELEMENT)
def test_element(name):
    given, limit, want = ELEMENT[name]
    clipped = clip(given, MaxNorm(limit), scope="element")
    if want is None:
        assert clipped.grads is given
        assert not clipped.clipped
    else:
        assert clipped.grads.astype(np.float64).tolist() == want
        assert clipped.clipped


def test_values_that_are_not_finite_under_keep():
    out = clip(f32(nan, inf, -inf, 0.5), MaxNorm(1.0), scope="element", nonfinite="keep").grads
    assert np.array_equal(out, f32(nan, 1, -1, 0.5), equal_nan=True)


@pytest.mark.parametrize(("low", "high"), [(1, -1), (0.5, 1), (-2, -1), (0, 0), (nan, 1), (-1, nan), (1, 1)])
def test_bounds_that_hold_no_zero_or_are_reversed_are_refused(low, high):
    with pytest.raises(ValueError, match="low <= 0 <= high"):
        Bounds(low, high)


@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
def test_integers_are_refused(scope):
    with pytest.raises(TypeError, match="int32"):
        clip([np.array([5], np.int32)], MaxNorm(2.5), scope=scope)


def test_no_gradients_at_all():
    for tree in ([], [None, None], {}):
        assert gradclip.norm(tree) == 0
        assert gradclip.clip_by_value(tree, 1.0).norm == 0


def test_a_generator_is_consumed_once_and_clipped():
    clipped = clip((x for x in [f32(3), f32(4)]), MaxNorm(1.0))
    assert values(clipped.grads) == [pytest.approx([0.6]), pytest.approx([0.8])]


def test_micro_batches_are_clipped_as_their_sum():
    micro = [f32(5), f32(-3), f32(5), f32(-3)]
    assert clip(sum(micro), MaxNorm(1.0)).grads == 1
    assert sum(clip(x, MaxNorm(1.0)).grads for x in micro) == 0, "each by itself loses the direction"


def test_a_scaled_gradient_is_unscaled_before_it_is_clipped():
    scaled, scale = f32(0.25 * 1024), 1024
    assert clip(scaled / scale, MaxNorm(1.0)).grads == 0.25
    assert clip(scaled, MaxNorm(1.0)).grads / scale == pytest.approx(1 / 1024)
