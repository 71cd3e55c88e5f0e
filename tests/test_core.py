"""The ridge fit and its leave-one-out error, against refits without the row."""

import naive
import numpy as np
import pytest
from problems import flat

from pda_numba import core, leave_one_out
from pda_numba.kernels.simd import padded

LEVELS = 10.0 ** np.arange(-16, 1)


def case(rng, n, r, e, windows=1, noise=0.05):
    """Features, targets (n, windows, e + 1), exact outputs and weights that look like a fit of attention rows."""
    x = np.exp(rng.standard_normal((n, 3)) @ rng.standard_normal((3, r)) * 0.7)
    x /= x.sum(axis=1, keepdims=True)
    near = 0.3 * rng.random((n, windows, 1)) * np.arange(windows)[None, :, None] / max(windows, 1)
    share = np.concatenate([rng.standard_normal((r, e)), np.ones((r, 1))], axis=1)
    far = x @ share + noise * rng.standard_normal((n, e + 1)) * np.r_[np.ones(e), 0.1]
    exact = far[:, :e] / far[:, e:]
    target = np.concatenate([exact, np.ones((n, 1))], axis=1)[:, None] * (1 - near)
    return x, target, exact, 0.5 + rng.random(n)


def run(cases, first=0, dtype=np.float64):
    """The stage on some cases of the same size."""
    x, target, exact, weight = (np.stack(a) for a in zip(*cases, strict=True))
    count, n, r = x.shape
    features = np.zeros((count, padded(r), n))
    features[:, :r] = x.transpose(0, 2, 1)
    problem = flat(*(np.zeros((count, 2, d), dtype) for d in (1, 1, exact.shape[2])))
    rank = np.full(count, r)
    return core.fit(problem, np.arange(count), features, target, exact, weight, rank, first=first)


def left_out_loss(x, target, exact, weight, level, first=0):
    errors = np.square(naive.left_out_outputs(x, target, exact, weight, level) - exact).sum(axis=1)
    errors = np.minimum(errors, leave_one_out._LARGEST_ERROR**2 * np.square(exact).sum() / len(exact))
    return (weight**2 * errors)[first:].sum(), errors


@pytest.mark.parametrize(("n", "r", "e"), [(20, 3, 1), (40, 6, 2), (63, 17, 8), (30, 1, 3)])
def test_coefficients_are_those_of_the_ridge_problem(n, r, e, rng):
    for windows in (1, 3):
        x, target, exact, weight = case(rng, n, r, e, windows)
        done = run([(x, target, exact, weight)])
        for w in range(windows):
            z = naive.ridge(x, target[:, w], weight, done.ridge[0, w])
            table = done.table[0, w]
            # Compared through the fitted values: Z itself is only as accurate as the condition of X allows.
            fitted = x @ table[:r, : e + 1]
            np.testing.assert_allclose(fitted, x @ z, rtol=0, atol=1e-9)  # values of size 1, condition below 1e6
            assert (table[r:] == 0).all()


@pytest.mark.parametrize("first", [0, 11])
@pytest.mark.parametrize(("n", "r", "e"), [(30, 4, 2), (45, 9, 5)])
def test_leave_one_out_is_exact(n, r, e, first, rng):
    """Against as many refits as there are rows, at the level that was chosen."""
    x, target, exact, weight = case(rng, n, r, e, windows=2)
    done = run([(x, target, exact, weight)], first=first)
    scale = (weight**2 * np.square(exact).sum(axis=1))[first:].sum()
    for w in range(2):
        loss, errors = left_out_loss(x, target[:, w], exact, weight, done.ridge[0, w], first)
        assert done.loo[0, w] == pytest.approx(np.sqrt(loss / scale), rel=1e-6)  # condition below 1e6, 1e4 eps times it
        np.testing.assert_allclose(done.row_error[0, w], errors, rtol=1e-5, atol=1e-9)


def test_the_best_level_is_chosen(rng):
    """Few value columns, so that the candidates are compared on the outputs themselves."""
    chosen = []
    for noise in (0.3, 0.03):
        x, target, exact, weight = case(rng, 24, 12, 2, noise=noise)
        done = run([(x, target, exact, weight)])
        losses = [left_out_loss(x, target[:, 0], exact, weight, level)[0] for level in LEVELS]
        own = left_out_loss(x, target[:, 0], exact, weight, done.ridge[0, 0])[0]
        assert own <= min(losses) * (1 + 1e-6)  # equal but for the rounding of two ways to compute it
        assert done.ridge[0, 0] in LEVELS
        chosen.append(done.ridge[0, 0])
    assert chosen[0] > 1e-8  # noisy targets need a real penalty, so the choice is not idle


def test_many_value_columns_are_compared_on_a_sketch(rng):
    """The level from a random sketch of 40 columns costs at most a tenth more than the best one."""
    x, target, exact, weight = case(rng, 30, 10, 40, noise=0.2)
    done = run([(x, target, exact, weight)])
    losses = [left_out_loss(x, target[:, 0], exact, weight, level)[0] for level in LEVELS]
    own = left_out_loss(x, target[:, 0], exact, weight, done.ridge[0, 0])[0]
    # eight random combinations see the squared error to about a third; candidates lie a factor of ten apart
    assert own <= 1.1 * min(losses)
    scale = (weight**2 * np.square(exact).sum(axis=1)).sum()
    assert done.loo[0, 0] == pytest.approx(np.sqrt(own / scale), rel=1e-6)  # what is reported is the full error


def test_leverage_of_left_out_rows(rng):
    x, target, exact, weight = case(rng, 30, 5, 2)
    done = run([(x, target, exact, weight)])
    level = done.ridge[0, 0] * np.linalg.norm(weight[:, None] * x, 2) ** 2
    for i in (0, 13, 29):
        keep = np.arange(30) != i
        gram = (weight[keep, None] * x[keep]).T @ (weight[keep, None] * x[keep]) + level * np.eye(5)
        true = x[i] @ np.linalg.solve(gram, x[i])
        assert done.row_leverage[0, 0, i] == pytest.approx(true, rel=1e-6)  # the same margin as above


def test_a_row_that_is_fitted_by_itself_alone(rng):
    """Without it nothing is known of its direction: its error is that of a fit of zero, its leverage huge."""
    x, target, exact, weight = case(rng, 30, 4, 2, noise=0)
    x = np.concatenate([x, np.zeros((30, 1))], axis=1)
    x[7] = [0, 0, 0, 0, 1]
    done = run([(x, target, exact, weight)])
    assert done.ridge[0, 0] < 1e-7
    assert done.row_leverage[0, 0, 7] > 1e6
    # T = [o, 1] and a fit of nothing: the normaliser is 0, which counts as the largest error there is
    largest = leave_one_out._LARGEST_ERROR**2 * np.square(exact).sum() / 30
    assert done.row_error[0, 0, 7] == pytest.approx(largest, rel=1e-12)


@pytest.mark.parametrize("first", [0, 17])
def test_rows_of_weight_zero_do_not_count(first, rng):
    """Whatever they hold, and wherever they are."""
    x, target, exact, weight = case(rng, 40, 5, 3)
    out = np.arange(40) % 4 == 1
    alone = run([(x[~out], target[~out], exact[~out], weight[~out])], first=(~out)[:first].sum())
    x[out], target[out], exact[out], weight[out] = np.nan, np.nan, np.nan, 0
    among = run([(x, target, exact, weight)], first=first)
    assert among.ridge[0, 0] == alone.ridge[0, 0]
    assert among.loo[0, 0] == pytest.approx(alone.loo[0, 0], rel=1e-9)
    np.testing.assert_allclose(among.table[0, 0, :, :4], alone.table[0, 0, :, :4], rtol=1e-9, atol=1e-12)
    for per_row in (among.row_error, among.row_leverage):
        assert (per_row[0, 0, out] == 0).all()
    np.testing.assert_allclose(among.row_error[0, 0, ~out], alone.row_error[0, 0], rtol=1e-9, atol=1e-12)


def test_fewer_rows_than_landmarks(rng):
    done = run([case(rng, 10, 24, 3)])
    assert np.isfinite(done.table).all()
    assert np.isfinite(done.loo).all()


@pytest.mark.parametrize("what", ["equal features", "zero targets", "repeated"])
def test_degenerate_problems_give_finite_tables(what, rng):
    x, target, exact, weight = case(rng, 30, 6, 3)
    if what == "equal features":
        x[:] = 1 / 6
    elif what == "zero targets":
        target[:, :, :3], exact[:] = 0, 0
    else:
        x[:, 3:] = x[:, :3]
    done = run([(x, target, exact, weight)])
    assert np.isfinite(done.table).all()
    assert np.isfinite(done.loo).all()
    if what == "repeated":
        z = naive.ridge(x, target[:, 0], weight, max(done.ridge[0, 0], 1e-13))
        np.testing.assert_allclose(x @ done.table[0, 0, :6, :4], x @ z, rtol=0, atol=1e-6)  # 1e-13 against the rest


def test_features_that_are_all_zero_cost_the_largest_error(rng):
    """Nothing can be fitted. The apply pass flags every row of such a head (its normaliser is not positive)."""
    x, target, exact, _ = case(rng, 30, 6, 3)
    done = run([(0 * x, target, exact, np.ones(30))])
    assert done.loo[0, 0] == pytest.approx(leave_one_out._LARGEST_ERROR, rel=1e-12)


def test_heads_do_not_mix(rng):
    cases = [case(rng, 30, 5, 2) for _ in range(3)]
    together = run(cases)
    # the sketch of two columns is the identity, so a head's place does not matter to its fit
    for h in range(3):
        alone = run([cases[h]])
        assert together.table[h, 0, :5, :3].tobytes() == alone.table[0, 0, :5, :3].tobytes()
        assert together.loo[h].tobytes() == alone.loo[0].tobytes()


def test_single_precision_problems_get_a_single_precision_table(rng):
    given = case(rng, 30, 5, 2)
    narrow, wide = run([given], dtype=np.float32), run([given])
    assert narrow.table.dtype == np.float32
    np.testing.assert_allclose(narrow.table[..., :3], wide.table[..., :3], rtol=1e-7)  # one rounding of the result
