"""Attention of some queries to a few keys, against a plain softmax in float64."""

import naive
import numpy as np
import pytest
from numba import njit

from pda_numba.kernels.block import ROOM, TILE_STRIDE, attend_rows
from pda_numba.kernels.panel import TILE
from pda_numba.kernels.simd import NARROW_ROWS, ROW_PADDING, half_lanes, padded


@njit
def attend(x, rows, used, k, v, near, out, lse):
    """To the keys of `near`; scratch is poisoned."""
    element = k.dtype
    tile = np.full((k.shape[1], TILE_STRIDE), np.nan, element)
    queries = np.zeros((NARROW_ROWS, k.shape[1]), element)
    scores = np.full((NARROW_ROWS, TILE), np.nan, element)
    sums = np.full((NARROW_ROWS, padded(out.shape[1], half_lanes(k))), np.nan, element)
    state = np.zeros((4, ROOM), element)
    room = tile, queries, scores, sums, (state[0], state[1], state[2], state[3])
    attend_rows(x, rows, used, element.type(1), k, v, near, True, *room, out, lse)


@pytest.mark.parametrize("element", [np.float32, np.float64])
@pytest.mark.parametrize(("d", "e"), [(1, 1), (59, 111), (64, 64), (256, 8)])
@pytest.mark.parametrize("near", [(3, 4, 90, 0), (0, 75, 80, 16), (5, 5, 40, 9), (2, 300, 301, 200), (0, TILE, 200, 1)])
def test_rows_go_on_from_what_they_have_seen(element, d, e, near):
    rng = np.random.default_rng(0)
    x, k = (rng.normal(size=(size, d)).astype(element) for size in (80, 501 + ROW_PADDING))
    k *= element(np.sqrt(1 / d) / np.log(2))  # scores are in units of log 2
    v = np.zeros((len(k), padded(e)), element)
    v[:, :e] = rng.normal(size=(len(k), e))
    rows = rng.permutation(len(x))[:37]
    out, lse = np.full((80, e), 7, element), np.full(80, -np.inf, element)
    begin, end, more, count = near
    seen = slice(450, 470)
    attend(x, rows[:20], 20, k, v, (seen.start, seen.stop, 0, 0), out, lse)  # some of them have seen other keys
    attend(x, rows, len(rows), k, v, near, out, lse)
    true, true_lse = np.full((80, e), 7.0), np.full(80, -np.inf)
    for i, row in enumerate(rows):
        keys = [*range(begin, end), *range(more, more + count), *(range(seen.start, seen.stop) if i < 20 else ())]
        true[row] = naive.attention(x[[row]], k[keys], v[keys, :e], np.log(2))
        true_lse[row] = np.log2(np.sum(np.exp2(k[keys].astype(float) @ x[row])))
    limit = 64 * np.finfo(element).eps  # roundings of scores up to 10, and of sums over some hundred keys
    assert np.max(np.abs(out - true)) <= limit
    np.testing.assert_allclose(lse, true_lse, rtol=0, atol=limit)
