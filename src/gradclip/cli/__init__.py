"""The command line: `gradclip demo`, `gradclip clip`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

EXTRA = "the command line needs more packages: pip install 'gradclip[cli]'"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command. An error is one line on standard error and exit code 2."""
    try:
        from .app import run
    except ModuleNotFoundError as error:
        _fail(f"{EXTRA} ({error})")
    try:
        raise SystemExit(run(sys.argv[1:] if arguments is None else list(arguments)))
    except BrokenPipeError:  # the reader of our output has gone: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _fail(message: str) -> None:
    print(f"gradclip: {message}", file=sys.stderr)
    raise SystemExit(2)
