"""The same seed gives the same bits: for any number of threads, from several Python threads at once, in any company."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import threading

import numba
import numpy as np
import pytest
from problems import make

import pda_numba
from pda_numba import attention, attention_vjp

# Two heads of three kinds of work: low rank with a window chosen, low rank with a projection, and exact.
OPTIONS = ({"rank": 32, "tol": None, "method": "pda"}, {"rank": 32, "tol": None, "method": "pda", "proj_dim": 8}, {})


def problem(n=1100):
    return [np.stack(pair) for pair in zip(make("decaying", n, seed=1), make("peaked", n, seed=2), strict=True)]


def digest(arrays=None, **more):
    """Of the outputs, certificates and gradients of all kinds of work."""
    found = hashlib.sha256()
    for options in OPTIONS:
        given = problem() if arrays is None else arrays
        out, info = attention(*given, return_info=True, **options, **more)
        _, pullback = attention_vjp(*given, **options, **more)
        numbers = info.error, info.error_limit, info.row_error, info.leave_one_out, info.rows, info.window
        for x in (out, *numbers, *pullback(out)):
            found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def expected():
    return digest()


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread is all there is")
def test_number_of_threads_in_this_process(expected):
    before = numba.get_num_threads()
    try:
        for threads in {1, 2, numba.config.NUMBA_NUM_THREADS}:
            numba.set_num_threads(threads)
            assert digest() == expected, threads
    finally:
        numba.set_num_threads(before)


def test_repeated_calls(expected):
    assert all(digest() == expected for _ in range(3))


def test_heads_do_not_depend_on_their_company():
    """A head alone, as the first of two, and with its memory elsewhere."""
    q, k, v = problem()
    for options in OPTIONS:
        both = attention(q, k, v, **options)
        assert attention(q[:1], k[:1], v[:1], **options)[0].tobytes() == both[0].tobytes()
        moved = [np.concatenate([x, x])[2:] for x in (q, k, v)]
        assert attention(*moved, **options).tobytes() == both.tobytes()


def test_groups_of_heads_do_not_change_the_result(monkeypatch):
    """Heads are computed together as far as the workspace allows: one at a time gives the same bits."""
    q, k, v = problem()
    whole = attention(q, k, v, **OPTIONS[0])
    monkeypatch.setattr(sys.modules["pda_numba.plan"], "GROUP_BYTES", 1)
    assert attention(q, k, v, **OPTIONS[0]).tobytes() == whole.tobytes()


def test_seeds_draw_differently(expected):
    assert digest(seed=1) != expected
    first, second = (attention(*problem(), seed=s, return_info=True, **OPTIONS[0]) for s in (0, 1))
    assert (first[0] != second[0]).mean() > 0.5
    assert (first[1].error != second[1].error).all()


def test_estimates_are_repeatable():
    q, k, v = problem()
    out = attention(q, k, v, **OPTIONS[0])
    one, same, other = (pda_numba.estimate_error(out, q, k, v, seed=s) for s in (3, 3, 4))
    assert (one.error == same.error).all()
    assert (one.error_limit == same.error_limit).all()
    assert (one.error != other.error).all()


def test_several_python_threads_at_once(expected):
    results, failures = [], []

    def work():
        try:
            results.append(digest())
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=600)
    assert not failures
    assert results == [expected] * 4


# --- in other processes ---

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)

ONE_CALL = "from test_determinism import digest; print(digest())"

FOUR_THREADS = """
import threading
from test_determinism import digest
found = []
workers = [threading.Thread(target=lambda: found.append(digest())) for _ in range(4)]
for w in workers: w.start()
for w in workers: w.join()
assert len(found) == 4, len(found)
print(*sorted(set(found)))
"""


def run(code, **environment):
    """Standard output of a fresh interpreter, which must be silent on the standard error."""
    path = os.pathsep.join([HERE, ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("threads", ["1", "2"])
def test_number_of_threads_of_a_process(threads, expected):
    assert run(ONE_CALL, NUMBA_NUM_THREADS=threads) == [expected]


def test_python_threads_on_the_simplest_threading_layer(expected):
    """Numba's own pool aborts the process if two threads enter it at once; the package lets them in one by one."""
    assert run(FOUR_THREADS, NUMBA_THREADING_LAYER="workqueue") == [expected]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("order", ["before", "after"])
def test_beside_torch(order, expected):
    """No warning of OpenMP or OpenBLAS on the standard error, and the same bits, whichever library came first."""
    torch = "import torch; a = torch.ones(300, 300); assert float((a @ a)[0, 0]) == 300\n"
    first, second = (torch, ONE_CALL) if order == "before" else (ONE_CALL + "\n", torch)
    assert run(first + second) == [expected]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_python_threads_beside_torch(expected):
    torch = "import torch; a = torch.ones(300, 300); assert float((a @ a)[0, 0]) == 300\n"
    assert run(torch + FOUR_THREADS + torch) == [expected]


@pytest.mark.slow
def test_compiled_afresh(expected, tmp_path):
    """Kernels that were loaded from the cache and kernels that have just been compiled give the same bits.

    Numba's cache follows the file of a driver, not the bodies that it inlines from other files: after a change of
    `kernels/` delete `__pycache__`, or this test fails on what is left of the old code.
    """
    assert run(ONE_CALL, NUMBA_CACHE_DIR=str(tmp_path)) == [expected]
    assert run(ONE_CALL, NUMBA_CACHE_DIR=str(tmp_path)) == [expected]
