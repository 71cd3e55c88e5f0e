"""Attention of one panel of queries to one tile of keys: the arithmetic of every pass over the keys, on both devices,
and the CPU's schedule for it.

A panel holds its queries in the lanes: `queries (D, lanes)`, `scores (keys, lanes)`, `sums (E, lanes)`. The state of
the online softmax is, per lane, `top` (running maximum of the scores), `total` (sum of the weights) and `sums`
(sum of weights times values):

    w_j = 2^(s_j - top)        total = sum_j w_j        sums = sum_j w_j v_j

Scores are in units of log 2: the factor scale * log2(e) is applied to the queries when they are packed.
"""

import math

from numba.extending import overload

from .._jit import inlined
from .scalar import exp2, fma, widen
from .simd import NARROW_ROWS, ROW_PADDING, ROWS, half_lanes, lane_count, multiply_block, multiply_narrow, padded

TILE = 128  # keys per tile: a tile of keys and one of values stay in the second-level cache
PANELS = 8  # panels that share a tile, one after the other

# --- the online softmax, one number at a time ---


@inlined
def larger(a, b):
    return a if a > b else b


@inlined
def weight(score, top):
    return exp2(score - top)


@inlined
def log_sum(top, total):
    """log2 of the sum of 2^s_j."""
    return top + math.log2(total)


@inlined
def in_band(query, key, window):
    """Does the near field of a query hold a key?"""
    return query - key <= window and key - query <= window


@inlined
def covered(bucket, heavy, probes, count):
    """Does the content near field of a query, with so many of its probes, hold the keys of a bucket?"""
    found = bucket == heavy
    for p in range(count):
        found |= probes[p] == bucket
    return found


@inlined
def clipped(x, low, high):
    return min(max(x, low), high)


@inlined
def is_kept(x, low, high):
    """Was an output left as it is, not clipped?"""
    return low <= x <= high


@inlined
def add_square(total, x):
    return fma(x, x, total)


@inlined
def slope(weight, product, offset):
    """ds_j = w_j (g . v_j + c): what a score does to the result, by the cotangent g of the row."""
    return weight * (product + offset)


# --- panels ---


@inlined
def load_tile(tile, source, start, count):
    """Rows start .. start + count of `source` into `tile`, widened; the rest of the tile is zero."""
    columns = source.shape[1]
    for i in range(count):
        for d in range(columns):
            tile[i, d] = widen(source[start + i, d])
        tile[i, columns:] = 0
    used = min(tile.shape[0], (count + ROW_PADDING - 1) // ROW_PADDING * ROW_PADDING)
    for i in range(count, used):
        tile[i, :] = 0


@inlined
def _load_whole_tile(tile, source, start, count):
    load_tile(tile, source, start, count)
    return tile


@inlined
def _tile_where_it_lies(tile, source, start, count):
    stop = start + padded(count)
    if source.shape[1] == tile.shape[1] and stop <= source.shape[0]:
        return source[start:stop]
    load_tile(tile, source, start, count)
    return tile


def tile_of(tile, source, start, count):
    """Rows start .. start + count of `source`: where they lie if they can be read like a tile, else loaded into `tile`.

    For tiles that one panel alone looks at; what lies behind those rows is another row, or zero.
    """
    return _load_whole_tile(tile, source, start, count)


@overload(tile_of, jit_options={"forceinline": True}, strict=False)
def _tile_of_by_type(tile, source, start, count):
    return _tile_where_it_lies if source == tile else _load_whole_tile


@inlined
def pack_query(panel, lane, source, row, factor):
    """Query `row` into one lane, times `factor`."""
    for d in range(source.shape[1]):
        panel[d, lane] = widen(source[row, d]) * factor


@inlined
def multiply_keys(scores, tile, queries, count):
    """scores[j, :] = k_j . q for the `count` keys of a tile."""
    width = tile.shape[1]
    for j in range(0, count, ROWS):
        multiply_block(scores, j, tile, j * width, width, 1, queries, queries.shape[0], False)


@inlined
def multiply_half(scores, tile, queries, first, stop, half):
    """The same for the keys first .. stop and one half of the lanes; `first` is a multiple of NARROW_ROWS."""
    width, lanes, at, depth = tile.shape[1], lane_count(scores), half * half_lanes(scores), queries.shape[0]
    for j in range(first, stop, NARROW_ROWS):
        multiply_narrow(scores, j * lanes + at, lanes, tile, j * width, width, 1, queries, at, lanes, depth, False)


@inlined
def add_values(sums, tile, weights, count):
    """sums += V^T w over the `count` keys of a tile."""
    width = tile.shape[1]
    for e in range(0, width, ROWS):
        multiply_block(sums, e, tile, e, 1, width, weights, count, True)


@inlined
def add_half(sums, tile, weights, first, stop, half):
    """The same over the keys first .. stop and for one half of the lanes."""
    width, lanes, at = tile.shape[1], lane_count(sums), half * half_lanes(sums)
    start, keys = first * lanes + at, stop - first
    for e in range(0, width, NARROW_ROWS):
        multiply_narrow(
            sums, e * lanes + at, lanes, tile, first * width + e, 1, width, weights, start, lanes, keys, True
        )


@inlined
def pack_rows(rows, panel, columns):
    """A panel (columns, lanes) transposed: column c of query x into rows[c // lanes, x, c % lanes]."""
    width = lane_count(panel)
    for c in range(columns):
        for x in range(width):
            rows[c // width, x, c % width] = panel[c, x]


@inlined
def add_outer(sums, weights, first, count, rows):
    """sums[p, j] += sum_x w_jx rows[p, x] for the `count` keys whose weights begin at row `first`."""
    width = lane_count(weights)
    for p in range(rows.shape[0]):
        for j in range(0, count, ROWS):
            multiply_block(sums[p], j, weights, (first + j) * width, width, 1, rows[p], width, True)


@inlined
def raise_top(top, peak, total, sums, scores, count):
    """Raise the running maximum to cover a tile's scores; rescale what was summed so far (`peak` is scratch)."""
    for x in range(lane_count(top)):
        peak[x] = top[x]
    j = 0
    while j + 4 <= count:  # four at a time: the running maximum is loaded and stored once
        for x in range(lane_count(top)):
            a = larger(scores[j, x], scores[j + 1, x])
            b = larger(scores[j + 2, x], scores[j + 3, x])
            peak[x] = larger(larger(a, b), peak[x])
        j += 4
    while j < count:
        for x in range(lane_count(top)):
            peak[x] = larger(scores[j, x], peak[x])
        j += 1
    raised = False
    for x in range(lane_count(top)):
        raised |= peak[x] != top[x]
    if raised:
        for x in range(lane_count(top)):
            shrink = weight(top[x], peak[x])
            top[x] = peak[x]
            peak[x] = shrink
            total[x] *= shrink
        for e in range(sums.shape[0]):
            for x in range(lane_count(top)):
                sums[e, x] *= peak[x]


@inlined
def weigh(scores, top, total, count):
    """Scores to weights 2^(s - top), in place; their sum is added to `total`."""
    j = 0
    while j + 4 <= count:
        for x in range(lane_count(top)):
            a = weight(scores[j, x], top[x])
            b = weight(scores[j + 1, x], top[x])
            c = weight(scores[j + 2, x], top[x])
            d = weight(scores[j + 3, x], top[x])
            scores[j, x], scores[j + 1, x], scores[j + 2, x], scores[j + 3, x] = a, b, c, d
            total[x] += (a + b) + (c + d)
        j += 4
    while j < count:
        for x in range(lane_count(top)):
            a = weight(scores[j, x], top[x])
            scores[j, x] = a
            total[x] += a
        j += 1
