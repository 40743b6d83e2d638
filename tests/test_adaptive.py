"""The rules that learn: equal to what was published, and better where that goes wrong."""

import dataclasses
import json
import math
import pickle
import warnings
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

import gradclip
from gradclip import (
    Both,
    Bounds,
    Clipper,
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
    clip_,
    init,
)
from gradclip.backends import host
from gradclip.rule import Bound, Measured, Rule

VECTORS = Path(__file__).parent / "vectors"


def numbers(values):
    """Recorded numbers, of which those that are not finite are strings."""
    return np.array([numbers(x) for x in values], np.float32) if isinstance(values, list) else float(values)


def loaded(name):
    return json.loads((VECTORS / f"{name}.json").read_text())


INPUTS = loaded("inputs")
WEIGHTS = {name: numbers(values) for name, values in INPUTS["params"].items()}


def steps(run):
    for t, recorded in enumerate(INPUTS["S3"] if run == "S3" else INPUTS["S1"]):
        if run == "S2":
            recorded = INPUTS["S2_overrides"].get(str(t), recorded)
        yield {name: numbers(values) for name, values in recorded.items()}


def norm64(x):
    return float(np.linalg.norm(x.astype(np.float64)))


REFERENCES = [
    ("zclip__adaptive_nomax", ZScore.published(max_norm=None, warmup=10), None, 2e-7),
    ("zclip__mean_nomax", ZScore.published(mode="mean", max_norm=None, warmup=10), None, 2e-7),
    ("zclip__percentile_nomax", ZScore.published(mode="percentile", max_norm=None, warmup=10), None, 2e-7),
    ("zclip__default", ZScore.published(), None, 3e-7),
    ("autoclip_pseeth__p10", Quantile.published(0.1), None, 3e-7),
    ("adagc_pytorch_optimizer__w10", EmaRatio.published(warmup=10), None, 1e-6),
    ("agc_timm__c0.01", Ratio(0.01), None, 1e-6),
    ("agc_optax__c0.01", Ratio(0.01), None, 1e-6),
    ("agc_dreamerv3__c0.3", Ratio(0.3), "tensor", 1e-6),
    ("block_rms_optax__0.1", MaxRms(0.1), None, 1e-6),
    ("block_rms_optax__1.0", MaxRms(1.0), None, 1e-6),
    ("normalize_optax__1.0", UnitNorm(1.0), None, 2e-6),  # optax divides by the norm + 1e-6
]


@pytest.mark.parametrize("run", ["S1", "S3"])
@pytest.mark.parametrize(("name", "rule", "scope", "tolerance"), REFERENCES, ids=[row[0] for row in REFERENCES])
def test_equal_to_the_reference(name, rule, scope, tolerance, run):
    recorded = {row["t"]: row for row in loaded(name)["runs"][run]}
    clipper, compared = Clipper(rule, scope, nonfinite="keep"), 0
    for t, grads in enumerate(steps(run)):
        clipped = clipper(grads, weights=WEIGHTS if rule.needs_weights else None)
        for tensor, x in grads.items() if t in recorded else ():
            coef, out = recorded[t]["coef"][tensor], recorded[t].get("out")
            if norm64(x):
                assert norm64(clipped.grads[tensor]) / norm64(x) == pytest.approx(numbers(coef), rel=tolerance)
                compared += 1
            if out:
                np.testing.assert_allclose(clipped.grads[tensor], numbers(out[tensor]), atol=5e-7)
    assert compared >= 4 * (len(recorded) - 1)


def test_zclips_averages():
    """μ and σ² from the recorded norms, which are float32."""
    rule = ZScore.published(max_norm=None, warmup=10)
    state = rule.init(host.norms("", 0.0)[()])
    for row in loaded("zclip__adaptive_nomax")["runs"]["S1"]:
        _, state = rule.decide(Measured(np.float64(row["ret"])), state, host)
        if row["mean"] is not None:
            assert float(state[0]) == pytest.approx(row["mean"], rel=1e-8)
            assert float(state[1]) == pytest.approx(row["var"], rel=1e-7)


def test_icefalls_threshold():
    rule = Median.published()
    state, seen = rule.init(host.norms("", 0.0)[()]), 0
    with host.quiet():
        for row in loaded("icefall_median__period100")["runs"]["S1"]:
            if row["weighted_norm"] is not None:
                bound, state = rule.decide(Measured(np.float64(row["weighted_norm"])), state, host)
            if row["threshold"] is not None:
                assert float(bound.high) == row["threshold"]
                seen += 1
    assert seen == 50


def test_the_quantile_of_the_past_is_that_of_autoclip():
    recorded = loaded("autoclip_pypi__quantile_global")["runs"]["S1"]
    state = (rule := Quantile(0.9, window=20, warmup=1)).init(host.norms("", 0.0)[()])
    norms = []
    with host.quiet():
        for row in recorded[:20]:  # up to the window's length, and before the first spike, which enters ours capped
            bound, state = rule.decide(Measured(np.float64(row["norm"])), state, host)
            if norms:
                assert float(bound.high) == pytest.approx(float(np.quantile(norms, 0.9)), rel=1e-12)
                want = row["coef"]["w1"]
                assert min(1.0, float(bound.high) / row["norm"]) == pytest.approx(want, rel=1e-6)
            norms.append(min(row["norm"], 2 * float(bound.high)))


def test_skipping_is_that_of_optax():
    state = init([1.0], rule := Skip(5.0, at_most=1000))
    for run in ("S1", "S2"):
        for grads, row in zip(steps(run), loaded("skip_optax__25")["runs"][run], strict=True):
            clipped = clip(grads, rule, state=state, nonfinite="skip")
            state = clipped.state
            assert bool(clipped.skipped) == row["skip_large"]


MOVING = ZScore(max_consecutive=5, decay=0.999)


@pytest.mark.parametrize(
    "rule",
    [
        MOVING,
        EmaRatio(max_consecutive=5, decay=0.999, warmup=3),
        Both(MaxNorm(1e3), MOVING),
        Both(Median(k=1e3), Both(MaxNorm(1e3), MOVING)),
        Groups({"0": MOVING}),
        Groups({"*": Both(MOVING, MaxNorm(1e3))}),
    ],
    ids=repr,
)
def test_too_many_clips_in_a_row_set_a_new_level_and_are_told_of(rule):
    clipper = Clipper(rule, scope="global")
    for _ in range(30):
        clipper([1.0])
    assert clipper.counts.clipped == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            assert clipper([100.0]).clipped
    clipper([100.0])
    with pytest.warns(UserWarning, match=f"{type(rule).__name__} took a new level for granted 1 time"):
        clipper.counts  # noqa: B018
    assert not clipper([100.0]).clipped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipper.counts  # noqa: B018


def test_new_levels_of_all_groups_and_parts_are_told_of():
    clipper = Clipper(Groups({"a": MOVING, "b": None, "c": MaxNorm(1e3), "*": Both(MOVING, Median(k=1e3))}))
    for norm, times in ((1.0, 30), (100.0, 5)):
        for _ in range(times):
            clipper(dict.fromkeys("abcd", norm))
    with pytest.warns(UserWarning, match="Groups took a new level for granted 2 times"):
        clipper.counts  # noqa: B018
    assert Groups({"a": MaxNorm(1.0), "b": None}).rebased(()) is None
    assert Both(MaxNorm(1.0), UnitNorm()).rebased(()) is None


def test_the_new_level_of_every_tensor_is_told_of():
    clipper = Clipper(EmaRatio(max_consecutive=5, decay=0.999, warmup=3))
    for first, second, times in ((1.0, 1.0, 10), (100.0, 1.0, 5), (100.0, 100.0, 5)):
        for _ in range(times):
            clipper([first, second])
        if first > 1:
            with pytest.warns(UserWarning, match="took a new level"):
                clipper.counts  # noqa: B018


@pytest.mark.parametrize("rule", [Median(), Quantile(), ZScore(), EmaRatio()])
def test_there_is_no_limit_in_the_warm_up_unless_there_is(rule):
    state = init([1.0], rule, "global")
    first = clip([1e6], rule, state=state, scope="global")
    assert first.limit == inf
    assert not first.clipped
    bounded = dataclasses.replace(rule, warmup_norm=2.0)
    assert clip([1e6], bounded, state=init([1.0], bounded, "global"), scope="global").grads == [2.0]


@pytest.mark.parametrize("rule", [Median(warmup=1), Quantile(warmup=1), ZScore(warmup=1), EmaRatio(warmup=1)])
@pytest.mark.parametrize("value", [nan, inf])
@pytest.mark.parametrize("policy", ["zero", "skip", "keep"])
def test_what_is_not_finite_never_enters_the_history(rule, value, policy):
    clipper = Clipper(rule, scope="global", nonfinite=policy)
    for x in (1.0, 1.1, 0.9):
        clipper([x])
    before = json.dumps(clipper.state_dict()["state"])
    clipper([value])
    assert json.dumps(clipper.state_dict()["state"]) == before
    with pytest.raises(NonFiniteError):
        Clipper(rule, scope="global")([value])


def test_a_tensor_without_gradient_in_the_warm_up_is_not_frozen():
    """LoRA's A has a zero gradient at first, since B is zero; AdaGC as published freezes it for ever."""
    ours = Clipper(EmaRatio(warmup=5))
    published = Clipper(EmaRatio.published(warmup=5))
    for t in range(300):
        grads = [np.array([0.0 if t < 8 else 6.8]), np.array([1.0])]
        last, frozen = ours(grads), published(grads)
    assert last.grads[0].item() == 6.8
    assert frozen.grads[0].item() < 1e-6


def test_zero_norms_do_not_pull_a_limit_to_zero():
    for rule in (Median(warmup=2), Quantile(warmup=2), ZScore(warmup=2), EmaRatio(warmup=2)):
        clipper = Clipper(rule, scope="global")
        for _ in range(50):
            assert not clipper([0.0]).clipped
        assert clipper([5.0]).grads == [5.0]


def test_max_rms_and_unit_norm():
    x = np.float32([3.0, 4.0])
    assert clip(x, MaxRms(1.0)).limit.item() == pytest.approx(math.sqrt(2))
    assert clip([x, None, np.float32([0.1])], MaxRms(1.0)).limit.tolist() == pytest.approx([math.sqrt(2), 0, 1])
    assert float(gradclip.norm(clip([x], UnitNorm(2.0)).grads)) == pytest.approx(2.0)
    assert float(gradclip.norm(clip([x / 100], UnitNorm(2.0)).grads)) == pytest.approx(2.0)
    assert clip([x * 0], UnitNorm(2.0)).grads[0].tolist() == [0, 0]


def test_units():
    w = np.array([[3.0, 4.0], [0.3, 0.4]])
    clipped = clip(
        {"w": w, "b": np.array([3.0, 4.0]), "none": None}, Ratio(1.0), weights={"w": w * 0 + 1, "b": w[0], "none": None}
    )
    assert clipped.norm.tolist() == [5, 0.5, 5]
    assert clipped.limit.tolist() == pytest.approx([math.sqrt(2), math.sqrt(2), 5])
    assert clipped.to_dict()["norm"] == [5.0, 0.5, 5.0]
    assert clipped.grads["w"][1].tolist() == [0.3, 0.4]
    assert np.linalg.norm(clipped.grads["w"][0]) == pytest.approx(math.sqrt(2))
    columns = clip(w, Ratio(1.0), scope=Unit(axis=1), weights=w)
    assert columns.norm.tolist() == pytest.approx(np.linalg.norm(w, axis=0).tolist())
    chosen = Unit(axis=lambda path, x: 1 if path == "a" else None)
    assert gradclip.norm({"a": w, "b": w}, scope=chosen).shape == (3,)
    assert gradclip.norm(w, scope="unit").tolist() == pytest.approx([5, 0.5])
    same = w.copy()
    clip_([same, same], Ratio(0.1), weights=[w, w])
    assert np.linalg.norm(same, axis=1).tolist() == pytest.approx([0.5, 0.05])
    assert clip(w, Ratio(10.0), weights=w).grads is w


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex64])
def test_units_of_every_type(dtype):
    x = np.random.default_rng(0).standard_normal((4, 3, 2)).astype(dtype)
    for axis in (0, 1, 2, -1):
        got = clip(x, Ratio(0.1), scope=Unit(axis), weights=x * 0 + 1).grads
        wide = np.abs(x.astype(np.complex128))
        norms = np.sqrt((np.moveaxis(wide, axis, 0).reshape(x.shape[axis], -1) ** 2).sum(1))
        limit = 0.1 * math.sqrt(x.size / x.shape[axis])
        want = np.moveaxis(np.moveaxis(x, axis, -1) * np.minimum(1, limit / norms), -1, axis)
        np.testing.assert_allclose(got, want, rtol=2e-3 if dtype == np.float16 else 1e-6)


def test_both():
    rule = Both(MaxNorm(1.0), UnitNorm(2.0))
    assert float(clip([8.0], rule).limit) == 1
    assert float(gradclip.norm(clip([0.5], rule).grads)) == 1
    assert clip([3.0, 4.0], Both(MaxNorm(9.0), MaxRms(1.0)), scope="global").limit == pytest.approx(math.sqrt(2))
    weights = [np.ones(1)]
    assert clip([np.array([8.0])], Both(MaxNorm(1.0), Ratio(0.5)), weights=weights).limit.tolist() == [0.5]
    learning = Both(Median(warmup=1), ZScore(warmup=1))
    state = init([1.0], learning)
    assert len(state) == 7
    assert clip([nan], rule, nonfinite="keep").grads[0] != clip([nan], rule, nonfinite="keep").grads[0]
    only_global = type("OnlyGlobal", (MaxRms,), {"scopes": ("global",)})
    with pytest.raises(ValueError, match="no scope in common: Ratio: unit, tensor; OnlyGlobal: global"):
        Both(Ratio(0.1), only_global())
    with pytest.raises(ValueError, match="cannot take Bounds"):
        Both(Bounds(-1, 1), MaxNorm(1.0))
    with pytest.raises(ValueError, match="another framework"):
        Both(MaxNorm(1.0, like="torch"), UnitNorm())
    with pytest.raises(ValueError, match="two rules or more"):
        Both(MaxNorm(1.0))
    with pytest.raises(TypeError, match="takes rules"):
        Both(MaxNorm(1.0), 2.0)


def test_skip():
    clipper = Clipper(Skip(5.0, at_most=2))
    values = [3.0, 30.0, 31.0, 32.0, 33.0, 4.0, 34.0]
    got = [(clipped.grads[0], bool(clipped.skipped)) for clipped in map(clipper, [[x] for x in values])]
    assert got == [(3.0, False), (30.0, True), (31.0, True), (5.0, False), (5.0, False), (4.0, False), (34.0, True)]
    assert clipper.counts == (7, 2, 3, 0)
    x = np.array([30.0])
    skipped = clip_(x, rule := Skip(5.0), state=init(x, rule))
    assert skipped.skipped and not skipped.clipped and x.item() == 30
    lost = clip([nan], rule, state=init([1.0], rule), nonfinite="skip")
    assert lost.skipped and not lost.finite
    for bad in (Skip(5.0), Bounds(-1, 1), Groups({"*": MaxNorm(1.0)})):
        with pytest.raises(ValueError, match="Skip cannot take"):
            Skip(bad)
    with pytest.raises(ValueError, match="at_most must be a whole number > 0; got 0"):
        Skip(5.0, at_most=0)
    with pytest.raises(ValueError, match="must be a number > 0"):
        Skip(-5.0)


TREE = {"head": {"w": np.array([30.0])}, "blocks": [{"w": np.array([3.0])}, {"w": np.array([4.0]), "b": np.array([12.0])}]}


def test_groups():
    rule = Groups({"head.*": None, "*.b": MaxNorm(6.0), "blocks.*": MaxNorm(1.0)})
    clipped = clip(TREE, rule)
    assert clipped.norm.tolist() == [0, 12, 5]
    assert clipped.limit.tolist() == [inf, 6, 1]
    assert clipped.coef.tolist() == [1, 0.5, 0.2]
    assert clipped.to_dict()["norm"] == [0.0, 12.0, 5.0]
    assert [x.item() for x in gradclip.clipped.flatten(clipped.grads)[0]] == pytest.approx([30, 0.6, 0.8, 6])
    assert clipped.grads["head"]["w"] is TREE["head"]["w"]
    written = {"a": np.array([3.0]), "b": np.array([9.0])}
    clip_(written, Groups({"b": None, "*": MaxNorm(1.0)}))
    assert (written["a"].item(), written["b"].item()) == (1, 9)
    with pytest.raises(ValueError, match=r"no pattern of Groups fits 'head\.w'"):
        clip(TREE, Groups({"blocks.*": MaxNorm(1.0)}))
    with pytest.raises(ValueError, match="the pattern 'tail' of Groups fits no tensor"):
        clip(TREE, Groups({"*": MaxNorm(1.0), "tail": MaxNorm(1.0)}))
    with pytest.raises(NonFiniteError, match=r"head\.w"):
        clip({"head": {"w": np.array([nan])}, "b": np.array([1.0])}, Groups({"b": None, "*": MaxNorm(1.0)}))


def test_a_group_may_lack_its_gradients():
    rule = Groups({"head.*": MaxNorm(1.0), "frozen.*": None, "*": Median(warmup=1)})
    clipper = Clipper(rule)
    for head in (np.array([3.0, 4.0]), None):
        clipped = clipper({"head": {"w": head}, "frozen": {"w": None}, "body": np.array([2.0])})
    assert clipped.norm.tolist() == [0, 0, 2]
    assert clipped.coef.tolist() == [1, 1, 1]
    assert clip({"a": None, "b": np.array([3.0])}, Groups({"b": MaxNorm(1.0)})).norm.tolist() == [3]  # nothing there to clip
    with pytest.raises(ValueError, match="the pattern 'tail' of Groups fits no tensor"):
        clip({"head": None}, Groups({"*": MaxNorm(1.0), "tail": MaxNorm(1.0)}))


def test_a_group_of_its_own_that_is_left_alone_may_hold_anything():
    clipped = clip({"a": np.array([nan]), "b": np.array([3.0])}, Groups({"a": None, "b": MaxNorm(1.0)}))
    assert clipped.finite
    assert clipped.grads["b"].item() == 1


def test_a_budget_is_shared_out():
    grads = {"a": np.ones(4) * 50, "b": np.ones(12) * 50}
    for budget, limits in (("equal", [math.sqrt(0.5)] * 2), ("size", [0.5, math.sqrt(0.75)])):
        clipped = clip(grads, Groups({"a": MaxNorm(1.0), "b": MaxNorm(1.0)}, budget=budget))
        assert clipped.limit.tolist() == pytest.approx(limits)
        assert float(gradclip.norm(clipped.grads)) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="shares the limit of MaxNorm out"):
        Groups({"*": Median()}, budget="size")
    with pytest.raises(ValueError, match='budget must be "equal", "size" or None'):
        Groups({"*": MaxNorm(1.0)}, budget="half")


def test_groups_that_learn():
    rule = Groups({"a": Median(warmup=1), "b": ZScore(warmup=2), "*": MaxNorm(1.0)})
    clipper = Clipper(rule)
    for x in (1.0, 1.1, 0.9):
        clipper({"a": x, "b": 10 * x, "c": 3 * x})
    last = clipper({"a": 50.0, "b": 10.0, "c": 3.0})
    assert last.grads["a"] == pytest.approx(2.0)
    assert last.grads["b"] == 10
    assert last.grads["c"] == pytest.approx(1.0)
    again = Clipper(rule)
    again.load_state_dict(json.loads(json.dumps(clipper.state_dict())))
    assert again({"a": 7.0, "b": 70.0, "c": 7.0}).to_dict() == clipper({"a": 7.0, "b": 70.0, "c": 7.0}).to_dict()


RULES = [
    Median(window=5, warmup=2),
    Quantile(window=5, warmup=2),
    ZScore(warmup=3),
    EmaRatio(warmup=3),
    Both(Median(window=5, warmup=2), EmaRatio(warmup=3)),
    Skip(ZScore(warmup=3)),
    ZScore.published(warmup=3),
    Quantile.published(window=5),
    EmaRatio.published(warmup=3),
    Median.published(period=5),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(rule):
    stream = [[np.array([x]), np.array([2 * x, 1.0])] for x in np.random.default_rng(0).lognormal(size=24)]
    whole, first = Clipper(rule), Clipper(rule)
    limits = [whole(grads).limit for grads in stream]
    for grads in stream[:11]:
        first(grads)
    second = Clipper(rule)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    resumed = [second(grads).limit for grads in stream[11:]]
    assert [x.tolist() for x in resumed] == [x.tolist() for x in limits[11:]]
    assert second.counts == whole.counts
    assert pickle.loads(pickle.dumps(rule)) == rule
    with pytest.raises(ValueError, match="rule"):
        Clipper(MaxNorm(1.0)).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Median(window=0), "window must be a whole number > 0; got 0"),
        (lambda: Median(window=5, warmup=6), "warmup must be at most window"),
        (lambda: Median(warmup=1.5), "warmup must be a whole number"),
        (lambda: Quantile(1.0), "q must be a number between 0 and 1; got 1.0"),
        (lambda: Quantile(0), "q must be a number between 0 and 1"),
        (lambda: ZScore(decay=1.0), "decay must be a number between 0 and 1"),
        (lambda: ZScore(z=-1), "z must be a number > 0"),
        (lambda: ZScore(max_consecutive=True), "max_consecutive must be a whole number"),
        (lambda: EmaRatio(floor=0), "floor must be a number > 0"),
        (lambda: Median(warmup_norm=-1.0), "warmup_norm must be a number > 0"),
        (lambda: ZScore.published(mode="mode"), 'mode must be "adaptive", "mean" or "percentile"'),
        (lambda: MaxRms(nan), "max_rms must be a number > 0"),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


TWO = [np.array([1.0]), np.array([2.0])]


@pytest.mark.parametrize(
    ("made", "rule", "scope"),
    [
        ((Median(window=12), None), Median(window=11), None),
        ((Median(window=11), None), Median(window=12), None),
        ((Quantile(window=50), None), Median(), None),
        ((ZScore.published(), None), Median.published(), None),
        ((EmaRatio(), None), ZScore(), "tensor"),
        ((Median(), "tensor"), Median(), "global"),
        ((Median(), "global"), Median(), "tensor"),
        ((ZScore(), "tensor"), ZScore(), "global"),
        ((ZScore(), "global"), ZScore(), "tensor"),
        ((Groups({"*": Median(window=12)}), None), Groups({"*": Median(window=11)}), None),
        ((Both(ZScore(), Median()), None), Both(Median(), ZScore()), None),
    ],
    ids=str,
)
def test_a_state_that_is_not_the_rule_s_is_refused(made, rule, scope):
    state = init(TWO, *made)
    grads = [x.copy() for x in TWO]
    with pytest.raises(ValueError, match=r"state= is not one of .*(entries|another rule, window, scope or tree)"):
        clip_(grads, rule, scope=scope, state=state)
    assert grads == TWO


def test_a_state_of_another_tree_or_of_no_numbers_is_refused():
    state = init(TWO, ZScore(), "tensor")
    for entries in (state, (None,) * 5, ("0",) * 5):
        with pytest.raises(ValueError, match="another rule, window, scope or tree"):
            clip([*TWO, np.array([3.0])], ZScore(), scope="tensor", state=entries)


@dataclasses.dataclass(frozen=True)
class OfTheLast(Rule):
    """At most the mean of the last three norms: a rule of one's own, whose state NumPy made."""

    scopes = ("global", "tensor")

    def init(self, zero):
        return 0, np.zeros((3, *np.shape(zero))), 1.0

    def decide(self, measured, state, ops):
        step, norms, least = state
        norms = ops.put(norms, step % 3, measured.norm)
        return Bound(0.0, norms[0] / 3 + norms[1] / 3 + norms[2] / 3), (step + 1, norms, least + 0 * measured.norm)


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_a_rule_of_one_s_own_may_keep_what_it_likes(scope):
    clipper = Clipper(OfTheLast(), scope)
    limits = [clipper([np.full(1, k), np.zeros(1)]).limit for k in (3.0, 6.0, 9.0)]
    assert [np.max(limit) for limit in limits] == pytest.approx([1.0, 3.0, 6.0])
    clipper.load_state_dict(clipper.state_dict())
    assert np.max(clipper([np.full(1, 3.0), np.zeros(1)]).limit) == pytest.approx(6.0)


SAVED = [
    (Median(window=12), Median(window=11), "another window"),
    (Both(ZScore(), EmaRatio()), Both(EmaRatio(), ZScore()), r"rule 'Both\(ZScore, EmaRatio\)'"),
    (Skip(ZScore()), Skip(Both(Median(), ZScore())), r"rule 'Skip\(ZScore\)'"),
    (Groups({"0": ZScore(), "*": None}), Groups({"1": ZScore(), "*": None}), "'0': ZScore"),
    (ZScore(), ZScore.published(), "rule 'ZScore', and the clipper of 'ZClip'"),
]


@pytest.mark.parametrize(("one", "other", "said"), SAVED, ids=[repr(row[0]) for row in SAVED])
def test_a_saved_state_of_other_parts_is_refused_and_one_that_is_replaced_begins_anew(one, other, said):
    clipper = Clipper(one, "global")
    for x in (1.0, 1.5, 0.7):
        clipper([x, x])
    again = Clipper(other, "global")
    before = again.state_dict()
    with pytest.raises(ValueError, match=said):
        again.load_state_dict(clipper.state_dict())
    assert again.state_dict() == before
    clipper.rule = other
    clipper([1.0, 1.0])
    again([1.0, 1.0])
    assert clipper.state_dict()["state"] == again.state_dict()["state"]


def test_a_rule_of_the_same_parts_goes_on():
    clipper = Clipper(Both(MaxNorm(9.0), Median(k=2, warmup=2)))
    for x in (1.0, 1.0):
        clipper([x])
    clipper.rule = Both(MaxNorm(8.0), Median(k=3, warmup=2))
    assert clipper([5.0]).grads == [3.0]


def test_weights_that_do_not_fit_are_refused():
    grads = {"w": np.ones((2, 2)), "b": np.ones(2)}
    with pytest.raises(ValueError, match="pass weights="):
        clip(grads, Ratio())
    with pytest.raises(ValueError, match="a tree like the gradients"):
        clip(grads, Ratio(), weights={"w": np.ones((2, 2))})
    with pytest.raises(ValueError, match=r"gradients' shapes; b: \(2,\) and \(3,\)"):
        clip(grads, Ratio(), weights={"w": np.ones((2, 2)), "b": np.ones(3)})
    with pytest.raises(ValueError, match="none that is 5"):
        clip(grads, Ratio(), scope=Unit(5), weights=grads)
    with pytest.raises(ValueError, match=r"remembers: pass state="):
        clip(grads, Median())
    with pytest.raises(ValueError, match="entries"):
        clip(grads, Median(), state=(1.0,))
