"""Attention of some queries to a few keys, for the CPU: queries in rows, keys in the lanes.

    s_ij = q_i . k_j      w_ij = 2^(s_ij - max_j s_ij)      o_i = sum_j w_ij v_j / sum_j w_ij

`panel` has it the other way round, queries in the lanes: each key then is read once for a whole panel, which pays if
there are many keys. Here queries, values and outputs are read and written as they lie in memory, and what is transposed
are the keys of a tile, once for all queries that look at it. Results go on from what a query has seen already: its
output and its lse. While a block of queries is worked on, the rows of the next are asked for.
"""

import numpy as np

from .._jit import shared
from ..grouping import RUN
from .fold import largest_of, sum_of
from .panel import TILE, larger, log_sum, weight
from .prefetch import prefetch
from .scalar import widen
from .simd import NARROW_ROWS, half_lanes, multiply_narrow, padded

ROOM = 32  # rows in the vectors of a block's state, though it has fewer: loops of 16 and less are not made vectors of
TILE_STRIDE = TILE + 16  # no power of two: the rows of a tile would all be in the same few lines of the cache


@shared
def _load_keys(k, begin, stop, at, tile):
    """Keys begin .. stop into the columns of `tile (D, TILE_STRIDE)` from `at` on."""
    for j in range(stop - begin):
        for d in range(k.shape[1]):
            tile[d, at + j] = k[begin + j, d]


@shared
def _ask_for(array, rows, first, part, parts):
    """One of so many parts of the rows of the block that begins at `first`: at once they would have to queue."""
    for i in range(first + part * NARROW_ROWS // parts, first + (part + 1) * NARROW_ROWS // parts):
        if i < rows.shape[0] and rows[i] >= 0:
            prefetch(array, rows[i])


@shared
def _weigh_block(scores, columns, tops, totals):
    """Scores to weights 2^(s - max s), in place; the rows' maxima and sums."""
    for r in range(NARROW_ROWS):
        tops[r] = largest_of(scores, r, columns)
    for r in range(NARROW_ROWS):
        top = tops[r]
        for x in range(columns):
            scores[r, x] = weight(scores[r, x], top)
    for r in range(NARROW_ROWS):
        totals[r] = sum_of(scores, r, columns)


@shared
def _share(tops, totals, before, now):
    """What rows have seen and what they see now, as shares of both; `tops` and `totals` become those of both.

    `before` comes as the lse of what was seen. All rows at once: each step of one row waits for the step before.
    """
    one = tops.dtype.type(1)  # 1 alone would make this a loop of doubles
    for r in range(ROOM):
        peak = larger(tops[r], before[r])
        old, new = weight(before[r], peak), weight(tops[r], peak)
        whole = old + totals[r] * new
        before[r], now[r] = old * (one / whole), new * (one / whole)
        tops[r], totals[r] = peak, whole


@shared
def _go_on(sums, r, before, now, out, row):
    """What row r of a block has found beside what the query has seen already."""
    for e in range(out.shape[1]):
        out[row, e] = out[row, e] * before + sums[r, e] * now


@shared
def _load_queries(x, rows, first, count, factor, lse, queries, seen):
    for r in range(count):
        row = rows[first + r]
        seen[r] = lse[row]
        for d in range(x.shape[1]):
            queries[r, d] = widen(x[row, d]) * factor


@shared
def _score_block(tile, count, queries, x, rows, following, scores):
    """Scores of a block of queries with the tile's keys; minus infinity up to whole vectors. How many columns."""
    depth, width = queries.shape[1], half_lanes(tile)
    columns = padded(count, width)
    for j in range(0, columns, width):
        _ask_for(x, rows, following, j // width, columns // width)
        multiply_narrow(scores, j, TILE, queries, 0, depth, 1, tile, j, TILE_STRIDE, depth, False)
    for r in range(NARROW_ROWS):
        for j in range(count, columns):
            scores[r, j] = -np.inf
    return columns


@shared
def _add_values(scores, v, begin, own, more, rest, out, rows, following, sums):
    """sums = W V over the `own` values from `begin` on and the `rest` from `more` on."""
    stride, columns, width = v.shape[1], sums.shape[1], half_lanes(sums)
    for e in range(0, columns, width):
        _ask_for(out, rows, following, e // width, columns // width)
        multiply_narrow(sums, e, columns, scores, 0, TILE, 1, v, begin * stride + e, stride, own, False)
        if rest > 0:
            multiply_narrow(sums, e, columns, scores, own, TILE, 1, v, more * stride + e, stride, rest, True)


@shared
def _attend_tile(x, rows, used, factor, v, begin, own, more, rest, tile, queries, scores, sums, state, out, lse):
    """To the `own` keys from `begin` on and the `rest` from `more` on, which are the tile's columns in this order."""
    tops, totals, before, now = state
    for first in range(0, used, NARROW_ROWS):
        count = min(NARROW_ROWS, used - first)
        following = first + NARROW_ROWS if first + NARROW_ROWS < used else RUN
        _load_queries(x, rows, first, count, factor, lse, queries, before)
        columns = _score_block(tile, own + rest, queries, x, rows, following, scores)
        _weigh_block(scores, columns, tops, totals)
        _add_values(scores, v, begin, own, more, rest, out, rows, following, sums)
        _share(tops, totals, before, now)
        for r in range(count):
            _go_on(sums, r, before[r], now[r], out, rows[first + r])
            lse[rows[first + r]] = log_sum(tops[r], totals[r])


@shared
def attend_rows(x, rows, used, factor, k, v, near, fresh, tile, queries, scores, sums, state, out, lse):
    """The queries x[rows[:used]] to keys: near = begin, end, more, count are begin .. end and `count` from `more` on.

    `tile (D, TILE_STRIDE)` keeps the keys, which are loaded if they are `fresh` or more than it holds. Scratch are
    `queries (NARROW_ROWS, D)`, `scores (NARROW_ROWS, TILE)`, `sums (NARROW_ROWS, whole vectors)`, and `state`, four
    vectors of ROOM numbers. Behind the rows of `v` are some that may be read; behind the queries those of the next run.
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
        _attend_tile(x, rows, used, factor, v, *part, tile, queries, scores, sums, state, out, lse)
