"""The certificate's parts: reach, the held-out rows and their probabilities, the limit, and its coverage."""

import math
from types import SimpleNamespace

import naive
import numpy as np
import pytest
from problems import flat
from scipy import stats

import pda_numba
from pda_numba import certify, draw, holdout
from pda_numba.reach import reach
from pda_numba.results import COLUMNS, ERROR, LIMIT, ROW_ERROR, ROW_SHARE

LEVEL = 1e-4  # how likely a perfect sampler would have failed a test when its seed was fixed


def many(count, n, d=1):
    return flat(*(np.zeros((count, x, d), np.float32) for x in (n, 1, 1)))


# --- reach ---


def test_reach_is_the_squared_length_in_units_of_the_spread(rng):
    heads, n, d = 200, 90, 5
    q = rng.standard_normal((n, d)) * np.linspace(0.2, 4, d) + 1
    q[7] *= 20
    problem = flat(np.tile(q, (heads, 1, 1)), np.zeros((heads, 2, d)), np.zeros((heads, 2, 1)))
    found = reach(problem, np.arange(heads)).mean(axis=0)
    moment = q.T @ q
    moment += 1e-3 * np.trace(moment) / d * np.eye(d)
    true = n / d * np.einsum("id,de,ie->i", q, np.linalg.inv(moment), q)
    # each estimate is chi-square with 16 degrees of freedom; the mean of 200 deviates by 0.025: five of those
    np.testing.assert_allclose(found, true, rtol=0.125)
    assert found.argmax() == 7


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e15])
def test_reach_of_extreme_queries_is_a_number(value, rng):
    q = (value * rng.standard_normal((1, 50, 4))).astype(np.float32)
    found = reach(flat(q, q, q), np.arange(1))
    assert np.isfinite(found).all()
    assert (found >= 0).all()


# --- held-out rows ---


def hold_out(count, n, first=10, edges=0, sizes=(20, 12, 6), seed=0):
    """Held-out rows of `count` heads that share one leverage and one reach; rows 0 .. first of the permutation are
    exact."""
    rng = np.random.default_rng(seed)
    leverage, far = rng.random(n) ** 6, rng.random(n) ** 2
    problem, heads = many(count, n), np.arange(count)
    state = np.zeros((count, n), np.int32)
    np.put_along_axis(state, draw.uniform_rows(problem, heads, first), holdout.EXACT, axis=1)
    spread = [np.tile(x, (count, 1)) for x in (leverage, far)]
    every, work = np.ones(count, np.int64), np.full((count, n), np.nan)
    held = holdout.hold_out(problem, heads, first, state, *spread, edges * every, every, work, sizes)
    return held, state, leverage, far


def audits(*args, **options):
    """The same head by head: rows, which of them are uniform, pi, and which rows of all are exact."""
    held, state, leverage, far = hold_out(*args, **options)
    listed = [
        SimpleNamespace(rows=held.rows[h, :n], uniform=held.chance[h, :n] != 0, pi=held.pi[h, :n], head=h)
        for h, n in enumerate(held.count)
    ]
    return listed, (state & holdout.EXACT) != 0, leverage, far


def test_audit_rows_are_new_and_distinct():
    drawn, exact, _, _ = audits(50, 300, edges=3)
    for audit, taken in zip(drawn, exact, strict=True):
        assert (np.diff(audit.rows) > 0).all()
        assert not taken[audit.rows].any()
        assert audit.uniform.sum() == 20
        assert ((audit.pi > 0) & (audit.pi <= 1)).all()
        ends = np.r_[0:3, 297:300]
        assert np.isin(ends[~taken[ends]], audit.rows).all()
        assert (audit.pi[np.isin(audit.rows, ends)] == 1).all()


def test_audit_probabilities_are_right():
    """Horvitz-Thompson: the mean over many draws of sum y / pi is the sum of y over the rows that are not exact."""
    drawn, exact, leverage, reach = audits(3000, 200, edges=2)
    rng = np.random.default_rng(5)
    for y in (np.ones(200), leverage, reach, rng.random(200) ** 8, np.eye(200)[50], np.eye(200)[0]):
        estimate = np.array([(y[a.rows] / a.pi).sum() for a in drawn])
        difference = estimate - np.array([y[~e].sum() for e in exact])
        error = difference.std() / math.sqrt(len(difference))
        assert abs(difference.mean()) <= stats.norm.isf(LEVEL / 12) * error + 1e-12  # six two-sided comparisons


def test_uniform_rows_of_an_audit_are_uniform():
    drawn, _, _, _ = audits(2000, 100, first=0)
    counts = np.bincount(np.concatenate([a.rows[a.uniform] for a in drawn]), minlength=100)
    assert stats.chisquare(counts).pvalue > LEVEL


def test_audit_of_few_rows_takes_all_that_are_left():
    drawn, exact, _, _ = audits(3, 25, first=10)
    for audit, taken in zip(drawn, exact, strict=True):
        assert (audit.rows == np.flatnonzero(~taken)).all()
        np.testing.assert_allclose(audit.pi, 1.0)


# --- the limit ---


@pytest.mark.parametrize("shape", [1.0, 1.5, 4.0, 30.0, 1000.0])
def test_gamma_limit(shape):
    mean, variance = 3.0, 9.0 / shape
    true = stats.gamma.ppf(0.95, shape, scale=mean / shape)
    assert certify._gamma_limit(mean, variance) == pytest.approx(true, rel=0.01)  # the approximation's own error
    assert certify._gamma_limit(2.0, 0.0) == 2.0


@pytest.mark.parametrize("count", [1, 64, 128, 1000])
def test_share_of_rows(count):
    """If less than that share of the rows were within the worst of `count`, seeing so few bad ones has 5 %."""
    share = certify.share_of_rows(count)
    assert share**count == pytest.approx(0.05, rel=1e-9)
    assert certify.share_of_rows(0) == 0.0


def judge(held, state, y, norm, left_out=((), (), ())):
    """The report on outputs with squared row errors y and exact squared norms `norm`, the same ones in every head.

    Rows are (sqrt(norm), 0), and (sqrt(norm), sqrt(y)) in the output. `left_out` are squared errors, leverages and
    reaches of fitted rows when each is left out.
    """
    count, n = state.shape
    true = np.stack([np.sqrt(norm), np.zeros(n)], axis=1)
    out = np.stack([np.sqrt(norm), np.sqrt(y)], axis=1)
    report = np.full((count, COLUMNS), np.nan)
    error, leverage, far = (np.tile(np.asarray(x, float), (count, 1)) for x in left_out)
    fitted = certify.Fitted(np.tile(np.arange(error.shape[1]), (count, 1)), error, leverage)
    truth = true[np.clip(held.rows, 0, n - 1)]  # slots that are not used hold whatever the memory held
    heads, every = np.zeros(count, np.int64), np.ones(count, np.int64)
    norms = np.tile(norm + y, (count, 1))
    certify.judge(many(1, n), heads, held, truth, out[None], norms, state, fitted, far, every, report)
    return report


ERRORS = {
    "even": lambda rng, n, leverage: np.ones(n),
    "exponential": lambda rng, n, leverage: rng.exponential(size=n),
    "log-normal": lambda rng, n, leverage: rng.lognormal(sigma=1, size=n),
    "like the leverage": lambda rng, n, leverage: leverage * rng.exponential(size=n),
    "few large rows": lambda rng, n, leverage: 0.01 + 10.0 * (leverage > np.quantile(leverage, 0.98)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_limit_covers_the_error_that_is_left(name):
    """The estimate is right on average; the 95 % limit holds in at least 93 % of draws."""
    count, n = 600, 2000
    held, state, leverage, _ = hold_out(count, n, first=0, sizes=(128, 48, 16), seed=3)
    rng = np.random.default_rng(11)
    y = 1e-3 * ERRORS[name](rng, n, leverage)
    norm = 1 + rng.random(n)
    covered, ratio = 0, []
    for h, row in enumerate(judge(held, state, y, norm)):
        left = y.sum() - y[held.rows[h, : held.count[h]]].sum()
        true = math.sqrt(left / norm.sum())
        covered += row[LIMIT] >= true
        ratio.append(row[ERROR] ** 2 / true**2)
    spread = np.std(ratio) / math.sqrt(count)
    # four standard errors (6e-5), and the share of the norm, which is estimated too
    assert abs(np.mean(ratio) - 1) <= 4 * spread + 0.02
    # If the limit holds with probability 0.95, fewer successes than this have probability 1e-4 (binomial).
    assert covered >= naive.fewest_successes(count, 0.95, 1e-4)


def test_limit_allows_for_a_row_like_the_worst_one():
    """One pseudo-row is added, as large as the largest expanded error, held out or left out of the fit."""
    held, state, _, _ = hold_out(1, 2000, first=0, sizes=(128, 48, 16))
    y, norm = np.full(2000, 1e-4), np.ones(2000)
    count = held.count[0]
    pi = held.pi[0, :count]
    expand = (1 - pi) / pi
    used = expand * y[:count]
    total = used.sum()
    # With |out|^2 = |o|^2 + y the deviations from the ratio estimate are y (1 + error^2), which is y to within 1e-4.
    variance = (expand / pi * y[:count] ** 2).sum()
    far = (5.0,), (1e-9,), (1e-9,)  # a left-out row that only the uniform design can draw
    left_out = 5.0 * (1 - held.uniform_pi[0]) / held.uniform_pi[0]
    for given, pseudo in ((((), (), ()), used.max()), (far, left_out)):
        limit = judge(held, state, y, norm, given)[0, LIMIT]
        mean, spread = total + pseudo, variance + pseudo**2
        quantile = stats.gamma.ppf(0.95, mean**2 / spread, scale=spread / mean)
        # 1 % for the approximation of the quantile, 1 % for the estimate of |o|^2 = 2000
        assert limit**2 * 2000 == pytest.approx(quantile, rel=0.02)


def test_nothing_left_is_no_error():
    held, state, _, _ = hold_out(1, 25, first=0, sizes=(128, 48, 16))
    (row,) = judge(held, state, np.full(25, 0.3), np.ones(25))
    assert row[ERROR] == row[LIMIT] == 0.0
    assert row[ROW_ERROR] > 0  # what the held-out rows were off by before they were replaced


def test_zero_output():
    held, state, _, _ = hold_out(1, 100, first=0)
    (row,) = judge(held, state, np.zeros(100), np.zeros(100))
    assert row[ERROR] == row[LIMIT] == row[ROW_ERROR] == 0.0


def test_heads_that_are_not_live_are_left_alone():
    problem, heads = many(2, 50), np.arange(2)
    state, live = np.zeros((2, 50), np.int32), np.array([0, 1])
    weight, work = np.ones((2, 50)), np.empty((2, 50))
    held = holdout.hold_out(problem, heads, 0, state, weight, weight, np.zeros(2, np.int64), live, work, (5, 4, 3))
    assert held.count[0] == 0 < held.count[1]
    assert not state[0].any()


# --- the public judge ---


def noisy(rng, level, shape=(3, 800)):
    q, k, v = (rng.standard_normal((*shape, d)) for d in (8, 8, 5))
    exact = naive.attention_heads(q, k, v)
    return q, k, v, exact + level * rng.standard_normal(exact.shape), exact


@pytest.mark.parametrize("level", [1e-2, 1e-5])
def test_estimate_error_finds_the_error(level, rng):
    q, k, v, out, exact = noisy(rng, level)
    estimate = pda_numba.estimate_error(out, q, k, v)
    for h in range(3):
        true = naive.relative(out[h], exact[h])
        # some 160 rows of five independent entries: the norm is known to about 1/sqrt(2 x 800) = 2.5 %
        assert estimate.error[h] == pytest.approx(true, rel=0.15)
        assert true <= estimate.error_limit[h] <= 2 * true
    assert estimate.error.shape == estimate.row_share.shape == (3,)
    assert (estimate.n_rows >= 128).all()
    assert "95 % limit" in str(estimate)


def test_estimate_of_exact_rows_is_rounding(rng):
    q, k, v, _, exact = noisy(rng, 0)
    estimate = pda_numba.estimate_error(exact, q, k, v)
    assert (estimate.error < 1e-13).all()  # two float64 results, logits up to 10
    assert (estimate.error_limit < 1e-12).all()


def test_estimate_with_every_row(rng):
    q, k, v, out, exact = noisy(rng, 1e-3, (100,))
    estimate = pda_numba.estimate_error(out, q, k, v, n_rows=5000)
    assert estimate.n_rows == 100
    assert estimate.error == pytest.approx(naive.relative(out, exact), rel=1e-9)
    worst = naive.row_errors(out, exact).max()
    assert estimate.row_error == pytest.approx(worst, rel=1e-9)


def test_estimate_sees_a_scale(rng):
    q, k, v, _, exact = noisy(rng, 0)
    estimate = pda_numba.estimate_error(exact, q, k, v, scale=0.9)
    assert (estimate.error > 0.05).all()


def test_row_statement_holds():
    """In at least 95 % of draws the stated share of rows is within the worst held-out row."""
    rng = np.random.default_rng(2)
    n, trials = 1000, 300
    y = 1e-4 * rng.lognormal(sigma=2, size=n)
    held, state, _, _ = hold_out(trials, n, first=0, sizes=(128, 48, 16))
    kept = 0
    for row in judge(held, state, y, np.ones(n)):
        within = np.sqrt(y) <= row[ROW_ERROR] * (1 + 1e-3)  # the typical row has length 1, estimated to within 1e-3
        kept += within.mean() >= row[ROW_SHARE]
    # binomial: fewer than this with probability 1e-4 if each holds with 95 %
    assert kept >= naive.fewest_successes(trials, 0.95, 1e-4)
