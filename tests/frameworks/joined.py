"""What two processes have to find together, with `reduce=`, whatever framework they run."""

from math import inf, nan

import numpy as np
import pytest

from gradclip import MaxNorm, Median, clip, init

ORDERS = (1.0, 2.0, 3.0, inf)
SCALES = (1.0, 1e200)


def whole(scale=1.0):
    return scale * np.random.default_rng(0).standard_normal((8, 3))


def found(rank, tensor, array, reduce):
    """One process's part of it: {case: what it was told}."""
    part = slice(4 * rank, 4 * rank + 4)
    said = {}
    for p in ORDERS:
        for scale in SCALES:
            clipped = clip({"w": tensor(whole(scale)[part])}, MaxNorm(1.0), p=p, reduce=reduce)
            said[f"{p} {scale}"] = [float(clipped.norm).hex(), array(clipped.grads["w"]).tolist()]
        bad = whole()
        bad[6, 1] = nan
        clipped = clip({"w": tensor(bad[part])}, MaxNorm(1.0), p=p, nonfinite="skip", reduce=reduce)
        said[f"{p} nan"] = [str(float(clipped.norm)), bool(clipped.skipped)]
    rule = Median(1.0, window=3, warmup=1)
    state = init({"w": tensor(whole()[part])}, rule)
    for step in range(5):
        clipped = clip({"w": tensor(whole(1.0 + step % 3)[part])}, rule, state=state, reduce=reduce)
        state = clipped.state
    said["limit"] = float(clipped.limit).hex()
    return said


def right(everyone):
    """All were told the same, and it is the truth."""
    for p in ORDERS:
        for scale in SCALES:
            norms = {said[f"{p} {scale}"][0] for said in everyone}
            assert len(norms) == 1
            want = clip({"w": whole(scale)}, MaxNorm(1.0), p=p)
            assert float.fromhex(norms.pop()) == pytest.approx(float(want.norm), rel=1e-12)
            parts = np.concatenate([said[f"{p} {scale}"][1] for said in everyone])
            assert parts == pytest.approx(want.grads["w"], rel=1e-12)
        assert [said[f"{p} nan"] for said in everyone] == [["nan", True]] * len(everyone)
    assert len({said["limit"] for said in everyone}) == 1
