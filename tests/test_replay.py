"""`gradclip replay`: any rule over a log of norms, as a clipper would have seen them; nothing is run that was typed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import gradclip
from gradclip import Both, Clipper, EmaRatio, Groups, MaxNorm, Median, Quantile, Skip, UnitNorm, ZScore
from gradclip.cli import main
from gradclip.cli._rule_expression import LONGEST, RULES, rule_of
from gradclip.cli.errors import UserError

NORMS = np.random.default_rng(3).lognormal(sigma=0.3, size=400)
NORMS[[200, 260]] *= 50


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys, tmp_path, monkeypatch) -> Callable[..., Ran]:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: Any) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(["replay", *map(str, arguments)])
        return Ran(ended.value.code, *capsys.readouterr())

    return run


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def write_csv(path: Path, norms: Any, column: str = "norm") -> Path:
    path.write_text(f"step,{column}\n" + "".join(f"{step},{norm}\n" for step, norm in enumerate(norms)), encoding="utf-8")
    return path


def write_state(path: Path, norms: Any) -> Path:
    """As a Trainer of Hugging Face writes it, with an evaluation between and its summary at the end."""
    history: list[dict[str, Any]] = [{"loss": 2.0, "grad_norm": float(norm), "step": 10 * i} for i, norm in enumerate(norms, 1)]
    history[1:1] = [{"eval_loss": 2.1, "step": 10}]
    path.write_text(json.dumps({"logging_steps": 10, "log_history": [*history, {"train_runtime": 1.0}]}), encoding="utf-8")
    return path


def refused(ran: Ran, *said: str) -> None:
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("gradclip: ")
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err
    for words in said:
        assert words in ran.err


def whole(ran: Ran) -> dict[str, Any]:
    assert (ran.code, ran.err) == (0, "")
    return json.loads(ran.out)["whole"]


class TestLogs:
    def test_what_the_library_writes(self, run, tmp_path):
        """A run that measures and logs `to_dict`; the replay decides as a clipper that was there would have."""
        rule, watching = Median(k=1.5, warmup=5), Clipper(MaxNorm(float("inf")), nonfinite="skip")
        there, gone = Clipper(rule, nonfinite="skip"), 40
        logged = []
        for i, norm in enumerate(NORMS):
            grads = [np.array([0.6, 0.8]) * (np.nan if i == gone else norm)]
            there(grads)
            logged.append(watching(grads).to_dict())
        assert logged[gone]["norm"] is None
        found = whole(run(write_lines(tmp_path / "a.jsonl", logged), "--rule", "Median(k=1.5, warmup=5)", "--json"))
        assert (found["clipped"], found["nonfinite"], found["skipped"]) == (there.counts.clipped, 1, 0)
        assert found["clipped"] > 10
        assert found["limit_last"] == pytest.approx(float(there.last.limit), rel=1e-12)
        assert found["norm_largest"] == pytest.approx(float(NORMS.max()))

    @pytest.mark.parametrize("form", ["lines", "csv", "state"])
    def test_every_kind_says_the_same(self, run, tmp_path, form):
        write = {"lines": write_lines, "csv": write_csv, "state": write_state}[form]
        name = {"lines": "a.jsonl", "csv": "A.CSV", "state": "trainer_state.json"}[form]
        path = write(tmp_path / name, [{"norm": float(x)} for x in NORMS] if form == "lines" else NORMS)
        ran = run(path, "--rule", "Median(k=2)", "--json")
        found, clipper = whole(ran), Clipper(Median(k=2))
        limits = [float(clipper([x]).limit) for x in NORMS]
        assert found == {
            "first": 1, "last": 400, "clipped": clipper.counts.clipped, "skipped": 0, "nonfinite": 0, "levels": 0,
            "limit_median": pytest.approx(float(np.median(limits))), "limit_last": pytest.approx(limits[-1]),
            "norm_median": pytest.approx(float(np.median(NORMS))), "norm_largest": pytest.approx(float(NORMS.max())),
        }  # fmt: skip
        notes = " ".join(json.loads(ran.out)["notes"])
        assert ("logging_steps" in notes) == ("Records without 'grad_norm', passed over: 2." in notes) == (form == "state")

    def test_what_is_not_finite_is_counted_and_nothing_more(self, run, tmp_path):
        text = "".join(f'{{"norm": {x}}}\n' for x in ("1.0", "null", "NaN", "Infinity", '"nan"', "1e999", "9" * 500, "2"))
        (tmp_path / "a.jsonl").write_text(text)
        (tmp_path / "a.csv").write_text("norm\n1.0\nnan\nNaN\ninf\nInfinity\n-nan\n1e999\n2\n")
        for name in ("a.jsonl", "a.csv"):
            found = whole(run(tmp_path / name, "--rule", "MaxNorm(1.5)", "--json"))
            assert (found["last"], found["nonfinite"], found["clipped"], found["norm_median"]) == (8, 6, 1, 1.5)

    def test_cells_and_fields_that_are_not_there_are_passed_over(self, run, tmp_path):
        (tmp_path / "a.csv").write_text('\ufeffstep,"norm",loss\r\n1,1.0,\r\n2,,3\r\n3\r\n4,2.0,1,9\r\n', encoding="utf-8")
        write_lines(tmp_path / "a.jsonl", [{"norm": 1}, {"loss": 3}, {}, {"norm": 2}])
        for name in ("a.csv", "a.jsonl"):
            ran = run(tmp_path / name, "--rule", "MaxNorm(1.5)")
            assert ran.out.splitlines()[2].split()[:2] == ["1–2", "50.0%"]
            assert "Records without 'norm', passed over: 2." in ran.out

    def test_a_column_by_its_name(self, run, tmp_path):
        path = write_lines(tmp_path / "a.jsonl", [{"norm": 1.0, "grad_norm": 2.0, "g/norm": 3.0}])
        refused(run(path, "--rule", "MaxNorm(1.5)"), "both norm and grad_norm: say which with --column")
        for column, largest in (("norm", 1), ("grad_norm", 2), ("g/norm", 3)):
            assert whole(run(path, "--rule", "MaxNorm(9)", "--column", column, "--json"))["norm_largest"] == largest
        refused(run(path, "--rule", "MaxNorm(9)", "--column", "x"), "holds no x", "--column", "norm, grad_norm, g/norm")
        path = write_csv(tmp_path / "a.csv", [1.0], "total")
        refused(run(path, "--rule", "MaxNorm(9)"), "holds no norm or grad_norm", "there is step, total")

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("a.jsonl", "", "is empty"),
            ("a.jsonl", "\n\n", "is empty"),
            ("a.csv", "", "is empty"),
            ("a.csv", "step,norm\n", "is empty"),
            ("a.json", '{"log_history": []}', "is empty"),
            ("a.jsonl", '{"norm": 1}\n\n{"norm": -0.5}\n', "line 3: a norm is a number that is not negative; got -0.5"),
            ("a.jsonl", '{"norm": true}\n', "got True"),
            ("a.jsonl", '{"norm": "high"}\n', "line 1: a norm is a number; got 'high'"),
            ("a.jsonl", '{"norm": {"w": 1.0}}\n', "line 1 has a norm for each of several"),
            ("a.jsonl", '{"norm": [1.0]}\n', "line 1 has a norm for each of several"),
            ("a.jsonl", '{"norm": 1}\n{"norm": 1', "line 2 is not JSON"),
            ("a.jsonl", "[" * 100_000, "line 1 is not JSON"),
            ("a.jsonl", "[1, 2]\n", "line 1 is no JSON object, but [1, 2]"),
            ("a.csv", "step,norm\n0,1\n1,-2\n", "line 3: a norm is a number that is not negative; got '-2'"),
            ("a.csv", "step,norm\n0,1\n1,much\n", "line 3: a norm is a number; got 'much'"),
            ("a.csv", "norm,norm\n0,1\n", "2 columns are called 'norm'"),
            ("a.csv", "norm\n" + "1" * 200_000 + "\n", "field larger than field limit"),
            ("a.json", '{"norm": 1}\n', "it has no log_history"),
            ("a.json", '{"norm": 1}\n{"norm": 1}\n', "the file is not JSON"),
            ("a.json", '{"log_history": [{"grad_norm": 1}, 2]}', "log_history[1] is no object, but 2"),
            ("a.json", '{"log_history": [{"grad_norm": 1}, {"grad_norm": -2}]}', "log_history[1]: a norm is a number"),
            ("a.txt", "1\n", ".jsonl (JSON lines), .csv or .json"),
            ("norms", "1\n", ".jsonl (JSON lines), .csv or .json"),
        ],
    )  # fmt: skip
    def test_a_log_that_is_none(self, run, tmp_path, name, text, said):
        (tmp_path / name).write_text(text)
        refused(run(tmp_path / name, "--rule", "Median()"), name, said)

    def test_a_file_that_cannot_be_read(self, run, tmp_path):
        (tmp_path / "folder.csv").mkdir()
        (tmp_path / "a.csv").write_bytes(b"norm\n\xff\n")
        refused(run("missing.csv", "--rule", "Median()"), "cannot read missing.csv: No such file")
        refused(run("folder.csv", "--rule", "Median()"), "it is a folder")
        refused(run("a.csv", "--rule", "Median()"), "cannot read a.csv: 'utf-8' codec can't decode byte 0xff")

    def test_norms_of_which_none_is_finite(self, run, tmp_path):
        found = whole(run(write_csv(tmp_path / "a.csv", ["nan"] * 3), "--rule", "Median()", "--json"))
        assert (found["nonfinite"], found["limit_last"], found["norm_largest"]) == (3, None, None)
        assert "–" in run("a.csv", "--rule", "Median()", "-o", "a.png").out

    def test_a_long_log(self, run, tmp_path):
        norms = np.resize(NORMS, 100_000)
        found = whole(run(write_csv(tmp_path / "a.csv", norms), "--rule", "MaxNorm(2.0)", "--json"))
        assert (found["last"], found["clipped"]) == (100_000, int((norms > 2).sum()))


WRITTEN = {
    "Median(k=2)": Median(k=2),
    " Median (\n 3.0 , window = 5, warmup=+2,)": Median(3.0, window=5, warmup=2),
    "MaxNorm(inf)": MaxNorm(float("inf")),
    "MaxNorm(1e3, min_norm=None, like='torch')": MaxNorm(1e3, like="torch"),
    "Both(MaxNorm(1.0), Median(k=2), UnitNorm(2))": Both(MaxNorm(1.0), Median(k=2), UnitNorm(2)),
    "Skip(Both(MaxNorm(5), ZScore(6.0, decay=0.99)), at_most=3)": Skip(Both(MaxNorm(5), ZScore(6.0, decay=0.99)), at_most=3),
    "ZScore.published(mode='mean', max_norm=None, skip_update=True)": ZScore.published(
        mode="mean", max_norm=None, skip_update=True
    ),
    "Quantile.published(0.1, window=100000)": Quantile.published(0.1, window=100_000),
    "EmaRatio(1.05, floor=1e-06)": EmaRatio(1.05, floor=1e-6),
    'Groups({"head.*": None, "*": MaxNorm(1.0)}, budget="size")': Groups({"head.*": None, "*": MaxNorm(1.0)}, budget="size"),
}


class TestExpressions:
    @pytest.mark.parametrize("text", WRITTEN)
    def test_rules_as_they_are_written(self, text):
        assert rule_of(text) == WRITTEN[text]

    def test_every_rule_may_be_named(self):
        assert set(RULES) == set(gradclip.__all__) & set(vars(gradclip)) - {
            name for name in gradclip.__all__ if name[0].islower()
        } - {"Clipped", "Clipper", "NonFiniteError", "Unit"}

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "cannot be read: invalid syntax"),
            ("Median(k=2", "'(' was never closed (character 7)"),
            ("Median(k=2) + 1", "Median(k=2) + 1 (character 1) is not accepted"),
            ("2.0", "2.0 is no rule: write one such as Median(k=2)"),
            ("[Median()]", "is no rule"),
            ("Median", "Median (character 1) is to be called: write Median(…)"),
            ("Both(MaxNorm, Median())", "MaxNorm (character 6) is to be called"),
            ("median()", "median (character 1) is not accepted: accepted are Both, Bounds"),
            ("Median(k=two)", "two (character 10) is not accepted"),
            ("MaxNorm(like='größe', max_norm=two)", "two (character 32) is not accepted"),
            ("Median(k=nan)", "nan (character 10) is not accepted"),
            ("Median(k=-two)", "two (character 11) is not accepted"),
            ("Median(k=--2)", "--2 (character 10) is not accepted"),
            ("Median(k=-None)", "-None (character 10) is not accepted"),
            ("Median(k=not 2)", "not 2 (character 10) is not accepted"),
            ("Median(k=1 + 1)", "1 + 1 (character 10) is not accepted"),
            ("Median(k=9**9**9**9)", "is not accepted"),
            ("Median(k=2j)", "2j (character 10) is not accepted"),
            ("Median(k=b'2')", "b'2' (character 10) is not accepted"),
            ("Median(k=...)", "... (character 10) is not accepted"),
            ("Median(k=f'{1}')", "is not accepted"),
            ("Median(k=[x for x in (1,)])", "is not accepted"),
            ("Median(k={1})", "{1} (character 10) is not accepted"),
            ("Median(k:=2)", "k:=2 (character 8) is not accepted"),
            ("Median(*[2])", "*[2] (character 8) is not accepted: write out what it holds"),
            ("Median(**{'k': 2})", "{'k': 2} (character 10) is not accepted behind **"),
            ("Median(k=2, k=3)", "3 (character 15) is not accepted: k is given twice"),
            ("Groups({**{}})", "the keys of a dict are strings"),
            ("Groups({1: None})", "1 (character 9) is not accepted: the keys of a dict are strings"),
            ("Median(j=2)", "Median(j=2) (character 1) has wrong arguments: got an unexpected keyword argument 'j'; they"),
            ("MaxNorm()", "missing a required argument: 'max_norm'; they are (max_norm, *, min_norm=None, like=None)"),
            ("Median(2, 3)", "too many positional arguments"),
            ("Median(window=0)", "Median(window=0) (character 1): window must be a whole number > 0; got 0"),
            ("Both(MaxNorm(1.0), Quantile(2.0))", "Quantile(2.0) (character 20): q must be a number between 0 and 1; got 2.0"),
            ("MaxNorm('high')", "max_norm must be a number"),
            ("MaxNorm(True)", "max_norm must be a number"),
            ("Median(k=[1])", "k must be a number"),
            ("Median(k=Median())", "k must be a number"),
            ("Both(MaxNorm(1.0), 2)", "Both takes rules such as MaxNorm(1.0); got 2"),
            ("Skip(Skip(1))", "Skip cannot take Skip"),
            ("MaxNorm.published(1)", "MaxNorm.published (character 1) is not accepted"),
            ("Median(window=100001)", "remembers too much: window may be at most 100000"),
            ("Median.published(period=1000000000)", "remembers too much: period may be at most 100000"),
            ("MaxNorm(99999999999999999999)", "is too large for a whole number: write a number such as 1e18"),
            ("MaxNorm(" + "9" * 900 + ")", "is too large for a whole number"),
            ("MaxNorm(" + "9" * LONGEST + ")", f"at most {LONGEST} are read"),
            ("Both(" * 150 + ")" * 150, "Both takes two rules or more"),
            ("(" * 450 + ")" * 450, "cannot be read"),
            ("[" * 450 + "]" * 450, "cannot be read"),
            ("-" * 900 + "1", "is not accepted"),
            ("not " * 200 + "1", "is not accepted"),
            ("lambda:" * 100 + "1", "is not accepted"),
            ("a." * 400 + "b", "is not accepted"),
            ("1+" * 400 + "1", "is not accepted"),
            ("a()" + "()" * 400, "is not accepted"),
            ("Median(\0)", "cannot be read"),
        ],
    )  # fmt: skip
    def test_what_is_no_rule_is_told_with_its_place(self, text, said):
        with pytest.raises(UserError) as told:
            rule_of(text)
        assert said in str(told.value)
        assert len(str(told.value)) < 600

    @pytest.mark.parametrize(
        "text",
        [
            "__import__('os').system('touch here')",
            "(lambda: open('here', 'w'))()",
            "Median.__init__.__globals__['math']",
            "Median.published.__globals__",
            "Median().published()",
            "Median.mro()",
            "().__class__.__base__.__subclasses__()",
            "gradclip.Median()",
            "clip([1.0], MaxNorm(1.0))",
            "Clipper(MaxNorm(1.0))",
            "set_threads(1)",
            "open('here', 'w')",
            "MaxNorm(max_norm=open('here', 'w'))",
            "Groups({open('here', 'w'): None})",
            "[Median() for _ in iter(int, 1)]",
            "Median(k=print)",
            "Median(k='%s' % 1)",
            "RULES['Median']()",
        ],
    )
    def test_nothing_is_run(self, run, tmp_path, text):
        write_csv(tmp_path / "a.csv", [1.0])
        refused(run("a.csv", "--rule", text), "is not accepted", "(character ")
        assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("Groups({'*': Median()})", "it has a limit for each group of tensors"),
            ("Ratio()", "compares with the norm of the weights"),
            ("Both(MaxNorm(1.0), Ratio())", "compares with the norm of the weights"),
            ("MaxRms()", "needs the number of elements"),
            ("Skip(MaxRms())", "needs the number of elements"),
            ("Bounds(-1, 1)", "it bounds values"),
            ("EmaRatio.published()", "it bounds the norm of each tensor"),
            ("Skip(EmaRatio.published())", "it bounds the norm of each tensor"),
            ("MaxNorm(1.0, like='mindspore.ClipByNorm')", "it bounds the norm of each tensor"),
        ],
    )
    def test_what_one_norm_a_step_cannot_tell(self, run, tmp_path, text, said):
        write_csv(tmp_path / "a.csv", [1.0])
        refused(run("a.csv", "--rule", text), f"{text} cannot be replayed: it ", said)


class TestReport:
    def test_the_table(self, run, tmp_path):
        norms = np.ones(100)
        norms[50:] = [30.0, *np.linspace(1.0, 1.1, 49)]
        ran = run(write_csv(tmp_path / "a.csv", norms), "--rule", "Median(k=2)")
        table = [" ".join(line.split()) for line in ran.out.splitlines()]
        assert table[2:7] == [
            "1–100 1.0% 0 0 2 2 1 30 0",
            "1–25 0.0% 0 0 2 2 1 1 0",
            "26–50 0.0% 0 0 2 2 1 1 0",
            "51–75 4.0% 0 0 2 2 1.025 30 0",
            "76–100 0.0% 0 0 2 2 1.075 1.1 0",
        ]
        assert "A replay cannot know what the training would have done had it clipped" in ran.out
        assert len(table) == 9

    def test_quarters_add_up(self, run, tmp_path):
        write_csv(tmp_path / "a.csv", NORMS[:397])
        said = json.loads(run("a.csv", "--rule", "Skip(ZScore(1.5, max_consecutive=2), at_most=2)", "--json").out)
        assert [(part["first"], part["last"]) for part in said["quarters"]] == [(1, 99), (100, 198), (199, 298), (299, 397)]
        for name in ("clipped", "skipped", "nonfinite", "levels"):
            assert sum(part[name] for part in said["quarters"]) == said["whole"][name]
        assert said["whole"]["skipped"] > 10 > said["whole"]["clipped"]
        assert said["whole"]["levels"] > 0

    def test_new_levels(self, run, tmp_path):
        write_csv(tmp_path / "a.csv", [1.0] * 50 + [9.0] * 50)
        for text in ("ZScore(max_consecutive=5)", "Both(MaxNorm(1e3), ZScore(max_consecutive=5))"):
            said = json.loads(run("a.csv", "--rule", text, "--json").out)
            assert (said["whole"]["levels"], [part["levels"] for part in said["quarters"]]) == (1, [0, 0, 1, 0])

    def test_json(self, run, tmp_path):
        ran = run(write_csv(tmp_path / "a.csv", [3.0, 1.0]), "--rule", "Median(k=2)", "--json")
        said = json.loads(ran.out)
        assert list(said) == ["log", "column", "passed_over", "rule", "whole", "quarters", "notes"]
        assert (said["rule"], said["column"], said["quarters"]) == ("Median(k=2)", "norm", [])
        assert said["whole"]["limit_last"] is None, "there is none in the warm-up"
        assert ran.out.count("\n") == 1

    def test_a_log_that_was_cut_off_is_told_of(self, run, tmp_path):
        write_csv(tmp_path / "cut.csv", np.minimum(NORMS, 1.5))
        write_csv(tmp_path / "whole.csv", NORMS)
        write_csv(tmp_path / "zero.csv", [0.0] * 10)
        for name, so in (("cut.csv", True), ("whole.csv", False), ("zero.csv", False)):
            assert ("the log was probably written after clipping" in run(name, "--rule", "Median()").out) == so
        assert (
            f"{(NORMS >= 1.5).mean():.0%} of the norms lie within 0.0001 of the largest, 1.5"
            in run("cut.csv", "--rule", "Median()").out
        )

    def test_a_rule_of_tensors_is_told_of(self, run, tmp_path):
        write_csv(tmp_path / "a.csv", NORMS)
        assert "EmaRatio bounds the norm of each tensor by default" in run("a.csv", "--rule", "EmaRatio()").out
        assert "by default" not in run("a.csv", "--rule", "Both(Median(), EmaRatio())").out

    @pytest.mark.parametrize("text", ["Median(k=2)", "Skip(Median(k=2))", "ZScore.published()", "MaxNorm(inf)"])
    def test_the_picture(self, run, tmp_path, text):
        write_csv(tmp_path / "a.csv", ["nan", *NORMS, 0.0])
        ran = run("a.csv", "--rule", text, "-o", "a.png")
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.splitlines()[-1] == "a.png"
        assert struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24]) == (900, 420)
        assert json.loads(run("a.csv", "--rule", text, "-o", "b.png", "--json").out)
        assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()

    def test_a_picture_of_little(self, run, tmp_path):
        for norms in ([0.0], ["nan"], [1.0]):
            write_csv(tmp_path / "a.csv", norms)
            assert run("a.csv", "--rule", "Skip(1.0)", "-o", "a.png").code == 0

    def test_where_the_picture_cannot_go(self, run, tmp_path):
        write_csv(tmp_path / "a.csv", [1.0])
        refused(run("a.csv", "--rule", "Median()", "-o", "a.pdf"), "a.pdf must end in .png")
        refused(run("a.csv", "--rule", "Median()", "-o", "missing/a.png"), "cannot write missing/a.png", "is missing")
        assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]

    def test_a_rule_has_to_be_named(self, run, tmp_path):
        refused(run(write_csv(tmp_path / "a.csv", [1.0])), "--rule")
