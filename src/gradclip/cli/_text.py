"""Text as numbers, and windows drawn from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .errors import UserError, told

Array = Any
LENGTH = 80  # characters that the network is trained through at once
BATCH = 16
KINDS = 128  # characters beyond the most frequent ones count as one: more would make the network's products large
SHORTEST = 1000


class Text(NamedTuple):
    """Each character as its rank, the most frequent first."""

    codes: Array  # [length]
    frequencies: Array  # [kinds]

    @classmethod
    def of(cls, text: str) -> Text:
        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        _, places, counts = np.unique(points, return_inverse=True, return_counts=True)
        ranks = np.empty(len(counts), np.intp)
        ranks[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
        codes = np.minimum(ranks, KINDS - 1)[places]
        return cls(codes, np.bincount(codes) / len(codes))

    def entropy(self) -> float:
        """Nats a character, for one who knows the frequencies alone."""
        return -float(np.sum(self.frequencies * np.log(self.frequencies)))

    def windows(self, rng: np.random.Generator) -> Array:
        """Stretches of the text side by side: [LENGTH + 1, BATCH]."""
        starts = rng.integers(0, len(self.codes) - LENGTH, size=BATCH)
        return self.codes[starts + np.arange(LENGTH + 1)[:, None]]


def read(path: Path | None) -> Text:
    """The file's text, or Python's own manual."""
    name, text = ("Python's manual", _manual()) if path is None else (str(path), _file(path))
    if len(text) < SHORTEST:
        raise UserError(f"{name} has {len(text)} characters: a text of at least {SHORTEST} is needed")
    if len(set(text)) == 1:
        raise UserError(f"{name} is one character over and over: there is nothing to learn")
    return Text.of(text)


def _file(path: Path) -> str:
    try:
        with told(f"cannot read {path}"):
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error


def _manual() -> str:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise UserError("this Python comes without its manual: name another text with --text FILE") from error
    return "\n\n".join(topics.values())
