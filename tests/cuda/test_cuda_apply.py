"""The fused apply pass on the device, against the CPU driver."""

import numpy as np
import problems
import pytest
import simulator
from common import host, on_cuda

from pda_numba.apply import apply
from pda_numba.core import LEVERAGE_COLUMNS
from pda_numba.kernels.simd import padded
from pda_numba.plan import PANEL

pytestmark = pytest.mark.cudasim


def make(rng, n, d, e, rank, *, window, proj=0, dtype=np.float32, heads=2):
    """A problem and what `apply` takes, as NumPy arrays."""
    q, k, v = (rng.standard_normal((heads, n, c)).astype(dtype) for c in (d, d, e))
    problem = problems.flat(q, k, v)
    element = problem.element
    starts = np.tile(np.arange(0, n, PANEL), (heads, 1))
    landmarks = np.zeros((heads, padded(rank), proj or d), element)
    landmarks[:, :rank] = rng.standard_normal((heads, rank, proj or d))
    table = np.zeros((heads, padded(rank), padded(e + 1 + LEVERAGE_COLUMNS)), element)
    table[:, :rank] = rng.standard_normal((heads, rank, table.shape[2]))
    table[:, :, e] = np.abs(table[:, :, e])
    basis = np.zeros((heads, padded(proj), d), element)
    basis[:, :proj] = rng.standard_normal((heads, proj, d))
    bounds = v.min(axis=1).astype(element), v.max(axis=1).astype(element)
    ranks = np.full(heads, rank)
    return problem, (starts, landmarks, table, ranks, np.full(heads, window), basis, bounds)


def both(problem, arrays, *, with_out=True):
    """(out, leverage, norm) of both devices."""
    heads = problems.heads(problem)
    shape = len(heads), problem.shape[0], problem.shape[3]
    device = on_cuda(problem)
    up = device.device.upload
    *plain, bounds = arrays
    given = [*(up(x) for x in plain), tuple(up(x) for x in bounds)]
    results = []
    for where, task, make_out in (
        (problem, arrays, lambda: np.zeros(shape, problem.element)),
        (device, given, lambda: device.device.zeros(shape, problem.element)),
    ):
        out = make_out() if with_out else None
        leverage, norm = apply(where, heads, *task, out=out)
        results.append([host(x) for x in ((out, leverage, norm) if with_out else (leverage,))])
    return results


def compare(results, n, tolerance=3e-4):
    """Sums with large cancelling coefficients in float32: a few hundred units of rounding."""
    for expected, got in zip(*results, strict=True):
        if expected.ndim == 2:
            expected, got = expected[:, :n], got[:, :n]
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * np.median(np.abs(expected)))


@pytest.mark.parametrize("window", [-1, 0, 5, 40])
def test_near_field_and_low_rank(window, rng):
    problem, arrays = make(rng, 97, 9, 6, 35, window=window)
    compare(both(problem, arrays), 97)


@pytest.mark.parametrize(
    ("d", "e", "dtype"), [(70, 66, np.float32), (5, 20, np.float64), (8, 8, np.float16), (1, 1, np.float32)]
)
def test_sizes_and_dtypes(d, e, dtype, rng):
    problem, arrays = make(rng, 65, d, e, 3, window=2, dtype=dtype, heads=1)
    compare(both(problem, arrays), 65, 1e-10 if dtype == np.float64 else 3e-4)


def test_projected(rng):
    problem, arrays = make(rng, 70, 9, 5, 20, window=3, proj=4)
    compare(both(problem, arrays), 70)


def test_leverage_alone_and_idle_heads(rng):
    problem, arrays = make(rng, 97, 6, 0 + 4, 12, window=3)
    starts, landmarks, table, ranks, window, basis, bounds = arrays
    short = np.ascontiguousarray(table[:, :, 4:])
    short = np.concatenate(
        [short, np.zeros((2, len(short[0]), padded(17) - short.shape[2] % padded(17)), np.float32)], 2
    )
    short = np.ascontiguousarray(short[:, :, : padded(17)])
    ranks[1] = 0
    compare(both(problem, (starts[:, ::-1].copy(), landmarks, short, ranks, window, basis, bounds), with_out=False), 97)


def test_every_barrier_is_needed(rng):
    problem, arrays = make(rng, 70, 68, 5, 40, window=3, heads=1)
    device = on_cuda(problem)
    up = device.device.upload
    *plain, bounds = arrays
    given = [*(up(x) for x in plain), tuple(up(x) for x in bounds)]

    def run():
        out = device.device.zeros((1, 70, 5), np.float32)
        leverage, _ = apply(device, np.arange(1), *given, out=out)
        return np.concatenate([host(out).ravel(), host(leverage)[0, :70]])

    assert not simulator.barriers_without_effect(run)
