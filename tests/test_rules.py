"""Thresholds, schedules, and other frameworks' arithmetic."""

from fractions import Fraction
from math import inf, isnan, nan

import numpy as np
import pytest

import gradclip
from gradclip import Bounds, MaxNorm, clip
from gradclip.conventions import CONVENTIONS
from gradclip.rule import Rule


def f32(*values):
    return np.array(values, np.float32)


def test_rules_are_values():
    assert MaxNorm(1.0) == MaxNorm(1.0)
    assert hash(Bounds(-1.0, 1.0)) == hash(Bounds(-1.0, 1.0))
    with pytest.raises(AttributeError):
        MaxNorm(1.0).max_norm = 2.0


@pytest.mark.parametrize("limit", [1, 1.0, np.float32(1), np.int64(1), Fraction(1), np.array(1.0), np.array(1)])
def test_every_kind_of_number_is_a_limit(limit):
    assert clip(f32(4), MaxNorm(limit)).grads == 1
    assert clip(f32(4), MaxNorm(limit), scope="element").grads == 1


def test_a_limit_too_large_for_a_float_is_refused():
    with pytest.raises(ValueError, match="max_norm must be"):
        MaxNorm(10**400)
    with pytest.raises(ValueError, match="bounds must have"):
        Bounds(-(10**400), 1)
    with pytest.raises(ValueError, match="max_norm must be"):
        clip(f32(1), MaxNorm(lambda step: 10**400), state=(0,))


def test_an_array_may_change_between_calls():
    limit = np.array(1.0)
    rule = MaxNorm(limit)
    assert clip(f32(4), rule).grads == 1
    limit[...] = 2
    assert clip(f32(4), rule).grads == 2
    limit[...] = -1
    with pytest.raises(ValueError, match="max_norm must be a number > 0"):
        clip(f32(4), rule)


@pytest.mark.parametrize(
    ("low", "high"), [(2.0, 1.0), (inf, inf), (0, 1.0), (-1.0, 1.0), (nan, 1.0), (np.array(2.0), np.array(1.0))]
)
def test_min_norm_is_finite_and_at_most_max_norm(low, high):
    with pytest.raises(ValueError, match="min_norm"):
        clip(f32(4), MaxNorm(high, min_norm=low))


def test_min_norm_is_for_norms():
    with pytest.raises(ValueError, match="'global', 'tensor'"):
        clip(f32(4), MaxNorm(2.0, min_norm=1.0), scope="element")
    with pytest.raises(ValueError, match="'element'"):
        clip(f32(4), Bounds(-1.0, 1.0), scope="global")


def test_a_schedule_counts_calls_from_zero():
    rule = MaxNorm(lambda step: 4.0 / (step + 1))
    state = gradclip.init(f32(8), rule)
    limits = []
    for _ in range(3):
        clipped = clip(f32(8), rule, state=state)
        state = clipped.state
        limits.append(float(clipped.limit))
    assert limits == [4, 2, 4 / 3]
    assert state == (3,)


def test_a_schedule_by_index_by_tensor_and_for_every_threshold():
    table = [1.0, 2.0]
    assert clip([f32(8), f32(9)], MaxNorm(table.__getitem__), scope="tensor", state=(1,)).limit.tolist() == [2, 2]
    assert clip(f32(0.1), MaxNorm(9.0, min_norm=lambda step: step + 1.0), state=(2,)).grads == 3
    assert clip(f32(9), Bounds(-1.0, lambda step: step + 1.0), state=(2,)).grads == 3
    assert clip(f32(9), Bounds(lambda step: -step - 1.0, 1.0), state=(2,)).state == (3,)


def test_a_schedule_without_state_says_what_to_do():
    with pytest.raises(ValueError, match=r"gradclip.init\(grads, rule\).*Clipper"):
        clip(f32(1), MaxNorm(lambda step: 1.0))


@pytest.mark.parametrize("value", [0.0, -1.0, nan])
def test_a_schedule_is_checked_at_every_step(value):
    with pytest.raises(ValueError, match="max_norm must be a number > 0"):
        clip(f32(1), MaxNorm(lambda step: value), state=(0,))
    with pytest.raises(TypeError, match="'high'"):
        clip(f32(1), MaxNorm(lambda step: "high"), state=(0,))
    with pytest.raises(TypeError, match="max_norm at step 0 is a function"):
        clip(f32(1), MaxNorm(lambda step: abs), state=(0,))


def test_a_norm_that_is_not_finite_does_not_enter_the_state():
    class Last(Rule):
        def init(self, zero):
            return (zero,)

        def decide(self, measured, state, ops):
            return (0.0, 1.0), (measured.norm,)

    for policy in ("zero", "skip", "keep"):
        assert clip(f32(nan), Last(), state=(5.0,), nonfinite=policy).state == (5.0,)
    assert clip(f32(3), Last(), state=(5.0,)).state == (3.0,)


@pytest.mark.parametrize(
    ("rule", "scope"), [(MaxNorm(lambda step: 1.0), "global"), (Bounds(-1.0, lambda step: 1.0), "element")]
)
def test_a_schedule_counts_every_step_that_is_taken(rule, scope):
    for policy, after in (("zero", 6), ("keep", 6), ("skip", 5)):
        assert clip(f32(nan), rule, scope=scope, state=(5,), nonfinite=policy).state == (after,)


def test_a_new_rule_needs_only_decide():
    class Halved(Rule):
        def decide(self, measured, state, ops):
            return (0.0, measured.norm / 2), state

    assert clip([f32(3), f32(4)], Halved()).limit == 2.5
    assert clip([f32(3), f32(4)], Halved(), scope="tensor").limit.tolist() == [1.5, 2]


def test_a_rule_may_ask_for_the_weights():
    class Share(Rule):
        needs_weights = True

        def decide(self, measured, state, ops):
            return (0.0, 0.1 * measured.weights), state

    weights = {"w": f32(3, 4), "b": f32(12)}
    grads = {"w": f32(6, 8), "b": f32(0.5)}
    assert clip(grads, Share(), weights=weights).limit == pytest.approx(1.3)
    assert clip(grads, Share(), weights=weights, scope="tensor").limit == pytest.approx([0.5, 1.2])
    with pytest.raises(ValueError, match="pass weights="):
        clip(grads, Share())
    with pytest.raises(ValueError, match="like the gradients"):
        clip(grads, Share(), weights={"w": f32(1)})


# (3, 4) under a limit of 5, the edge; (3, 4) under 1; what the framework itself returns for them, in float32
PORTED = {
    "torch": ([2.99999928, 3.99999905], [0.599999905, 0.799999833]),
    "paddle": ([3, 4], [0.600000024, 0.800000012]),
    "paddle.utils": ([2.99999952, 3.99999928], [0.599999905, 0.799999833]),
    "paddle.fleet": ([2.99999952, 3.99999928], [0.599999905, 0.799999833]),
    "tensorflow": ([3, 4], [0.600000024, 0.800000012]),
    "keras": ([3, 4], [0.600000024, 0.800000012]),
    "optax": ([3, 4], [0.600000024, 0.800000012]),
    "mindspore.clip_by_norm": ([2.99999928, 3.99999905], [0.599999905, 0.799999833]),
    "mindspore.clip_by_global_norm": ([3, 4], [0.600000024, 0.800000012]),
    "mindspore.ClipByNorm": ([3, 4], [0.600000024, 0.800000012]),
    "mlx": ([2.99999952, 3.99999928], [0.599999905, 0.799999833]),
}


def test_every_convention_has_its_row():
    assert set(PORTED) == set(CONVENTIONS)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_convention_gives_what_its_framework_gives(name):
    for limit, want in zip((5.0, 1.0), PORTED[name], strict=True):
        got = clip([f32(3, 4)], MaxNorm(limit, like=name)).grads[0]
        np.testing.assert_array_max_ulp(got, f32(*want), 2)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_convention_belongs_to_its_scope(name):
    rule = MaxNorm(1.0, like=name)
    scopes = set(CONVENTIONS[name].formulas)
    assert set(rule.allowed_scopes()) == scopes
    for scope in {"global", "tensor", "element"} - scopes:
        with pytest.raises(ValueError, match="scope must be one of"):
            clip([f32(3)], rule, scope=scope)


TINY = f32(6e-8, 8e-8)


@pytest.mark.parametrize(
    ("name", "scope", "grads", "limit", "want"),
    [
        ("torch", "global", TINY, float(np.linalg.norm(TINY)), f32(5.4545e-9, 7.2727e-9)),
        ("paddle.utils", "global", f32(3e-7, 4e-7), 1e-6, f32(2e-7, 2.6667e-7)),
        ("paddle", "global", f32(3e-7, 4e-7), 1e-6, f32(3e-7, 4e-7)),
        ("paddle.fleet", "global", f32(3e-7, 4e-7), 1e-6, f32(1.5e-7, 2e-7)),
        ("paddle.fleet", "global", f32(0.03, 0.04), 0.1, f32(0.0299997, 0.0399996)),
        ("tensorflow", "global", f32(1, 2, 3), 41.0, f32(0.99999994, 1.99999988, 2.99999976)),
        ("mindspore.ClipByNorm", "tensor", f32(3e-5, 4e-5), 1e-4, f32(3e-6, 4e-6)),
        ("mindspore.ClipByNorm", "tensor", f32(6e-8), 1e-7, f32(6e-12)),
        ("tensorflow", "tensor", f32(3), 1.0, f32(1)),
        ("paddle", "tensor", f32(3), 1.0, f32(1)),
        ("optax", "global", f32(300, 400), 1.0, f32(0.6, 0.8)),
        ("torch", "global", f32(3, 4), inf, f32(3, 4)),
        ("paddle", "global", f32(3, 4), inf, f32(nan, nan)),
        ("paddle", "tensor", f32(3, 4), inf, f32(nan, nan)),
        ("tensorflow", "global", f32(3, 4), inf, f32(nan, nan)),
        ("mindspore.clip_by_global_norm", "global", f32(3, 4), inf, f32(nan, nan)),
        ("optax", "global", f32(3, 4), inf, f32(3, 4)),
        ("mindspore.clip_by_norm", "global", f32(3, 4), inf, f32(3, 4)),
        ("torch", "global", f32(0, 0), 1.0, f32(0, 0)),
        ("tensorflow", "global", f32(0, 0), 1.0, f32(0, 0)),
        ("torch", "global", f32(1, nan), 1.0, f32(nan, nan)),
        ("mindspore.clip_by_norm", "global", f32(1, nan), 1.0, f32(1, nan)),
        ("mindspore.clip_by_global_norm", "global", f32(1, nan), 1.0, f32(1, nan)),
        ("mindspore.ClipByNorm", "tensor", f32(1, nan), 1.0, f32(1, nan)),
        ("tensorflow", "global", f32(1, inf), 1.0, f32(nan, nan)),
        ("optax", "global", f32(1, inf), 1.0, f32(0, nan)),
        ("torch", "global", f32(1, inf), 1.0, f32(0, nan)),
    ],
)
def test_a_convention_keeps_its_framework_s_edges(name, scope, grads, limit, want):
    got = clip(grads, MaxNorm(limit, like=name), scope=scope, nonfinite="keep").grads
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_a_convention_that_moves_gradients_below_the_limit_says_clipped():
    assert clip(f32(1, 2, 3), MaxNorm(41.0, like="tensorflow")).clipped
    assert not clip(f32(1, 2, 3), MaxNorm(41.0)).clipped


def test_the_coefficient_is_computed_in_the_working_precision():
    norm = np.float32(5)
    want = (np.float32(1) / (norm + np.float32(1e-6))) * np.float32(0.7)
    assert np.float32(clip(f32(3, 4), MaxNorm(0.7, like="torch")).coef) == want
    wide = clip([f32(3), np.array([4.0])], MaxNorm(0.7, like="torch")).coef
    assert wide == 1 / (5 + 1e-6) * 0.7


def test_a_none_keeps_its_coefficient_of_one_under_a_convention():
    clipped = clip([None, 1e-5], MaxNorm(1e-4, like="mindspore.ClipByNorm"))
    assert clipped.coef.tolist() == pytest.approx([1.0, 0.1])
    assert not clip([None, None], MaxNorm(1e-7, like="torch")).clipped


def test_a_convention_excludes_min_norm_and_unknown_names():
    with pytest.raises(ValueError, match="exclude each other"):
        MaxNorm(2.0, min_norm=1.0, like="torch")
    with pytest.raises(ValueError, match="'torch', 'paddle'"):
        MaxNorm(2.0, like="pytorch")
    with pytest.raises(ValueError, match="'torch', 'paddle'"):
        MaxNorm(2.0, like=["torch"])


def test_a_nan_norm_gives_a_nan_coefficient():
    for rule in (MaxNorm(1.0), MaxNorm(inf), MaxNorm(2.0, min_norm=1.0)):
        assert isnan(clip(f32(1, nan), rule, nonfinite="keep").coef)
