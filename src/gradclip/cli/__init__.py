"""The command line: `gradclip demo`, `gradclip clip`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from .stdout import drop

EXTRA = "the command line needs more packages: pip install 'gradclip[cli]'"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command. An error is one line on standard error and exit code 2."""
    try:
        from .app import run
    except ModuleNotFoundError as error:
        _fail(f"{EXTRA} ({error})")
    try:
        code = run(sys.argv[1:] if arguments is None else list(arguments))
        print(end="", flush=True)
    except OSError as error:  # of standard output: the commands tell all others themselves
        drop()
        if isinstance(error, BrokenPipeError):
            raise SystemExit(1) from None
        _fail(f"cannot write to standard output: {error.strerror}")
    raise SystemExit(code)


def _fail(message: str) -> NoReturn:
    print(f"gradclip: {message}", file=sys.stderr)
    raise SystemExit(2)
