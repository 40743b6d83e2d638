"""NumPy's archives: a zip file whose members are arrays."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy

from .errors import UserError, told

Array = Any
SUFFIX = ".npy"
LONGEST = 65_535  # bytes of a name in a zip file, as UTF-8


def read(path: Path) -> tuple[dict[str, Array], list[ZipInfo]]:
    """The arrays by name, in the archive's order, and its members."""
    # a corrupt file may raise anything in zipfile, zlib, struct, tokenize, NumPy, and warn as it is parsed
    with told(f"cannot read {path}: it is damaged, or no .npz archive", Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ZipFile(path) as archive:
            members = archive.infolist()
            _check_names(path, members)
            return {_name(member): _read(path, archive, member) for member in members}, members


def write(path: Path, arrays: dict[str, Array], members: list[ZipInfo]) -> None:
    """The arrays as members with the names, dates and compression of those that they came from."""
    with ZipFile(path, "w") as archive:
        for member, x in zip(members, arrays.values(), strict=True):
            info = ZipInfo(member.filename, member.date_time)
            info.compress_type, info.external_attr = member.compress_type, member.external_attr
            with archive.open(info, "w", force_zip64=True) as stream:
                npy.write_array(stream, x, allow_pickle=False)


def _name(member: ZipInfo) -> str:
    return member.filename.removesuffix(SUFFIX)


def _check_names(path: Path, members: list[ZipInfo]) -> None:
    if any(len(member.filename.encode()) > LONGEST for member in members):
        raise UserError(f"cannot read {path}: a name is longer than {LONGEST} bytes")
    for name, count in Counter(map(_name, members)).items():
        if count > 1:
            raise UserError(f"cannot read {path}: {count} of its members are called {name!r}")


def _read(path: Path, archive: ZipFile, member: ZipInfo) -> Array:
    what = f"cannot read {path}: its member {_name(member)!r}"
    with told(f"{what} is damaged, or no array", Exception):
        with archive.open(member) as stream:
            _check_header(stream, member.file_size, what)
        with archive.open(member) as stream:
            x = npy.read_array(stream, allow_pickle=False)
            stream.read()  # to the end, where the checksum is compared
            return x


def _check_header(stream: IO[bytes], size: int, what: str) -> None:
    """Refuses what must not be read, and a size that would be reserved in vain."""
    version = npy.read_magic(stream)
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    if dtype.hasobject:
        raise UserError(f"{what} holds pickled objects, which are never opened: save arrays of numbers")
    if dtype == np.dtype("V2"):
        raise UserError(f"{what} is of {dtype.str}: an .npz file cannot say bfloat16; save it as .safetensors")
    if stream.tell() + math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{size} bytes cannot hold {dtype} of shape {shape}")
