"""Projections: the right scale, the fast transform, orthogonality, and the best pair from the data."""

import importlib

import naive
import numpy as np
import pytest
from problems import flat

import pda_numba

room = importlib.import_module("pda_numba.project")  # the package exports the function of that name

KINDS = ("srht", "gaussian", "orthogonal")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "count"), [(1, 1), (8, 3), (13, 5), (16, 16)])
def test_inner_products_are_kept_on_average(kind, dim, count):
    """The mean of P P^T over seeds is the identity: on the diagonal the scale, off it the independence of the signs."""
    seeds = 600
    total, squares = np.zeros((dim, dim)), np.zeros((dim, dim))
    for seed in range(seeds):
        p = pda_numba.projection_matrix(dim, count, kind=kind, seed=seed, dtype=np.float64)
        total += p @ p.T
        squares += (p @ p.T) ** 2
    mean = total / seeds
    error = np.sqrt(np.maximum(squares / seeds - mean**2, 0) / seeds)
    # five standard errors in each of at most 256 entries (6e-7 each), and rounding where nothing varies
    assert (np.abs(mean - np.eye(dim)) <= 5 * error + 1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_project_multiplies_by_the_matrix(kind, dtype, rng):
    x = rng.standard_normal((2, 3, 300, 20)).astype(dtype)
    out = pda_numba.project(x, 7, kind=kind, seed=5)
    p = pda_numba.projection_matrix(20, 7, kind=kind, seed=5, dtype=np.float64)
    assert out.shape == (2, 3, 300, 7)
    assert out.dtype == dtype
    # sums of 20 to 32 terms of size 1
    np.testing.assert_allclose(out, x.astype(float) @ p, rtol=0, atol=100 * np.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_project_widens(kind, name, rng):
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if name == "bfloat16" else np.dtype(name)
    x = rng.standard_normal((50, 12)).astype(dtype)
    out = pda_numba.project(x, 4, kind=kind)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, pda_numba.project(x.astype(np.float32), 4, kind=kind), rtol=0, atol=1e-6)  # 8 eps


@pytest.mark.parametrize("size", [1, 2, 4, 8, 64, 256])
def test_fast_transform_is_the_hadamard_matrix(size, rng):
    """With every coordinate kept, x P = (signs x) H / sqrt(size), in some order of the columns."""
    p = pda_numba.projection_matrix(size, size, kind="srht", seed=3, dtype=np.float64) * np.sqrt(size)
    h = naive.hadamard(size)
    assert set(np.unique(p)) <= {-1.0, 1.0}
    signs = _signs(p, h)
    restored = p * signs[:, None]
    order = [int(np.flatnonzero((restored == h[:, [j]]).all(axis=0))[0]) for j in range(size)]
    assert sorted(order) == list(range(size))
    x = rng.standard_normal((10, size))
    fast = pda_numba.project(x, size, kind="srht", seed=3)
    np.testing.assert_allclose(fast[:, order], (x * signs) @ h / np.sqrt(size), rtol=0, atol=1e-13)


def _signs(p, h):
    """The row signs that make p's columns those of h: the column for h's constant one is the signs themselves."""
    for c in range(p.shape[1]):
        columns = {tuple(x) for x in (p * p[:, [c]]).T}
        if columns == {tuple(x) for x in h.T}:
            return p[:, c]
    raise AssertionError("no signs turn the columns into those of a Hadamard matrix")


@pytest.mark.parametrize(("kind", "dim"), [("orthogonal", 7), ("orthogonal", 40), ("srht", 8), ("srht", 64)])
def test_orthogonal_columns(kind, dim):
    """P^T P = (D/m) I; for srht where D is a power of two, since padding is cut off otherwise."""
    for count in {1, dim // 2, dim}:
        p = pda_numba.projection_matrix(dim, count, kind=kind, seed=1, dtype=np.float64)
        np.testing.assert_allclose(p.T @ p, dim / count * np.eye(count), rtol=0, atol=1e-12 * dim)


def test_orthogonal_matrices_have_no_preferred_sign():
    """Without the sign correction the first entry of every matrix would have the sign of LAPACK's convention."""
    first = [pda_numba.projection_matrix(4, 2, kind="orthogonal", seed=s, dtype=np.float64)[0, 0] for s in range(400)]
    # 200 expected, standard deviation 10: a fair sign fails five deviations with probability 6e-7
    assert abs(np.sum(np.array(first) > 0) - 200) < 50


@pytest.mark.parametrize("kind", KINDS)
def test_seeds(kind):
    one, same, other = (pda_numba.projection_matrix(16, 8, kind=kind, seed=s) for s in (1, 1, 2))
    assert one.tobytes() == same.tobytes()
    assert np.abs(one - other).max() > 0.1
    assert one.dtype == np.float32


@pytest.mark.parametrize("count", [1, 4, 9, 12])
def test_the_pair_is_the_best_factor(count, rng):
    """q P_Q P_K^T (k - mean)^T has the error of the best rank-m approximation (Eckart, Young, Mirsky)."""
    spread = 1.0 / (1 + np.arange(12))
    q = rng.standard_normal((300, 12)) * spread + 0.5
    k = rng.standard_normal((200, 12)) @ rng.standard_normal((12, 12)) + 3
    p_q, p_k = pda_numba.projection_pair(q, k, count)
    centred = k - k.mean(axis=0)
    product = q @ centred.T
    error = np.linalg.norm(q @ p_q @ (centred @ p_k).T - product)
    best = np.sqrt((np.linalg.svd(product, compute_uv=False)[count:] ** 2).sum())
    assert error <= best + 1e-10 * np.linalg.norm(product)  # condition of the two roots, below 1e3 each


def test_the_pair_is_balanced(rng):
    q, k = rng.standard_normal((300, 8)), rng.standard_normal((200, 8)) * np.linspace(0.1, 5, 8)
    p_q, p_k = pda_numba.projection_pair(q, k, 5)
    of_queries, of_keys = q @ p_q, (k - k.mean(axis=0)) @ p_k
    np.testing.assert_allclose(of_queries.T @ of_queries, of_keys.T @ of_keys, atol=1e-9 * np.linalg.norm(q) ** 2)


def test_pair_shapes(rng):
    q, k = rng.standard_normal((2, 6, 20, 8)), rng.standard_normal((2, 3, 30, 8))
    p_q, p_k = pda_numba.projection_pair(q, k, 5)
    assert p_q.shape == p_k.shape == (2, 6, 8, 5)
    alone = pda_numba.projection_pair(q[1, 5], k[1, 2], 5)
    assert alone[0].shape == (8, 5)
    # every row is in the sample, only in another order
    product = p_q[1, 5] @ p_k[1, 5].T
    np.testing.assert_allclose(alone[0] @ alone[1].T, product, rtol=0, atol=1e-10 * np.abs(product).max())


@pytest.mark.parametrize("what", ["zero queries", "equal keys", "few keys", "equal columns"])
def test_pair_of_degenerate_data_is_finite(what, rng):
    q, k = rng.standard_normal((50, 6)), rng.standard_normal((40, 6))
    if what == "zero queries":
        q[:] = 0
    elif what == "equal keys":
        k[:] = k[0]
    elif what == "few keys":
        k = k[:2]
    else:
        k[:, 3:] = k[:, :3]
    centred = k - k.mean(axis=0)
    for count in (2, 6):
        p_q, p_k = pda_numba.projection_pair(q, k, count)
        assert np.isfinite(p_q).all()
        assert np.isfinite(p_k).all()
    assert np.abs(q @ p_q @ (centred @ p_k).T - q @ centred.T).max() < 1e-9  # nothing is lost with all coordinates


def test_basis_of_a_head_keeps_the_common_shift(rng):
    """The projected logits of the data-driven pair are the best rank-m part plus q . mean(k), exactly."""
    q, k = rng.standard_normal((2, 60, 8)), 2 + rng.standard_normal((2, 70, 8))
    problem = flat(q, k, k)
    basis, _, project_landmarks = room.head_bases(problem, np.arange(2), 8, "pca")
    landmarks = k[:, :5].repeat(3, axis=0)  # three sets for each head
    projected = project_landmarks(landmarks, 3)
    for h in range(2):
        for copy in range(3):
            scores = q[h] @ basis[h, :9].T @ projected[3 * h + copy].T
            np.testing.assert_allclose(scores, q[h] @ landmarks[3 * h + copy].T, rtol=0, atol=1e-9)  # full rank: all


@pytest.mark.parametrize("kind", ["pca", *KINDS])
def test_projected_problem(kind, rng):
    q, k, v = rng.standard_normal((4, 50, 8)), rng.standard_normal((2, 60, 8)), rng.standard_normal((2, 60, 3))
    problem = flat(q, k, v)
    small = room.projected_problem(problem, np.array([1, 2]), 8, kind)
    assert small.scale == problem.scale
    for i, h in enumerate((1, 2)):
        assert (small.v[i] == v[h // 2]).all()
        scores = small.q[i] @ small.k[i].T
        if kind != "gaussian":  # no coordinate lost: logits up to a shift of each row
            full = q[h] @ k[h // 2].T
            shift = (scores - full).mean(axis=1, keepdims=True)
            np.testing.assert_allclose(scores, full + shift, rtol=0, atol=1e-9)
        else:
            assert np.isfinite(scores).all()
