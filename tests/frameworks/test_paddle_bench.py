"""The rows of `gradclip bench --framework paddle` measure what they say."""

import numpy as np

from gradclip.cli.benchmarks import paddle as rows


def test_both_sides_of_a_row_do_the_same_work():
    made = [make() for make in rows.rows(1 << 12)]
    assert [row.at_least for row in made] == [5, None, None, None]
    for row in made:
        for (_, ours), (_, theirs) in zip(row.ours(), row.theirs(), strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-6)
