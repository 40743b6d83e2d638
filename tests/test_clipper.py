"""The clip that remembers."""

import json
from math import inf, nan

import numpy as np
import pytest

from gradclip import Bounds, Clipper, MaxNorm, NonFiniteError
from gradclip.clipper import Counts


def f32(*values):
    return np.array(values, np.float32)


def schedule(step):
    return 4.0 / (step + 1)


def test_it_counts():
    clipper = Clipper(MaxNorm(1.0), nonfinite="skip")
    for x in (0.5, 3, nan, 2):
        clipper(f32(x))
    assert clipper.counts == (4, 2, 1, 1)


def test_a_call_that_raises_changes_nothing():
    clipper = Clipper(MaxNorm(schedule))
    clipper(f32(8))
    before, last = clipper.state_dict(), clipper.last
    with pytest.raises(NonFiniteError):
        clipper(f32(nan))
    with pytest.raises(TypeError):
        clipper([1])
    assert clipper.state_dict() == before
    assert clipper.last is last


def test_last_says_what_was_done_and_holds_no_gradient():
    clipper = Clipper(MaxNorm(1.0), scope="tensor")
    given = {"w": [f32(3, 4), None], "b": 0.5}
    returned = clipper(given)
    assert returned.grads["w"][0] == pytest.approx([0.6, 0.8])
    assert clipper.last.to_dict() == returned.to_dict()
    assert repr(clipper.last) == repr(returned)
    assert clipper.last.grads == {"w": [np.dtype("float32"), None], "b": float}


def test_a_schedule_goes_on_from_call_to_call():
    clipper = Clipper(MaxNorm(schedule))
    assert [float(clipper(f32(8)).limit) for _ in range(3)] == [4, 2, 4 / 3]


def test_a_generator_is_clipped_under_a_schedule_too():
    clipper = Clipper(MaxNorm(lambda step: 1.0))
    for _ in range(2):
        assert clipper(x for x in [f32(3, 4)]).grads[0] == pytest.approx([0.6, 0.8])


def test_what_replaces_the_rule_must_be_one():
    clipper = Clipper(MaxNorm(1.0))
    clipper.rule = 5
    with pytest.raises(TypeError, match="MaxNorm"):
        clipper(f32(1))


def test_the_rule_may_be_replaced():
    clipper = Clipper(MaxNorm(schedule))
    clipper(f32(8))
    clipper.rule = MaxNorm(lambda step: 10.0 * step)
    assert clipper(f32(80)).limit == 10
    clipper.rule = MaxNorm(1.0)
    assert clipper(f32(8)).limit == 1
    clipper.rule = Bounds(-1.0, lambda step: step + 1.0)
    assert clipper(f32(8)).limit == 1, "another kind of rule starts anew"
    assert clipper.counts.steps == 4


def test_a_resumed_run_is_the_uninterrupted_one():
    steps = [f32(x) for x in (8, 0.1, 3, nan, 2, 9)]
    whole = Clipper(MaxNorm(schedule), nonfinite="skip")
    want = [whole(x).to_dict() for x in steps]
    first = Clipper(MaxNorm(schedule), nonfinite="skip")
    got = [first(x).to_dict() for x in steps[:4]]
    saved = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    second = Clipper(MaxNorm(schedule), nonfinite="skip")
    second.load_state_dict(saved)
    got += [second(x).to_dict() for x in steps[4:]]
    assert got == want
    assert second.state_dict() == whole.state_dict()


def test_a_fresh_one_can_be_saved_too():
    clipper = Clipper(MaxNorm(schedule), p=inf)
    other = Clipper(MaxNorm(schedule), p=inf)
    other.load_state_dict(json.loads(json.dumps(clipper.state_dict(), allow_nan=False)))
    assert other(f32(8)).limit == 4


@pytest.mark.parametrize(
    "other",
    [
        Clipper(MaxNorm(schedule), scope="tensor"),
        Clipper(MaxNorm(schedule), p=1),
        Clipper(Bounds(-1.0, schedule)),
        Clipper(MaxNorm(1.0)),
    ],
)
def test_another_rule_s_state_is_refused_and_nothing_changes(other):
    clipper = Clipper(MaxNorm(schedule))
    clipper(f32(8))
    before = other.state_dict()
    with pytest.raises(ValueError, match="this state"):
        other.load_state_dict(clipper.state_dict())
    assert other.state_dict() == before


@pytest.mark.parametrize("key", ["version", "rule", "scope", "p", "state", "counts"])
def test_a_state_with_something_missing_is_refused(key):
    clipper = Clipper(MaxNorm(schedule))
    clipper(f32(8))
    saved = {name: value for name, value in clipper.state_dict().items() if name != key}
    with pytest.raises(ValueError, match="state"):
        Clipper(MaxNorm(schedule)).load_state_dict(saved)


@pytest.mark.parametrize(
    "wrong", [{"state": "a"}, {"state": [None]}, {"state": ["x"]}, {"counts": {"steps": -3}}, {"counts": 5}, {"state": 7}]
)
def test_a_state_of_the_wrong_kind_is_refused(wrong):
    clipper = Clipper(MaxNorm(schedule))
    clipper(f32(8))
    before = clipper.state_dict()
    with pytest.raises(ValueError, match="state"):
        clipper.load_state_dict(before | wrong)
    with pytest.raises(ValueError, match="state"):
        clipper.load_state_dict("saved")
    assert clipper.state_dict() == before


def test_wrong_arguments_are_told_at_once():
    with pytest.raises(ValueError, match="scope"):
        Clipper(MaxNorm(1.0), scope="layer")
    with pytest.raises(TypeError, match="MaxNorm"):
        Clipper(1.0)
    with pytest.raises(ValueError, match="nonfinite"):
        Clipper(MaxNorm(1.0), nonfinite="warn")


def test_a_step_that_is_left_out_was_not_clipped():
    """Under a tracer its gradients become zeros, which is a change."""
    assert Counts().plus(np.True_, np.False_, np.True_) == Counts(steps=1, skipped=1, nonfinite=1)
    assert Counts().plus(np.True_, np.True_, np.False_) == Counts(steps=1, clipped=1)
