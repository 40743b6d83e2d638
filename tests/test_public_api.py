"""The public names, their documentation, and the version."""

import inspect
import re
from pathlib import Path

import pytest

import gradclip
from gradclip.backends import _protocol, host

ROOT = Path(__file__).parent.parent
NAMES = [
    "Both", "Bounds", "Clipped", "Clipper", "EmaRatio", "Groups", "MaxNorm", "MaxRms", "Median", "NonFiniteError",
    "Quantile", "Ratio", "Skip", "Unit", "UnitNorm", "ZScore", "clip", "clip_", "clip_by_global_norm", "clip_by_norm",
    "clip_by_value", "init", "norm", "set_threads",
]  # fmt: skip


def test_the_public_names_are_these():
    assert sorted(gradclip.__all__) == NAMES
    public = {name for name, value in vars(gradclip).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented(name):
    thing = getattr(gradclip, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        methods = [m for n, m in vars(thing).items() if inspect.isfunction(m) and not n.startswith("_")]
        inherited = ("init", "decide", "allowed_scopes", "formula")
        assert all(inspect.getdoc(m) or m.__name__ in inherited for m in methods)


def test_every_backend_supplies_the_vocabulary_and_nothing_is_spelled_otherwise():
    for protocol in (_protocol.Ops, _protocol.Backend):
        for name, promised in vars(protocol).items():
            if not name.startswith("_") and callable(promised):
                assert callable(getattr(host, name)), name


def test_the_changelog_has_the_version():
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert gradclip.__version__ in versions


def test_the_package_is_typed():
    assert (Path(gradclip.__file__).parent / "py.typed").exists()
