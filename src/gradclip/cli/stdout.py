"""Standard output, where it cannot be written."""

from __future__ import annotations

import os
import sys

from .errors import UserError


def show(text: str) -> None:
    """Prints; a reader that has gone away (`| head -1`) does not undo what was asked for."""
    try:
        print(text, flush=True)
    except OSError as error:
        drop()
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"cannot write to standard output: {error.strerror}") from error


def drop() -> None:
    """What is still to be printed goes nowhere; Python would fail on it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
