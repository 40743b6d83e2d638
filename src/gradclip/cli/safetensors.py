"""Safetensors: a header in JSON, then the arrays' bytes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy learns the name bfloat16 from it
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .errors import UserError, told

Array = Any
DTYPES = ("F16", "BF16", "F32", "F64", "C64")


def read(path: Path) -> tuple[dict[str, Array], dict[str, str] | None]:
    """The arrays by name, in the order of the file, and its metadata."""
    with (
        told(f"cannot read {path}: it is damaged, or no .safetensors file", Exception),
        safe_open(path, framework="numpy") as archive,
    ):
        _check_names(path)
        return {name: _read(path, archive, name) for name in archive.offset_keys()}, archive.metadata()


def write(path: Path, arrays: dict[str, Array], metadata: dict[str, str] | None) -> None:
    dense = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    try:
        save_file(dense, path, metadata)
    except SafetensorError as error:  # what the system said is the end of its message
        raise OSError(str(error).rpartition("I/O error: ")[2]) from error


def _check_names(path: Path) -> None:
    """A name that stands twice in the header; the library keeps the last and says nothing."""
    with path.open("rb") as stream:
        header = stream.read(int.from_bytes(stream.read(8), "little"))
    json.loads(header, object_pairs_hook=lambda pairs: _check_unique(path, [name for name, _ in pairs]))


def _check_unique(path: Path, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"cannot read {path}: its header has {count} entries called {name!r}")


def _read(path: Path, archive: Any, name: str) -> Array:
    dtype = archive.get_slice(name).get_dtype()
    if dtype not in DTYPES:
        raise UserError(f"cannot read {path}: {name!r} is of {dtype}: gradients are of {', '.join(DTYPES)}")
    return archive.get_tensor(name)
