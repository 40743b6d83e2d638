"""`gradclip demo`: the network's gradient is right, the unclipped run explodes, and the clipped ones learn."""

from __future__ import annotations

import math
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest

from gradclip.cli import _runs, _training, main
from gradclip.cli._limits import Limits
from gradclip.cli._network import Network, fresh, loss_and_gradient
from gradclip.cli._table import COLUMNS
from gradclip.cli._text import KINDS, LENGTH, SHORTEST, Text, read
from gradclip.cli._training import NAMES, SCOPES, Run, Setup, train

PROSE = "The gradient is clipped where its norm exceeds the limit; elsewhere it is left alone.\n" * 20
PROGRAM = "from gradclip.cli import main; main()"


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def demo(capsys, tmp_path, monkeypatch) -> Callable[..., Ran]:
    monkeypatch.chdir(tmp_path)

    def demo(*options: Any) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(["demo", *map(str, options)])
        return Ran(ended.value.code, *capsys.readouterr())

    return demo


@pytest.fixture
def prose(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE, encoding="utf-8")
    return path


@pytest.fixture
def letters(tmp_path):
    """Text without order: nothing but the frequencies to learn."""
    draw = random.Random(0)
    path = tmp_path / "letters.txt"
    path.write_text("".join(draw.choice("abcdefgh") for _ in range(5000)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def manual() -> Text:
    return read(None)


@pytest.fixture(scope="module")
def runs(manual) -> tuple[list[Run], Limits]:
    return _runs.train_all(manual, 400, 0)


def small(seed: int) -> tuple[Network, np.ndarray]:
    """A network in float64, far enough from the activation's kink at 0."""
    rng = np.random.default_rng(seed)
    return fresh(rng.dirichlet(np.ones(7)), rng, np.float64, hidden=6), rng.integers(0, 7, size=(13, 3))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", Network._fields)
def test_gradient_is_the_numerical_derivative(name, seed):
    network, codes = small(seed)
    gradient = getattr(loss_and_gradient(network, codes)[1], name)
    weights = getattr(network, name)
    step = 1e-6
    for index in np.ndindex(weights.shape):
        before = weights[index]
        weights[index] = before + step
        above = loss_and_gradient(network, codes)[0]
        weights[index] = before - step
        below = loss_and_gradient(network, codes)[0]
        weights[index] = before
        assert gradient[index] == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-8)


def test_loss_is_the_mean_negative_log_likelihood():
    network, codes = small(0)
    total = 0.0
    for column in codes.T:
        state = np.zeros(6)
        for x, y in pairwise(column):
            state = network.inputs[x] + state @ network.recurrent + network.bias
            state = np.where(state > 0, state, 0.4 * state)
            odds = np.exp(state @ network.outputs + network.offset)
            total -= math.log(odds[y] / odds.sum())
    assert loss_and_gradient(network, codes)[0] == pytest.approx(total / (12 * 3), rel=1e-12)


def test_training_is_in_float32(manual):
    rng = np.random.default_rng(0)
    network = fresh(manual.frequencies, rng)
    grads = loss_and_gradient(network, manual.windows(rng))[1]
    stepped = network.stepped(grads, 0.5)
    assert {x.dtype for x in (*network, *grads, *stepped)} == {np.dtype(np.float32)}


def test_overflow_is_silent_and_ends_the_run():
    network, codes = small(0)
    huge = Network(*(1e200 * weights for weights in network))
    loss, _ = loss_and_gradient(huge, codes)
    assert not math.isfinite(loss)


def test_text_is_ranked_by_frequency():
    text = Text.of("abracadabra")
    assert text.codes.tolist() == [0, 1, 2, 0, 3, 0, 4, 0, 1, 2, 0]
    assert text.frequencies.tolist() == [5 / 11, 2 / 11, 2 / 11, 1 / 11, 1 / 11]
    assert Text.of("aabb").entropy() == pytest.approx(math.log(2))


def test_rare_characters_count_as_one():
    text = Text.of("".join(chr(0x4E00 + rank) * (300 - rank) for rank in range(300)))
    assert len(text.frequencies) == KINDS
    assert text.codes.max() == KINDS - 1
    assert text.frequencies.sum() == pytest.approx(1)


def test_windows_are_stretches_of_the_text():
    text = Text(np.arange(LENGTH + 2), np.ones(1))
    windows = text.windows(np.random.default_rng(0))
    assert (np.diff(windows, axis=0) == 1).all()
    assert set(windows[0]) == {0, 1}


def run_of(norms: list[float], nonfinite: int | None = None) -> Run:
    run = Run(None, None, losses=[1.0] * len(norms), nonfinite=nonfinite)
    for scope, times in zip(SCOPES, (0.1, 0.5, 1.0), strict=True):
        run.largest[scope] = [times * norm for norm in norms]
    return run


def test_limits_are_read_off_the_steps_before_the_explosion():
    limits = Limits.of(run_of([3.0, 2.0, 1.0, 2.0, 2.5, 19.0, 26.0, 1e9], nonfinite=9))
    assert (limits.calm, limits.exploded) == (6, True)
    assert limits.medians == {"element": pytest.approx(0.25), "tensor": 1.25, "global": 2.5}
    assert [limits.limit(scope) for scope in SCOPES] == [0.025, 1.25, 2.5]


def test_an_explosion_may_be_one_step_that_is_not_finite():
    limits = Limits.of(run_of([1.0] * 8, nonfinite=9))
    assert (limits.calm, limits.exploded) == (8, True)


def test_without_an_explosion_all_steps_count():
    limits = Limits.of(run_of([1.0] * 8))
    assert (limits.calm, limits.exploded) == (8, False)


def test_limits_have_three_digits():
    assert Limits.of(run_of([math.pi] * 8)).limit("global") == 3.14


@pytest.mark.parametrize(("last", "nonfinite", "final"), [(2.0, None, 2.0), (4.0, None, None), (2.0, 41, None)])
def test_final_loss_is_told_unless_it_diverged(last, nonfinite, final):
    run = Run("global", 1.0, losses=[3.0] * 38 + [last - 0.5, last + 0.5], nonfinite=nonfinite)
    assert run.final_loss() == final


def test_only_the_unclipped_run_explodes(runs, manual):
    (unclipped, *clipped), limits = runs
    assert limits.exploded
    assert limits.calm >= 10
    assert unclipped.final_loss() is None
    assert unclipped.nonfinite is not None or max(unclipped.norms) > 1e3
    for run in clipped:
        assert run.nonfinite is None
        assert run.final_loss() < manual.entropy() - 0.7
        assert sum(run.losses[-20:]) < sum(run.losses[20:40])
        assert run.clipped > 0
        assert run.limit == limits.limit(run.scope)


def test_all_runs_start_from_the_same_weights_and_windows(runs):
    assert len({run.losses[0] for run in runs[0]}) == 1
    assert len({run.norms[0] for run in runs[0]}) == 1


def test_an_unreachable_limit_changes_nothing(manual):
    setup = Setup(manual, 40, 0)
    unclipped = train(setup, None, None, lambda loss, norm: None)
    for scope in SCOPES:
        run = train(setup, scope, 1e30, lambda loss, norm: None)
        assert (run.losses, run.norms, run.clipped) == (unclipped.losses, unclipped.norms, 0)
        assert run.largest[scope] == unclipped.largest[scope]


def test_same_seed_same_numbers_same_picture(demo, prose, tmp_path):
    first = demo("--text", prose, "--steps", 40, "--seed", 3)
    picture = (tmp_path / "gradclip-demo.png").read_bytes()
    again = demo("--text", prose, "--steps", 40, "--seed", 3)
    other = demo("--text", prose, "--steps", 40, "--seed", 4)
    assert first == again
    assert first.code == 0
    assert first.out != other.out
    assert (tmp_path / "gradclip-demo.png").read_bytes() != picture


def test_everything_is_told(demo, prose, tmp_path):
    ran = demo("--text", prose, "--steps", 60, "--out", "a.PNG")
    assert ran.err == ""
    head, _, *rows = ran.out.splitlines()
    assert [head.find(column) for column in COLUMNS] == sorted({head.find(column) for column in COLUMNS} - {-1})
    assert [row.split("  ")[0] for row in rows[:4]] == list(NAMES.values())
    assert "times its median" in ran.out
    assert ran.out.splitlines()[-1] == "a.PNG"
    assert "\x1b" not in ran.out
    assert "\r" not in ran.out


def test_picture_is_a_png_of_the_promised_size(demo, prose, tmp_path):
    assert demo("--text", prose, "--steps", 40, "--out", tmp_path / "picture.png").code == 0
    data = (tmp_path / "picture.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", data[16:24]) == (1600, 1000)
    assert {path.name for path in tmp_path.iterdir()} == {"picture.png", "prose.txt"}


def test_a_training_that_does_not_explode_says_so(demo, monkeypatch, tmp_path, letters):
    monkeypatch.setattr(_training, "RATE", 0.1)
    ran = demo("--text", letters, "--steps", 40)
    assert ran.code == 0
    assert "never exceeded 10 times its median" in ran.out
    assert "diverged" not in ran.out
    assert (tmp_path / "gradclip-demo.png").exists()


ERRORS = {
    "missing text": (["--text", "absent.txt"], "cannot read absent.txt: No such file or directory"),
    "text is a folder": (["--text", "folder"], "cannot read folder: it is a folder"),
    "text is not UTF-8": (["--text", "latin.txt"], "latin.txt is not UTF-8 text: byte 1200 is 0xe9"),
    "text is short": (["--text", "short.txt"], f"short.txt has 5 characters: a text of at least {SHORTEST} is needed"),
    "text is empty": (["--text", "empty.txt"], f"empty.txt has 0 characters: a text of at least {SHORTEST} is needed"),
    "text is one character": (["--text", "same.txt"], "same.txt is one character over and over: there is nothing to learn"),
    "text is the picture": (["--text", "same.png", "--out", "same.png"], "same.png and same.png are the same file"),
    "few steps": (["--steps", "39"], "--steps must be at least 40; got 39"),
    "no number": (["--steps", "many"], "Invalid value for '--steps': "),
    "negative seed": (["--seed", "-1"], "--seed must be at least 0; got -1"),
    "missing folder": (["--out", "absent/a.png"], "cannot write absent/a.png: "),
    "out is a folder": (["--out", "folder.png"], "cannot write folder.png: it is there, and not a regular file"),
    "another extension": (["--out", "a.jpg"], "a.jpg must end in .png"),
    "no extension": (["--out", "a"], "a must end in .png"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_one_line(case, demo, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"a" * 1200 + "é".encode("latin-1") * 1200)
    (tmp_path / "short.txt").write_text("short", encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    for name in ("same.txt", "same.png"):
        (tmp_path / name).write_text("x" * 2000, encoding="utf-8")
    before = set(tmp_path.rglob("*"))
    options, message = ERRORS[case]
    ran = demo(*options)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"gradclip: {message}")
    assert ran.err.count("\n") == 1
    assert set(tmp_path.rglob("*")) == before


def test_python_without_its_manual(demo, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    ran = demo()
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "gradclip: this Python comes without its manual: name another text with --text FILE\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_nothing_is_written(number, code, tmp_path):
    interruptible = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {PROGRAM}"  # as in a terminal
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", interruptible, "demo", "--steps", "100000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            wait_for(lambda: any(tmp_path.iterdir()))
            time.sleep(0.5)
            child.send_signal(number)
            out, err = child.communicate(timeout=30)
        finally:
            child.kill()
    assert (child.returncode, out, err) == (code, b"", b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="terminals are POSIX's")
def test_progress_is_live_on_a_terminal_and_gone_at_the_end(letters, tmp_path):
    seen = on_a_terminal("demo", "--text", str(letters), "--steps", "40", cwd=tmp_path)
    for name in NAMES.values():
        assert name in seen
    assert "40/40" in seen
    assert "loss" in seen
    assert "\x1b[2K" in seen.split("largest norm of a tensor")[0]
    assert seen.rstrip().endswith("gradclip-demo.png")


def on_a_terminal(*arguments: str, cwd) -> str:
    import pty

    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PROGRAM, *arguments]
    with subprocess.Popen(command, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as child:
        os.close(theirs)
        seen = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    assert child.returncode == 0
    return seen.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("nothing happened in 30 s")
