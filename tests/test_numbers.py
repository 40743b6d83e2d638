"""The numbers that the library promises: norms to 1e-12 whatever the values, one rounding, never larger than asked."""

import math
from fractions import Fraction
from math import inf

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import gradclip
from gradclip import MaxNorm, clip
from gradclip.backends import _blocks, host

BLOCK = _blocks.BLOCK
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
SIZE = 200_003


def true_norm(x):
    """√Σx², from exactly summed squares of the values divided by the largest."""
    wide = np.ravel(x).astype(np.float64)
    peak = float(np.abs(wide).max(initial=0.0))
    if peak == 0:
        return 0.0
    return peak * math.sqrt(math.fsum(np.square(wide / peak).tolist()))


def relative(got, want):
    return abs(float(got) - want) / want


EQUAL = {
    np.float16: [0.1, 6e-8, 6e4],
    ml_dtypes.bfloat16: [0.1, 3e-23, 1e20, 1e-40, 3e38],
    np.float32: [0.1, 3e-23, 1e20, 1e-45, 3e38],
    np.float64: [0.1, 3e-23, 1e20, 1e200, 1e-200, 5e-324, 1.7e305],
}


@pytest.mark.parametrize(("dtype", "value"), [(dtype, value) for dtype, values in EQUAL.items() for value in values])
def test_equal_elements(dtype, value):
    x = np.full(SIZE, value).astype(dtype)
    assert relative(gradclip.norm(x), float(x[0].astype(np.float64)) * math.sqrt(SIZE)) <= 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0, 1, 10])
def test_random_elements(dtype, spread):
    rng = np.random.default_rng(spread)
    with np.errstate(over="ignore"):
        x = (rng.normal(size=SIZE) * 10.0 ** rng.uniform(-spread, spread, SIZE)).astype(dtype)
    x = x[np.isfinite(x)]
    assert relative(gradclip.norm(x), true_norm(x)) <= 1e-12


def test_two_to_the_26_elements():
    x = np.full(2**26, 0.1, np.float32)
    assert relative(gradclip.norm(x), float(x[0]) * 2**13) <= 1e-12


@pytest.mark.parametrize(
    ("dtype", "value", "count", "want"),
    [
        (np.float16, 60000, 10**6, 6e7),
        (np.float32, 1e20, 100, 1e21),
        (np.float32, 1e-25, 4, 2e-25),
        (np.float64, 1e200, 4, 2e200),
        (np.float64, 1e-200, 4, 2e-200),
        (np.float64, 5e-324, 4, 1e-323),
    ],
)
def test_no_finite_input_overflows_or_underflows(dtype, value, count, want):
    x = np.full(count, value, dtype)
    want = want if dtype is not np.float32 else float(x[0]) * math.sqrt(count)
    assert gradclip.norm(x) == pytest.approx(want, rel=1e-15)
    clipped = clip(x, MaxNorm(want / 2))
    assert clipped.finite
    if value != 5e-324:
        assert gradclip.norm(clipped.grads) == pytest.approx(want / 2, rel=1e-3 if dtype is np.float16 else 1e-7)


@pytest.mark.parametrize("p", [0.3, 0.5, 1, 1.5, 3, 7, 50, 400, 1e5])
@pytest.mark.parametrize("value", [1.0, 1e-300, 1e298, 1e20, 1e-20])
def test_any_p_in_any_range(p, value):
    x = np.full(1000, value)
    assert gradclip.norm(x, p) == pytest.approx(value * 1000 ** (1 / p), rel=1e-12)
    assert gradclip.norm(x, inf) == value


@pytest.mark.parametrize("p", [1e-17, 1e-10, 1e-5, 1e-3])
def test_a_tiny_p(p):
    assert gradclip.norm([5.3, 0.0], p) == pytest.approx(5.3, rel=1e-12)
    assert gradclip.norm([5.3, 1.0], p) == (inf if p < 1e-3 else pytest.approx((5.3**p + 1) ** (1 / p), rel=1e-12))


def test_a_norm_beyond_float64_is_told_and_not_made_up():
    with pytest.raises(gradclip.NonFiniteError, match="too large for float64"):
        clip(np.full(9, 1e308), MaxNorm(1.0))


def test_a_norm_of_3e40_is_clipped_to_a_hundredth():
    x = np.full(10**5, 1e38, np.float32)
    clipped = clip(x, MaxNorm(0.01))
    assert clipped.norm > 3e40
    assert gradclip.norm(clipped.grads) == pytest.approx(0.01, rel=1e-6)


def test_a_norm_of_2e_42_is_raised_to_one():
    x = np.full(4, 1e-42, np.float32)
    assert gradclip.norm(x) == pytest.approx(2e-42, rel=1e-3)
    assert gradclip.norm(clip(x, MaxNorm(2.0, min_norm=1.0)).grads) == pytest.approx(1, rel=1e-6)


def test_coefficients_that_are_no_normal_float64():
    raised = clip(np.full(4, 1e-310), MaxNorm(inf, min_norm=2.0)).grads
    assert raised == pytest.approx(np.ones(4), rel=1e-10)
    lowered = clip(np.full(4, 1e200), MaxNorm(2e-120)).grads
    assert lowered == pytest.approx(np.full(4, 1e-120), rel=1e-14)
    in_place = np.full(4, 1e-310)
    gradclip.clip_(in_place, MaxNorm(inf, min_norm=2.0))
    assert np.array_equal(in_place, raised)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_the_same_bits_for_any_order_nesting_and_cut_at_blocks(p):
    rng = np.random.default_rng(0)
    whole = (rng.normal(size=5 * BLOCK + 17) * 10.0 ** rng.uniform(-9, 9, 5 * BLOCK + 17)).astype(np.float32)
    want = float(gradclip.norm(whole, p))
    cuts = [whole[:BLOCK], whole[BLOCK : 4 * BLOCK], whole[4 * BLOCK :]]
    assert float(gradclip.norm(cuts, p)) == want
    assert float(gradclip.norm({"z": cuts[2], "a": [cuts[0], {"k": cuts[1]}]}, p)) == want
    for seed in range(20):
        pieces = [whole[i * 1000 : (i + 1) * 1000] for i in range(300)]
        np.random.default_rng(seed).shuffle(pieces)
        assert gradclip.norm(pieces, p) == gradclip.norm(sorted(pieces, key=lambda x: x[0]), p)
    folded = whole[: 5 * BLOCK].reshape(5, 256, 256)
    assert gradclip.norm(folded.transpose(2, 0, 1), p) == gradclip.norm(folded, p)
    odd = [whole[:1001], whole[1001:]]
    assert relative(gradclip.norm(odd, p), want) <= 1e-15


def neighbours(values):
    """The next value of the same type on either side, away from zero and towards it."""
    bits = values.view(f"u{values.itemsize}")
    return (bits + 1).view(values.dtype), (bits - 1).view(values.dtype)


SOME = {
    np.float16: np.arange(0, 2**16, 7, np.uint16),
    ml_dtypes.bfloat16: np.arange(0, 2**16, 11, np.uint16),
    np.float32: np.random.default_rng(0).integers(0, 2**32, 3000, np.uint64).astype(np.uint32),
}


@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize("coef", [0.1, 1 / 3, 0.999999, 1e-3, 2.0**-9 * (1 + 2.0**-40), 3.7, 1 + 2.0**-9, 1 + 2.0**-12])
def test_products_are_rounded_once(dtype, coef):
    x = SOME[dtype].view(dtype)
    with np.errstate(all="ignore"):
        x = x[np.isfinite(x)].copy()
        got = host.scale([x], [coef])[0]
        inside = np.isfinite(got) & (got != 0) & np.isfinite(neighbours(got)[0])
    x, got = x[inside], got[inside]
    even = got.view(f"u{got.itemsize}") % 2 == 0
    for other in neighbours(got):
        for i in range(len(x)):
            product = Fraction(float(x[i]) * coef)
            error, distance = (abs(Fraction(float(y[i])) - product) for y in (got, other))
            assert error < distance or (error == distance and even[i]), (x[i], coef, got[i])


FINITE = hnp.arrays(
    st.sampled_from([np.float32, np.float64]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
)
TREES = st.lists(FINITE, max_size=4)
LIMITS = st.floats(1e-30, 1e30)


@given(TREES, LIMITS, st.sampled_from(["global", "tensor"]), st.sampled_from([0.5, 1, 2, 3, inf]))
@example([np.float32([3, 4])], 1.0, "global", 2)
def test_never_larger_than_asked(tree, limit, scope, p):
    clipped = clip(tree, MaxNorm(limit), scope=scope, p=p)
    assert np.all(gradclip.norm(clipped.grads, p, scope) <= limit * (1 + 1e-6) + 1e-44 * len(tree) * 200 ** (1 / p))


@given(TREES, LIMITS, st.sampled_from(["global", "tensor", "element"]))
def test_clipping_twice_changes_at_most_a_millionth(tree, limit, scope):
    once = clip(tree, MaxNorm(limit), scope=scope).grads
    twice = clip(once, MaxNorm(limit), scope=scope).grads
    for a, b in zip(once, twice, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-44)


@given(TREES, LIMITS, st.sampled_from(["global", "tensor"]))
def test_the_direction_stays(tree, limit, scope):
    clipped = clip(tree, MaxNorm(limit), scope=scope)
    coefs = np.broadcast_to(clipped.coef, (len(tree),))
    for x, y, coef in zip(tree, clipped.grads, coefs, strict=True):
        assert 0 <= coef <= 1
        if coef == 1:
            assert y is x
        else:
            assert np.array_equal(y, (x.astype(np.float64) * coef).astype(x.dtype))


@given(TREES, LIMITS)
def test_in_place_gives_the_same_bits(tree, limit):
    want = clip(tree, MaxNorm(limit)).grads
    copies = [x.copy() for x in tree]
    gradclip.clip_(copies, MaxNorm(limit))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(want, copies, strict=True))


@given(TREES, st.integers(-60, 60), st.sampled_from([1, 2, inf]))
def test_scaling_all_gradients_scales_the_norm(tree, power, p):
    tree = [x.astype(np.float64) for x in tree]
    norm = float(gradclip.norm(tree, p))
    assert gradclip.norm([x * 2.0**power for x in tree], p) == pytest.approx(norm * 2.0**power, rel=1e-15, abs=0)


@given(TREES, st.randoms(use_true_random=False))
def test_the_order_of_tensors_does_not_matter(tree, random):
    shuffled = list(tree)
    random.shuffle(shuffled)
    assert gradclip.norm(shuffled) == gradclip.norm(tree)


@given(TREES, st.lists(st.booleans(), min_size=4, max_size=4), st.sampled_from([1, 2, 3, inf]))
def test_a_split_over_processes_is_no_split(tree, side, p):
    ours = [x for x, mine in zip(tree, side, strict=False) if mine]
    theirs = [x for x, mine in zip(tree, side, strict=False) if not mine]

    def reduce(power, p):
        if p == inf:
            return np.maximum(power, [float(gradclip.norm(theirs, inf)), 0.0])
        return power + host.powers(theirs, [len(theirs)], p)[0]

    assume(float(gradclip.norm(tree, 2)) > 1e-100 or not tree)
    alone = clip(ours, MaxNorm(1.0), p=p, reduce=reduce).norm
    assert float(alone) == pytest.approx(float(gradclip.norm(tree, p)), rel=1e-12)


@given(FINITE, LIMITS)
def test_by_value_is_clamp(x, limit):
    bound = x.dtype.type(limit)
    assert np.array_equal(clip(x, MaxNorm(limit), scope="element").grads, np.clip(x, -bound, bound))


@settings(max_examples=300)
@given(hnp.arrays(np.float64, st.integers(1, 6), elements=st.floats(-1e305, 1e305)), st.floats(1e-300, 1e300))
def test_the_whole_range_of_float64(x, limit):
    want = true_norm(x)
    assert float(gradclip.norm(x)) == pytest.approx(want, rel=1e-12, abs=0)
    assert float(gradclip.norm(clip(x, MaxNorm(limit)).grads)) <= limit * (1 + 1e-6) + 1e-322


def test_norms_per_unit():
    x = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    for axis in (0, 1, 2, -1):
        moved = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1).astype(np.float64)
        for p in (1, 2, 3):
            assert host.unit_powers([x], [axis], p) == pytest.approx((np.abs(moved) ** p).sum(axis=1), rel=1e-14)
        assert host.unit_powers([x], [axis], inf).tolist() == moved.max(axis=1).tolist()
    for empty in (np.zeros((0, 3)), np.zeros((3, 0)), np.zeros((2, 0, 3))):
        assert host.unit_powers([empty], [0], 2).tolist() == [0.0] * len(empty)
        assert host.unit_powers([empty], [0], inf).tolist() == [0.0] * len(empty)
    assert np.isnan(host.unit_powers([np.float32([[1, math.nan], [3, 4]])], [0], inf)).tolist() == [True, False]
    both = host.unit_powers([x, np.float32([3, 4]), np.float32(2)], [0, None, None], 2)
    assert both.tolist() == [*host.unit_powers([x], [0], 2), 25, 4]
    assert host.unit_powers([x], [0], 2, np.array([2.0, 4.0])) == pytest.approx(host.unit_powers([x], [0], 2) / [4, 16])
    assert host.unit_powers([], [], 2).shape == (0,)


def test_memory_stays_flat():
    import tracemalloc

    x = np.ones(2**22, np.float32)
    for layout in (x, x.reshape(2048, 2048).T, x.reshape(2048, 2048)[:, ::2]):
        tracemalloc.start()
        gradclip.norm(layout)
        gradclip.norm(layout, 3)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * BLOCK * 8
