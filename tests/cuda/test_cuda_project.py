"""Projections on the simulator: the CPU's numbers, whatever the order of the threads; every barrier is needed."""

import contextlib
import importlib

import numpy as np
import pytest
import simulator
from common import host, on_cuda
from problems import flat, heads

from pda_numba import _jit
from pda_numba.device import Cuda
from pda_numba.kernels import groups, small_qr
from pda_numba.pair import balanced_pairs

room = importlib.import_module("pda_numba.project")  # the package exports the function of that name

pytestmark = pytest.mark.cudasim

ORDERS = [contextlib.nullcontext, simulator.backwards]


@pytest.fixture(autouse=True)
def _small_teams(monkeypatch):
    """Eight groups of four threads, and narrow panels: the same meetings, sooner."""
    monkeypatch.setattr(_jit, "SIMULATED_TEAM", 32)
    monkeypatch.setattr(groups, "_LARGEST", 4)
    monkeypatch.setattr(small_qr, "_CUDA_LANES", 16)


def problem_of(rng, n, m, dim, dtype=np.float64):
    q, k = rng.standard_normal((4, n, dim)), 1 + rng.standard_normal((2, m, dim))
    return flat(*(x.astype(dtype) for x in (q, k, k[..., :3])), seed=5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "dim", "count"), [(1, 1, 1), (3, 5, 2), (2, 64, 9), (40, 100, 33)])
@pytest.mark.parametrize("element", [np.float32, np.float64])
def test_srht(rows, dim, count, element, order, rng):
    """The same signs, coordinates and sums: the same bits."""
    x = rng.standard_normal((rows, dim)).astype(element)
    device = Cuda()
    with order():
        found = room.srht(device.upload(x), count, 3, element, device)
    np.testing.assert_array_equal(host(found), room.srht(x, count, 3, element))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("n", "m", "dim", "count"), [(20, 30, 6, 4), (9, 5, 8, 8), (40, 33, 17, 3)])
def test_balanced_pairs(n, m, dim, count, order, rng):
    """Singular vectors have a sign each; what the pair gives has not."""
    problem = problem_of(rng, n, m, dim)
    true = balanced_pairs(problem, heads(problem)[1:3], count)
    with order():
        found = balanced_pairs(on_cuda(problem), heads(problem)[1:3], count)
    p_q, p_k, mean = (host(x) for x in found)
    np.testing.assert_allclose(mean, true[2], rtol=1e-13)  # sums in the same order
    for h in range(2):
        product, own = p_q[h].T @ p_k[h], true[0][h].T @ true[1][h]
        np.testing.assert_allclose(product, own, rtol=0, atol=1e-8 * np.abs(own).max())  # condition below 1e6


@pytest.mark.parametrize("kind", ["pca", *room.RANDOM_KINDS])
def test_bases_and_projected_problems(kind, rng):
    problem = problem_of(rng, 12, 10, 8, np.float32)
    gpu, which = on_cuda(problem), heads(problem)[:3]
    tiles = rng.standard_normal((6, 8, 8)).astype(np.float32)  # two for each head
    basis, _, project_landmarks = room.head_bases(problem, which, 5, kind)
    on_gpu, _, project_on_gpu = room.head_bases(gpu, which, 5, kind)
    assert host(on_gpu).shape == basis.shape
    own, found = project_landmarks(tiles, 2), host(project_on_gpu(gpu.device.upload(tiles), 2))
    for t in range(6):  # logits, which do not depend on signs; single precision
        count = own.shape[2]
        a, b = (np.asarray(x[t // 2, :count].T) @ y[t].T for x, y in ((host(on_gpu), found), (basis, own)))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
    small, small_gpu = room.projected_problem(problem, which, 5, kind), room.projected_problem(gpu, which, 5, kind)
    np.testing.assert_array_equal(host(small_gpu.v), small.v)
    for h in range(3):
        a, b = (host(p.q)[h] @ host(p.k)[h].T for p in (small_gpu, small))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_every_barrier_is_needed(rng):
    problem = on_cuda(problem_of(rng, 20, 30, 9))
    problem.device.pieces = 3  # blocks that take one row after the other
    which = heads(problem)[:1]

    def run():
        p_q, p_k, mean = (host(x).ravel() for x in balanced_pairs(problem, which, 5))
        small = room.projected_problem(problem, which, 5, "gaussian")
        fast = room.projected_problem(problem, which, 5, "srht")
        return np.concatenate([p_q, p_k, mean, *(host(p.q).ravel() for p in (small, fast))])

    left = simulator.barriers_without_effect(run)  # those of the QR are tested on their own
    assert not [place for place in left if place[0].endswith(("project.py", "pair.py"))]
