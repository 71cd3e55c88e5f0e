"""Attention of some queries to a few keys, against a plain softmax in float64."""

import naive
import numpy as np
import pytest
from numba import njit

from pda_numba.kernels.block import ROOM, TILE_STRIDE, attend_rows
from pda_numba.kernels.panel import TILE
from pda_numba.kernels.simd import NARROW_ROWS, half_lanes, padded


@njit
def attend(x, rows, used, k, v, own, more, following, out, lse):
    """To the keys of two lists; scratch is poisoned."""
    element = k.dtype
    columns = padded(out.shape[1], half_lanes(k))
    tile, values = np.full((k.shape[1], TILE_STRIDE), np.nan, element), np.full((TILE, columns), np.nan, element)
    values[:, v.shape[1] :] = 0
    queries = np.zeros((NARROW_ROWS, k.shape[1]), element)
    scores, sums = np.full((NARROW_ROWS, TILE), np.nan, element), np.full((NARROW_ROWS, columns), np.nan, element)
    state = np.zeros((4, ROOM), element)
    room = tile, values, queries, scores, sums, (state[0], state[1], state[2], state[3])
    attend_rows(x, rows, used, element.type(1), k, v, own, more, following, True, *room, out, lse)


@pytest.mark.parametrize("element", [np.float32, np.float64])
@pytest.mark.parametrize(("d", "e"), [(1, 1), (59, 111), (64, 64), (256, 8)])
@pytest.mark.parametrize("sizes", [(1, 0), (75, 16), (0, 9), (298, 200), (TILE, 1)])
def test_rows_go_on_from_what_they_have_seen(element, d, e, sizes):
    rng = np.random.default_rng(0)
    x, k, v = (rng.normal(size=size).astype(element) for size in ((80, d), (520, d), (520, e)))
    k *= element(np.sqrt(1 / d) / np.log(2))  # scores are in units of log 2
    rows, keys = rng.permutation(len(x))[:37], rng.permutation(len(k))
    own, more, seen = keys[: sizes[0]], keys[sizes[0] : sum(sizes)], keys[500:]
    out, lse = np.full((80, e), np.nan, element), np.full(80, -np.inf, element)
    attend(x, rows[:20], 20, k, v, seen, seen[:0], own, out, lse)  # some of them have seen other keys
    attend(x, rows, len(rows), k, v, own, more, seen, out, lse)
    true, true_lse = np.full((80, e), np.nan), np.full(80, -np.inf)
    for i, row in enumerate(rows):
        near = [*own, *more, *(seen if i < 20 else ())]
        true[row] = naive.attention(x[[row]], k[near], v[near], np.log(2))
        true_lse[row] = np.log2(np.sum(np.exp2(k[near].astype(float) @ x[row])))
    limit = 64 * np.finfo(element).eps  # roundings of scores up to 10, and of sums over some hundred keys
    np.testing.assert_allclose(out, true, rtol=0, atol=limit)
    np.testing.assert_allclose(lse, true_lse, rtol=0, atol=limit)
