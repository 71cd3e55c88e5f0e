"""Draws of rows: distinct, uniform, with the inclusion probabilities they claim, and the same in any company."""

import math

import naive
import numpy as np
import pytest
from problems import flat
from scipy import stats

from pda_numba import draw

# Seeds are fixed: a test either always passes or always fails. LEVEL is how likely a perfect sampler would have failed.
LEVEL = 1e-4


def many(count, n, seed=0):
    """A problem whose only use is its number of heads and rows."""
    problem = flat(*(np.zeros((count, x, 1), np.float32) for x in (n, 1, 1)), seed=seed)
    return problem, np.arange(count)


@pytest.mark.parametrize("n", [1, 2, 63, 97, 1025])
def test_uniform_rows_are_distinct(n):
    problem, heads = many(5, n)
    rows = draw.uniform_rows(problem, heads, n)
    assert (np.sort(rows, axis=1) == np.arange(n)).all()


def test_ranges_of_the_permutation_fit_together():
    problem, heads = many(3, 500)
    whole = draw.uniform_rows(problem, heads, 300)
    parts = [draw.uniform_rows(problem, heads, 100, first=f) for f in (0, 100, 200)]
    assert (np.concatenate(parts, axis=1) == whole).all()


def test_uniform_rows_are_uniform():
    problem, heads = many(3000, 40 * 8)
    rows = draw.uniform_rows(problem, heads, 16)
    counts = np.bincount(rows.ravel(), minlength=320)
    # draws without replacement are a little less spread than chi-square, so the level is conservative
    assert stats.chisquare(counts).pvalue > LEVEL
    assert counts.std() > 0.5 * math.sqrt(counts.mean())  # and not evenly spread by construction either


def test_draws_depend_on_seed_head_and_stage_alone():
    problem, heads = many(6, 1000)
    rows = draw.uniform_rows(problem, heads, 50)
    assert (draw.uniform_rows(problem, heads[[4, 1]], 50) == rows[[4, 1]]).all()
    others = [
        draw.uniform_rows(many(6, 1000, seed=1)[0], heads, 50),
        draw.uniform_rows(problem, heads, 50, stage=draw.JUDGE),
        np.roll(rows, 1, axis=0),
    ]
    assert all((other != rows).mean() > 0.9 for other in others)


def test_streams_do_not_overlap():
    """A permutation takes four streams in a row, every other stage one."""
    permutations = (draw.ROWS, draw.PROJECTION, draw.AUDIT, draw.REACH, draw.JUDGE, draw.PANELS, draw.REFINE)
    single = (draw.LEVERAGE, draw.POOL, draw.PIVOT, draw.SKETCH, draw.COMBINE)
    taken = [s + i for s in permutations for i in range(4)] + list(single)
    assert len(taken) == len(set(taken))


WEIGHTS = {
    "even": np.ones(50),
    "spread": np.linspace(0.01, 1, 50) ** 3,
    "heavy": np.r_[100.0, 50.0, 10.0, np.full(47, 0.1)],
    "zeros": np.r_[np.zeros(10), np.linspace(0.1, 2, 30), np.zeros(10)],
    "huge range": 10.0 ** np.linspace(-12, 6, 50),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("count", [1, 7, 20])
def test_inclusion_probabilities(name, count):
    weight, trials = WEIGHTS[name], 4000
    problem, heads = many(trials, 50)
    place, pi, scale = draw.weighted_rows(problem, heads, np.tile(weight, (trials, 1)), count, stage=draw.LEVERAGE)
    true = naive.inclusion_probabilities(weight, count)
    np.testing.assert_allclose(np.minimum(1, scale[:, None] * weight), np.tile(true, (trials, 1)), atol=1e-9)
    # rounding may lose the last draw where the start of the walk falls within 1e-12 of a whole step
    assert (pi > 0).all()
    np.testing.assert_allclose(pi, true[place], atol=1e-9)
    assert all(len(set(row)) == count for row in place)
    included = np.bincount(place.ravel(), minlength=50)
    for i in range(50):
        if true[i] > 1 - 1e-9:
            assert included[i] == trials
        elif true[i] == 0:
            assert included[i] == 0
        else:
            # 50 rows, 15 cases, two sides
            assert stats.binomtest(int(included[i]), trials, true[i]).pvalue > LEVEL / 750


def test_fewer_positive_weights_than_draws():
    problem, heads = many(2, 8)
    weight = np.array([[0, 1, 0, 2, 0, 0, 5e-9, 0], [1, 1, 1, 1, 1, 1, 1, 0]], float)
    place, pi, _ = draw.weighted_rows(problem, heads, weight, 5, stage=draw.AUDIT)
    assert place[0].tolist() == [1, 3, 6, 0, 0]
    assert pi[0].tolist() == [1, 1, 1, 0, 0]  # slots that are left over: position 0 with probability 0
    np.testing.assert_allclose(pi[1], 5 / 7, rtol=1e-12)


def test_no_draws():
    problem, heads = many(1, 4)
    place, _, scale = draw.weighted_rows(problem, heads, np.ones((1, 4)), 0, stage=draw.AUDIT)
    assert place.shape == (1, 0)
    assert scale[0] == 0
