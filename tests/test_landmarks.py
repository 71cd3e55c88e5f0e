"""Landmarks: the pool follows the mass, pivoting finds an independent set, the Lloyd step averages."""

import naive
import numpy as np
import pytest
from problems import flat, heads, make
from scipy import stats

from pda_numba import draw, landmarks
from pda_numba.kernels.panel import TILE
from pda_numba.rows import rows

LEVEL = 1e-4  # how likely a perfect sampler would have failed a test when its seed was fixed


def raw_draws(q, k, which, draws, *, apart=-1):
    """Every draw of the pool before duplicates are removed, (draws + rows,), and the problem."""
    problem = flat(q, k, np.zeros((len(k), 1), q.dtype))
    _, lse, masses = rows(problem, heads(problem), which, masses=True)
    pool = np.empty((1, draws + which.shape[1]), np.int64)
    scratch = np.empty((4, masses.shape[2])), np.empty((4, 3, TILE))
    task = which, lse, masses, apart, draws, problem.factor, problem.seed
    landmarks._pool_cpu(*problem.arrays(heads(problem)), *task, *scratch, pool)
    return pool[0]


def chi_square(observed, probability):
    """p value after merging the cells that expect fewer than five."""
    expected = probability * observed.sum()
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] == 0:
        assert observed[-1] == 0
        observed, expected = observed[:-1], expected[:-1]
    return stats.chisquare(observed, expected).pvalue


@pytest.mark.parametrize("keys", [50, 700])
def test_pool_draws_follow_the_mass(keys, rng):
    q, k = 1.5 * rng.standard_normal((30, 6)), rng.standard_normal((keys, 6))
    which = np.array([[3, 11, 29]])
    draws = 30_000
    pool = raw_draws(q, k, which, draws)
    a = naive.softmax(naive.logits(q, k))
    for r, row in enumerate(which[0]):
        assert chi_square(np.bincount(pool[r:draws:3], minlength=keys), a[row]) > LEVEL / 3
        # the row's largest key in its heaviest tile
        tile = np.add.reduceat(a[row], np.arange(0, keys, TILE)).argmax() * TILE
        assert pool[draws + r] == tile + a[row, tile : tile + TILE].argmax()


def test_pool_leaves_out_tiles_near_the_row(rng):
    n, apart = 900, 40
    q, k = rng.standard_normal((n, 6)), rng.standard_normal((n, 6))
    which = np.array([[0, 450, 899]])
    draws = 30_000
    pool = raw_draws(q, k, which, draws, apart=apart)
    a = naive.softmax(naive.logits(q, k))
    for r, row in enumerate(which[0]):
        # a tile is near if any of its keys is
        first = np.arange(0, n, TILE)
        near = (first <= row + apart) & (first + TILE > row - apart)
        far = ~np.repeat(near, TILE)[:n]
        true = np.where(far, a[row], 0)
        assert chi_square(np.bincount(pool[r:draws:3], minlength=n), true / true.sum()) > LEVEL / 3
        assert far[pool[draws + r]]


def test_pool_without_far_keys_still_draws(rng):
    """A window over everything leaves no far mass: any key will do, and none is out of range."""
    q, k = rng.standard_normal((90, 4)), rng.standard_normal((90, 4))
    pool = raw_draws(q, k, np.array([[0, 50]]), 500, apart=89)
    assert ((pool >= 0) & (pool < 90)).all()


def test_pool_is_sorted_and_distinct(rng):
    q, k = rng.standard_normal((2, 60, 5)), rng.standard_normal((2, 80, 5))
    problem = flat(q, k, np.zeros((2, 80, 1)))
    which = draw.uniform_rows(problem, heads(problem), 10)
    _, lse, masses = rows(problem, heads(problem), which, masses=True)
    pool, size = landmarks.draw_pool(problem, heads(problem), which, lse, masses, 64)
    for row, count in zip(pool, size, strict=True):
        assert (np.diff(row[:count]) > 0).all()
        assert (row[count:] == 0).all()
        assert 0 < count <= 74


def choose(columns, count, dtype=np.float64):
    """Pivots of `columns (heads, pool, n)`, every head with random numbers of its own; and how many."""
    total, pool = columns.shape[:2]
    problem = flat(*(np.zeros((total, 1, 1), dtype) for _ in range(3)))
    index = np.tile(np.arange(pool), (total, 1))
    return landmarks.choose(problem, np.arange(total), columns.astype(dtype), index, np.full(total, pool), count)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rank_deficient_pool(dtype, rng):
    """Forty columns in a space of dimension seven: seven landmarks, and they span it."""
    columns = rng.random((1, 40, 7)) @ rng.random((7, 25))
    chosen, found = choose(columns, 20, dtype)
    # Rounding of the columns may leave one or two more directions above the cut-off, at eps times their size.
    assert 7 <= found[0] <= 9
    picked = columns[0, chosen[0, : found[0]]]
    assert len(set(chosen[0, : found[0]])) == found[0]
    left = columns[0] - columns[0] @ np.linalg.pinv(picked, rcond=1e-4) @ picked
    assert np.abs(left).max() <= 1e-3 * np.abs(columns).max()  # eps of float32 times the condition, below 1e4


def test_duplicates_are_never_chosen_twice(rng):
    distinct = rng.random((12, 30))
    copies = rng.integers(12, size=60)
    copies[:12] = np.arange(12)
    chosen, found = choose(distinct[copies][None], 30, np.float32)
    kinds = copies[chosen[0, : found[0]]]
    assert found[0] == len(set(kinds)) == 12


def test_zero_columns_are_never_chosen(rng):
    columns = rng.random((1, 20, 15))
    columns[0, ::2] = 0
    chosen, found = choose(columns, 20)
    assert found[0] == 10
    assert (chosen[0, :10] % 2 == 1).all()
    assert choose(np.zeros((1, 5, 4)), 3)[1][0] == 0


def test_full_rank_pool_is_used_up(rng):
    chosen, found = choose(rng.random((1, 9, 30)), 20)
    assert found[0] == 9
    assert sorted(chosen[0, :9]) == list(range(9))


def test_first_and_second_pivot_follow_the_residual(rng):
    """First with probability ~ |column|^2 / sum of the column, then ~ the squared residual."""
    columns = rng.random((6, 8)) * np.array([1, 2, 0.5, 1, 3, 1.0])[:, None]
    trials = 6000
    chosen, _ = choose(np.tile(columns, (trials, 1, 1)), 2)
    b = columns / np.sqrt(columns.sum(axis=1, keepdims=True))
    square = (b**2).sum(axis=1)
    assert chi_square(np.bincount(chosen[:, 0], minlength=6), square / square.sum()) > LEVEL
    for first in range(6):
        unit = b[first] / np.linalg.norm(b[first])
        residual = ((b - np.outer(b @ unit, unit)) ** 2).sum(axis=1)
        residual[first] = 0
        second = chosen[chosen[:, 0] == first, 1]
        assert chi_square(np.bincount(second, minlength=6), residual / residual.sum()) > LEVEL / 6


def test_effective_rank_of_duplicated_keys():
    """Forty different keys can give at most forty landmarks, wherever the pool comes from."""
    q, k, v = make("duplicated", 800, seed=3)
    problem = flat(q, k, v)
    which = draw.uniform_rows(problem, heads(problem), 200)
    _, lse, masses = rows(problem, heads(problem), which, masses=True)
    pool, size = landmarks.draw_pool(problem, heads(problem), which, lse, masses, 512)
    a = naive.softmax(naive.logits(q, k))
    columns = a[which[0]][:, pool[0]].T[None]
    keys, found = landmarks.choose(problem, heads(problem), columns.astype(np.float32), pool, size, 64)
    assert 20 < found[0] <= 40
    assert len(np.unique(k[keys[0, : found[0]]], axis=0)) == found[0]


@pytest.mark.parametrize("count", [1000, 37])
def test_lloyd_step(count, rng):
    k = rng.standard_normal((2, 120, 5))
    problem = flat(rng.standard_normal((2, 10, 5)), k, np.zeros((2, 120, 1)))
    keys = np.stack([rng.choice(120, 11, replace=False) for _ in range(2)])
    found = np.array([11, 6])
    centres, mean = landmarks.refine(problem, heads(problem), keys, found, count)
    which = draw.uniform_rows(problem, heads(problem), min(count, 120), stage=draw.REFINE, size=120)
    for h in range(2):
        start = k[h][keys[h, : found[h]]]
        sample = k[h][which[h]]
        nearest = ((sample[:, None] - start) ** 2).sum(axis=2).argmin(axis=1)
        for c in range(found[h]):
            true = (start[c] + sample[nearest == c].sum(axis=0)) / (1 + (nearest == c).sum())
            np.testing.assert_allclose(centres[h, c], true, rtol=0, atol=1e-14)  # ten additions of size 1
        np.testing.assert_allclose(mean[h], sample.mean(axis=0), rtol=0, atol=1e-14)


def test_gather_widens_and_pads(rng):
    k = rng.standard_normal((2, 30, 4)).astype(np.float16)
    problem = flat(k, k, k[:, :, :1])
    which = np.array([[5, 0, 29], [1, 1, 2]])
    out = landmarks.gather(problem, heads(problem), which, np.array([3, 2]))
    assert out.dtype == np.float32
    assert out.shape == (2, 8, 4)
    assert (out[0, :3] == k[0][which[0]].astype(np.float32)).all()
    assert (out[1, :2] == k[1][which[1, :2]].astype(np.float32)).all()
    assert (out[0, 3:] == 0).all()
    assert (out[1, 2:] == 0).all()
