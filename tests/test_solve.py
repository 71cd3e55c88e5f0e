"""The fit at one rank: which rows it takes, how they are weighted, and how it chooses among near fields."""

import dataclasses

import naive
import numpy as np
import pytest
from problems import flat, heads, make

from pda_numba import solve
from pda_numba.info import Clock
from pda_numba.options import WINDOWS, Fields, options
from pda_numba.results import HeadResult

WINDOWS_OR_NONE = Fields((0, *WINDOWS), (0,), False)


def run(problem, rank, fields=None, **choices):
    n, m, d, _ = problem.shape
    given = {"rank": rank, "tol": None, "window": "auto", "near": "auto", "proj_dim": None, "method": "pda", **choices}
    wished = options(**given, n=n, m=m, d=d)
    wished = wished if fields is None else dataclasses.replace(wished, near=fields)
    every = heads(problem)
    results = {h: HeadResult() for h in every}
    sample = solve.uniform_part(problem, every, None, rank, results, Clock())
    return solve.solve(problem, every, sample, wished, rank, results, Clock(), slope=False)


def stacked(kind, n, count):
    return [np.stack(x) for x in zip(*(make(kind, n, seed=s) for s in range(count)), strict=True)]


@pytest.mark.parametrize("kind", ["decaying", "outliers"])
def test_sampled_rows_are_exact_and_distinct(kind):
    q, k, v = stacked(kind, 900, 2)
    done = run(flat(q, k, v), 32)
    for h in range(2):
        rows = done.sample.rows[h]
        assert len(set(rows)) == len(rows) == 4 * 32
        exact = naive.attention(q[h], k[h], v[h])[rows]
        np.testing.assert_allclose(done.sample.out[h], exact, rtol=0, atol=1e-4)  # float32, logits up to 100


def test_outlier_queries_are_among_the_rows():
    """Leverage finds the rows that a uniform draw would miss: nearly all of those that are 5 to 30 times as long."""
    q, k, v = stacked("outliers", 2000, 6)
    done = run(flat(q, k, v), 32, near="none")
    found = total = 0
    for h in range(6):
        length = np.linalg.norm(q[h], axis=1)
        extreme = np.flatnonzero(length > 3 * np.quantile(length, 0.995))
        found += np.isin(extreme, done.sample.rows[h]).sum()
        total += len(extreme)
    assert total >= 15
    assert found >= 0.6 * total  # a uniform draw of as many rows would find 6 %


def test_rows_likely_to_be_drawn_weigh_less():
    """The weighted sums over the sampled rows are, over many heads, those over all rows."""
    count, n, rank = 60, 900, 32
    q, k, v = (np.tile(x, (count, 1, 1)) for x in make("decaying", n, seed=2))
    done = run(flat(q, k, v), rank)
    weight = done.sample.weights(n) ** 2
    exact = naive.attention(q[0], k[0], v[0])
    for y in (np.ones(n), np.square(exact).sum(axis=1), np.square(q[0]).sum(axis=1)):
        estimate = (weight * y[done.sample.rows]).sum(axis=1) * n / weight.shape[1]
        # The inclusion probability of a uniform row under the leverage design is estimated, hence 15 %; without any
        # weights the last of the three sums would be off by a half.
        assert estimate.mean() == pytest.approx(y.sum(), rel=0.15)


def band(rng, n=1500, d=24):
    """Queries that attend to their neighbours, on top of a smooth part."""
    angle = np.arange(n)[:, None] * np.geomspace(0.7, 0.02, d // 2 - 2)
    place = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    q, k = (np.concatenate([1.5 * place, 0.3 * rng.standard_normal((n, 4))], axis=1) for _ in range(2))
    return tuple(x.astype(np.float32) for x in (3 * q, k, rng.standard_normal((n, 8))))


def test_window_is_chosen_where_it_helps(rng):
    q, k, v = band(rng)
    assert run(flat(q, k, v), 32, WINDOWS_OR_NONE).window[0] > 0
    assert run(flat(*make("decaying", 1500, seed=1)), 32, WINDOWS_OR_NONE).window[0] == -1


def test_no_window_between_different_tokens(rng):
    q, k, v = band(rng)
    assert run(flat(q, k[:1400], v[:1400]), 32).window[0] == -1


@pytest.mark.parametrize("window", [0, 5, 64])
def test_given_window(window, rng):
    done = run(flat(*band(rng)), 32, window=window)
    assert done.window[0] == (window if window else -1)


def test_leave_one_out_error_is_honest():
    """It foretells the error of the rows that the fit has not seen, within a factor of two."""
    for kind in ("decaying", "gaussian", "peaked"):
        q, k, v = stacked(kind, 1500, 4)
        problem = flat(q, k, v)
        done = run(problem, 32, window=0)
        for h in range(4):
            landmarks = done.tiles[h, : done.found[h]].astype(float)
            z = done.table[h, : done.found[h], :9].astype(float)
            out, _ = naive.apply(q[h], k[h], v[h], landmarks, z, -1, problem.scale)
            rest = np.setdiff1d(np.arange(1500), done.sample.rows[h])
            true = naive.relative(out[rest], naive.attention(q[h], k[h], v[h])[rest])
            assert true / 2 < done.loo[h] < 2 * true, kind
