"""One norm over several processes: every layout beside torch's own function, training, errors, state, and what it costs."""

import json
import subprocess
import sys
from types import SimpleNamespace

import on_torch_ranks as each
import pytest
import torch
from ranks import on_ranks

from gradclip import Skip
from gradclip.backends._torch_shares import device_for


@pytest.fixture(scope="module")
def rows():
    command = [sys.executable, "-m", "gradclip.cli", "verify", "--distributed", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["rows"]


def test_all_layouts(rows):
    """Right to 1e-6 in every layout, the same bits on all ranks, one collective; torch's function is not."""
    assert len(rows) == 160
    assert [row for row in rows if not row["ours"]["ok"]] == []
    assert max(row["ours"]["error"] for row in rows) <= 1e-6
    for row in rows:
        most = 2 if row["layout"].startswith("Partial") else 1
        assert row["ours"]["collectives"] == (0 if row["layout"].startswith("DDP") else most), row
    theirs = [row["theirs"]["kind"] for row in rows if row["theirs"]]
    assert {"right", "wrong", "raises"} <= set(theirs)
    assert theirs.count("right") < len(theirs) / 2


@pytest.mark.parametrize("fused", [False, True], ids=["SGD", "fused AdamW"])
@pytest.mark.parametrize("scales", [False, True], ids=["plain", "GradScaler"])
@pytest.mark.parametrize("accumulates", [False, True], ids=["each batch", "accumulated"])
@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_trains_as_on_one_process(how, accumulates, scales, fused):
    on_ranks(2, each.trains, how, accumulates, scales, fused)


def test_four_ranks_train_as_one():
    on_ranks(4, each.trains, "FSDP2", True, True, True)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_leaves_the_step_out_on_all(fused):
    on_ranks(2, each.a_scaler_leaves_the_step_out_on_all, fused)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "work",
    [
        each.partial_gradients_are_added_up_first,
        each.each_tensor_by_its_own,
        each.against_whole_weights,
        each.units_of_parts_are_refused,
        each.plain_beside_spread_has_to_be_declared,
        each.plain_alone_is_nobody_elses_business,
        each.the_functions_of_the_core,
        each.diagnoses,
        each.ranks_without_any_gradient_join,
        each.declared_experts_train,
        each.stages_are_grouped,
    ],
    ids=lambda work: work.__name__,
)
def test_on_ranks(work, size):
    on_ranks(size, work)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("p", [2.0, 3.0, float("inf")])
def test_not_finite_is_told_by_all(p, size):
    on_ranks(size, each.not_finite_is_told_by_all, p)


@pytest.mark.parametrize("rule", [None, Skip(100.0)], ids=["nonfinite", "Skip"])
def test_skip_is_of_all(rule):
    on_ranks(2, each.skip_is_of_all, rule)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rule_knows_the_same_on_all_and_is_saved(tmp_path, size):
    on_ranks(size, each.a_rule_knows_the_same_on_all_and_is_saved, str(tmp_path / "checkpoint"))


def test_a_clip_of_one_rank_ends_in_an_error():
    on_ranks(2, each.a_clip_of_one_rank_ends_in_an_error, patience=4)


def test_gradients_that_are_kept_on_the_cpu_travel_by_a_device_that_the_group_knows():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert device_for(SimpleNamespace(_device_types=[cuda]), cpu) == cuda
    assert device_for(SimpleNamespace(_device_types=[cuda, cpu]), cpu) == cpu
    assert device_for(SimpleNamespace(_device_types=[cuda]), cuda) == cuda


def test_the_first_call_is_not_slow():
    """1000 sharded parameters: torch dispatches each as a DTensor, and plans each shape anew."""
    for ours, theirs, ours_again, theirs_again in on_ranks(2, each.cold, patience=60):
        assert ours < theirs / 20, (ours, theirs)
        assert ours_again < theirs_again / 20, (ours_again, theirs_again)
