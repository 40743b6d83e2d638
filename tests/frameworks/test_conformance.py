"""Every rule and scope, eager and traced, against the same in float64 NumPy."""

from math import inf, nan

import numpy as np
import pytest
from frames import FRAMES

from gradclip import (
    Both,
    Bounds,
    EmaRatio,
    Groups,
    MaxNorm,
    MaxRms,
    Median,
    NonFiniteError,
    Quantile,
    Ratio,
    Skip,
    Unit,
    UnitNorm,
    ZScore,
    clip,
    init,
)

RULES = {
    "max_norm": MaxNorm(0.7),
    "far": MaxNorm(1e6),
    "measure": MaxNorm(inf),
    "min_norm": MaxNorm(20.0, min_norm=9.0),
    "like": MaxNorm(0.7, like="torch"),
    "bounds": Bounds(-0.25, 0.5),
    "unit_norm": UnitNorm(2.0),
    "max_rms": MaxRms(0.3),
    "both": Both(MaxNorm(0.9), MaxRms(0.3)),
    "groups": Groups({"a": MaxNorm(0.5), "b.*": UnitNorm(1.0), "c": None}),
    "budget": Groups({"a": MaxNorm(0.5), "*": MaxNorm(0.5)}, budget="size"),
}
LEARNING = {
    "median": Median(window=6, warmup=2),
    "quantile": Quantile(0.7, window=6, warmup=2, warmup_norm=3.0),
    "z_score": ZScore(1.5, warmup=3, max_consecutive=3),
    "ema_ratio": EmaRatio(warmup=3, max_consecutive=3),
    "both": Both(Median(window=6, warmup=2), ZScore(warmup=3)),
    "skip": Skip(Median(window=6, warmup=2), at_most=2),
    "groups": Groups({"a": Median(window=6, warmup=2), "b.*": None, "*": ZScore(warmup=3)}),
    "zclip": ZScore.published(warmup=3),
    "autoclip": Quantile.published(0.4, window=6),
    "adagc": EmaRatio.published(warmup=3),
    "icefall": Median.published(period=4),
    "schedule": MaxNorm(lambda step: 1.0 / (step + 1.0)),
}
CASES = [
    (name, scope, p)
    for name, rule in RULES.items()
    for scope in rule.allowed_scopes()
    for p in ((1, 2, 3, inf) if scope != "element" else (2,))
]
POLICIES = ["zero", "skip", "keep"]


def pytest_generate_tests(metafunc):
    if "mode" in metafunc.fixturenames:
        frame = FRAMES[metafunc.config.getoption("--framework")]()
        metafunc.parametrize("mode", sorted(frame.modes))


def tree(dtype=np.float32):
    random = np.random.default_rng(0)
    parts = [random.standard_normal(shape).astype(dtype) for shape in ((3, 4), (5,), (2, 1, 3), ())]
    return {"a": parts[0], "b": [parts[1], None, (parts[2],)], "c": parts[3]}


def mapped(f, tree):
    if isinstance(tree, dict):
        return {key: mapped(f, child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(f, child) for child in tree)
    return None if tree is None else f(tree)


def leaves(tree):
    if isinstance(tree, dict):
        return [leaf for child in tree.values() for leaf in leaves(child)]
    if isinstance(tree, list | tuple):
        return [leaf for child in tree for leaf in leaves(child)]
    return [] if tree is None else [tree]


def run(frame, mode, grads, rule, scope, p=2, policy="keep", reduce=None):
    """The clip in this mode, its arrays read as NumPy; its tree flattened."""

    def work(grads):
        done = clip(grads, rule, scope=scope, p=p, nonfinite=policy, reduce=reduce)
        return done.grads, done.norm, done.limit, done.coef, done.clipped, done.finite, done.skipped

    fields = frame.modes[mode](work)(mapped(frame.make, grads))
    read = [mapped(frame.read, field) for field in fields]
    return dict(zip(("grads", "norm", "limit", "coef", "clipped", "finite", "skipped"), read, strict=True))


def assert_same(got, want, dtype, traced, exact=("clipped", "finite", "skipped")):
    norm_error = 1e-5 if traced else 1e-12
    for name in ("norm", "limit", "coef"):
        expected = getattr(want, name)
        assert (got[name] is None) == (expected is None)
        if expected is not None:
            assert np.shape(got[name]) == np.shape(expected)
            rounded = np.float64(np.asarray(expected, got[name].dtype))  # the type that is returned
            np.testing.assert_allclose(np.float64(got[name]), rounded, rtol=norm_error)
    for name in exact:
        assert bool(got[name]) == bool(getattr(want, name)), name
    step = 2.0**-23 if dtype != np.float16 else 2.0**-10
    for ours, theirs in zip(leaves(got["grads"]), leaves(want.grads), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(np.float64(ours), np.float64(theirs), rtol=2 * step, atol=1e-30)


@pytest.mark.parametrize(("name", "scope", "p"), CASES)
def test_every_rule_in_every_scope(frame, mode, name, scope, p):
    grads, rule = tree(), RULES[name]
    want = clip(grads, rule, scope=scope, p=p)
    got = run(frame, mode, grads, rule, scope, p)
    assert_same(got, want, np.float32, mode in frame.traced)
    assert got["grads"]["b"][1] is None
    assert isinstance(got["grads"]["b"][2], tuple)


@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
def test_every_type(frame, mode, scope):
    for dtype in frame.dtypes:
        grads = tree(dtype)
        wide = mapped(np.float64, grads)
        want = clip(wide, MaxNorm(0.5), scope=scope)
        got = run(frame, mode, grads, MaxNorm(0.5), scope)
        half_ulp = {8: 2.0**-50, 4: 2.0**-23, 2: 2.0**-8}[np.dtype(dtype).itemsize]
        rounded = np.float64(np.asarray(want.norm, got["norm"].dtype))
        np.testing.assert_allclose(np.float64(got["norm"]), rounded, rtol=1e-5 if mode in frame.traced else 1e-12)
        for ours, theirs in zip(leaves(got["grads"]), leaves(want.grads), strict=True):
            assert ours.dtype == dtype
            np.testing.assert_allclose(np.float64(ours), theirs, rtol=half_ulp, atol=1e-30)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_policies(frame, mode, scope, policy, value):
    grads = {"a": np.float32([3, value]), "b": np.float32([0.25])}
    got = run(frame, mode, grads, MaxNorm(1.0), scope, policy=policy)
    assert not got["finite"]
    assert bool(got["skipped"]) == (policy == "skip")
    if policy == "zero" or (policy == "skip" and mode not in frame.readable):
        assert [x.tolist() for x in leaves(got["grads"])] == [[0, 0], [0]]
    elif policy == "skip":
        assert np.array_equal(got["grads"]["a"], grads["a"], equal_nan=True)
    else:
        want = clip(grads, MaxNorm(1.0), scope=scope, nonfinite="keep")
        for ours, theirs in zip(leaves(got["grads"]), leaves(want.grads), strict=True):
            assert np.array_equal(ours, theirs, equal_nan=True)


def test_raise(frame, mode):
    grads = {"a": np.float32([3, nan]), "b": np.float32([1])}
    if mode not in frame.readable:
        with pytest.raises(Exception, match='pass nonfinite="keep"'):
            run(frame, mode, grads, MaxNorm(1.0), "global", policy="raise")
    else:
        with pytest.raises(NonFiniteError, match=r"a \(1 NaN of 2\)"):
            run(frame, mode, grads, MaxNorm(1.0), "global", policy="raise")


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_the_range(frame, mode, scope):
    """Neither large nor small finite values overflow or underflow in the norm."""
    for values in ([1e20] * 100, [1e-25] * 4, [3e38, 1e38], [1e-30, 3e-23], [0.0, 0.0]):
        grads = [np.float32(values)]
        want = clip(grads, MaxNorm(1.0), scope=scope)
        got = run(frame, mode, grads, MaxNorm(1.0), scope)
        np.testing.assert_allclose(np.float64(got["norm"]), want.norm, rtol=1e-6)
        assert bool(got["clipped"]) == bool(want.clipped)
        np.testing.assert_allclose(leaves(got["grads"])[0], leaves(want.grads)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("scope", "p"), [*((scope, p) for scope in ("global", "tensor") for p in (1, 2, 3, inf)), ("element", 2)]
)
def test_joined_with_another_process(frame, mode, scope, p):
    """As if another one had the same gradients."""

    def reduce(power, p):
        return power if p == inf else power + power

    joined = scope != "element" and p != inf
    want = clip(tree(np.float64), MaxNorm(0.7), scope=scope, p=p)
    got = run(frame, mode, tree(), MaxNorm(0.7), scope, p, reduce=reduce)
    np.testing.assert_allclose(np.float64(got["norm"]), want.norm * (2 ** (1 / p) if joined else 1), rtol=1e-5)


@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
def test_a_limit_of_the_frameworks_own(frame, mode, scope):
    """A 0-d array of every type, given to eager gradients and in a trace."""
    want = clip(tree(), MaxNorm(0.5), scope=scope)
    for dtype in frame.dtypes:
        got = run(frame, mode, tree(), MaxNorm(frame.make(np.asarray(0.5, dtype))), scope)
        assert_same(got, want, np.float32, mode in frame.traced)


def test_nothing_to_clip_is_untouched(frame, mode):
    grads = tree()
    for scope in ("global", "tensor", "element"):
        got = run(frame, mode, grads, MaxNorm(1e3), scope)
        assert not got["clipped"]
        for ours, theirs in zip(leaves(got["grads"]), leaves(grads), strict=True):
            assert ours.tobytes() == theirs.tobytes()


EMPTY = [
    [np.zeros((0, 3), np.float32)],
    [np.zeros(0, np.float32), np.float32(0)],
    {"a": None, "b": np.zeros(2, np.float32)},
]


@pytest.mark.parametrize("grads", EMPTY)
@pytest.mark.parametrize(("scope", "p"), [("global", 2), ("global", 3), ("global", inf), ("tensor", 2), ("element", 2)])
def test_empty_trees_and_arrays(frame, mode, grads, scope, p):
    got = run(frame, mode, grads, MaxNorm(1.0), scope, p)
    assert not got["clipped"]
    assert got["finite"]
    assert not np.any(got["norm"])


def flow(count=14):
    """Gradients of several steps, with spikes, zeros and a step that is not finite."""
    random = np.random.default_rng(1)
    scales = [1, 1.2, 0.8, 1, 30, 1.1, 0, 0.9, nan, 20, 22, 25, 24, 1.0][:count]
    for scale in scales:
        parts = [(scale * random.standard_normal(shape)).astype(np.float32) for shape in ((3, 4), (5,), (2, 1, 3), ())]
        yield {"a": parts[0], "b": [parts[1], None, (parts[2],)], "c": parts[3]}


@pytest.mark.parametrize("name", LEARNING)
def test_every_rule_that_learns(frame, mode, name):
    """The same limits and the same state as in NumPy, step by step, through a function that is run in this mode."""
    rule = LEARNING[name]
    scope = rule.allowed_scopes()[0]

    def work(grads, state):
        done = clip(grads, rule, scope=scope, state=state, nonfinite="skip")
        return done.grads, done.limit, done.skipped, done.state

    step = frame.modes[mode](work)
    first = next(flow())
    ours, theirs = init(mapped(frame.make, first), rule, scope), init(first, rule, scope)
    assert len(ours) == len(theirs)
    for grads in flow():
        want = clip(grads, rule, scope=scope, state=theirs, nonfinite="skip")
        theirs = want.state
        got, limit, skipped, ours = step(mapped(frame.make, grads), ours)
        np.testing.assert_allclose(np.float64(frame.read(limit)), want.limit, rtol=2e-5)
        assert bool(frame.read(skipped)) == bool(want.skipped)
        if not want.skipped:
            for mine, other in zip(leaves(mapped(frame.read, got)), leaves(want.grads), strict=True):
                np.testing.assert_allclose(mine, other, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("scope", ["unit", "tensor", Unit(0), Unit(-1)])
def test_ratio(frame, mode, scope):
    """Adaptive clipping against the weights, by units along the axis that the framework's layout has, or a given one."""
    weights = tree()
    grads = mapped(lambda x: (3 * x + 1).astype(np.float32), tree())

    def work(grads, weights):
        done = clip(grads, Ratio(0.5), scope=scope, weights=weights, nonfinite="keep")
        return done.grads, done.norm

    got, norm = frame.modes[mode](work)(mapped(frame.make, grads), mapped(frame.make, weights))
    axis = frame.unit_axis if scope == "unit" else scope.axis if isinstance(scope, Unit) else None
    same = "tensor" if scope == "tensor" else Unit(axis)
    want = clip(grads, Ratio(0.5), scope=same, weights=weights)
    np.testing.assert_allclose(np.float64(frame.read(norm)), want.norm, rtol=1e-5)
    for ours, theirs in zip(leaves(mapped(frame.read, got)), leaves(want.grads), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
