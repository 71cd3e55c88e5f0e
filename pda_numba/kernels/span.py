"""Spans: the keys low .. high that a query sees, where it does not see all of them.

A mask is an array `spans (patterns, N, 2)` of them; an empty one (patterns, 0, 2) hides nothing. On the CPU the lanes
of a panel are judged together: a tile that every lane sees whole needs no mask, one that no lane sees is left out.
"""

from .._jit import shared
from .scalar import fma, widen
from .simd import lane_count


@shared
def sees(key, low, high):
    return low <= key and key < high


@shared
def place_spans(spans, row, start, stop, lows, highs, x):
    """The span of query `row`, cut to the keys start .. stop, into lane x."""
    lows[x] = max(spans[row, 0], start)
    highs[x] = min(spans[row, 1], stop)


@shared
def spread(lows, highs, x, lanes):
    """The span of lane x into the lanes from `x + 1` on, which hold no query."""
    for y in range(x + 1, lanes):
        lows[y], highs[y] = lows[x], highs[x]


@shared
def outside(lows, highs, start, keys):
    """Is a tile seen by no lane?"""
    some = False
    for x in range(lows.shape[0]):
        some |= start + keys > lows[x] and start < highs[x]
    return not some


@shared
def inside(lows, highs, start, keys):
    """Is it seen whole by every lane?"""
    whole = True
    for x in range(lows.shape[0]):
        whole &= lows[x] <= start and start + keys <= highs[x]
    return whole


@shared
def hide_unseen(scores, lows, highs, start, keys, hidden):
    """`hidden` for every key of a tile that a lane does not see."""
    for j in range(keys):
        for x in range(lane_count(scores)):
            scores[j, x] = scores[j, x] if sees(start + j, lows[x], highs[x]) else hidden


@shared
def is_finite(tile, rows):
    total = tile.dtype.type(0)
    for j in range(rows):
        for e in range(tile.shape[1]):
            total += tile[j, e] * tile.dtype.type(0)
    return total == total


@shared
def add_seen(sums, rows, factors, lows, highs, start, keys):
    """sums[e, x] += factors[j, x] rows[j, e] over the keys that lane x sees: what others hold, NaN say, is not read."""
    nothing = sums.dtype.type(0)
    for j in range(keys):
        for e in range(rows.shape[1]):
            for x in range(lane_count(sums)):
                value = rows[j, e] if sees(start + j, lows[x], highs[x]) else nothing
                sums[e, x] = fma(factors[j, x], value, sums[e, x])


@shared
def spoil_of(source, row, stop, zero):
    """0 where a row of values is finite, or there is none; otherwise NaN."""
    total = zero
    if row < stop:
        for e in range(source.shape[1]):
            total += widen(source[row, e]) * zero
    return total
