"""The rows of `gradclip bench --framework jax` measure what they say."""

import jax
import numpy as np

from gradclip.cli.benchmarks import jax as rows


def test_both_sides_of_a_row_do_the_same_work():
    made = [make() for make in rows.rows(1 << 12)]
    assert [row.at_least for row in made] == [20, 3, None]
    for row in made:
        ours, theirs = row.ours()["w"], row.theirs()["w"]
        assert isinstance(ours, jax.Array)
        assert np.array_equal(ours, theirs)
