"""The fit on the simulator: the CPU's tables and errors, whatever the order of the threads; every barrier is needed."""

import contextlib

import numpy as np
import pytest
import simulator
import test_core
from common import host, on_cuda
from problems import flat

from pda_numba import _jit, core
from pda_numba.kernels import groups, small_qr
from pda_numba.kernels.simd import padded

pytestmark = pytest.mark.cudasim

ORDERS = [contextlib.nullcontext, simulator.backwards]


@pytest.fixture(autouse=True)
def _small_teams(monkeypatch):
    """Four groups of four threads, and narrow panels: the same meetings, sooner."""
    monkeypatch.setattr(_jit, "SIMULATED_TEAM", 16)
    monkeypatch.setattr(groups, "_LARGEST", 4)
    monkeypatch.setattr(small_qr, "_CUDA_LANES", 16)


def both(cases, first=0, rank=None, dtype=np.float64):
    """The stage's arguments on either device."""
    x, target, exact, weight = (np.stack(a) for a in zip(*cases, strict=True))
    count, n, r = x.shape
    features = np.zeros((count, padded(r), n), dtype)
    features[:, :r] = x.transpose(0, 2, 1)
    problem = flat(*(np.zeros((count, 2, d), dtype) for d in (1, 1, exact.shape[2])))
    ranks = np.full(count, r) if rank is None else np.array(rank)
    arrays = features, target.astype(dtype), exact.astype(dtype), weight, ranks
    gpu = on_cuda(problem)
    heads = np.arange(count)
    yield lambda: core.fit(problem, heads, *arrays, first=first)
    yield lambda: core.fit(gpu, heads, *(gpu.device.upload(a) for a in arrays), first=first)


def compare(cpu, gpu, x, columns):
    """Equal up to rounding, which the condition of the features (below 1e5) may enlarge."""
    np.testing.assert_array_equal(host(gpu.ridge), cpu.ridge)
    np.testing.assert_allclose(host(gpu.loo), cpu.loo, rtol=1e-8)
    np.testing.assert_allclose(host(gpu.row_error), cpu.row_error, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(host(gpu.row_leverage), cpu.row_leverage, rtol=1e-6)
    table = host(gpu.table)
    for h, features in enumerate(x):
        r = features.shape[1]
        for w in range(table.shape[1]):
            fitted, true = (features @ t[h, w, :r, :columns] for t in (table, cpu.table))
            np.testing.assert_allclose(fitted, true, rtol=0, atol=1e-9)  # values of size 1
            assert (table[h, w, r:] == 0).all()
            gram, own = (t[h, w, :r, columns:] @ t[h, w, :r, columns:].T for t in (table, cpu.table))
            np.testing.assert_allclose(features @ gram @ features.T, features @ own @ features.T, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("n", "r", "e", "windows"), [(20, 3, 1, 1), (20, 1, 2, 2), (33, 9, 2, 3), (12, 9, 10, 1), (140, 4, 3, 1)]
)
def test_fit(n, r, e, windows, order, rng):
    cases = [test_core.case(rng, n, r, e, windows) for _ in range(2 if n < 30 else 1)]
    for x, _, _, weight in cases:
        x *= 0.5 + rng.random((n, 1))  # one landmark's features would all be 1, and every level as good as another
        weight[::5] = 0
    cpu, gpu = both(cases, first=n // 3)
    with order():
        found = gpu()
    compare(cpu(), found, [x for x, *_ in cases], e + 1)


def test_fewer_landmarks_than_room(rng):
    """Each head its own rank, in single precision."""
    cases = [test_core.case(rng, 24, 6, 2) for _ in range(2)]
    cpu, gpu = (run() for run in both(cases, rank=[2, 5], dtype=np.float32))
    assert host(gpu.table).dtype == np.float32
    np.testing.assert_array_equal(host(gpu.ridge), cpu.ridge)
    np.testing.assert_allclose(host(gpu.loo), cpu.loo, rtol=1e-6)
    np.testing.assert_allclose(host(gpu.table), cpu.table, rtol=1e-4, atol=1e-5)
    assert (host(gpu.table)[0, 0, 2:] == 0).all()


def test_fewer_rows_than_landmarks(rng):
    cpu, gpu = (run() for run in both([test_core.case(rng, 7, 12, 2)]))
    np.testing.assert_allclose(host(gpu.loo), cpu.loo, rtol=1e-6)
    assert np.isfinite(host(gpu.table)).all()


@pytest.mark.slow
@pytest.mark.parametrize("windows", [1, 4])
def test_every_barrier_is_needed(windows, rng, monkeypatch):
    """With fewer target columns than landmarks, and with more; twice as many threads as lanes, as on a GPU."""
    monkeypatch.setattr(_jit, "SIMULATED_TEAM", 32)
    _, gpu = both([test_core.case(rng, 20, 9, 2, windows)], first=3)

    def run():
        return np.concatenate([host(field).ravel() for field in gpu()])

    assert simulator.barriers_without_effect(run) == []
