"""The examples run, and show what they say."""

import re
import runpy
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
