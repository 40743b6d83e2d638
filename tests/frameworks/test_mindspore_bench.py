"""The rows of `gradclip bench --framework mindspore` measure what they say."""

import numpy as np

from gradclip.cli.benchmarks import mindspore as rows


def test_both_sides_of_a_row_do_the_same_work():
    made = [make() for make in rows.rows(1 << 12)]
    assert [row.at_least for row in made] == [50, None]
    for row in made:
        for ours, theirs in zip(row.ours(), row.theirs(), strict=True):
            np.testing.assert_allclose(ours.asnumpy(), theirs.asnumpy(), rtol=1e-5)
