"""Files of gradients, read without unpickling anything, and written whole or not at all."""

from __future__ import annotations

import os
import secrets
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from . import npz, safetensors
from .errors import UserError, told

Array = Any


class Format(NamedTuple):
    """What a file says besides its arrays travels from `read` to `write` as `extra`."""

    read: Callable[[Path], tuple[dict[str, Array], Any]]
    write: Callable[[Path, dict[str, Array], Any], None]


FORMATS = {".npz": Format(npz.read, npz.write), ".safetensors": Format(safetensors.read, safetensors.write)}


def common_format(source: Path, target: Path) -> Format:
    """The format that both are named after."""
    ours, theirs = _extension(source), _extension(target)
    if ours != theirs:
        raise UserError(f"{source} and {target} must be of one format: a file that is {ours} stays {ours}")
    return FORMATS[ours]


def check_source(path: Path) -> None:
    with told(f"cannot read {path}"):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise UserError(f"cannot read {path}: it is {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}")
        path.open("rb").close()


def check_apart(source: Path, target: Path) -> None:
    with told(f"cannot write {target}"):
        if target.exists() and target.samefile(source):
            raise UserError(f"{source} and {target} are the same file: name another output")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new, empty file beside `path`, with its extension, which takes its place when the block ends well.

    Whatever ends the block otherwise leaves nothing behind and `path` as it was; an OSError becomes a UserError.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".gradclip-{secrets.token_hex(8)}{target.suffix}")
    with told(f"cannot write {path}"), _terminable():
        _check_target(path, target)
        try:
            _create(temporary, like=target)
            yield temporary
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _extension(path: Path) -> str:
    extension = path.suffix.lower()
    if extension not in FORMATS:
        raise UserError(f"{path} must end in {' or '.join(FORMATS)}, which says its format")
    return extension


def _check_target(path: Path, target: Path) -> None:
    if not target.parent.is_dir():
        raise UserError(f"cannot write {path}: {target.parent} {'is not a folder' if target.parent.exists() else 'is missing'}")
    if not os.path.lexists(target):
        return
    if not target.is_file():
        raise UserError(f"cannot write {path}: it is there, and not a regular file")
    if not os.access(target, os.W_OK):
        raise UserError(f"cannot write {path}: it is read-only")


def _create(path: Path, like: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    if like.exists():
        path.chmod(stat.S_IMODE(like.stat().st_mode))


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds the block, as SIGINT does."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
