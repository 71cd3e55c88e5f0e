"""Near sums of sampled rows, against loops over the band."""

import naive
import numpy as np
import pytest
from problems import flat, heads

from pda_numba.near import near_sums
from pda_numba.rows import rows


@pytest.mark.parametrize(("n", "m"), [(60, 60), (40, 90), (90, 40)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_against_loops(n, m, dtype, rng):
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in ((2, n, 7), (2, m, 7), (2, m, 4)))
    problem = flat(q, k, v)
    which = np.stack([np.r_[0, 1, n - 1, rng.choice(n, 12, replace=False)] for _ in range(2)])
    lse = rows(problem, heads(problem), which)[1]
    windows = np.array([0, 1, 5, 31, 200])
    out = near_sums(problem, heads(problem), which, lse, windows)
    assert out.shape == (2, 15, 5, 5)
    for h in range(2):
        true_lse = naive.log_sum_exp(naive.logits(q[h][which[h]], k[h]))
        for w, window in enumerate(windows):
            true = naive.near_sums(q[h], k[h], v[h], which[h], true_lse, window, problem.scale)
            # sums of at most 90 terms whose weights add up to at most 1, values of size 3: 40 roundings
            np.testing.assert_allclose(out[h, :, w], true, rtol=0, atol=40 * np.finfo(dtype).eps)


def test_a_window_over_everything_is_the_output(rng):
    q, k, v = (rng.standard_normal((50, d)) for d in (6, 6, 3))
    problem = flat(q, k, v)
    which = np.arange(50)[None]
    out, lse, _ = rows(problem, heads(problem), which)
    near = near_sums(problem, heads(problem), which, lse, [49])[0, :, 0]
    np.testing.assert_allclose(near[:, :3], out[0], rtol=0, atol=1e-13)  # two ways of adding up 50 numbers of size 1
    np.testing.assert_allclose(near[:, 3], 1.0, rtol=0, atol=1e-14)


def test_rows_beyond_the_keys_have_nothing_near(rng):
    q, k, v = rng.standard_normal((50, 4)), rng.standard_normal((10, 4)), rng.standard_normal((10, 2))
    problem = flat(q, k, v)
    which = np.array([[40, 15, 14]])
    lse = rows(problem, heads(problem), which)[1]
    near = near_sums(problem, heads(problem), which, lse, [5])[0, :, 0]
    assert (near[:2] == 0).all()  # 15 - 5 = 10 is the first key that does not exist
    assert near[2, 2] > 0
