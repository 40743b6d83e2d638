"""What goes wrong by what a person gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 1000  # characters of a library's message


class UserError(Exception):
    """One line: what was given, what is accepted, what to do."""


@contextmanager
def told(what: str, kinds: type[Exception] | tuple[type[Exception], ...] = OSError) -> Iterator[None]:
    """An error of these kinds becomes a UserError that says what could not be done, and why; so does a lack of memory."""
    try:
        yield
    except UserError:
        raise
    except MemoryError as error:
        raise UserError("not enough memory") from error
    except kinds as error:
        raise UserError(f"{what}: {_reason(error)}") from error


def printable(text: str) -> str:
    """The text in one line, without characters that would move or recolour a terminal's."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _reason(error: Exception) -> str:
    reason = str(getattr(error, "strerror", None) or error) or type(error).__name__
    return reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}…"
