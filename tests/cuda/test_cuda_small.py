"""Small QR, SVD and triangular solves by a team, on the simulator, against LAPACK; every barrier is needed."""

import contextlib

import numpy as np
import pytest
import simulator
from scipy import linalg

from pda_numba import _jit
from pda_numba._jit import cuda_kernel
from pda_numba.kernels import groups
from pda_numba.kernels.simd import dot, lane_count, multiply_block, multiply_rows, padded
from pda_numba.kernels.small_qr import moment_places, moment_root, qr_places, solve_upper, triangularise
from pda_numba.kernels.small_svd import orthogonalise_rows
from pda_numba.kernels.team import barrier

pytestmark = pytest.mark.cudasim

ORDERS = [contextlib.nullcontext, simulator.backwards]
TEAM = 32


@pytest.fixture(autouse=True)
def _small_teams(monkeypatch):
    """Eight groups of four threads: the same meetings, sooner."""
    monkeypatch.setattr(_jit, "SIMULATED_TEAM", TEAM)
    monkeypatch.setattr(groups, "_LARGEST", 4)


@cuda_kernel(TEAM)
def _multiply_cuda(c, a, b, out):
    multiply_rows(c, 0, c.shape[0], a, 0, a.shape[1], 1, b, b.shape[0], False)
    barrier()
    multiply_block(c, 0, a, 0, a.shape[1], 1, b, b.shape[0], True)
    out[0, 0] = dot(a, 1, a, 2, a.shape[1])
    out[0, 1] = lane_count(b)


@cuda_kernel(TEAM)
def _triangularise_cuda(a, columns, work):
    triangularise(a, columns, work)


@cuda_kernel(TEAM)
def _orthogonalise_cuda(a, columns, squares):
    orthogonalise_rows(a, columns, squares)


@cuda_kernel(TEAM)
def _solve_cuda(x, root, right, width, work):
    moment_root(x, 1e-3, root, width, work)
    solve_upper(root, right)


def qr(a, columns, width):
    """`triangularise` through the panel layout and back."""
    n, total = a.shape
    panels = np.zeros((-(-total // width), padded(n), width))
    for c in range(total):
        panels[c // width, :n, c % width] = a[:, c]
    _triangularise_cuda.launch(1, 0, panels, columns, np.full(qr_places(padded(n), width, TEAM)[-1], np.nan))
    return np.stack([panels[c // width, :, c % width] for c in range(total)], axis=1)


def test_products(rng):
    """Any number of lanes."""
    a, b = rng.standard_normal((16, 5)), rng.standard_normal((5, 11))
    c, out = np.full((16, 11), np.nan), np.zeros((1, 2))
    _multiply_cuda.launch(1, 0, c, a, b, out)
    np.testing.assert_allclose(c[8:], a[8:] @ b, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(c[0], 2 * a[0] @ b, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(out[0], [a[1] @ a[2], 11], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [8, 16, 64])
@pytest.mark.parametrize(("n", "columns"), [(1, 1), (9, 7), (33, 17), (5, 12)])
def test_triangularise(n, columns, width, order, rng):
    x, t = rng.standard_normal((n, columns)), rng.standard_normal((n, 3))
    with order():
        a = qr(np.hstack([x, t]), columns, width)
    size = min(n, columns)
    r, right = a[:size, :columns], a[:size, columns:]
    assert (np.tril(a[:, :columns], -1) == 0).all()
    np.testing.assert_allclose(r.T @ r, x.T @ x, rtol=0, atol=1e-12)  # 100 eps of squared norms below 50
    np.testing.assert_allclose(r.T @ right, x.T @ t, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 12, 19])
def test_orthogonalise(size, order, rng):
    r, y = np.triu(rng.standard_normal((size, size))), rng.standard_normal((size, 4))
    r[size // 2] *= 1e-20  # a row that is as good as nothing
    a, squares = np.hstack([r, y]), np.full(size, np.nan)
    with order():
        _orthogonalise_cuda.launch(1, 0, a, size, squares)
    rows = a[:, :size]
    singular = linalg.svd(r, compute_uv=False)
    np.testing.assert_allclose(np.sort(squares)[::-1], singular**2, rtol=0, atol=1e-11 * singular[0] ** 2)
    np.testing.assert_allclose(rows.T @ rows, r.T @ r, rtol=0, atol=1e-13 * singular[0] ** 2)
    np.testing.assert_allclose(rows.T @ a[:, size:], r.T @ y, rtol=0, atol=1e-12 * singular[0])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("n", "dim", "width"), [(5, 3, 8), (30, 17, 8), (4, 9, 16), (0, 4, 8)])
def test_moment_root_and_solve(n, dim, width, order, rng):
    x, right = rng.standard_normal((n, dim)), rng.standard_normal((dim, 40))
    root, solved = np.full((dim, dim), np.nan), right.copy()
    with order():
        _solve_cuda.launch(1, 0, x, root, solved, width, np.full(moment_places(n, dim, width, TEAM)[1], np.nan))
    moment = x.T @ x
    true = moment + (1e-3 * np.trace(moment) / dim if n else 1.0) * np.eye(dim)
    np.testing.assert_allclose(root.T @ root, true, rtol=0, atol=1e-12 * np.trace(true))
    assert (np.tril(root, -1) == 0).all()
    np.testing.assert_allclose(root @ solved, right, rtol=0, atol=1e-11)  # condition below 300


@pytest.mark.slow
def test_every_barrier_is_needed(rng):
    x, square = rng.standard_normal((17, 12)), np.triu(rng.standard_normal((10, 10)))
    right = rng.standard_normal((12, 5))

    def run():
        reduced = qr(x, 10, 8)
        a, squares = np.hstack([square, np.eye(10)]), np.full(10, np.nan)
        _orthogonalise_cuda.launch(1, 0, a, 10, squares)
        root, solved = np.full((12, 12), np.nan), right.copy()
        _solve_cuda.launch(1, 0, x, root, solved, 8, np.full(moment_places(17, 12, 8, TEAM)[1], np.nan))
        return np.concatenate([part.ravel() for part in (reduced, a, squares, root, solved)])

    # What ends `solve_upper` is for its caller, who here reads nothing more.
    left = simulator.barriers_without_effect(run)
    assert len(left) == 1
    assert left[0][0].endswith("small_qr.py")
