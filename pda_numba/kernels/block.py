"""Attention of some queries to a few keys, for the CPU: queries in rows, keys in the lanes.

    s_ij = q_i . k_j      w_ij = 2^(s_ij - max_j s_ij)      o_i = sum_j w_ij v_j / sum_j w_ij

`panel` has it the other way round, queries in the lanes: each key then is read once for a whole panel, which pays if
there are many keys. Here queries, values and outputs are read and written as they lie in memory, and what is transposed
are the keys of a tile, once for all queries that look at it. Results go on from what a query has seen already: its
output and its lse. While a block of queries is worked on, the rows of the next are asked for.
"""

import numpy as np

from .._jit import shared
from .panel import TILE, larger, log_sum, weight
from .prefetch import prefetch
from .scalar import widen
from .simd import NARROW_ROWS, half_lanes, lane_count, multiply_narrow

TILE_STRIDE = TILE + 16  # no power of two: the rows of a tile would all be in the same few lines of the cache


@shared
def _load_keys(k, begin, stop, at, tile):
    """Keys begin .. stop into the columns of `tile (D, TILE_STRIDE)` from `at` on."""
    for j in range(stop - begin):
        for d in range(k.shape[1]):
            tile[d, at + j] = k[begin + j, d]


@shared
def _ask_for(x, rows, used, first, out, lse):
    """The rows of the block that begins at `first`."""
    for i in range(first, min(first + NARROW_ROWS, used)):
        prefetch(x, rows[i])
        prefetch(out, rows[i])
        prefetch(lse, rows[i])


@shared
def _raise_peaks(scores, panels, lanes):
    """lanes[r, x] = the largest of row r's scores in the columns x of the panels."""
    for r in range(NARROW_ROWS):
        for x in range(lane_count(lanes)):
            lanes[r, x] = scores[r, 0, x]
        for p in range(1, panels):
            for x in range(lane_count(lanes)):
                lanes[r, x] = larger(lanes[r, x], scores[r, p, x])


@shared
def _weigh_block(scores, panels, tops, lanes):
    """Scores to weights 2^(s - top), in place; lanes[r, x] = the sum of row r's in the columns x of the panels."""
    lanes[:] = 0
    for p in range(panels):
        for r in range(0, NARROW_ROWS, 4):  # four at a time: none of them waits for another
            first, second, third, fourth = tops[r], tops[r + 1], tops[r + 2], tops[r + 3]
            for x in range(lane_count(lanes)):
                a = weight(scores[r, p, x], first)
                b = weight(scores[r + 1, p, x], second)
                c = weight(scores[r + 2, p, x], third)
                d = weight(scores[r + 3, p, x], fourth)
                scores[r, p, x], scores[r + 1, p, x], scores[r + 2, p, x], scores[r + 3, p, x] = a, b, c, d
                lanes[r, x] += a
                lanes[r + 1, x] += b
                lanes[r + 2, x] += c
                lanes[r + 3, x] += d


@shared
def _largest(lanes, r):
    """The largest of a row, which is overwritten."""
    half = lane_count(lanes) // 2
    while half > 0:
        for x in range(half):
            lanes[r, x] = larger(lanes[r, x], lanes[r, x + half])
        half //= 2
    return lanes[r, 0]


@shared
def _sum(lanes, r):
    """The sum of a row in a fixed order; it is overwritten."""
    half = lane_count(lanes) // 2
    while half > 0:
        for x in range(half):
            lanes[r, x] += lanes[r, x + half]
        half //= 2
    return lanes[r, 0]


@shared
def _go_on(sums, r, top, total, out, lse, row):
    """What row r of a block has found beside what the query has seen already."""
    peak = larger(top, lse[row])
    before, now = weight(lse[row], peak), weight(top, peak)
    whole = before + total * now
    share = 1 / whole
    before, now = before * share, now * share
    for e in range(out.shape[1]):
        out[row, e] = out[row, e] * before + sums[r, e] * now
    lse[row] = log_sum(peak, whole)


@shared
def _load_queries(x, rows, first, count, factor, queries):
    for r in range(count):
        row = rows[first + r]
        for d in range(x.shape[1]):
            queries[r, d] = widen(x[row, d]) * factor


@shared
def _score_block(tile, count, queries, scores):
    """Scores of a block of queries with the tile's keys; minus infinity up to whole panels."""
    stride, depth = scores.shape[1] * scores.shape[2], queries.shape[1]
    panels = (count + lane_count(tile) - 1) // lane_count(tile)
    for j in range(0, count, half_lanes(tile)):
        multiply_narrow(scores, j, stride, queries, 0, depth, 1, tile, j, TILE_STRIDE, depth, False)
    for r in range(NARROW_ROWS):
        for x in range(count - (panels - 1) * lane_count(tile), lane_count(tile)):
            scores[r, panels - 1, x] = -np.inf
    return panels


@shared
def _add_values(scores, first, v, begin, count, sums, accumulate):
    """sums (+)= W V over the values begin .. begin + count, whose weights begin in column `first`."""
    stride, columns = scores.shape[1] * scores.shape[2], sums.shape[1]
    for e in range(0, columns, half_lanes(sums)):
        place = begin * v.shape[1] + e
        multiply_narrow(sums, e, columns, scores, first, stride, 1, v, place, v.shape[1], count, accumulate)


@shared
def _attend_tile(x, rows, used, factor, v, begin, own, more, rest, tile, queries, scores, sums, tops, lanes, out, lse):
    """To the `own` keys from `begin` on and the `rest` from `more` on, which are the tile's columns in this order."""
    _ask_for(x, rows, used, 0, out, lse)
    for first in range(0, used, NARROW_ROWS):
        count = min(NARROW_ROWS, used - first)
        _ask_for(x, rows, used, first + NARROW_ROWS, out, lse)
        _load_queries(x, rows, first, count, factor, queries)
        panels = _score_block(tile, own + rest, queries, scores)
        _raise_peaks(scores, panels, lanes)
        for r in range(NARROW_ROWS):
            tops[r] = _largest(lanes, r)
        _weigh_block(scores, panels, tops, lanes)
        _add_values(scores, 0, v, begin, own, sums, False)
        _add_values(scores, own, v, more, rest, sums, True)
        for r in range(count):
            _go_on(sums, r, tops[r], _sum(lanes, r), out, lse, rows[first + r])


@shared
def attend_rows(x, rows, used, factor, k, v, near, fresh, tile, queries, scores, sums, tops, lanes, out, lse):
    """The queries x[rows[:used]] to keys: near = begin, end, more, count are begin .. end and `count` from `more` on.

    `tile (D, TILE_STRIDE)` keeps the keys, which are loaded if they are `fresh` or more than it holds. Scratch are
    `queries (NARROW_ROWS, D)`, `scores (NARROW_ROWS, panels, lanes)`, `sums (NARROW_ROWS, whole vectors)`, `tops
    (NARROW_ROWS)` and `lanes (NARROW_ROWS, lanes)`. Behind the rows of `v` are some that may be read.
    """
    begin, end, more, count = near
    own = end - begin
    for i in range(0, own + count if used > 0 else 0, TILE):
        stop = min(i + TILE, own + count)
        first, last, second = begin + min(i, own), begin + min(stop, own), more + max(i - own, 0)
        rest = stop - i - (last - first)
        if fresh or own + count > TILE:
            _load_keys(k, first, last, 0, tile)
            _load_keys(k, second, second + rest, last - first, tile)
        part = first, last - first, second, rest
        _attend_tile(x, rows, used, factor, v, *part, tile, queries, scores, sums, tops, lanes, out, lse)
