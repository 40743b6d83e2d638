"""`gradclip verify`: what it finds, and that it can find a fault."""

import json
import re
import sys

import numpy as np
import pytest

from gradclip.cli import main
from gradclip.cli.verify import command, worker
from gradclip.cli.verify.cases import cases, rounded_to_bfloat16, truth
from gradclip.cli.verify.known import KNOWN
from gradclip.cli.verify.table import cell


def run(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as end:
        main(["verify", *arguments])
    assert end.value.code == code
    return capsys.readouterr()


@pytest.fixture(scope="module")
def numpys():
    return command._worked("numpy", sys.executable)


def test_the_library_agrees_everywhere(numpys):
    assert len(numpys["rows"]) == 3 * len(cases())
    assert [row for row in numpys["rows"] if not row["ours"]["ok"]] == []


def test_the_documents_code_does_not(numpys):
    kinds = {(row["case"], row["scope"]): row["own"]["kind"] for row in numpys["rows"]}
    assert kinds["random float32", "global"] == "agrees"
    assert kinds["100 of 1e20", "global"] == "differs"
    assert kinds["1000 of 60000, float16", "tensor"] == "differs"
    assert kinds["100 of 1e20", "element"] == "agrees"


def test_the_truth_is_worked_out_without_the_library():
    case = next(case for case in cases() if case.name.startswith("(3, 0)"))
    assert [x.tolist() for x in truth(case._replace(limit=1.0), "global").grads] == [[0.6000000000000001, 0], [0, 0.8]]
    assert truth(case, "tensor").norms == [3, 4]
    assert rounded_to_bfloat16(np.float64([0.1, 3.0])).tolist() == [0.10009765625, 3.0]


def test_a_fault_of_ours_is_found(monkeypatch, capsys):
    wrong = {"framework": "numpy", "version": "1", "core": "none", "rows": []}
    row = {"case": "c", "scope": "global", "ours": {"ok": False, "kind": "agrees", "units": 9}, "own": None}
    monkeypatch.setattr(command, "_worked", lambda name, python: wrong | {"rows": [row]})
    out = run(capsys, "--framework", "numpy", code=1).out
    assert "✗" in out
    assert "agrees in 0 of 1 comparisons" in out


def test_a_wrong_library_does_not_pass(monkeypatch):
    from gradclip.cli.verify.frameworks.numpy import FRAMEWORK

    monkeypatch.setattr(worker, "clip", lambda grads, rule, **_: worker_clip(grads))
    case = cases()[1]
    assert not worker._ours(FRAMEWORK, case, "global", truth(case, "global"))["ok"]


def worker_clip(grads):
    import gradclip

    return gradclip.clip(grads, gradclip.MaxNorm(0.7 * (1 + 1e-6)))


def test_a_table_is_printed_and_a_page_is_written(capsys, tmp_path):
    page = tmp_path / "page.html"
    out = run(capsys, "--framework", "numpy", "--html", str(page)).out
    assert re.search(r"random float32 +element +✓ ✓", out)
    assert "squares in float32" in out
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "src=" not in html and "http" not in html
    assert html.count("<tr") == 1 + 3 * len(cases())


def test_json(capsys):
    said = json.loads(run(capsys, "--framework", "numpy", "--json").out)
    assert [result["framework"] for result in said["frameworks"]] == ["numpy"]


def test_what_is_not_there_is_listed_and_what_crashes_does_not_stop_the_rest(capsys, monkeypatch):
    monkeypatch.setattr(command, "_has", lambda python, name: name in ("numpy", "torch"))
    worked = command._worked
    crash = {"framework": "torch", "said": "its process ended with exit code -11: no message"}
    monkeypatch.setattr(command, "_worked", lambda name, python: crash if name == "torch" else worked(name, python))
    out = run(capsys).out
    assert "mlx: not installed" in out
    assert "torch: its process ended with exit code -11" in out
    assert "random float32" in out


def test_a_folder_is_no_framework(tmp_path, monkeypatch):
    """A compiler's cache, or examples: a folder beside which the command is run."""
    (tmp_path / "absent").mkdir()
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert not command._has(sys.executable, "absent")
    assert command._has(sys.executable, "numpy")
    assert "rows" in command._worked("numpy", sys.executable)


def test_a_process_that_ends_badly_is_told_of():
    assert "exit code 1" in command._worked("nothing", sys.executable)["said"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--framework", "torch7"], "--framework must be one of jax, mindspore, .*; got 'torch7'"),
        (["--python", "/nonexistent/python"], "--python /nonexistent/python: No such file"),
    ],
)
def test_bad_input(capsys, arguments, said):
    assert re.search(said, run(capsys, *arguments, code=2).err)


def test_every_known_divergence_names_cases_that_exist():
    names = {case.name for case in cases()}
    for known in KNOWN:
        assert set(known.cases) <= names
        assert known.cause


def test_a_divergence_that_is_not_known_is_called_new():
    row = {"case": "zeros", "scope": "global", "ours": {"ok": True, "kind": "agrees"}}
    shown = cell(row | {"own": {"function": "clip_grad_norm_", "kind": "differs", "said": "1 for 0"}})
    assert shown.note == "clip_grad_norm_: new: not known before"
