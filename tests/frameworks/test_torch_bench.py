"""The rows of `gradclip bench --framework torch` measure what they say."""

import torch

from gradclip.cli.benchmarks import torch as rows


def test_both_sides_of_a_row_do_the_same_work(monkeypatch):
    small = [(300, 7), (7,)]
    for name in ("GPT2", "SMALL", "LAYERS"):
        monkeypatch.setattr(rows, name, small)
    for make in (
        lambda: rows.by_norm("a", small, torch.float32, True, 1.0),
        lambda: rows.by_norm("a", small, torch.float32, False, 1.0),
    ):
        row = make()
        for _ in range(3):
            assert torch.allclose(row.ours(), row.theirs(), rtol=1e-6)
    made = [make() for make in rows.rows(1 << 12)]
    assert len(made) == 13
    for row in made:
        row.ours()
        row.theirs()


def test_the_fused_step_clips_every_time():
    both = rows.pair([(30, 7)])
    step = rows.attached_step(both)
    for _ in range(3):
        step()
        assert both.ours[0] is not None
    assert 0.99 < both.norm / rows.pair([(30, 7)]).norm < 1
