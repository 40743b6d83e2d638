"""What goes wrong by what a person gave."""

from __future__ import annotations


class UserError(Exception):
    """One line: what was given, what is accepted, what to do."""
