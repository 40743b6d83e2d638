import math
import os
import platform
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import gradclip.native as native
from gradclip.native import _core

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # ml_dtypes, of a signalling NaN

bfloat16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype("float64"), np.dtype("float32"), bfloat16, np.dtype("float16")]
SIXTEEN_BITS = [bfloat16, np.dtype("float16")]
BLOCK = _core.BLOCK

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def memory(*arrays, writable=False):
    return _core.open_buffers(list(arrays), writable)


def measure(*arrays, p=2.0, divisors=None, threads=1):
    divisors = None if divisors is None else np.array(divisors, np.float64)
    return _core.measure(*memory(*arrays), p, divisors, threads)


def power(*arrays, **options):
    return math.fsum(measure(*arrays, **options)[0])


def scale(x, coef, out=None, threads=1):
    out = np.empty_like(x) if out is None else out
    (source, lengths, dtypes), (target, _, _) = memory(x), memory(out, writable=True)
    _core.scale(source, target, lengths, dtypes, np.full(1, coef), threads)
    return out


def clamp(x, low, high, out=None, threads=1):
    out = np.empty_like(x) if out is None else out
    (source, lengths, dtypes), (target, _, _) = memory(x), memory(out, writable=True)
    changed = _core.clamp(source, target, lengths, dtypes, np.full(1, low), np.full(1, high), threads)
    return out, bool(changed[0])


def units(x, p=2.0, divisors=None, threads=1):
    start = x.__array_interface__["data"][0]
    divisors = None if divisors is None else np.array(divisors, np.float64)
    strides = [stride // x.itemsize for stride in x.strides]
    return _core.measure_units(start, *x.shape, *strides, DTYPES.index(x.dtype), p, divisors, threads)


def bits(x):
    return x.view(f"u{x.itemsize}")


def same_bits(a, b):
    return np.array_equal(bits(np.atleast_1d(a)), bits(np.atleast_1d(b)))


def exact_power(x):
    return math.fsum((x.astype(np.float64).ravel() ** 2).tolist())


def values(dtype, n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(dtype)


def rounded_once(product, dtype):
    """float64 to the nearest of a 16-bit type, ties to even, by exact scaling."""
    digits, least, beyond = (8, -133, 2.0**128) if dtype == bfloat16 else (11, -24, 2.0**16)
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(product)
        unit = np.maximum(exponent - digits, least)
        result = np.ldexp(np.rint(np.ldexp(product, -unit)), unit)
        result = np.where(np.isfinite(product), result, product)
        return np.where(np.abs(result) >= beyond, np.copysign(np.inf, result), result).astype(dtype)


def all_of(dtype):
    return np.arange(65536, dtype=np.uint16).view(dtype)


@each_dtype
def test_dense_memory_opens(dtype):
    x = values(dtype, 24).reshape(2, 3, 4)
    opened = [x, np.asfortranarray(x), x.transpose(1, 2, 0), x[:1], x[:, :1][:, :, :4][:1], np.zeros((), dtype), x[:0]]
    addresses, lengths, dtypes = memory(*opened)
    assert dtypes.tolist() == [DTYPES.index(dtype)] * len(opened)
    assert lengths.tolist() == [a.size for a in opened]
    assert all(a.ctypes.data == address for a, address in zip(opened, addresses, strict=True) if a.size)


@each_dtype
def test_other_memory_is_marked(dtype):
    x = values(dtype, 24).reshape(4, 6)
    closed = [x[::2], x[:, ::2], x[::-1], x[:, 1:], np.broadcast_to(x[:1], (4, 6)), x.astype(dtype.newbyteorder())]
    closed = closed[:-1] if dtype == bfloat16 else closed
    assert set(memory(*closed)[2].tolist()) == {255}


def test_other_types_are_marked():
    closed = [np.zeros(3, t) for t in ("i4", "?", "c8", "O", "u2", "g")] + [ml_dtypes.float8_e4m3fn(1), 1.0, None, "x"]
    closed.append(np.zeros(3, bfloat16.newbyteorder()))
    assert set(memory(*closed)[2].tolist()) == {255}


@each_dtype
def test_read_only_memory_is_marked_where_it_would_be_written(dtype):
    x = values(dtype, 3)
    x.flags.writeable = False
    assert memory(x)[2][0] == DTYPES.index(dtype)
    assert memory(x, writable=True)[2][0] == 255


def test_buffers_are_released():
    x = bytearray(8)
    memory(memoryview(x).cast("d"), writable=True)
    x.append(0)
    before = sys.getrefcount(y := np.zeros(3)), sys.getrefcount(z := np.zeros(3, bfloat16))
    memory(y, z)
    assert before == (sys.getrefcount(y), sys.getrefcount(z))


@pytest.mark.parametrize("arrays", [(), [[]]])
def test_nothing_to_open(arrays):
    if not arrays:
        assert [a.size for a in memory()] == [0, 0, 0]
        assert [a.size for a in measure()] == [0, 0]
    else:
        assert memory(np.array(arrays, np.float32))[1].tolist() == [0]


@each_dtype
@pytest.mark.parametrize("fill", [0.1, 3e-23, 1e20, "random", "subnormal"])
@pytest.mark.parametrize("n", [1, 31, 32, 1000, 3 * BLOCK + 17])
def test_accuracy(dtype, fill, n):
    if fill == "random":
        x = values(dtype, n)
    elif fill == "subnormal":
        x = (np.arange(n) % 100).astype(np.uint16 if dtype.itemsize == 2 else f"u{dtype.itemsize}").view(dtype)
    else:
        x = np.full(n, min(fill, 6e4) if dtype == np.float16 else fill, np.float64).astype(dtype)
    divisor = 2.0**-1060 if fill == "subnormal" and dtype == np.float64 else 1.0
    exact = math.fsum(((x.astype(np.float64) / divisor) ** 2).tolist())
    assert power(x, divisors=[divisor]) == pytest.approx(exact, rel=1e-12, abs=0)


def test_two_to_the_26():
    x = np.full(1 << 26, 0.1, np.float32)
    assert power(x, threads=2) == pytest.approx(float(x[0]) ** 2 * 2**26, rel=1e-12)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 7.25])
@each_dtype
def test_powers(dtype, p):
    x = values(dtype, 70000)
    exact = math.fsum((np.abs(x.astype(np.float64)) ** p).tolist())
    assert power(x, p=p) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_divisors(p):
    x, y = np.array([3e200, 4e200]), np.array([3e-200, 4e-200])
    powers, peaks = measure(x, y, p=p, divisors=[1e200, 1e-200])
    assert powers == pytest.approx([3**p + 4**p] * 2, rel=1e-14)
    assert peaks.tolist() == [4e200, 4e-200]


def test_float64_subnormals():
    x = np.arange(100, dtype=np.uint64).view(np.float64)
    tiny = 5e-324
    assert measure(x, p=1.0)[0][0] == 4950 * tiny
    assert measure(x, p=math.inf)[0][0] == 99 * tiny
    assert measure(x, divisors=[99 * tiny])[0][0] == pytest.approx(sum(k * k for k in range(100)) / 99**2, rel=1e-14)


@each_dtype
def test_peaks(dtype):
    x = values(dtype, 2 * BLOCK + 5)
    x[BLOCK + 40] = -100
    x[-1] = 50
    powers, peaks = measure(x, p=math.inf)
    assert peaks.tolist() == powers.tolist() == [np.abs(b.astype(np.float64)).max() for b in np.split(x, [BLOCK, 2 * BLOCK])]
    assert measure(x)[1].tolist() == peaks.tolist()


@each_dtype
@pytest.mark.parametrize("at", [5, 37, 65535])
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_and_inf_in_peaks_and_counts(dtype, at, sign):
    x = values(dtype, BLOCK + 100)
    x[at] = sign * np.inf
    assert measure(x)[1][0] == np.inf and np.isfinite(measure(x)[1][1])
    y = x.copy()
    y[at - 5] = np.copysign(np.nan, sign)
    assert np.isnan(measure(y)[1][0]) and np.isnan(measure(y)[0][0])
    y[-3:] = -np.inf
    nan, inf = _core.count_nonfinite(*memory(values(dtype, 9), x, y), 1)
    assert (nan.tolist(), inf.tolist()) == ([0, 0, 1], [0, 1, 4])


@each_dtype
def test_signalling_nan_is_nan(dtype):
    x = np.zeros(40, dtype)
    infinity = bits(np.full(1, np.inf, dtype))
    bits(x)[7:8] = infinity + infinity.dtype.type(1)
    assert np.isnan(measure(x)[1][0])
    assert _core.count_nonfinite(*memory(x), 1)[0][0] == 1


@each_dtype
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_cutting_at_blocks_keeps_the_partials(dtype, p):
    x = values(dtype, 5 * BLOCK + 77)
    whole = measure(x, p=p)
    pieces = measure(x[: 2 * BLOCK], x[2 * BLOCK : 3 * BLOCK], x[:0], x[3 * BLOCK :], p=p)
    assert same_bits(whole[0], pieces[0]) and same_bits(whole[1], pieces[1])


@each_dtype
def test_unaligned_addresses(dtype):
    x = values(dtype, 70000)
    raw = np.zeros(x.nbytes + 8, np.uint8)
    for shift in (1, 2, 3, 5):
        raw[shift : shift + x.nbytes] = x.view(np.uint8)
        address = np.array([raw.ctypes.data + shift], np.uint64)
        at = (np.array([x.size]), np.array([DTYPES.index(dtype)], np.uint8))
        assert same_bits(_core.measure(address, *at, 2.0, None, 1)[0], measure(x)[0])
        _core.scale(address, address, *at, np.array([0.3]), 1)
        assert raw[shift : shift + x.nbytes].tobytes() == scale(x, 0.3).tobytes()
        assert _core.clamp(address, address, *at, np.array([-0.5]), np.array([0.5]), 1)[0]
        assert raw[shift : shift + x.nbytes].tobytes() == clamp(scale(x, 0.3), -0.5, 0.5)[0].tobytes()


@each_dtype
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 33), (130, 257), (2, 70000), (70000, 3), (300, 1), (1, 300)])
def test_units_have_the_bits_of_arrays(dtype, p, shape):
    x = values(dtype, math.prod(shape)).reshape(shape)
    wide = np.zeros((shape[0], 2 * shape[1]), dtype)
    wide[:, ::2] = x
    expected = np.array([max(measure(row, p=p)[0]) if p == math.inf else power(row, p=p) for row in x.copy()])
    for view in (x, np.asfortranarray(x), wide[:, ::2]):
        assert same_bits(units(view, p), expected)
        assert same_bits(units(view, p, threads=3), expected)


@each_dtype
def test_units_with_divisors(dtype):
    x = values(dtype, 150 * 70).reshape(150, 70)
    divisors = np.linspace(0.5, 3, 150)
    expected = np.array([power(row, divisors=[d]) for row, d in zip(x, divisors, strict=True)])
    assert same_bits(units(x, divisors=divisors), expected)
    assert same_bits(units(np.asfortranarray(x), divisors=divisors), expected)


def test_units_show_nan():
    x = np.ones((4, 70000), np.float32)
    x[1, 69999], x[2, 5] = np.nan, np.inf
    for p in (2.0, math.inf):
        got = units(x, p)
        assert np.isnan(got[1]) and got[2] == np.inf and np.isfinite(got[[0, 3]]).all()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_units_of_nothing(shape):
    assert units(np.zeros(shape, np.float32)).tolist() == [0.0] * shape[0]


def hard_coefs(dtype, rng):
    """Coefficients that put some product on, just above or just below the middle of two numbers."""
    x = np.abs(all_of(dtype).astype(np.float64))
    x = x[np.isfinite(x) & (x > 0)]
    middles = (x[:-1] + np.diff(x) / 2)[:-1]
    coefs = rng.choice(middles, 150) / rng.choice(x, 150)
    return [c for coef in coefs for c in (coef, np.nextafter(coef, 0), np.nextafter(coef, np.inf))]


PLAIN = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    0.75,
    1 / 3,
    -0.1,
    257 / 129,
    1.5,
    3.0,
    1e-3,
    1e-8,
    2.0**-24,
    2.0**-133,
    2.0**-100,
    1e-30,
    1e-40,
    5e-324,
]
PLAIN += [1e30, 1e38, 1e60, 1e100, 2.0**400, 1e300, -1e300, 1.7e308, np.inf, -np.inf, 1 - 2**-53, 1 + 2**-52]


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_one_rounding_of_every_16_bit_number(dtype):
    rng = np.random.default_rng(1)
    x = all_of(dtype)
    wide = x.astype(np.float64)
    for coef in [*PLAIN, *hard_coefs(dtype, rng), *rng.uniform(0, 1, 60), *10.0 ** rng.uniform(-45, 45, 100)]:
        with np.errstate(all="ignore"):
            expected = rounded_once(wide * coef, dtype)
        got = scale(x, coef)
        nan = np.isnan(expected)
        assert np.isnan(got[nan]).all() and same_bits(got[~nan], expected[~nan]), coef


def test_one_rounding_of_float32_and_float64():
    rng = np.random.default_rng(2)
    x = rng.integers(0, 2**32, 300_001, dtype=np.uint32).view(np.float32)
    for coef in [*PLAIN, *10.0 ** rng.uniform(-45, 45, 50)]:
        with np.errstate(all="ignore"):
            for a in (x, x.astype(np.float64)):
                expected = (a.astype(np.float64) * coef).astype(a.dtype)
                got, nan = scale(a, coef), np.isnan(expected)
                assert np.isnan(got[nan]).all() and same_bits(got[~nan], expected[~nan]), coef


@settings(max_examples=300, deadline=None)
@given(coef=st.floats(allow_nan=False), seed=st.integers(0, 2**32 - 1), which=st.sampled_from([0, 1]))
def test_one_rounding_of_any_coef(coef, seed, which):
    dtype = SIXTEEN_BITS[which]
    x = np.random.default_rng(seed).integers(0, 65536, 999, dtype=np.uint16).view(dtype)
    with np.errstate(all="ignore"):
        expected = rounded_once(x.astype(np.float64) * coef, dtype)
    got, nan = scale(x, coef), np.isnan(expected)
    assert np.isnan(got[nan]).all() and same_bits(got[~nan], expected[~nan])


@each_dtype
def test_scaling_in_place_and_nan_coefs(dtype):
    x = values(dtype, 3 * BLOCK + 9)
    expected = scale(x, 0.37)
    guard = np.concatenate([x, np.full(40, 7, dtype)])
    scale(guard[: x.size], 0.37, out=guard[: x.size], threads=2)
    assert same_bits(guard[: x.size], expected) and (guard[x.size :] == 7).all()
    assert np.isnan(scale(x, np.nan)).all()
    assert scale(x[:0], 0.5).size == 0
    assert scale(np.array(3, dtype), 0.5) == 1.5


@each_dtype
@pytest.mark.parametrize(
    ("low", "high"), [(-1.0, 1.0), (0.0, 0.5), (-0.0, 0.0), (-0.25, np.inf), (-np.inf, np.inf), (0.5, 2.0), (-2.0, -1.0)]
)
def test_clamp(dtype, low, high):
    x = np.concatenate([values(dtype, 9000), np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, 1.0], dtype)])
    x = np.concatenate([x, all_of(dtype)]) if dtype.itemsize == 2 else x
    wide = x.astype(np.float64)
    expected = np.where(wide < low, low, np.where(wide > high, high, wide)).astype(dtype)
    moved = (wide < low) | (wide > high)
    keep = np.where(moved, bits(expected), bits(x)).view(dtype)
    got, changed = clamp(x, low, high)
    assert same_bits(got, keep) and changed == bool(moved.any())
    got, changed = clamp(x.copy(), low, high, out=(y := x.copy()))
    assert same_bits(y, keep)
    clamp(y := x.copy(), low, high, out=y, threads=2)
    assert same_bits(y, keep)


@each_dtype
def test_clamp_in_place_writes_nothing_inside_the_bounds(dtype, tmp_path):
    x = np.memmap(tmp_path / "x", dtype=np.uint8, mode="w+", shape=BLOCK * dtype.itemsize).view(dtype)
    x[:] = np.clip(values(np.float32, BLOCK), -1, 1).astype(dtype)
    x.flush()
    frozen = np.memmap(tmp_path / "x", dtype=np.uint8, mode="r").view(dtype)  # a write would end the process
    at = memory(np.asarray(frozen))
    assert not _core.clamp(at[0], at[0], at[1], at[2], np.array([-1.0]), np.array([1.0]), 1)[0]


@each_dtype
@pytest.mark.parametrize("place", [0, 1023, 1024, 40000, BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 6])
def test_clamp_finds_the_only_one_outside(dtype, place):
    x = np.zeros(2 * BLOCK + 7, dtype)
    x[place] = -3
    expected = x.copy()
    expected[place] = -1
    got, changed = clamp(x, -1.0, 1.0)
    assert same_bits(got, expected) and changed
    clamp(x, -1.0, 1.0, out=x)
    assert same_bits(x, expected)


def test_clamp_says_which_arrays_changed():
    x, y, z = np.array([3.0]), np.array([0.5], np.float32), np.zeros(0)
    address, lengths, dtypes = memory(x, y, z, writable=True)
    assert _core.clamp(address, address, lengths, dtypes, -np.ones(3), np.ones(3), 1).tolist() == [1, 0, 0]
    assert x[0] == 1


def table_of_bits(threads=1):
    """One table of cases, as bytes."""
    result = []
    for dtype in DTYPES:
        x = values(dtype, 5 * BLOCK + 1234, seed=3)
        x[:500] = np.arange(500, dtype=f"u{dtype.itemsize}").view(dtype)
        odd = x.copy()
        odd[[3, 70000]] = [np.inf, -np.nan]
        bits(odd)[200000] = bits(np.array([np.inf], dtype))[0] + 1
        for p in (0.5, 1.0, 2.0, 2.5, 3.0, math.inf):
            result += measure(x, odd, x[:7], p=p, threads=threads)
            result += measure(x, x[5:999], p=p, divisors=[0.3, 1.7], threads=threads)
            square = x[: 700 * 460].reshape(700, 460)
            result += [units(square, p, threads=threads), units(square.T, p, threads=threads)]
        for coef in (0.3, 0.75, 1 / 3, -2.0, 1e-7, 1e-39, 1e30, 0.0, np.inf, np.nan):
            result += [scale(a, coef, threads=threads) for a in (x, odd)]
        result += [clamp(a, -0.5, 0.25, threads=threads)[0] for a in (x, odd)]
        result += _core.count_nonfinite(*memory(x, odd), threads)
    if dtype.itemsize == 2:
        result += [scale(all_of(t), 0.123) for t in SIXTEEN_BITS]
    return b"".join(a.tobytes() for a in result)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_the_same_bits_for_any_number_of_threads(threads):
    assert table_of_bits(threads) == table_of_bits(1)


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, cwd=os.path.dirname(__file__), capture_output=True
    )


def supported_paths():
    names = ["baseline", "avx2", "avx512"]
    return names[: names.index(_core.cpu()) + 1]


@pytest.mark.parametrize("path", supported_paths())
def test_the_same_bits_on_every_path(path):
    code = "import sys, test_native as t; sys.stdout.buffer.write(t._core.cpu().encode() + t.table_of_bits())"
    run = run_python(code, GRADCLIP_CPU=path)
    assert run.stdout == path.encode() + table_of_bits(), run.stderr.decode()


@pytest.mark.parametrize("path", supported_paths())
def test_one_rounding_on_every_path(path):
    code = "import test_native as t; [t.test_one_rounding_of_every_16_bit_number(d) for d in t.SIXTEEN_BITS]"
    run = run_python(code, GRADCLIP_CPU=path)
    assert run.returncode == 0, run.stderr.decode()


def test_an_unknown_path_is_refused_in_one_line():
    run = run_python("import gradclip.native", GRADCLIP_CPU="sse9")
    assert b"ImportError: GRADCLIP_CPU=sse9" in run.stderr and b"baseline" in run.stderr


def test_after_fork():
    x = values(np.float32, 1 << 20)
    expected = measure(x, threads=2)[0]
    if (child := os.fork()) == 0:
        os._exit(0 if same_bits(measure(x, threads=2)[0], expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_eight_python_threads_at_once():
    arrays = [values(np.float32, 1 << 20, seed) for seed in range(8)]
    expected = [measure(x)[0] for x in arrays]
    start = threading.Barrier(8)

    def work(i):
        start.wait()
        for _ in range(20):
            x = arrays[i].copy()
            assert same_bits(measure(x, threads=2)[0], expected[i])
            scale(x, 0.5, out=x, threads=2)
            assert same_bits(x, arrays[i] * np.float32(0.5))
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_threads_come_from_set_threads_then_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert native.threads() == 5
    monkeypatch.setenv("GRADCLIP_NUM_THREADS", "3")
    assert native.threads() == 3
    native.set_threads(7)
    try:
        assert native.threads() == 7
    finally:
        native.set_threads(None)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("GRADCLIP_NUM_THREADS")
    assert 1 <= native.threads() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2"])
def test_bad_thread_counts(n):
    with pytest.raises(ValueError, match="n must be an integer from 1 to 1024, not "):
        native.set_threads(n)


@pytest.mark.parametrize("text", ["0", "two", "-1", "²"])
def test_bad_environment(monkeypatch, text):
    monkeypatch.setenv("GRADCLIP_NUM_THREADS", text)
    with pytest.raises(ValueError, match="GRADCLIP_NUM_THREADS"):
        native.threads()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"self": "0::/a", "a/cpu.max": "150000 100000"}, 2),
        ({"self": "0::/a", "a/cpu.max": "max 100000", "cpu.max": "300000 100000"}, 3),
        ({"self": "3:cpu,cpuacct:/b", "cpu/b/cpu.cfs_quota_us": "400000", "cpu/b/cpu.cfs_period_us": "100000"}, 4),
        ({"self": "3:cpu:/b", "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 1 << 16),
        ({"self": ""}, 1 << 16),
    ],
)
def test_quota(monkeypatch, files, expected):
    def read(path):
        name = str(path).removeprefix("/sys/fs/cgroup/")
        return files.get("self" if name == "/proc/self/cgroup" else name, "")

    monkeypatch.setattr(native, "_read", read)
    assert native._quota.__wrapped__() == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 0.0}, "p must be a number > 0 or inf, not 0"),
        ({"p": -1.0}, "p must be"),
        ({"p": math.nan}, "p must be"),
        ({"threads": 0}, "threads must be at least 1, not 0"),
        ({"dtypes": np.array([255], np.uint8)}, "dtypes must be .* not 255"),
        ({"lengths": np.array([-1])}, "lengths must be at least 0, not -1"),
        ({"lengths": np.array([1, 1])}, "one length for each address, not 2 for 1"),
        ({"divisors": np.ones(2)}, "one divisor for each address, not 2 for 1"),
    ],
)
def test_bad_values_are_refused(change, message):
    x = np.ones(3)
    addresses, lengths, dtypes = memory(x)
    call = {"addresses": addresses, "lengths": lengths, "dtypes": dtypes, "p": 2.0, "divisors": None, "threads": 1} | change
    with pytest.raises(ValueError, match=message):
        _core.measure(**call)


def test_crossed_bounds_are_refused():
    with pytest.raises(ValueError, match="low must not exceed high, not"):
        clamp(np.ones(3), 1.0, -1.0)
    with pytest.raises(ValueError, match="low must not exceed high"):
        clamp(np.ones(3), np.nan, 1.0)


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="sets glibc's environment by its layout")
def test_flushing_to_zero_in_the_caller_changes_nothing():
    x = np.arange(1, 100, dtype=np.uint32).view(np.float32)
    expected = measure(x)[0]
    code = (
        "import ctypes, numpy as np, test_native as t; x = np.arange(1, 100, dtype=np.uint32).view(np.float32); "
        "libm = ctypes.CDLL('libm.so.6'); env = ctypes.create_string_buffer(64); libm.fegetenv(env); "
        "env[28:32] = (0x9fc0).to_bytes(4, 'little'); a = t.memory(x); libm.fesetenv(env); "
        "r = t._core.measure(*a, 2.0, None, 1)[0]; "
        "assert np.float32(1e-40) * np.float32(1) == 0; libm.fesetenv(ctypes.c_void_p(-1)); print(r[0].hex())"
    )
    run = run_python(code)
    assert run.stdout.decode().strip() == expected[0].hex(), run.stderr.decode()
