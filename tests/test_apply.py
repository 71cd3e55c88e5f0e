"""Features and the fused apply, against dense float64 with a given table; the leverage; the window's edges."""

import naive
import numpy as np
import pytest
from numba import njit
from problems import flat, heads

from pda_numba.apply import apply, load_probes
from pda_numba.core import LEVERAGE_COLUMNS, fit
from pda_numba.kernels.simd import lanes, padded
from pda_numba.plan import PANEL
from pda_numba.products import features
from pda_numba.rows import rows


def tiles(landmarks):
    """Landmarks (heads, R, D) as the panel bodies read them."""
    out = np.zeros((len(landmarks), padded(landmarks.shape[1]), landmarks.shape[2]), landmarks.dtype)
    out[:, : landmarks.shape[1]] = landmarks
    return out


def tables(z, g):
    out = np.zeros((len(z), padded(z.shape[1]), padded(z.shape[2] + LEVERAGE_COLUMNS)), z.dtype)
    out[:, : z.shape[1], : z.shape[2]] = z
    out[:, : z.shape[1], z.shape[2] : z.shape[2] + LEVERAGE_COLUMNS] = g
    return out


def bounds(v):
    return v.min(axis=1), v.max(axis=1)


def all_starts(problem, count):
    panels = -(-problem.shape[0] // PANEL)
    return np.tile(np.arange(panels) * PANEL, (count, 1))


def no_basis(problem, count):
    return np.empty((count, 0, problem.shape[2]), problem.element)


def run(problem, landmarks, z, g, rank, window, basis=None):
    count = len(landmarks)
    out = np.full((count, problem.shape[0], problem.shape[3]), np.nan, problem.element)
    basis = no_basis(problem, count) if basis is None else tiles(basis)
    v = problem.v
    leverage, norm = apply(
        problem,
        heads(problem),
        all_starts(problem, count),
        tiles(landmarks),
        tables(z, g),
        np.array(rank),
        np.array(window),
        basis,
        bounds(v),
        out,
    )
    n = problem.shape[0]
    return out, leverage[:, :n], norm[:, :n]


def random_case(rng, n, m, d, e, r, dtype):
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in ((2, n, d), (2, m, d), (2, m, e)))
    landmarks = rng.standard_normal((2, r, d)).astype(dtype)
    # positive normalisers, as a fit has them; the values' part is arbitrary
    z = np.concatenate([rng.standard_normal((2, r, e)), 0.5 + rng.random((2, r, 1))], axis=2).astype(dtype)
    return q, k, v, landmarks, z, rng.standard_normal((2, r, LEVERAGE_COLUMNS)).astype(dtype)


CASES = [  # n, m, d, e, R, windows of the two heads
    (1, 1, 1, 1, 1, (-1, 0)),
    (63, 63, 16, 16, 8, (-1, 5)),
    (97, 97, 59, 7, 33, (32, -1)),
    (97, 200, 8, 20, 130, (0, 128)),
    (200, 97, 8, 3, 17, (40, 300)),
    (500, 500, 5, 9, 12, (3, 127)),
    (1025, 1025, 4, 2, 7, (128, 129)),
    (500, 500, 16, 24, 12, (31, 64)),  # keys and values can be read where they lie
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "m", "d", "e", "r", "window"), CASES)
def test_against_dense(n, m, d, e, r, window, dtype, rng):
    q, k, v, landmarks, z, g = random_case(rng, n, m, d, e, r, dtype)
    problem = flat(q, k, v)
    out, leverage, norm = run(problem, landmarks, z, g, (r, max(1, r - 3)), window)
    for h, rank in enumerate((r, max(1, r - 3))):
        near = (q[h], k[h], v[h], landmarks[h, :rank], z[h, :rank].astype(float), window[h], problem.scale)
        true, share = naive.apply(*near)
        # Outputs are clipped to the values, so of size 3 at most; the sums behind them have up to 400 terms.
        bound = 100 * np.finfo(dtype).eps
        np.testing.assert_allclose(out[h], true, rtol=0, atol=bound)
        np.testing.assert_allclose(norm[h], (true**2).sum(axis=1), rtol=0, atol=10 * bound * e)
        true_leverage = np.square(share @ g[h, :rank].astype(float)).sum(axis=1)
        size = np.square(np.abs(share) @ np.abs(g[h, :rank].astype(float))).sum(axis=1)
        assert (np.abs(leverage[h] - true_leverage) <= bound * size).all()


def test_leverage_without_output_is_the_same(rng):
    q, k, v, landmarks, z, g = random_case(rng, 97, 97, 8, 5, 20, np.float32)
    problem = flat(q, k, v)
    for window in ((-1, -1), (7, 20)):
        _, full, _ = run(problem, landmarks, z, g, (20, 15), window)
        short = np.zeros((2, padded(20), padded(1 + LEVERAGE_COLUMNS)), np.float32)
        short[:, :, : 1 + LEVERAGE_COLUMNS] = tables(z, g)[:, :, 5 : 6 + LEVERAGE_COLUMNS]
        given = (tiles(landmarks), short, np.array([20, 15]), np.array(window), no_basis(problem, 2), None)
        alone, norm = apply(problem, heads(problem), all_starts(problem, 2), *given)
        np.testing.assert_allclose(alone[:, :97], full, rtol=1e-5)  # the same sums in another order
        assert (norm == 0).all()


def test_some_panels_only(rng):
    q, k, v, landmarks, z, g = random_case(rng, 300, 300, 6, 4, 10, np.float32)
    problem = flat(q, k, v)
    whole, leverage, _ = run(problem, landmarks, z, g, (10, 10), (-1, 9))
    starts = np.array([[2, 3], [0, 1]]) * PANEL
    out = np.full((2, 300, 4), np.nan, np.float32)
    given = (tiles(landmarks), tables(z, g), np.array([10, 10]), np.array([-1, 9]), no_basis(problem, 2))
    part, _ = apply(problem, heads(problem), starts, *given, bounds(problem.v), out)
    for h in range(2):
        rows_done = (starts[h][:, None] + np.arange(PANEL)).ravel()
        assert (out[h, rows_done] == whole[h, rows_done]).all()
        assert (part[h] == leverage[h, rows_done]).all()
        assert np.isnan(np.delete(out[h], rows_done, axis=0)).all()


def test_projected_scores(rng):
    """With a basis the landmarks live in the projected space, and the near field stays in the original one."""
    q, k, v = (rng.standard_normal((2, 90, d)) for d in (12, 12, 3))
    basis = rng.standard_normal((2, 5, 12)) / 3
    landmarks = rng.standard_normal((2, 9, 5))
    z = np.concatenate([rng.standard_normal((2, 9, 3)), 0.5 + rng.random((2, 9, 1))], axis=2)
    problem = flat(q, k, v)
    out, _, _ = run(problem, landmarks, z, np.zeros((2, 9, LEVERAGE_COLUMNS)), (9, 9), (-1, 6), basis)
    for h, window in enumerate((-1, 6)):
        lifted = landmarks[h] @ basis[h]  # (q B^T) . l = q . (l B)
        true, _ = naive.apply(q[h], k[h], v[h], lifted, z[h], window, problem.scale)
        np.testing.assert_allclose(out[h], true, rtol=0, atol=1e-12)  # 100 terms, size 3


def test_output_is_clipped_to_the_values(rng):
    q, k, v, landmarks, z, g = random_case(rng, 97, 97, 6, 4, 10, np.float32)
    problem = flat(q, k, v)
    out, _, _ = run(problem, landmarks, z * np.float32(50), g, (10, 10), (-1, 4))
    for h in range(2):
        assert (out[h] >= v[h].min(axis=0)).all()
        assert (out[h] <= v[h].max(axis=0)).all()


def test_normaliser_that_is_not_positive_is_reported(rng):
    q, k, v, landmarks, z, g = random_case(rng, 97, 97, 6, 4, 10, np.float32)
    z[0, :, -1] = -0.1
    z[1, :, -1] = np.nan  # what a fit to features that are all zero leaves behind
    problem = flat(q, k, v)
    _, leverage, _ = run(problem, landmarks, z, g, (10, 10), (-1, -1))
    assert np.isposinf(leverage).all()


def test_huge_scores(rng):
    q, k, v, landmarks, z, g = random_case(rng, 97, 97, 6, 4, 10, np.float32)
    problem = flat(1000 * q, 10 * k, v)
    out, _, _ = run(problem, 10 * landmarks, z, g, (10, 10), (-1, 4))
    assert np.isfinite(out).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_features(dtype, rng):
    q, k, v = (rng.standard_normal((2, n, d)).astype(dtype) for n, d in ((120, 9), (150, 9), (150, 2)))
    landmarks = rng.standard_normal((2, 37, 9)).astype(dtype)
    problem = flat(q, k, v)
    which = np.stack([rng.choice(120, 50, replace=False) for _ in range(2)])
    lse = rows(problem, heads(problem), which)[1]
    out = features(problem, heads(problem), which, lse, tiles(landmarks), np.array([37, 20]), no_basis(problem, 2))
    assert out.shape == (2, padded(37), 50)
    for h, rank in enumerate((37, 20)):
        true_lse = naive.log_sum_exp(naive.logits(q[h][which[h]], k[h]))
        true = naive.features(q[h], landmarks[h, :rank], which[h], true_lse, problem.scale)
        np.testing.assert_allclose(out[h, :rank], true, rtol=60 * np.finfo(dtype).eps)  # scores of size 10, six steps
        assert (out[h, rank:] == 0).all()


def test_leverage_sketch_has_the_right_mean(rng):
    """Over many heads with the same fit, |x G|^2 averages x (X^T W^2 X + lambda)^-1 x."""
    count, n, r = 400, 64, 6
    x = rng.random((r, n)) + 0.1
    target = np.concatenate([rng.standard_normal((n, 2)), np.ones((n, 1))], axis=1)
    problem = flat(*(np.zeros((count, s, d)) for s, d in ((n, 3), (n, 3), (n, 2))))
    spread = np.zeros((count, padded(r), n))
    spread[:, :r] = x
    done = fit(
        problem,
        np.arange(count),
        spread,
        np.tile(target[:, None], (count, 1, 1, 1)),
        np.tile(target[:, :2], (count, 1, 1)),
        np.ones((count, n)),
        np.full(count, r),
    )
    g = done.table[:, 0, :r, 3 : 3 + LEVERAGE_COLUMNS]
    estimate = np.square(np.einsum("rn,hrg->hng", x, g)).sum(axis=2).mean(axis=0)
    ridge = done.ridge[0, 0] * np.linalg.norm(x, 2) ** 2
    true = np.einsum("rn,rs,sn->n", x, np.linalg.inv(x @ x.T + ridge * np.eye(r)), x)
    # one estimate is chi-square with 16 degrees of freedom: deviation sqrt(2/16), of the mean 0.018; five of those
    np.testing.assert_allclose(estimate, true, rtol=0.09)


@njit
def _loaded(probes, row, count, names):
    load_probes(probes, row, count, names)


@pytest.mark.parametrize("element", [np.float32, np.float64])
def test_names_of_probes_stay_in_their_place(element):
    """Lanes are those of the arithmetic, though the names are of 32 bits."""
    width = lanes(element)
    count = width * 2 // 3
    room = np.full(3 * width + 200, -7, np.int32)
    names = room[: 3 * width].reshape(3, width)
    probes = np.arange(40 * 4, dtype=np.int32).reshape(40, 4)
    _loaded(probes, 5, count, names)
    np.testing.assert_array_equal(names[:, :count], probes[5 : 5 + count, :3].T)
    assert (names[:, count:] == -2).all()
    assert (room[3 * width :] == -7).all()
