"""QR by blocked reflections, against LAPACK."""

import numba
import numpy as np
import pytest
from scipy import linalg

from pda_numba.kernels.simd import lanes, padded
from pda_numba.kernels.small_qr import qr_places, triangularise

WIDTH = lanes(np.float64)


@numba.njit(error_model="numpy")
def _triangularise(a, columns, work):
    triangularise(a, columns, work)


def qr(a, columns):
    """The first rows of `triangularise`, through the panel layout and back."""
    n, total = a.shape
    panels = np.zeros((-(-total // WIDTH), padded(n), WIDTH))
    for c in range(total):
        panels[c // WIDTH, :n, c % WIDTH] = a[:, c]
    _triangularise(panels, columns, np.full(qr_places(padded(n), WIDTH, 1)[-1], np.nan))
    return np.stack([panels[c // WIDTH, :, c % WIDTH] for c in range(total)], axis=1)


def check(x, t):
    """R^T R = X^T X, R^T Q^T T = X^T T and the norm of T is kept: what makes it a QR whatever the signs."""
    n, columns = x.shape
    a = qr(np.hstack([x, t]), columns)
    size = min(n, columns)
    r, right = a[:size, :columns], a[:, columns:]
    assert (np.tril(a[:, :columns], -1) == 0).all()
    scale = np.linalg.norm(x, 2) if x.size else 0.0
    # Householder QR is backward stable: |X - QR| is of order eps |X|, times a modest power of the size; 100 eps covers
    # it at these sizes (LAPACK shows 5 to 20 eps here).
    bound = 100 * np.finfo(float).eps * max(scale, 1e-300)
    assert np.abs(r.T @ r - x.T @ x).max() <= bound * max(scale, 1e-300)
    top = right[:size]
    assert np.abs(r.T @ top - x.T @ t).max(initial=0) <= bound * max(np.linalg.norm(t, 2), 1e-300)
    np.testing.assert_allclose(np.linalg.norm(right, axis=0), np.linalg.norm(t, axis=0), rtol=1e-13)
    return r


@pytest.mark.parametrize(("n", "columns"), [(1, 1), (2, 1), (8, 8), (9, 7), (63, 17), (97, 64), (200, 33), (500, 128)])
def test_against_lapack(n, columns, rng):
    x, t = rng.standard_normal((n, columns)), rng.standard_normal((n, 9))
    r = check(x, t)
    reference = linalg.qr(x, mode="r")[0][: min(n, columns)]
    sign = np.sign(np.diag(r)) * np.sign(np.diag(reference))
    # both are exact for a perturbation of 1e-14; the condition of a Gaussian matrix of these shapes is below 1e4
    np.testing.assert_allclose(r * sign[:, None], reference, rtol=0, atol=1e-10 * np.abs(reference).max())


@pytest.mark.parametrize(("n", "columns"), [(5, 12), (16, 40), (1, 9)])
def test_more_columns_than_rows(n, columns, rng):
    check(rng.standard_normal((n, columns)), rng.standard_normal((n, 3)))


def test_graded_columns(rng):
    """Columns over 24 orders of magnitude: each column of R is accurate relative to its own size."""
    x = rng.standard_normal((80, 24)) * 10.0 ** -np.arange(24)
    r = check(x, rng.standard_normal((80, 2)))
    np.testing.assert_allclose(np.linalg.norm(r, axis=0), np.linalg.norm(x, axis=0), rtol=1e-13)


def test_rank_deficient(rng):
    x = rng.standard_normal((60, 5)) @ rng.standard_normal((5, 20))
    r = check(x, rng.standard_normal((60, 2)))
    diagonal = np.sort(np.abs(np.diag(r)))[::-1]
    assert diagonal[5] <= 1e-13 * diagonal[0]  # rounding level: 60 eps


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_matrix(value, rng):
    check(np.full((40, 10), value), rng.standard_normal((40, 3)))


def test_zero_columns_among_others(rng):
    x = rng.standard_normal((50, 20))
    x[:, ::3] = 0
    check(x, rng.standard_normal((50, 3)))


def test_already_triangular(rng):
    x = np.triu(rng.standard_normal((30, 12)))
    a = qr(np.hstack([x, np.ones((30, 1))]), 12)
    assert (a[:30, :12] == x).all()  # every reflection is the identity
    assert (a[:30, 12] == 1).all()


@pytest.mark.parametrize("scale", [1e-120, 1e120])
def test_very_small_and_very_large(scale, rng):
    x = rng.standard_normal((40, 10))
    r = qr(x * scale, 10)[:10]
    np.testing.assert_allclose(r.T @ (r / scale), scale * x.T @ x, rtol=0, atol=scale * 1e-12 * np.linalg.norm(x) ** 2)
