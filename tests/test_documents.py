"""The pages on the rules, whose examples run; and the numbers printed in the texts that the project started from.

Those are three ways to clip, in NumPy, beside the frameworks. There the comparison by value clips one array in place and
compares it with itself. Here both sides are copies.
"""

import doctest
import re
from pathlib import Path

import numpy as np
import pytest

import gradclip
from gradclip.cli._rule_expression import RULES

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [DOCS / "rules.md", *sorted((DOCS / "rules").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_on_a_page_run(page):
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS, encoding="utf-8")
    assert tried > 0
    assert failed == 0


def test_every_rule_has_a_page_and_a_row():
    assert {page.stem for page in PAGES} == {*RULES, "published", "rules"}
    rows = re.findall(r"^\| \[`(\w+)\(.*?\)`\]\(rules/\1\.md\)", PAGES[0].read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(RULES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_links_to_is_there(page):
    links = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_picture_is_shown_and_small():
    shown = set(re.findall(r"\(([\w-]+\.png)\)", "".join(page.read_text(encoding="utf-8") for page in PAGES)))
    pictures = {path.name: path.stat().st_size for path in (DOCS / "rules").glob("*.png")}
    assert set(pictures) == shown
    assert max(pictures.values()) < 60_000


@pytest.fixture
def draw():
    return np.random.RandomState(10001).rand


def compared(ours, theirs):
    """The largest difference of two results that share no memory."""
    for a, b in zip(ours, theirs, strict=True):
        if np.shares_memory(a, b):
            raise AssertionError("the two sides are one array, which always equals itself")
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


def by_value(grad, value):
    grad[grad < -value] = -value
    grad[grad > value] = value
    return grad


def test_by_value(draw):
    grad = draw(4, 100) * 3 - 1.5
    assert (grad.min(), grad.max()) == (-1.4982050803275673, 1.4785602913399787)
    theirs = by_value(grad.copy(), 1.0)
    ours = gradclip.clip_by_value(grad, 1.0).grads
    assert (ours.min(), ours.max()) == (-1.0, 1.0)
    assert compared([ours], [theirs]) == 0.0


def test_a_comparison_of_an_array_with_itself_is_caught(draw):
    grad = draw(4, 100) * 3 - 1.5
    theirs = by_value(grad, 1.0)
    ours = gradclip.clip_by_value(grad, 1.0).grads
    with pytest.raises(AssertionError, match="one array"):
        compared([ours], [theirs])


def by_global_norm(grads, max_norm):
    norm = np.linalg.norm([np.linalg.norm(g) for g in grads])
    return [g * min(1.0, max_norm / (norm + 1e-6)) for g in grads]


def test_by_global_norm(draw):
    grads = [draw(2, 40) * 3 - 1.5, draw(2, 40) * 2 - 1]
    theirs = by_global_norm(grads, 1.0)
    ported = gradclip.clip(grads, gradclip.MaxNorm(1.0, like="torch")).grads
    assert compared(ported, theirs) < 1e-16
    ours = gradclip.clip_by_global_norm(grads, 1.0)
    assert 1e-9 < compared(ours.grads, theirs) < 1e-6, "they add 1e-6 to the norm"
    assert float(gradclip.norm(ours.grads)) == pytest.approx(1.0, rel=1e-15)


def test_by_norm(draw):
    draw(2, 40)
    grad = (draw(2, 40) * 2 - 1).astype(np.float32)
    norm = np.sqrt(np.sum(np.square(grad)))
    theirs = grad * 1.0 / norm
    ours = gradclip.clip_by_norm([grad], 1.0)
    assert compared(ours.grads, [theirs]) < 1e-7
    assert float(ours.norm[0]) == pytest.approx(float(norm), rel=1e-6)


def test_every_way_returns_every_gradient(draw):
    grads = tuple(draw(3) for _ in range(4))
    for clip in (gradclip.clip_by_value, gradclip.clip_by_norm, gradclip.clip_by_global_norm):
        out = clip(grads, 0.1).grads
        assert type(out) is tuple
        assert len(out) == 4
