"""The C++ core, where there is one, and how many threads it may use."""

from __future__ import annotations

import math
import operator
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

available = find_spec(f"{__name__}._core") is not None
if available:
    from . import _core

__all__ = ["available", "core", "set_threads", "threads"]


def core() -> str:
    """Which path of the core is in use, "avx512", "avx2" or "baseline"; "none": NumPy does the work."""
    return _core.cpu() if available else "none"


MOST = 1024
_chosen: int | None = None


def set_threads(n: int | None) -> None:
    """Let the core use n threads; None goes back to the environment's choice."""
    global _chosen
    _chosen = None if n is None else _count("n", n)


def threads() -> int:
    """set_threads, else GRADCLIP_NUM_THREADS, else OMP_NUM_THREADS, else as many CPUs as this process may use."""
    if _chosen is not None:
        return _chosen
    if text := os.environ.get("GRADCLIP_NUM_THREADS", "").strip():
        return _count("GRADCLIP_NUM_THREADS", int(text) if text.isdecimal() else text)
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # OpenMP: one number per level
    if first.isdecimal() and 0 < int(first) <= MOST:
        return int(first)
    return max(1, min(_affinity(), _quota()))


def _count(name: str, n: Any) -> int:
    try:
        count = operator.index(n)
    except TypeError:
        count = 0
    if not 1 <= count <= MOST or isinstance(n, bool):
        raise ValueError(f"{name} must be an integer from 1 to {MOST}, not {n!r}")
    return count


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _quota() -> int:
    """CPUs that the control groups of this process grant; many where they set no limit."""
    root = Path("/sys/fs/cgroup")
    groups = _read(Path("/proc/self/cgroup")).splitlines()
    limits = [_limit(root, *line.split(":", 2)[1:]) for line in groups if line.count(":") >= 2]
    return min((limit for limit in limits if limit), default=1 << 16)


def _limit(root: Path, controllers: str, path: str) -> int | None:
    if controllers and "cpu" not in controllers.split(","):
        return None
    folders = [root / path.lstrip("/"), root] if not controllers else [root / "cpu" / path.lstrip("/"), root / "cpu"]
    limits = [_version_2(folder) if not controllers else _version_1(folder) for folder in folders]
    return min((limit for limit in limits if limit), default=None)


def _version_2(folder: Path) -> int | None:
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    return _cpus(quota, period)


def _version_1(folder: Path) -> int | None:
    return _cpus(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _cpus(quota: str, period: str) -> int | None:
    try:
        limit = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return math.ceil(limit) if limit > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
