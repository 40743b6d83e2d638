"""The commands where this framework is installed, which may go by another name than its module."""

import json

import pytest

from gradclip.cli import main


def test_bench(capsys, pytestconfig):
    name = pytestconfig.getoption("--framework")
    with pytest.raises(SystemExit) as end:
        main(["bench", "--framework", name, "--power", "10", "--rounds", "1", "--json"])
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found[name].count(".") >= 1
    assert found["rows"]


def test_verify(capsys, pytestconfig):
    name = pytestconfig.getoption("--framework")
    with pytest.raises(SystemExit) as end:
        main(["verify", "--framework", name, "--json"])
    assert end.value.code == 0
    (found,) = json.loads(capsys.readouterr().out)["frameworks"]
    assert found["framework"] == name
    assert all(row["ours"]["ok"] for row in found["rows"])
    assert len(found["rows"]) > 40
