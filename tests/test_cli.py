"""`gradclip clip`: files come back whole, and an error is one line, exit code 2 and no output."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.lib import format as npy
from safetensors import safe_open
from safetensors.numpy import save_file

import gradclip
from gradclip.cli import main, npz, safetensors
from gradclip.cli.errors import UserError
from gradclip.cli.files import replacing

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NAMES = ["layer.0.weight", "file", "a/b", "a", "größe ∇", "allow_pickle", "[bold]red[/bold]", "", "x.npy", "tab\tand\nline"]
SMALL = {"w": np.array([3.0, 4.0]), "b": np.array([0.5], np.float32)}


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys) -> Run:
    def run(*arguments: Any) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return Ran(ended.value.code, *capsys.readouterr())

    return run


def in_child(*arguments: Any, before: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    program = f"{before}\nfrom gradclip.cli import main; main()"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, text=True, encoding="utf-8", stderr=subprocess.PIPE, check=False, **options)


def write_npz(path: Path, arrays: dict[str, Any], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, x in arrays.items():
            with archive.open(f"{name}.npy", "w") as stream:
                npy.write_array(stream, np.asanyarray(x))
    return path


def write_raw(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def write_header(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def npy_bytes(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = repr(header).encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def assert_refused(ran: Ran, *said: str) -> None:
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("gradclip: ")
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err
    for words in said:
        assert words in ran.err


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def source(tmp_path) -> Path:
    return write_npz(tmp_path / "in.npz", SMALL)


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "out.npz"


class TestRoundTrip:
    @pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_npz(self, run, tmp_path, target, compression):
        rng = np.random.default_rng(0)
        dtypes = ["f2", "f4", "f8", "c8", "c16", ">f2", ">f4", ">f8", ">c8", ">c16"]
        shapes = [(), (0,), (3, 0, 2), (1,), (2, 3), (5, 1), (2, 3, 4), (70_000,), (1, 7), (4,)]
        arrays = {
            name: np.asarray(rng.normal(size=shape), dtype)
            for name, shape, dtype in zip(NAMES, shapes, rng.permutation(dtypes), strict=True)
        }
        arrays["F"] = np.asfortranarray(rng.normal(size=(3, 4, 5)))
        source = write_npz(tmp_path / "in.npz", arrays, compression)
        assert run("clip", source, "-o", target, "--max-norm", 0.5).code == 0
        expected = gradclip.clip(arrays, gradclip.MaxNorm(0.5)).grads
        with zipfile.ZipFile(target) as archive:
            assert archive.namelist() == [f"{name}.npy" for name in arrays]
            assert {member.compress_type for member in archive.infolist()} == {compression}
        clipped, _ = npz.read(target)
        for name, x in arrays.items():
            y = clipped[name]
            assert (y.dtype, y.shape, y.flags.fnc) == (x.dtype, x.shape, x.flags.fnc)
            assert y.tobytes() == expected[name].tobytes()

    def test_npz_as_numpy_reads_it(self, run, source, target):
        assert run("clip", source, "-o", target, "--max-norm", 1, "--scope", "tensor").code == 0
        with np.load(target, allow_pickle=False) as loaded:
            assert loaded.files == ["w", "b"]
            np.testing.assert_array_equal(loaded["w"], np.array([3.0, 4.0]) * 0.2)

    def test_compression_may_differ_by_member(self, run, tmp_path, target):
        with zipfile.ZipFile(tmp_path / "in.npz", "w") as archive:
            for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                archive.writestr(
                    f"{kind}.npy", npy_bytes({"descr": "<f8", "fortran_order": False, "shape": (1,)}, bytes(8)), kind
                )
        assert run("clip", tmp_path / "in.npz", "-o", target, "--max-norm", 1).code == 0
        with zipfile.ZipFile(target) as archive:
            assert [member.compress_type for member in archive.infolist()] == [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]

    def test_the_same_input_gives_the_same_file(self, run, tmp_path, source):
        for name in ("one.npz", "two.npz"):
            assert run("clip", source, "-o", tmp_path / name, "--max-norm", 1).code == 0
        assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()

    @pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
    def test_every_version_of_the_npy_format(self, run, tmp_path, target, version):
        with zipfile.ZipFile(tmp_path / "in.npz", "w") as archive, archive.open("w.npy", "w") as stream:
            npy.write_array(stream, np.ones(3), version=version)
        assert run("clip", tmp_path / "in.npz", "-o", target, "--max-norm", 9).code == 0

    def test_safetensors(self, run, tmp_path):
        rng = np.random.default_rng(1)
        dtypes = [BFLOAT16, "f2", "f4", "f8", "c8", BFLOAT16, "f4", BFLOAT16, "f2", "f4"]
        shapes = [(2, 3), (), (0,), (3, 1), (4,), (), (0, 2), (70_000,), (1,), (2, 2, 2)]
        arrays = {
            name: rng.normal(size=shape).astype(dtype) if shape else np.array(rng.normal(), dtype)
            for name, shape, dtype in zip(NAMES, shapes, dtypes, strict=True)
        }
        source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
        save_file(arrays, source, {"format": "pt", "größe": "∇\n", "": ""})
        assert run("clip", source, "-o", target, "--max-norm", 0.5).code == 0
        expected = gradclip.clip(arrays, gradclip.MaxNorm(0.5))
        assert expected.clipped
        with safe_open(target, framework="numpy") as archive:
            assert archive.metadata() == {"format": "pt", "größe": "∇\n", "": ""}
            assert set(archive.keys()) == set(arrays)
            for name, x in arrays.items():
                y = archive.get_tensor(name)
                assert (y.dtype, y.shape) == (x.dtype, x.shape)
                assert y.tobytes() == expected.grads[name].tobytes()

    def test_without_metadata_there_is_none_after(self, run, tmp_path):
        source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
        save_file({"w": np.ones(2, np.float32)}, source)
        assert run("clip", source, "-o", target, "--max-norm", 9).code == 0
        assert source.read_bytes() == target.read_bytes()

    @pytest.mark.parametrize("extension", ["npz", "safetensors"])
    def test_untouched_tensors_keep_their_bits(self, run, tmp_path, extension):
        payloads = np.array([0x7FC00001, 0xFF800123, 0x80000000, 1], np.uint32).view(np.float32)
        arrays = {"large": np.full(3, 9.0), "small": np.array([-0.0, 5e-324, 0.1]), "nan": payloads}
        source, target = tmp_path / f"in.{extension}", tmp_path / f"out.{extension}"
        write_npz(source, arrays) if extension == "npz" else save_file(arrays, source)
        assert run("clip", source, "-o", target, "--max-norm", 1, "--scope", "element", "--nonfinite", "keep").code == 0
        clipped, _ = (npz if extension == "npz" else safetensors).read(target)
        assert clipped["large"].tolist() == [1.0, 1.0, 1.0]
        for name in ("small", "nan"):
            assert clipped[name].tobytes() == arrays[name].tobytes()

    @given(
        arrays=st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
            st.lists(st.floats(width=32), max_size=3),
            max_size=4,
        )
    )
    def test_any_name(self, tmp_path_factory, arrays):
        folder = tmp_path_factory.mktemp("names")
        given = {name: np.array(values, np.float32) for name, values in arrays.items()}
        write_npz(folder / "in.npz", given)
        npz.write(folder / "out.npz", *npz.read(folder / "in.npz"))
        read, _ = npz.read(folder / "out.npz")
        assert list(read) == list(given)
        assert all(x.tobytes() == given[name].tobytes() for name, x in read.items())

    @pytest.mark.parametrize("extension", ["npz", "safetensors", "NPZ"])
    def test_an_empty_archive(self, run, tmp_path, extension):
        source, target = tmp_path / f"in.{extension}", tmp_path / f"out.{extension}"
        write_header(source, {}) if extension == "safetensors" else write_npz(source, {})
        ran = run("clip", source, "-o", target, "--max-norm", 1)
        assert (ran.code, ran.out, ran.err) == (0, "norm 0.0, 0 tensors\n", "")
        assert target.exists()


class TestRules:
    @pytest.mark.parametrize(
        ("options", "rule", "more"),
        [
            (["--max-norm", 1], gradclip.MaxNorm(1), {}),
            (["--max-norm", 1, "--scope", "tensor"], gradclip.MaxNorm(1), {"scope": "tensor"}),
            (["--max-norm", 1, "--scope", "element"], gradclip.MaxNorm(1), {"scope": "element"}),
            (["--max-norm", 1, "--p", "inf"], gradclip.MaxNorm(1), {"p": np.inf}),
            (["--max-norm", 1, "--p", 0.5], gradclip.MaxNorm(1), {"p": 0.5}),
            (["--max-norm", 20, "--min-norm", 10], gradclip.MaxNorm(20, min_norm=10), {}),
            (["--min-norm", 10], gradclip.MaxNorm(np.inf, min_norm=10), {}),
            (["--max-norm", "inf"], gradclip.MaxNorm(np.inf), {}),
            (["--low", -1, "--high", 2], gradclip.Bounds(-1, 2), {}),
            (["--low", 0], gradclip.Bounds(0, np.inf), {}),
            (["--high", 2, "--scope", "element"], gradclip.Bounds(-np.inf, 2), {}),
        ],
    )
    def test_they_are_the_library_s(self, run, tmp_path, target, options, rule, more):
        arrays = {"w": np.array([3.0, -4.0]), "b": np.array([0.5], np.float32)}
        ran = run("clip", write_npz(tmp_path / "in.npz", arrays), "-o", target, *options)
        expected = gradclip.clip(arrays, rule, **more)
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.splitlines()[-1] == repr(expected)
        clipped, _ = npz.read(target)
        for name, x in expected.grads.items():
            np.testing.assert_array_equal(clipped[name], x)

    @pytest.mark.parametrize(
        ("policy", "expected", "summary"),
        [
            ("zero", [0.0, 0.0], "clipped, not finite"),
            ("skip", [np.nan, 3.0], "skipped, not finite"),
            ("keep", [np.nan, np.nan], "clipped, not finite"),
        ],
    )
    def test_nonfinite(self, run, tmp_path, target, policy, expected, summary):
        source = write_npz(tmp_path / "in.npz", {"w": np.array([np.nan, 3.0])})
        ran = run("clip", source, "-o", target, "--max-norm", 1, "--nonfinite", policy)
        assert ran.code == 0
        assert ran.out.rstrip().endswith(summary)
        np.testing.assert_array_equal(npz.read(target)[0]["w"], expected)

    def test_the_advice_is_told_whole(self, run, tmp_path, target):
        source = write_npz(tmp_path / "in.npz", {f"{'block.' * 15}{i}": np.array([np.nan]) for i in range(9)})
        ran = run("clip", source, "-o", target, "--max-norm", 1)
        assert_refused(ran, "and 4 more", 'nonfinite="skip"', '"keep"\n')

    def test_raise(self, run, tmp_path, target):
        source = write_npz(tmp_path / "in.npz", {"w": np.array([np.nan, 3.0, np.inf])})
        assert_refused(run("clip", source, "-o", target, "--max-norm", 1), "w (1 NaN, 1 inf of 3)", "Nothing was changed")
        assert not target.exists()


class TestReport:
    def test_table(self, run, source, target):
        lines = run("clip", source, "-o", target, "--max-norm", 1, "--scope", "tensor").out.splitlines()
        assert lines[0].split() == ["tensor", "shape", "norm", "before", "norm", "after", "clipped"]
        assert lines[2].split() == ["w", "(2,)", "5", "1", "yes"]
        assert lines[3].split() == ["b", "(1,)", "0.5", "0.5", "no"]
        assert lines[-1] == "largest norm 5.0 → 1.0, 2 tensors, clipped"

    def test_a_tensor_that_stays_as_it_was_is_not_called_clipped(self, run, tmp_path, target):
        source = write_npz(tmp_path / "in.npz", {"w": np.ones(4), "zero": np.zeros(2), "none": np.zeros((0, 2))})
        rows = run("clip", source, "-o", target, "--max-norm", 1).out.splitlines()[2:5]
        assert [row.split()[-1] for row in rows] == ["yes", "no", "no"]

    def test_names_are_shown_whole_and_as_they_are(self, run, tmp_path, target):
        names = ["layers." * 60 + "weight", "[bold]x[/bold]", "[/]", "größe ∇", ":smile:", "\x1b[31m\r\n\t\u202e", ""]
        source = write_npz(tmp_path / "in.npz", {name: np.ones(1) for name in names})
        out = run("clip", source, "-o", target, "--max-norm", 1).out
        shown = [line.split("   ")[0] for line in out.splitlines()[2 : 2 + len(names)]]
        assert shown == [*names[:5], r"\x1b[31m\r\n\t\u202e", "''"]
        assert all(line.isprintable() for line in out.splitlines())

    def test_json(self, run, source, target):
        ran = run("clip", source, "-o", target, "--max-norm", 1, "--scope", "tensor", "--json")
        assert json.loads(ran.out) == {
            "input": str(source),
            "output": str(target),
            "scope": "tensor",
            "p": 2.0,
            "norm": {"w": 5.0, "b": 0.5},
            "limit": {"w": 1.0, "b": 1.0},
            "coef": {"w": 0.2, "b": 1.0},
            "clipped": True,
            "finite": True,
            "skipped": False,
            "tensors": [
                {"name": "w", "shape": [2], "dtype": "float64", "before": 5.0, "after": 1.0, "clipped": True},
                {"name": "b", "shape": [1], "dtype": "float32", "before": 0.5, "after": 0.5, "clipped": False},
            ],
        }

    def test_json_is_strict(self, run, tmp_path, target):
        source = write_npz(tmp_path / "in.npz", {"\x1b": np.array([np.nan, np.inf])})
        ran = run("clip", source, "-o", target, "--max-norm", "inf", "--p", "inf", "--nonfinite", "keep", "--json")
        told = json.loads(ran.out, parse_constant=pytest.fail)
        assert (told["p"], told["norm"], told["limit"]) == ("inf", None, None)
        assert told["tensors"][0] | {"clipped": None} == {
            "name": "\x1b",
            "shape": [2],
            "dtype": "float64",
            "before": None,
            "after": None,
            "clipped": None,
        }

    def test_an_output_that_knows_ascii_alone(self, source, target):
        environment = os.environ | {"PYTHONIOENCODING": "ascii", "FORCE_COLOR": "1"}
        ran = in_child("clip", source, "-o", target, "--max-norm", 1, env=environment, stdout=subprocess.PIPE)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.isascii()
        assert "\x1b" not in ran.stdout


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ([], "none was given"),
            (["--max-norm", 1, "--low", -1], "both were given"),
            (["--min-norm", 1, "--high", 1], "both were given"),
            (["--max-norm", 0], "got 0.0"),
            (["--max-norm", -1], "got -1.0"),
            (["--max-norm", "nan"], "got nan"),
            (["--max-norm", "one"], "'one' is not a number"),
            (["--max-norm", ""], "'' is not a number"),
            (["--max-norm", 1, "--min-norm", 0], "got 0.0"),
            (["--max-norm", 1, "--min-norm", 2], "min_norm=2.0 and max_norm=1.0"),
            (["--max-norm", 1, "--min-norm", 0.5, "--scope", "element"], "'global', 'tensor'"),
            (["--low", 1], "low=1.0"),
            (["--low", 1, "--high", -1], "low <= 0 <= high"),
            (["--low", "nan"], "low=nan"),
            (["--low", -1, "--scope", "tensor"], "'element'"),
            (["--max-norm", 1, "--scope", "layer"], "'layer'"),
            (["--max-norm", 1, "--nonfinite", "ignore"], "'ignore'"),
            (["--max-norm", 1, "--p", 0], "got 0.0"),
            (["--max-norm", 1, "--p", -2], "got -2.0"),
            (["--max-norm", 1, "--p", "nan"], "got nan"),
            (["--max-norm", 1, "--p", 3, "--scope", "element"], "neither p="),
            (["--max-norm", 1, "--P", 3], "--P"),
            (["--max-norm"], "--max-norm"),
            (["--max-norm", 1, "more.npz"], "more.npz"),
        ],
    )
    def test_refused_before_anything_is_read(self, run, tmp_path, target, options, said):
        assert_refused(run("clip", tmp_path / "missing.npz", "-o", target, *options), said)
        assert left(tmp_path) == []

    def test_both_files_must_be_named(self, run, source):
        assert_refused(run("clip", "-o", "out.npz", "--max-norm", 1), "IN")
        assert_refused(run("clip", source, "--max-norm", 1), "--output")


class TestSource:
    @pytest.fixture
    def clip(self, run, tmp_path) -> Iterator[Callable[[Path], Ran]]:
        """Clips to an output that is there already, and must stay as it is."""

        def clip(source: Path) -> Ran:
            return run("clip", source, "-o", output.with_suffix(source.suffix), "--max-norm", 1)

        folder = tmp_path / "outputs"
        folder.mkdir()
        output = folder / "out"
        for suffix in (".npz", ".safetensors"):
            output.with_suffix(suffix).write_text("as before")
        yield clip
        assert left(folder) == ["out.npz", "out.safetensors"]
        assert {path.read_text() for path in folder.iterdir()} == {"as before"}

    @pytest.mark.parametrize("extension", ["npz", "safetensors"])
    def test_no_file(self, clip, tmp_path, extension):
        (tmp_path / f"folder.{extension}").mkdir()
        os.mkfifo(tmp_path / f"pipe.{extension}")
        assert_refused(clip(tmp_path / f"missing.{extension}"), "missing.", "No such file or directory")
        assert_refused(clip(tmp_path / f"folder.{extension}"), "it is a folder")
        assert_refused(clip(tmp_path / f"pipe.{extension}"), "not a regular file")
        assert_refused(clip(tmp_path / "missing\x1b[31m\n" / f"in.{extension}"), r"missing\x1b[31m")

    @pytest.mark.parametrize("extension", ["npz", "safetensors"])
    @pytest.mark.parametrize("content", [b"", b"\0", b"text, not an archive", b"PK\x03\x04" + bytes(100), b"\xff" * 64])
    def test_no_archive(self, clip, tmp_path, extension, content):
        source = tmp_path / f"in.{extension}"
        source.write_bytes(content)
        assert_refused(clip(source), f"cannot read {source}: it is damaged, or no .{extension}")

    def test_truncated(self, clip, tmp_path):
        write_npz(tmp_path / "in.npz", SMALL)
        save_file(SMALL, tmp_path / "in.safetensors")
        for source in (tmp_path / "in.npz", tmp_path / "in.safetensors"):
            whole = source.read_bytes()
            for length in range(0, len(whole), 7):
                source.write_bytes(whole[:length])
                assert_refused(clip(source), "cannot read")

    def test_pickled_objects(self, clip, tmp_path):
        with zipfile.ZipFile(tmp_path / "in.npz", "w") as archive, archive.open("evil.npy", "w") as stream:
            npy.write_array(stream, np.array([Opened()], object))
        assert_refused(clip(tmp_path / "in.npz"), "'evil'", "pickled", "never opened")

    @pytest.mark.parametrize(
        ("member", "said"),
        [
            (b"", "'x' is damaged, or no array"),
            (b"text", "'x' is damaged, or no array"),
            (npy_bytes({"descr": "<f8", "fortran_order": False, "shape": (2,)}, bytes(15)), "cannot hold"),
            (npy_bytes({"descr": "<f8", "fortran_order": False, "shape": (2,)}, bytes(17)), "cannot hold"),
            (npy_bytes({"descr": "<f8", "fortran_order": False, "shape": (2**40, 2**40)}), "cannot hold"),
            (npy_bytes({"descr": "<f8", "fortran_order": False, "shape": (-1, -1)}, bytes(8)), "'x'"),
            (npy_bytes({"descr": "<f8", "fortran_order": False, "shape": (0, 2**62, 2**62)}), "'x'"),
            (npy_bytes({"descr": "<f8", "fortran_order": False, "shape": (1,) * 200}, bytes(8)), "'x'"),
            (npy_bytes({"descr": "nonsense", "fortran_order": False, "shape": ()}), "'x'"),
            (npy_bytes({"descr": [("f", "<f8")], "fortran_order": False, "shape": (1,)}, bytes(8)), "'x' is of"),
            (npy_bytes({"descr": "|S0", "fortran_order": False, "shape": (2**62,)}), "'x'"),
            (b"\x93NUMPY\x09\x00" + bytes(20), "'x'"),
        ],
    )
    def test_a_member_that_is_no_array(self, clip, tmp_path, member, said):
        assert_refused(clip(write_raw(tmp_path / "in.npz", [("x.npy", member)])), said)

    def test_headers_are_not_evaluated(self, clip, tmp_path):
        source = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
        text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({source},)}}\n".encode()
        member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
        assert_refused(clip(write_raw(tmp_path / "in.npz", [("x.npy", member)])), "'x'")
        assert not (tmp_path / "ran").exists()

    def test_members_of_one_name(self, clip, tmp_path):
        one = npy_bytes({"descr": "<f8", "fortran_order": False, "shape": ()}, bytes(8))
        with pytest.warns(UserWarning, match="Duplicate"):
            write_raw(tmp_path / "in.npz", [("x.npy", one), ("x.npy", one)])
        assert_refused(clip(tmp_path / "in.npz"), "2 of its members are called 'x'")
        assert_refused(clip(write_raw(tmp_path / "in.npz", [("x", one), ("x.npy", one)])), "2 of its members are called 'x'")

    def test_tensors_of_one_name(self, clip, tmp_path):
        entry = b'"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
        source = write_header(tmp_path / "in.safetensors", b"{" + entry + b"," + entry + b"}", bytes(4))
        assert_refused(clip(source), "2 entries called 'w'")

    @pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    def test_checksum(self, clip, tmp_path, compression):
        source = write_npz(tmp_path / "in.npz", {"w": np.random.default_rng(0).normal(size=9)}, compression)
        with zipfile.ZipFile(source) as archive:
            crc = struct.pack("<I", archive.infolist()[0].CRC)
        whole = source.read_bytes()
        for at in (whole.index(crc), whole.rindex(crc)):
            source.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert_refused(clip(source), "'w'", "Bad CRC-32")

    @pytest.mark.parametrize("dtype", ["i8", "u1", "?", "U3", "M8[s]", "g"])
    def test_npz_of_other_types(self, clip, tmp_path, dtype):
        source = write_npz(tmp_path / "in.npz", {"w": np.ones(1), "step": np.zeros(3, dtype)})
        assert_refused(clip(source), str(source), "'step' is of", "float16", "complex128")

    def test_npz_cannot_say_bfloat16(self, clip, tmp_path):
        source = write_npz(tmp_path / "in.npz", {"w": np.zeros(3, "V2")})
        assert_refused(clip(source), "'w' is of |V2", "bfloat16", ".safetensors")

    @pytest.mark.parametrize("dtype", ["I64", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"])
    def test_safetensors_of_other_types(self, clip, tmp_path, dtype):
        data = bytes(8 if dtype == "I64" else 1)
        header = {"step": {"dtype": dtype, "shape": [1], "data_offsets": [0, len(data)]}}
        source = write_header(tmp_path / "in.safetensors", header, data)
        assert_refused(clip(source), str(source), f"'step' is of {dtype}", "BF16")

    def test_safetensors_header_of_absurd_size(self, clip, tmp_path):
        (tmp_path / "in.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
        assert_refused(clip(tmp_path / "in.safetensors"), "cannot read")

    @pytest.mark.parametrize("kind", ["stored.npz", "deflated.npz", "in.safetensors"])
    def test_damage(self, run, tmp_path, kind):
        """Wherever bytes are changed, cut or doubled, the answer is a clip or one line."""
        source, rng = tmp_path / kind, random.Random(0)
        arrays = {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(3, np.float16), "größe": np.zeros((0, 2), np.float32)}
        if source.suffix == ".npz":
            write_npz(source, arrays, zipfile.ZIP_STORED if kind == "stored.npz" else zipfile.ZIP_DEFLATED)
        else:
            save_file(arrays | {"h": np.ones(2, BFLOAT16)}, source, {"k": "v"})
        whole = source.read_bytes()
        target = tmp_path / f"out{source.suffix}"
        for _ in range(200):
            source.write_bytes(damaged(whole, rng))
            ran = run("clip", source, "-o", target, "--max-norm", 1)
            if ran.code == 0:
                assert ran.err == ""
                target.unlink()
            else:
                assert_refused(ran)
            assert left(tmp_path) == [source.name]


class Opened:
    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


def damaged(whole: bytes, rng: random.Random) -> bytes:
    content = bytearray(whole)
    for _ in range(rng.choice([1, 1, 2, 8])):
        start = rng.randrange(len(content))
        stop = start + rng.choice([1, 1, 2, 4, 40])
        piece = content[start:stop]
        content[start:stop] = rng.choice(
            [rng.randbytes(len(piece)), b"", piece + piece, b"\xff" * len(piece), bytes(len(piece))]
        )
        if not content:
            break
    return bytes(content)


class TestTarget:
    @pytest.mark.parametrize(
        ("names", "said"),
        [
            (("in.npz", "out.safetensors"), "must be of one format"),
            (("in.npz", "out.txt"), ".npz or .safetensors"),
            (("in.npz", "out"), ".npz or .safetensors"),
            (("in.pt", "out.npz"), ".npz or .safetensors"),
            (("in.npz", "missing/out.npz"), "missing is missing"),
            (("in.npz", "in.npz/out.npz"), "in.npz is not a folder"),
            (("in.npz", "folder.npz"), "not a regular file"),
            (("in.npz", "in.npz"), "the same file"),
            (("in.npz", "../files/in.npz"), "the same file"),
            (("in.npz", "soft.npz"), "the same file"),
            (("in.npz", "hard.npz"), "the same file"),
            (("in.npz", "n" * 300 + ".npz"), "File name too long"),
        ],
    )
    def test_refused(self, run, tmp_path, names, said):
        folder = tmp_path / "files"
        (folder / "folder.npz").mkdir(parents=True)
        before = write_npz(folder / "in.npz", SMALL).read_bytes()
        (folder / "soft.npz").symlink_to("in.npz")
        (folder / "hard.npz").hardlink_to(folder / "in.npz")
        there = left(folder)
        source, target = (folder / name for name in names)
        assert_refused(run("clip", source, "-o", target, "--max-norm", 1), said)
        assert left(folder) == there
        assert (folder / "in.npz").read_bytes() == before

    @pytest.mark.parametrize("device", ["/dev/full", "/dev/null"])
    def test_devices_are_not_replaced(self, device):
        with pytest.raises(UserError, match="not a regular file"), replacing(Path(device)):
            pytest.fail("opened")

    def test_an_old_output_is_replaced(self, run, source, target):
        target.write_text("old")
        target.chmod(0o640)
        assert run("clip", source, "-o", target, "--max-norm", 1).code == 0
        assert list(npz.read(target)[0]) == ["w", "b"]
        assert target.stat().st_mode & 0o777 == 0o640

    def test_a_link_is_followed(self, run, tmp_path, source):
        (tmp_path / "elsewhere").mkdir()
        link, target = tmp_path / "link.npz", tmp_path / "elsewhere" / "out.npz"
        link.symlink_to(target)
        for _ in range(2):
            assert run("clip", source, "-o", link, "--max-norm", 1).code == 0
            assert link.is_symlink()
            assert left(tmp_path / "elsewhere") == ["out.npz"]

    def test_links_in_a_circle(self, run, tmp_path, source):
        (tmp_path / "a.npz").symlink_to("b.npz")
        (tmp_path / "b.npz").symlink_to("a.npz")
        for names, said in ((("a.npz", "out.npz"), "Too many levels"), (("in.npz", "a.npz"), "not a regular file")):
            source, target = (tmp_path / name for name in names)
            assert_refused(run("clip", source, "-o", target, "--max-norm", 1), said)
            assert left(tmp_path) == ["a.npz", "b.npz", "in.npz"]

    def test_relative_paths(self, run, source, monkeypatch):
        monkeypatch.chdir(source.parent)
        assert run("clip", source.name, "-o", "out.npz", "--max-norm", 1).code == 0
        assert left(source.parent) == ["in.npz", "out.npz"]

    @pytest.mark.parametrize("mask", [0o022, 0o077])
    def test_permissions_are_as_the_umask_says(self, tmp_path, mask):
        before = os.umask(mask)
        try:
            with replacing(tmp_path / "out.npz"):
                pass
        finally:
            os.umask(before)
        assert (tmp_path / "out.npz").stat().st_mode & 0o777 == 0o666 & ~mask

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
    def test_whatever_ends_the_block_leaves_nothing(self, tmp_path, error):
        target = tmp_path / "out.png"
        target.write_text("old")

        def fail() -> None:
            with replacing(target) as temporary:
                assert (temporary.parent, temporary.suffix) == (tmp_path, ".png")
                temporary.write_text("half")
                raise error

        with pytest.raises(error):
            fail()
        assert left(tmp_path) == ["out.png"]
        assert target.read_text() == "old"

    def test_what_the_system_refuses_is_told(self, run, source, target, monkeypatch):
        def refuse(*paths: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "replace", refuse)
        ran = run("clip", source, "-o", target, "--max-norm", 1)
        assert (ran.code, ran.err) == (2, f"gradclip: cannot write {target}: Permission denied\n")
        assert left(target.parent) == ["in.npz"]

    def test_a_read_only_output_stays(self, run, source, target, monkeypatch):
        target.write_text("old")
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
        assert_refused(run("clip", source, "-o", target, "--max-norm", 1), "read-only")
        assert target.read_text() == "old"

    def test_terminated(self, tmp_path):
        program = (
            "import pathlib, sys, time\nfrom gradclip.cli.files import replacing\n"
            "with replacing(pathlib.Path(sys.argv[1])):\n    print('open', flush=True)\n    time.sleep(60)\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "out.npz")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "open\n"
            assert len(left(tmp_path)) == 1
            process.terminate()
            assert process.wait() == 128 + signal.SIGTERM
        assert left(tmp_path) == []

    @pytest.mark.parametrize("extension", ["npz", "safetensors"])
    def test_disk_full(self, tmp_path, extension):
        source, target = tmp_path / f"in.{extension}", tmp_path / f"out.{extension}"
        arrays = {"w": np.random.default_rng(0).normal(size=100_000)}
        write_npz(source, arrays) if extension == "npz" else save_file(arrays, source)
        target.write_text("old")
        before = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
        ran = in_child("clip", source, "-o", target, "--max-norm", 1, before=before, stdout=subprocess.PIPE)
        assert_refused(Ran(ran.returncode, ran.stdout, ran.stderr), f"cannot write {target}: File too large")
        assert left(tmp_path) == [source.name, target.name]
        assert target.read_text() == "old"


class TestOutput:
    @pytest.mark.parametrize(
        "arguments", [["clip", "{source}", "-o", "{target}", "--max-norm", "1"], ["--help"], ["--version"]]
    )
    def test_full(self, source, target, arguments):
        target.write_text("old")
        arguments = [argument.format(source=source, target=target) for argument in arguments]
        with open("/dev/full", "w") as full:
            ran = in_child(*arguments, stdout=full)
        assert_refused(Ran(ran.returncode, "", ran.stderr), "cannot write to standard output: No space left on device")
        assert left(target.parent) == ["in.npz", "out.npz"]
        assert target.read_text() == "old"

    def test_a_reader_that_has_gone_does_not_undo_the_clip(self, source, target):
        reader, writer = os.pipe()
        os.close(reader)
        ran = in_child("clip", source, "-o", target, "--max-norm", 1, stdout=writer)
        os.close(writer)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert list(npz.read(target)[0]) == ["w", "b"]

    def test_closed(self, source, target):
        before = "import os, sys; os.close(1); sys.stdout = None"
        ran = in_child("clip", source, "-o", target, "--max-norm", 1, before=before)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert target.exists()

    def test_without_the_extra(self):
        ran = in_child("--version", before="import sys; sys.modules['safetensors'] = None")
        assert_refused(Ran(ran.returncode, "", ran.stderr), "pip install 'gradclip[cli]'")

    def test_version(self, run):
        assert run("--version") == Ran(0, f"gradclip {gradclip.__version__}, core: {gradclip.native.core()}\n", "")
