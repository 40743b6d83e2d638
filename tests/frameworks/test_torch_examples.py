"""The examples run, and show what they say."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_mixed_precision(capsys):
    runpy.run_path(str(EXAMPLES / "torch_amp.py"), run_name="__main__")
    out = capsys.readouterr().out
    first, last = re.search(r"^clipped: loss (\S+) → (\S+)$", out, re.MULTILINE).groups()
    assert float(last) < 0.1 * float(first)
    lost = re.search(r"^not clipped: loss (\S+) → (\S+)$", out, re.MULTILINE)[2]
    assert not float(lost) < 1e3
    assert "150 of 150 steps were clipped" in out


def test_four_processes_clip_as_one():
    """A transformer under FSDP2 and tensor parallelism: the same norms for 200 steps."""
    command = [sys.executable, str(EXAMPLES / "torch_fsdp_tp.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert float(re.search(r"the norms of 200 steps differ by at most (\S+)", done.stdout)[1]) < 1e-5
    first, last, clipped = re.search(r"loss (\S+) → (\S+), (\d+) of 200 steps clipped", done.stdout).groups()
    assert float(last) < 0.9 * float(first)
    assert int(clipped) > 20
