"""What becomes of a spike, and of a lasting rise: the published rules as their references, ours as the documentation says."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from gradclip import EmaRatio, Quantile, ZScore
from gradclip.backends import host
from gradclip.cli._rule_expression import rule_of
from gradclip.rule import Measured

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "vectors" / "behaviour_levelshift_spike.json").read_text())["rows"]
START, WINDOW = 300, 50  # when it happens, and how many outcomes tell whether clipping has recovered
NORMS = 1 + 0.1 * np.random.default_rng(5).standard_normal((len(RECORDED), 2, 3300))  # a shift and a spike for each row


class Behaviour(NamedTuple):
    """What leaves a clipper, of norms about 1."""

    shifted: np.ndarray  # from the step on at which the norms become ten times as large
    recovered: float  # after so many steps the median of 50 is above 0.9 of the norms; nan: never
    spike: float  # of a norm of 100
    second: float  # of another, five steps later
    steady: float  # which part of the 150 steps before is clipped


def decided(rule, norms):
    state, out = rule.init(host.norms("", 0.0)[()]), []
    with host.quiet():
        for norm in norms:
            bound, state = rule.decide(Measured(np.float64(norm), size=np.float64(1)), state, host)
            out.append(0.0 if bound.skip else min(norm, float(bound.high)))
    return np.array(out)


def behaviour(rule, norms):
    shifted, spiked = (x.copy() for x in norms)
    shifted[START:] *= 10
    spiked[START] = 100
    out, first = decided(rule, shifted), decided(rule, spiked)
    passed = [np.median((out / shifted)[t : t + WINDOW]) > 0.9 for t in range(START, len(out) - WINDOW)]
    spiked[START + 5] = 100
    before = slice(START // 2, START)
    steady = (first[before] < spiked[before] * (1 - 1e-6)).mean()
    recovered = passed.index(True) if any(passed) else np.nan
    return Behaviour(out[START:], recovered, first[START], decided(rule, spiked)[START + 5], steady)


PUBLISHED = {
    "ZClip default(adaptive)": ZScore.published(max_norm=None),
    "ZClip mean": ZScore.published(mode="mean", max_norm=None),
    "ZClip skip_update": ZScore.published(max_norm=None, skip_update=True),
    "ZClip percentile": ZScore.published(mode="percentile", max_norm=None),
    "AdaGC (po 4.1, lam_abs=1)": EmaRatio.published(),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_behave_as_their_references_did(name):
    """Which were looked at every 5 steps for whether they had recovered, and their numbers rounded to 3 digits."""
    recorded, found = RECORDED[name], behaviour(PUBLISHED[name], NORMS[list(RECORDED).index(name)])
    for after, out in recorded["shift_out_norm_at"].items():
        assert found.shifted[int(after)] == pytest.approx(out, abs=6e-4)
    assert found.spike == pytest.approx(recorded["spike100_out"], abs=6e-4)
    assert found.steady == pytest.approx(recorded["frac_clipped_before"], abs=6e-4)
    if recorded["recover_steps"] is None:
        assert np.isnan(found.recovered)
    else:
        assert recorded["recover_steps"] - 5 < found.recovered <= recorded["recover_steps"]


ROW = re.compile(
    r"^\| `(?P<rule>[^`]+)` \| (?P<spike>\S+) \| (?P<second>\S+) \| (?P<recovered>\S+)(?: steps)? \| (?P<steady>\S+) % \|$"
)
TABLE = [row.groupdict() for line in (HERE.parent / "docs" / "rules.md").read_text().splitlines() if (row := ROW.match(line))]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["rule"])
def test_the_table_of_the_documentation_holds(row):
    found = behaviour(rule_of(row["rule"]), NORMS[0])
    assert found.spike == pytest.approx(float(row["spike"]), abs=0.006)
    assert found.second == pytest.approx(float(row["second"]), abs=0.006)
    assert 100 * found.steady == pytest.approx(float(row["steady"]), abs=0.06)
    assert row["recovered"] == ("never" if np.isnan(found.recovered) else str(found.recovered))
    if row["recovered"] != "never":
        after = found.shifted / (10 * NORMS[0][0][START:])
        assert min(np.median(after[t : t + WINDOW]) for t in range(int(row["recovered"]), len(after) - WINDOW)) > 0.85


def test_the_table_has_the_rules_that_learn():
    assert {"Median()", "Quantile()", "ZScore()", "EmaRatio()"} < {row["rule"] for row in TABLE}


def test_a_history_that_is_not_capped_follows_sooner():
    """The quantile of AutoClip on PyPI, whose raw history is 25 steps behind the shift, and ours, whose is capped."""
    recorded = RECORDED["autoclip.QuantileClip q.9 h1000"]
    found = behaviour(Quantile(0.9, warmup=1), NORMS[list(RECORDED).index("autoclip.QuantileClip q.9 h1000")])
    assert found.spike == pytest.approx(recorded["spike100_out"], abs=6e-4)
    assert recorded["recover_steps"] < found.recovered < 120
