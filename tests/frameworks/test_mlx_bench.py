"""The rows of `gradclip bench --framework mlx` measure what they say."""

import mlx.core as mx
import numpy as np

from gradclip.cli.benchmarks import mlx as rows


def test_both_sides_of_a_row_do_the_same_work(monkeypatch):
    monkeypatch.setattr(rows, "SMALL", [(30, 7), (7,)] * 2)
    made = [make() for make in rows.rows(1 << 12)]
    assert [row.at_least for row in made] == [1.2, None, None, None, None]
    for row in made:
        for ours, theirs in zip(row.ours(), row.theirs(), strict=True):
            assert isinstance(ours, mx.array)
            np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=1e-5)


def test_rows_clip_where_they_say_so():
    for name, limit in (("nothing", rows.FAR), ("clipping", 1.0)):
        row = rows.by_norm(name, [(300,)], limit)
        [clipped], [given] = row.ours(), rows.normal([(300,)])
        assert np.array_equal(np.array(clipped), np.array(given)) == (limit == rows.FAR)
