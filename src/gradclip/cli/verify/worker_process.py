"""A Python of any environment that runs a worker of this very package."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[2]
# a folder beside which this was started may be named after a framework, and is none
INSTALLED_ONLY = "import sys; sys.path = [folder for folder in sys.path if folder]\n"
# this very package, and nothing else of the environment it lies in: that has its own NumPy
BOOT = """
import runpy
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("gradclip", sys.argv.pop(1), submodule_search_locations=[sys.argv.pop(1)])
sys.modules["gradclip"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["gradclip"])
runpy.run_module(f"gradclip.cli.verify.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)
"""


def started(python: Path, worker: str, *arguments: str) -> list[str]:
    """The command line that starts a module of this folder."""
    return [str(python), "-c", INSTALLED_ONLY + BOOT, str(PACKAGE / "__init__.py"), str(PACKAGE), worker, *arguments]


def last(text: str) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")[:200]
