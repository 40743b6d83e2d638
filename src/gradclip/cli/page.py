"""What is printed, made into text first: nothing half-printed, and nothing that standard output cannot encode."""

from __future__ import annotations

import io
import sys

from rich.console import Console, RenderableType


def rendered(*parts: RenderableType) -> str:
    """As wide as it must be, unless it is for a terminal."""
    page = _Page()
    terminal = sys.stdout is not None and sys.stdout.isatty()
    console = Console(file=page, force_terminal=terminal, width=None if terminal else 1_000_000, highlight=False)
    console.print(*parts, sep="\n")
    return "\n".join(line.rstrip() for line in page.text().splitlines())


class _Page(io.TextIOWrapper):
    """Text that standard output can encode."""

    def __init__(self) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding=getattr(sys.stdout, "encoding", None) or "utf-8", errors="backslashreplace")

    def text(self) -> str:
        self.flush()
        return self.bytes.getvalue().decode(self.encoding)
