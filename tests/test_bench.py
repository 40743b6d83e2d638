"""The benchmark: its arithmetic, and that it runs."""

import json
import re

import numpy as np
import pytest

import gradclip
from gradclip.cli import main
from gradclip.cli.benchmarks import numpy as against_numpy
from gradclip.cli.benchmarks.timing import Row, Timed, timed


def nothing():
    pass


def test_a_goal_is_how_many_times_faster():
    row = Row("work", "theirs", nothing, nothing, at_least=3)
    assert Timed.of(row, 1.0, 3.5)[4:] == (3.5, "≥ 3", True)
    assert Timed.of(row, 1.0, 2.5)[4:] == (2.5, "≥ 3", False)


def test_a_limit_is_how_many_times_slower():
    row = Row("work", "theirs", nothing, nothing, at_most=1.25)
    assert Timed.of(row, 1.2, 1.0)[4:] == (1.2, "≤ 1.25", True)
    assert Timed.of(row, 1.3, 1.0)[4:] == (1.3, "≤ 1.25", False)
    assert Timed.of(Row("work", "theirs", nothing, nothing), 2.0, 1.0)[4:] == (0.5, "", True)


def test_both_take_turns_and_the_first_round_is_not_counted(monkeypatch):
    from gradclip.cli.benchmarks import timing

    seconds = iter([100, 100, 1, 2, 3, 6, 2, 4])
    order = []
    monkeypatch.setattr(timing, "seconds", lambda work: (work(), next(seconds))[1])
    row = Row("work", "theirs", lambda: order.append("ours"), lambda: order.append("theirs"))
    results = list(timed(row, 3))
    assert order == ["ours", "theirs"] * 4
    assert results[:-1] == [None] * 3
    assert (results[-1].ours, results[-1].theirs, results[-1].ratio) == (2, 4, 2)


@pytest.mark.parametrize("make", list(against_numpy.rows(1 << 12)))
def test_both_sides_of_a_row_do_the_same_work(make):
    row = make()
    ours, theirs = row.ours(), row.theirs()
    if isinstance(ours, gradclip.Clipped):
        assert ours.clipped
    elif "read" not in row.against:
        assert float(ours) == pytest.approx(float(theirs) if "loop" not in row.against else theirs**0.5, rel=1e-5)


def test_what_is_clipped_in_place_is_clipped_every_time():
    row = against_numpy.small_clipped()
    assert all(row.ours().clipped for _ in range(5))


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["bench", "--power", "10", "--rounds", "1", *arguments])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_it_prints_a_table(capsys):
    out = run(capsys, "--framework", "numpy")
    assert "2^10 float32 measured" in out
    assert "short of the goal: " in out or "every goal is reached" in out
    assert f"core {gradclip.native.core()}" in out


def test_it_prints_json(capsys):
    said = json.loads(run(capsys, "--json", "--framework", "numpy"))
    assert said["numpy"] == np.__version__
    assert len(said["rows"]) == 7
    assert set(said["rows"][0]) == {"name", "against", "ours", "theirs", "ratio", "goal", "reached"}


def test_each_framework_has_a_process_of_its_own(capsys, monkeypatch):
    from gradclip.cli import bench

    monkeypatch.setattr(bench, "_installed", lambda: ["numpy", "numpy"])
    assert len(json.loads(run(capsys, "--json"))["rows"]) == 14


@pytest.mark.parametrize(
    ("name", "said"), [("torch7", "must be one of .*numpy.*; got 'torch7'"), ("torch", "torch is not installed here")]
)
def test_frameworks_that_are_not_there(capsys, monkeypatch, name, said):
    from gradclip.cli import bench

    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        main(["bench", "--framework", name])
    assert end.value.code == 2
    assert re.search(said, capsys.readouterr().err)
