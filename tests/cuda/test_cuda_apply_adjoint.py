"""The adjoint of the fused apply pass on the device: the same sums as on the CPU, within rounding."""

import numpy as np
import pytest
import simulator
from common import host, on_cuda
from test_cuda_apply import make

from pda_numba import apply_adjoint as module
from pda_numba.backward import Gradients

pytestmark = pytest.mark.cudasim

HELD = 5, 7  # places in the list of exact rows


@pytest.fixture(autouse=True)
def _short_ranges(monkeypatch):
    monkeypatch.setattr(module, "_LEAST_RANGE", 32)


def task(rng, n, d, e, rank, *, window, proj=0, dtype=np.float32, heads=1):
    """What `apply_adjoint` takes: some rows are exact, held out or lost, some outputs were clipped."""
    problem, (_, landmarks, table, ranks, window, basis, bounds) = make(
        rng, n, d, e, rank, window=window, proj=proj, dtype=dtype, heads=heads
    )
    model = landmarks, np.abs(table[:, :, : e + 1]), ranks, window, basis
    given = rng.standard_normal((heads, n, e)).astype(problem.element)
    slot = np.zeros((heads, n), np.int32)
    slot[:, : min(n, 6)] = [2, -1, 0, HELD[0] + 1, 0, HELD[1]][: min(n, 6)]
    return problem, model, [x / 2 for x in bounds], given, slot


def run(problem, model, bounds, given, slot, heads=None):
    device = problem.device
    up, heads = device.upload, np.arange(len(slot)) if heads is None else heads
    total = Gradients(*(device.zeros(x.shape, problem.element) for x in (problem.q, problem.k, problem.v)))
    model, bounds = [[up(x) for x in group] for group in (model, bounds)]
    task = problem, heads, model, bounds, up(given), up(slot), HELD, total
    *results, squares, _ = module.apply_adjoint(*task)
    return [host(x) for x in (*total, *results)] + [host(squares).sum(axis=1)]


def compare(problem, *rest, tolerance=3e-6):
    for expected, got in zip(run(problem, *rest), run(on_cuda(problem), *rest), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.max(np.abs(expected), initial=1e-30))


@pytest.mark.parametrize(("n", "rank", "window"), [(66, 5, -1), (34, 33, 0), (66, 5, 40)])
def test_near_field_and_low_rank(n, rank, window, rng):
    compare(*task(rng, n, 4, 3, rank, window=window))


@pytest.mark.parametrize(
    ("d", "e", "dtype"), [(66, 65, np.float32), (5, 20, np.float64), (8, 8, np.float16), (1, 1, np.float32)]
)
def test_sizes_and_dtypes(d, e, dtype, rng):
    compare(*task(rng, 10, d, e, 3, window=2, dtype=dtype), tolerance=1e-13 if dtype == np.float64 else 3e-6)


def test_projected(rng):
    compare(*task(rng, 34, 9, 5, 6, window=3, proj=4))


def test_heads_of_their_own(rng):
    problem, model, *rest = task(rng, 10, 4, 3, 10, window=3, heads=2)
    model[2][1], model[3][1] = 6, -1  # the rank, and no near field
    for x in model[:2]:
        x[1, 6:] = 0
    compare(problem, model, *rest)


def test_a_head_without_rank_owes_nothing(rng):
    problem, model, *rest = task(rng, 5, 3, 2, 4, window=1)
    model[2][0] = 0
    assert not any(np.any(x) for x in run(on_cuda(problem), model, *rest))


def test_no_positive_normaliser(rng):
    problem, model, *rest = task(rng, 9, 3, 2, 4, window=-1)
    model[1][:, :, 2] *= -1
    compare(problem, model, *rest)


def test_no_result_depends_on_the_order_of_threads_and_blocks(rng):
    problem, *rest = task(rng, 34, 3, 2, 4, window=1)
    problem = on_cuda(problem)
    forwards = run(problem, *rest)
    with simulator.backwards():
        backwards = run(problem, *rest)
    for a, b in zip(forwards, backwards, strict=True):
        np.testing.assert_array_equal(a, b)
