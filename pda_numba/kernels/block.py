"""Attention of some queries to a few keys, for the CPU: queries in rows, keys in the lanes.

    s_ij = q_i . k_j      w_ij = 2^(s_ij - max_j s_ij)      o_i = sum_j w_ij v_j / sum_j w_ij

`panel` has it the other way round, queries in the lanes: each key then is read once for a whole panel, which pays if
there are many keys. Here queries, values and outputs are read and written as they lie in memory, and what is transposed
are the keys of a tile, once for all queries that look at it. Results go on from what a query has seen already: its
output and its lse. While a block of queries is worked on, the rows of the next are asked for, and some of the next
tile's keys and values: all of them lie anywhere.
"""

import numpy as np

from .._jit import inlined
from ..grouping import RUN
from .fold import largest_of_rows, sum_of_rows
from .panel import TILE, larger, log_sum, weight
from .prefetch import prefetch
from .scalar import widen
from .simd import NARROW_ROWS, half_lanes, multiply_narrow, padded

ROOM = 32  # rows in the vectors of a block's state, though it has fewer: loops of 16 and less are not made vectors of
TILE_STRIDE = TILE + 16  # no power of two: the rows of a tile would all be in the same few lines of the cache


@inlined
def _load_keys(k, v, own, more, first, stop, tile, values):
    """Keys first .. stop of those that `own` and `more` list into the columns of `tile`, their values into `values`."""
    for j in range(first, stop):
        row = own[j] if j < own.shape[0] else more[j - own.shape[0]]
        for d in range(k.shape[1]):
            tile[d, j - first] = widen(k[row, d])
        for e in range(v.shape[1]):
            values[j - first, e] = widen(v[row, e])


@inlined
def _ask_for(array, rows, first, count, part, parts):
    """One of so many parts of array[rows[first : first + count]]: asked for all at once they would have to queue."""
    some = (count + parts - 1) // parts
    begin = first + part * some
    for i in range(begin, min(begin + some, first + count, rows.shape[0])):
        if rows[i] >= 0:
            prefetch(array, rows[i])


@inlined
def _weigh_block(scores, columns, tops, totals):
    """Scores to weights 2^(s - max s), in place; the rows' maxima and sums."""
    largest_of_rows(scores, columns, tops)
    for r in range(NARROW_ROWS):
        top = tops[r]
        for x in range(columns):
            scores[r, x] = weight(scores[r, x], top)
    sum_of_rows(scores, columns, totals)


@inlined
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


@inlined
def _go_on(sums, r, before, now, out, row):
    """What row r of a block has found beside what the query has seen already, if anything."""
    if before == 0:
        for e in range(out.shape[1]):
            out[row, e] = sums[r, e] * now
    else:
        for e in range(out.shape[1]):
            out[row, e] = out[row, e] * before + sums[r, e] * now


@inlined
def _load_queries(x, rows, first, count, factor, lse, queries, seen):
    for r in range(count):
        row = rows[first + r]
        seen[r] = lse[row]
        for d in range(x.shape[1]):
            queries[r, d] = widen(x[row, d]) * factor


@inlined
def _score_block(tile, count, queries, scores, x, k, ahead):
    """Scores of a block of queries with the tile's keys; minus infinity up to whole vectors. How many columns."""
    depth, width = queries.shape[1], half_lanes(tile)
    columns = padded(count, width)
    for j in range(0, columns, width):
        _ask_for_next(x, k, ahead, j // width, columns // width)
        multiply_narrow(scores, j, TILE, queries, 0, depth, 1, tile, j, TILE_STRIDE, depth, False)
    for r in range(NARROW_ROWS):
        for j in range(count, columns):
            scores[r, j] = -np.inf
    return columns


@inlined
def _add_values(scores, values, count, sums, out, v, ahead):
    """sums = W V."""
    columns, width = sums.shape[1], half_lanes(sums)
    for e in range(0, columns, width):
        _ask_for_next(out, v, ahead, e // width, columns // width)
        multiply_narrow(sums, e, columns, scores, 0, TILE, 1, values, e, columns, count, False)


@inlined
def _ask_for_next(by_query, by_key, ahead, part, parts):
    """One of so many parts of the next block's rows and of this block's share of the next tile's."""
    rows, first, keys, begin, count = ahead
    _ask_for(by_query, rows, first, NARROW_ROWS, part, parts)
    _ask_for(by_key, keys, begin, count, part, parts)


@inlined
def _attend_tile(x, rows, used, factor, k, v, following, count, tile, values, queries, scores, sums, state, out, lse):
    """To the tile's `count` keys, while those that `following` lists are asked for."""
    tops, totals, before, now = state
    share = (following.shape[0] * NARROW_ROWS + used - 1) // used
    for first in range(0, used, NARROW_ROWS):
        present = min(NARROW_ROWS, used - first)
        next_block = first + NARROW_ROWS if first + NARROW_ROWS < used else RUN
        ahead = rows, next_block, following, first // NARROW_ROWS * share, share
        _load_queries(x, rows, first, present, factor, lse, queries, before)
        columns = _score_block(tile, count, queries, scores, x, k, ahead)
        _weigh_block(scores, columns, tops, totals)
        _add_values(scores, values, count, sums, out, v, ahead)
        _share(tops, totals, before, now)
        for r in range(present):
            _go_on(sums, r, before[r], now[r], out, rows[first + r])
            lse[rows[first + r]] = log_sum(tops[r], totals[r])


@inlined
def attend_rows(
    x, rows, used, factor, k, v, own, more, following, fresh, tile, values, queries, scores, sums, state, out, lse
):
    """The queries x[rows[:used]] to the keys that `own` and `more` list; those in `following` come next.

    `tile (D, TILE_STRIDE)` and `values (TILE, whole vectors)` keep the keys and values, which are loaded if they are
    `fresh` or more than that holds. Scratch are `queries (NARROW_ROWS, D)`, `scores (NARROW_ROWS, TILE)`, `sums
    (NARROW_ROWS, whole vectors)`, and `state`, four vectors of ROOM numbers. Behind the rows are those of the next run.
    """
    total = own.shape[0] + more.shape[0]
    for first in range(0, total if used > 0 else 0, TILE):
        count = min(TILE, total - first)
        if fresh or total > TILE:
            _load_keys(k, v, own, more, first, first + count, tile, values)
        room = tile, values, queries, scores, sums, state
        _attend_tile(x, rows, used, factor, k, v, following, count, *room, out, lse)
