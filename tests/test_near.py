"""Near sums of sampled rows, against loops over the band."""

import naive
import numpy as np
import pytest
from problems import flat, heads

from pda_numba.near import targets
from pda_numba.rows import rows


def near_sums(problem, which, windows):
    """The near field of every window: what `targets` takes from [0, 1]. And the rows' outputs."""
    out, lse, _ = rows(problem, heads(problem), which)
    left = targets(problem, heads(problem), which, np.zeros_like(out), lse, np.tile(windows, (len(which), 1)))
    left[..., -1] -= 1
    far = targets(problem, heads(problem), which, out, lse, np.tile(windows, (len(which), 1)))
    near = -left
    np.testing.assert_allclose(far[..., :-1], out[:, :, None] - near[..., :-1], rtol=0, atol=0)
    return near, out, lse


@pytest.mark.parametrize(("n", "m"), [(60, 60), (40, 90), (90, 40)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_against_loops(n, m, dtype, rng):
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in ((2, n, 7), (2, m, 7), (2, m, 4)))
    problem = flat(q, k, v)
    which = np.stack([np.r_[0, 1, n - 1, rng.choice(n, 12, replace=False)] for _ in range(2)])
    windows = np.array([-1, 0, 1, 5, 31, 200])
    out, _, _ = near_sums(problem, which, windows)
    assert out.shape == (2, 15, 6, 5)
    assert (out[:, :, 0] == 0).all()
    for h in range(2):
        true_lse = naive.log_sum_exp(naive.logits(q[h][which[h]], k[h]))
        for w, window in enumerate(windows[1:], 1):
            true = naive.near_sums(q[h], k[h], v[h], which[h], true_lse, window, problem.scale)
            # sums of at most 90 terms whose weights add up to at most 1, values of size 3: 40 roundings
            np.testing.assert_allclose(out[h, :, w], true, rtol=0, atol=40 * np.finfo(dtype).eps)


def test_a_window_over_everything_is_the_output(rng):
    q, k, v = (rng.standard_normal((50, d)) for d in (6, 6, 3))
    problem = flat(q, k, v)
    which = np.arange(50)[None]
    near, out, _ = near_sums(problem, which, [49])
    near = near[0, :, 0]
    np.testing.assert_allclose(near[:, :3], out[0], rtol=0, atol=1e-13)  # two ways of adding up 50 numbers of size 1
    np.testing.assert_allclose(near[:, 3], 1.0, rtol=0, atol=1e-14)


def test_rows_beyond_the_keys_have_nothing_near(rng):
    q, k, v = rng.standard_normal((50, 4)), rng.standard_normal((10, 4)), rng.standard_normal((10, 2))
    problem = flat(q, k, v)
    which = np.array([[40, 15, 14]])
    near = near_sums(problem, which, [5])[0][0, :, 0]
    assert (near[:2] == 0).all()  # 15 - 5 = 10 is the first key that does not exist
    assert near[2, 2] > 0


def test_every_head_has_windows_of_its_own(rng):
    q, k, v = (rng.standard_normal((2, 60, d)) for d in (5, 5, 3))
    problem = flat(q, k, v)
    which = np.tile(np.arange(0, 60, 7), (2, 1))
    out, lse, _ = rows(problem, heads(problem), which)
    windows = np.array([[-1, 4], [3, 9]])
    both = targets(problem, heads(problem), which, out, lse, windows)
    for h in range(2):
        one = targets(problem, heads(problem), which, out, lse, np.tile(windows[h], (2, 1)))
        assert (both[h] == one[h]).all()
    assert (both[0, :, 0, :3] == out[0]).all()
    assert (both[0, :, 0, 3] == 1).all()
