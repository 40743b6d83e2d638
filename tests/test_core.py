"""The native core behind the public functions: the same as NumPy, the same bits whatever the machine does, safe to call."""

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import gradclip
from gradclip import Bounds, MaxNorm, native

needs_core = pytest.mark.skipif(not native.available, reason="the core is not built")
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def gradients(seed=0, n=200_003):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(n // (i + 1)).astype(dtype) for i, dtype in enumerate(DTYPES)]


CASES = [
    (MaxNorm(1.0), {}),
    (MaxNorm(1.0), {"scope": "tensor"}),
    (MaxNorm(1.0), {"p": 1}),
    (MaxNorm(1.0), {"p": 3.5, "scope": "tensor"}),
    (MaxNorm(1.0), {"p": float("inf")}),
    (MaxNorm(1e9), {}),
    (MaxNorm(0.7), {"scope": "element"}),
    (Bounds(-0.1, 2.0), {"scope": "element"}),
    (MaxNorm(1e9, min_norm=1e8), {}),
]


def outcome(clip, grads, rule, options):
    clipped = clip(grads, rule, **options)
    coef = () if clipped.coef is None else clipped.coef.reshape(-1).tolist()
    return clipped.norm.reshape(-1).tolist(), coef, bool(clipped.clipped), clipped.grads


@needs_core
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("clip", [gradclip.clip, gradclip.clip_])
def test_without_the_core_norms_and_decisions_are_the_same(monkeypatch, clip, case):
    norm, coef, clipped, grads = outcome(clip, gradients(), *CASES[case])
    monkeypatch.setattr(native, "available", False)
    norm_, coef_, clipped_, grads_ = outcome(clip, gradients(), *CASES[case])
    assert norm_ == pytest.approx(norm, rel=1e-12)
    assert coef_ == pytest.approx(coef, rel=1e-12)
    assert clipped_ == clipped
    for x, y in zip(grads, grads_, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol=np.finfo(np.float32).eps * 2**16, atol=0)


def digest():
    """The bits of all that comes out of the table of cases, and of its norms."""
    found = hashlib.sha256()
    for rule, options in CASES:
        norm, coef, clipped, grads = outcome(gradclip.clip, gradients(n=300_001), rule, options)
        found.update(repr((norm, coef, clipped)).encode())
        for x in grads:
            found.update(x.tobytes())
    return found.hexdigest()


@needs_core
def test_the_same_bits_with_any_number_of_threads():
    try:
        found = []
        for threads in (1, 2, 3, 8):
            gradclip.set_threads(threads)
            found.append(digest())
    finally:
        gradclip.set_threads(None)
    assert len(set(found)) == 1


PATH = "import test_core; from gradclip import native; print(native.core(), test_core.digest())"


def on_path(name):
    environment = os.environ | {"GRADCLIP_CPU": name, "PYTHONPATH": os.path.dirname(__file__)}
    return subprocess.run([sys.executable, "-c", PATH], env=environment, capture_output=True, text=True, check=False)


@needs_core
def test_the_same_bits_on_every_path():
    runs = {name: on_path(name) for name in ("baseline", "avx2", "avx512")}
    supported = {name: run.stdout.split() for name, run in runs.items() if run.returncode == 0}
    assert "baseline" in supported
    assert all(name == found[0] for name, found in supported.items())
    assert {found[1] for found in supported.values()} == {digest()}
    for name in set(runs) - set(supported):
        assert "ImportError" in runs[name].stderr
        assert name in runs[name].stderr


@needs_core
def test_an_unknown_path_is_refused():
    run = on_path("sse9")
    assert run.returncode != 0
    assert "sse9" in run.stderr


def test_eight_threads_at_once():
    want = digest()
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: digest(), range(16))) == {want}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_after_a_fork():
    want = digest()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, digest().encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert told.read() == want
    assert os.waitpid(child, 0)[1] == 0


FORKS = """
import os, threading, numpy as np, gradclip
xs = [np.ones(2000, np.float32) for _ in range(50)]
stop = False
def work():
    while not stop:
        gradclip.clip(xs, gradclip.MaxNorm(1.0), scope="tensor")
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
codes = []
for _ in range(25):
    child = os.fork()
    if not child:
        gradclip.clip(xs, gradclip.MaxNorm(1.0))
        os._exit(7)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop = True
print(set(codes))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_other_threads_clip():
    run = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout == "{7}\n"


def test_a_dropped_array_is_kept_alive_by_the_call():
    grads = (np.full(100_000, float(i)) for i in range(1, 50))
    assert gradclip.norm(grads) == pytest.approx((1e5 * sum(i * i for i in range(1, 50))) ** 0.5)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "two", 2**40])
def test_a_number_of_threads_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="from 1 to 1024"):
        gradclip.set_threads(wrong)


def test_another_library_s_variable_is_no_error(monkeypatch):
    monkeypatch.delenv("GRADCLIP_NUM_THREADS", raising=False)
    for value in ("0", "many", "99999999999999"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert native.threads() >= 1
    for value in ("0", "many", "99999999999999"):
        monkeypatch.setenv("GRADCLIP_NUM_THREADS", value)
        with pytest.raises(ValueError, match="GRADCLIP_NUM_THREADS must be"):
            native.threads()


@pytest.mark.parametrize(("variable", "value", "want"), [("GRADCLIP_NUM_THREADS", "3", 3), ("OMP_NUM_THREADS", "5", 5)])
def test_the_environment_sets_the_threads(monkeypatch, variable, value, want):
    for name in ("GRADCLIP_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert native.threads() == want
    gradclip.set_threads(2)
    try:
        assert native.threads() == 2
    finally:
        gradclip.set_threads(None)
