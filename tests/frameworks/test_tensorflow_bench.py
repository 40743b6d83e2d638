"""The rows of `gradclip bench --framework tensorflow` measure what they say."""

import numpy as np
import tensorflow as tf

from gradclip.cli.benchmarks import tensorflow as rows


def test_both_sides_of_a_row_do_the_same_work():
    made = [make() for make in rows.rows(1 << 12)]
    assert [row.at_least for row in made] == [4, None, None, None, None]
    for row in made:
        for ours, theirs in zip(row.ours(), row.theirs(), strict=True):
            assert tf.is_tensor(ours)
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
