"""One panel of queries against tiles of keys: the online softmax, against the softmax itself."""

import math

import naive
import numba
import numpy as np
import pytest

from pda_numba.kernels import panel, scalar
from pda_numba.kernels.simd import lanes, padded


@numba.njit(error_model="numpy")
def _stream(q, k, v, factor, tile_keys, queries, key_tile, value_tile, scores, top, peak, total, sums):
    for x in range(q.shape[0]):
        panel.pack_query(queries, x, q, x, factor)
    for j in range(0, k.shape[0], tile_keys):
        keys = min(tile_keys, k.shape[0] - j)
        panel.load_tile(key_tile, k, j, keys)
        panel.load_tile(value_tile, v, j, keys)
        panel.multiply_keys(scores, key_tile, queries, keys)
        panel.raise_top(top, peak, total, sums, scores, keys)
        panel.weigh(scores, top, total, keys)
        panel.add_values(sums, value_tile, scores, keys)


def _online(q, k, v, tile_keys, scale, poison):
    width, dtype = lanes(q.dtype), q.dtype
    queries = np.zeros((q.shape[1], width), dtype)
    key_tile = np.full((panel.TILE, q.shape[1]), poison, dtype)
    value_tile = np.full((panel.TILE, padded(v.shape[1])), poison, dtype)
    scores = np.full((panel.TILE, width), poison, dtype)
    top, total = np.full(width, np.finfo(dtype).min / 2, dtype), np.zeros(width, dtype)
    sums = np.zeros((padded(v.shape[1]), width), dtype)
    factor = dtype.type(scale * scalar.LOG2_E)
    _stream(q, k, v, factor, tile_keys, queries, key_tile, value_tile, scores, top, top.copy(), total, sums)
    return (sums / total)[: v.shape[1], : len(q)].T, (top + np.log2(total))[: len(q)] / scalar.LOG2_E


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("keys", [1, 3, 8, 97, 128, 129, 300])
def test_online_softmax(dtype, keys, rng):
    q, k = (rng.standard_normal((n, 11)).astype(dtype) for n in (lanes(dtype), keys))
    v = rng.standard_normal((keys, 5)).astype(dtype)
    out, lse = _online(q, k, v, panel.TILE, 0.5, np.nan)
    # Entries are means of values of size 1 to 4. The scores, up to 20, carry about eight roundings of relative eps.
    bound = 100 * np.finfo(dtype).eps
    np.testing.assert_allclose(out, naive.attention(q, k, v, 0.5), rtol=0, atol=bound)
    np.testing.assert_allclose(lse, naive.log_sum_exp(naive.logits(q, k, 0.5)), rtol=0, atol=bound)


def test_small_tiles_give_the_same_answer(rng):
    """The running maximum rises from tile to tile; earlier sums must be rescaled each time."""
    q, k, v = (rng.standard_normal((n, 4)) for n in (lanes(np.float64), 60, 60))
    k[:, 0] += np.linspace(-20, 20, 60)
    q[:, 0] = np.abs(q[:, 0]) + 1  # the scores climb
    exact = naive.attention(q, k, v, 1.0)
    for tile_keys in (1, 2, 5, 8, 64):
        out, _ = _online(q, k, v, tile_keys, 1.0, np.nan)
        np.testing.assert_allclose(out, exact, rtol=0, atol=1e-12)  # scores up to 100 times a few eps


def test_scratch_contents_do_not_matter(rng):
    q, k, v = (rng.standard_normal((n, 6)).astype(np.float32) for n in (5, 77, 77))
    results = [_online(q, k, v, panel.TILE, 1.0, poison) for poison in (0, np.nan, 1e30)]
    assert all(r[0].tobytes() == results[0][0].tobytes() for r in results)
    assert all(r[1].tobytes() == results[0][1].tobytes() for r in results)


def test_equal_scores_give_the_mean(rng):
    v = rng.standard_normal((50, 3))
    out, lse = _online(np.zeros((2, 4)), np.ones((50, 4)), v, panel.TILE, 1.0, 0.0)
    np.testing.assert_allclose(out, np.tile(v.mean(axis=0), (2, 1)), rtol=0, atol=1e-14)  # 50 additions of size 1
    np.testing.assert_allclose(lse, math.log(50), rtol=1e-14)
