"""SVD by one-sided Jacobi rotations, against LAPACK."""

import numba
import numpy as np
import pytest
from scipy import linalg

from pda_numba.kernels.small_svd import orthogonalise_rows


@numba.njit(error_model="numpy")
def _orthogonalise(a, columns, squares):
    orthogonalise_rows(a, columns, squares)


def svd(r, y):
    a, squares = np.hstack([r, y]), np.empty(len(r))
    _orthogonalise(a, r.shape[1], squares)
    return a[:, : r.shape[1]], a[:, r.shape[1] :], squares


def check(r, y):
    rows, right, squares = svd(r, y)
    largest = np.linalg.norm(r, 2) ** 2
    singular = linalg.svd(r, compute_uv=False, lapack_driver="gesvd")
    # The rows are orthogonal to a cosine of 1e-12, which changes sigma^2 by at most that share of the largest.
    np.testing.assert_allclose(np.sort(squares)[::-1], singular**2, rtol=0, atol=1e-11 * max(largest, 1e-300))
    np.testing.assert_allclose((rows**2).sum(axis=1), squares, rtol=0, atol=1e-12 * max(largest, 1e-300))
    gram = rows @ rows.T
    off = gram - np.diag(np.diag(gram))
    length = np.sqrt(np.diag(gram))
    negligible = length**2 <= 1e-31 * largest
    bound = 1e-11 * np.outer(length, length) + 1e-14 * largest * (negligible[:, None] | negligible)
    assert (np.abs(off) <= bound).all()
    # Rotations from the left: what does not depend on the rotation is R^T R and R^T Y.
    size = max(np.linalg.norm(r, 2), 1e-300)
    np.testing.assert_allclose(rows.T @ rows, r.T @ r, rtol=0, atol=1e-13 * size**2)
    np.testing.assert_allclose(rows.T @ right, r.T @ y, rtol=0, atol=1e-13 * size * max(np.linalg.norm(y, 2), 1e-300))
    return squares


@pytest.mark.parametrize("size", [1, 2, 3, 16, 63, 128])
def test_random_triangle(size, rng):
    check(np.triu(rng.standard_normal((size, size))), rng.standard_normal((size, 4)))


def test_graded_triangle_keeps_small_singular_values(rng):
    """One-sided Jacobi finds small singular values of a graded matrix to relative accuracy, down to the cut-off."""
    grades = 10.0 ** -np.linspace(0, 12, 30)
    r = np.triu(rng.standard_normal((30, 30))) * 0.1 + np.eye(30)
    squares = check(grades[:, None] * r, rng.standard_normal((30, 2)))
    exact = linalg.svd(grades[:, None].astype(float) * r, compute_uv=False, lapack_driver="gesvd") ** 2
    large = exact > 1e-16 * exact[0]  # LAPACK itself is accurate to eps sigma_1 only: sigma above 1e-8 sigma_1
    np.testing.assert_allclose(np.sort(squares)[::-1][large], exact[large], rtol=1e-6)


def test_repeated_singular_values(rng):
    q, _ = np.linalg.qr(rng.standard_normal((20, 20)))
    squares = check(3.0 * q, rng.standard_normal((20, 3)))
    np.testing.assert_allclose(squares, 9.0, rtol=1e-12)  # 20 eps


def test_rank_deficient(rng):
    r = np.linalg.qr(rng.standard_normal((40, 6)) @ rng.standard_normal((6, 24)), mode="r")
    squares = np.sort(check(r, rng.standard_normal((24, 3))))[::-1]
    assert (squares[6:] <= 1e-28 * squares[0]).all()  # (100 eps)^2


@pytest.mark.parametrize("value", [0.0, 2.0])
def test_constant(value, rng):
    check(np.full((7, 7), value), rng.standard_normal((7, 2)))


def test_zero_rows_among_others(rng):
    r = np.triu(rng.standard_normal((12, 12)))
    r[::3] = 0
    check(r, rng.standard_normal((12, 2)))
