"""Kernels over dense memory, given as parallel arrays of addresses, lengths (in elements) and dtypes.

Dtypes: 0 float64, 1 float32, 2 bfloat16, 3 float16. Nothing is checked about the memory itself: it must
stay alive, and writable where it is written, until the call returns. Lists of different lengths, unknown
dtypes, negative lengths, p <= 0 and threads < 1 raise ValueError. A team is what `find_team` gave: its threads do
the work, except after a fork.
"""

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

BLOCK: Final = 65536

def cpu() -> Literal["baseline", "avx2", "avx512"]:
    """The instruction set in use: the best there is, or that of the environment's GRADCLIP_CPU."""

def find_team() -> int:
    """The address of OpenMP's entry point in this process, of the first OpenMP that all may see; 0: there is none."""

def open_buffers(arrays: list[object], writable: bool) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint8]]:
    """(addresses, lengths, dtypes) of arrays, which the caller keeps alive.

    Dtype 255 marks what has no dense native-endian memory of the four types, or none that may be written.
    """

def open_tensors(tensors: list[object], exchange: object) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint8]]:
    """The same for the tensors of a framework whose type offers `__dlpack_c_exchange_api__`, which is `exchange`.

    Empty where one of them cannot be looked at, or lies elsewhere than in the CPU's memory.
    """

def measure(
    addresses: NDArray[np.uint64],
    lengths: NDArray[np.int64],
    dtypes: NDArray[np.uint8],
    p: float,
    divisors: NDArray[np.float64] | None,
    threads: int,
    team: int = 0,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(powers, peaks): Σ|x / divisor|^p and the largest |x| of each BLOCK elements, array by array.

    A peak is NaN where there is any NaN, else inf where there is any inf. For p = inf powers are peaks.
    """

def measure_units(
    address: int,
    rows: int,
    cols: int,
    row_stride: int,
    col_stride: int,
    dtype: int,
    p: float,
    divisors: NDArray[np.float64] | None,
    threads: int,
) -> NDArray[np.float64]:
    """Σ|x / divisor|^p of each row of a 2-D view, strides in elements; for p = inf its largest |x|.

    For columns swap the two sizes and the two strides.
    """

def count_nonfinite(
    addresses: NDArray[np.uint64],
    lengths: NDArray[np.int64],
    dtypes: NDArray[np.uint8],
    threads: int,
    team: int = 0,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(nan, inf): how many of each every array holds."""

def scale(
    sources: NDArray[np.uint64],
    targets: NDArray[np.uint64],
    lengths: NDArray[np.int64],
    dtypes: NDArray[np.uint8],
    coefs: NDArray[np.float64],
    threads: int,
    team: int = 0,
) -> None:
    """Writes the float64 product x * coef, rounded once. A target is its source or apart from it."""

def clamp(
    sources: NDArray[np.uint64],
    targets: NDArray[np.uint64],
    lengths: NDArray[np.int64],
    dtypes: NDArray[np.uint8],
    lows: NDArray[np.float64],
    highs: NDArray[np.float64],
    threads: int,
    team: int = 0,
) -> NDArray[np.uint8]:
    """Writes x within [low, high], bounds that the dtype holds; NaN stays NaN. Says which arrays changed.

    In place it writes only where something changes.
    """
