"""One decoding step: a few queries against ranges of the keys, exactly.

    over_keys     lse = log sum_j exp(s_j)       o = sum_j exp(s_j - lse) v_j          j over a range of the keys
    blend         lse = log(e^lse_a + e^lse_b)   o = e^(lse_a - lse) o_a + e^(lse_b - lse) o_b

A decoding step is a handful of queries per head: every key is read once and little is done with it, so that a query
goes over the keys alone, its vectors along the head dimension (`rows` puts the queries there). Ranges are cut into
segments, whose results are merged in their order. `lse` is in units of log 2, and -inf where there is nothing.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, serial_kernel, shared
from .kernels.panel import TILE, larger, log_sum, weight
from .kernels.scalar import fma, widen
from .kernels.score import place_query, score_keys
from .kernels.simd import dot, two_schedules
from .kernels.team import barrier, member, members, team_max, team_sum
from .rows import rows

SEGMENT = 1024  # keys that are one piece of work
FEW = 32768  # products of queries and keys that one core is done with before the others are awake
_PANEL = 4  # queries of a head from which a panel of them is faster than one at a time
ROOM = 4  # query, key, scores, ones

# --- bodies ---


@shared
def _sum_as_vectors(room, count):
    return dot(room, 2, room, 3, count)


@shared
def _sum_by_team(room, count):
    total = room.dtype.type(0)
    for j in range(member(), count, members()):
        total += room[2, j]
    return team_sum(total)


@two_schedules(_sum_as_vectors, _sum_by_team)
def _sum_weights(room, count):
    """The sum of the first `count` weights; the last row of `room` holds ones."""
    return _sum_by_team(room, count)


@shared
def _add_rows(v, start, count, room, shrink, sums):
    """sums = shrink sums + sum_j w_j v_j, four values at a time."""
    for e in range(member(), sums.shape[0], members()):
        sums[e] *= shrink
    j = 0
    while j + 4 <= count:
        a, b, c, d = room[2, j], room[2, j + 1], room[2, j + 2], room[2, j + 3]
        row = start + j
        for e in range(member(), sums.shape[0], members()):
            low = fma(a, widen(v[row, e]), fma(b, widen(v[row + 1, e]), sums[e]))
            sums[e] = fma(c, widen(v[row + 2, e]), fma(d, widen(v[row + 3, e]), low))
        j += 4
    while j < count:
        for e in range(member(), sums.shape[0], members()):
            sums[e] = fma(room[2, j], widen(v[start + j, e]), sums[e])
        j += 1


@shared
def attend_keys(k, v, start, stop, room, sums):
    """Online softmax of the query in `room` over the keys start .. stop; returns (top, total), fills `sums`."""
    zero = room.dtype.type(0)
    top, total = room.dtype.type(np.finfo(room.dtype).min / 2), zero
    for e in range(member(), sums.shape[0], members()):
        sums[e] = zero
    for j in range(start, stop, TILE):
        count = min(TILE, stop - j)
        score_keys(room, k, j, count)
        peak = top
        for i in range(member(), count, members()):
            peak = larger(room[2, i], peak)
        peak = team_max(peak)
        for i in range(member(), count, members()):
            room[2, i] = weight(room[2, i], peak)
        shrink = weight(top, peak)
        # for the sum the team meets, and so sees all weights
        total = total * shrink + _sum_weights(room, count)
        _add_rows(v, j, count, room, shrink, sums)
        barrier()
        top = peak
    return top, total


@shared
def prepare(room, q, row, factor):
    """The query and the ones into `room`."""
    place_query(room, q, row, factor)
    for j in range(member(), room.shape[1], members()):
        room[3, j] = room.dtype.type(1)
    barrier()


@shared
def _segment(q, k, v, row, factor, start, stop, room, sums):
    """One segment: log2 of the sum of its weights and, in `sums`, its output."""
    prepare(room, q, row, factor)
    top, total = attend_keys(k, v, start, stop, room, sums)
    for e in range(member(), sums.shape[0], members()):
        sums[e] /= total
    return log_sum(top, total)


@shared
def _segments(start, stop):
    return (stop - start + SEGMENT - 1) // SEGMENT if stop > start else 0


@shared
def _segment_item(item, q, k, v, query_head, key_head, head, time, start, stop, factor, room, lse, out):
    """Item s * rows + r is segment s of row r, if it has one."""
    r, s = item % lse.shape[0], item // lse.shape[0]
    if s < _segments(start[r], stop[r]):
        h, first = head[r], start[r] + s * SEGMENT
        keys = key_head[h]
        task = time[r], factor, first, min(stop[r], first + SEGMENT), room, out[r, s]
        value = _segment(q[query_head[h]], k[keys], v[keys], *task)
        if member() == 0:
            lse[r, s] = value


@shared
def _merge_segments(partial_lse, partial_out, used, out):
    """The first `used` segments of one row into `out`, by a team; returns their lse."""
    top = partial_lse[0]
    for s in range(1, used):
        top = larger(partial_lse[s], top)
    total = top - top
    for s in range(used):
        total += weight(partial_lse[s], top)
    for e in range(member(), out.shape[0], members()):
        value = out.dtype.type(0)
        for s in range(used):
            value = fma(weight(partial_lse[s], top) / total, partial_out[s, e], value)
        out[e] = value
    return log_sum(top, total)


@shared
def _blend(first, first_lse, second, second_lse, out):
    """One row, by a team; returns its lse. Either side may be nothing, not both."""
    top = larger(first_lse, second_lse)
    a, b = weight(first_lse, top), weight(second_lse, top)
    total = a + b
    for e in range(member(), out.shape[0], members()):
        out[e] = (a * first[e] + b * second[e]) / total
    return log_sum(top, total)


# --- CPU drivers ---


@cpu_kernel
def _keys_cpu(q, k, v, query_head, key_head, head, time, start, stop, factor, room, lse, out):
    """A piece takes a run of items, of which neighbours are one segment's rows: heads that share keys find them in the
    cache.
    """
    pieces, (rows, segments) = room.shape[0], lse.shape
    items = rows * segments
    for p in prange(pieces):
        for item in range(p * items // pieces, (p + 1) * items // pieces):
            _segment_item(item, q, k, v, query_head, key_head, head, time, start, stop, factor, room[p], lse, out)


@serial_kernel
def _few_keys_cpu(q, k, v, query_head, key_head, head, time, start, stop, factor, room, lse, out):
    for item in range(lse.size):
        _segment_item(item, q, k, v, query_head, key_head, head, time, start, stop, factor, room[0], lse, out)


@serial_kernel
def _merge_cpu(partial_lse, partial_out, start, stop, lse, out):
    for r in range(lse.shape[0]):
        used = _segments(start[r], stop[r])
        lse[r] = -np.inf
        out[r] = 0
        if used:
            lse[r] = _merge_segments(partial_lse[r], partial_out[r], used, out[r])


@serial_kernel
def _blend_cpu(first, first_lse, second, second_lse, out, lse):
    for r in range(lse.shape[0]):
        lse[r] = _blend(first[r], first_lse[r], second[r], second_lse[r], out[r])


# --- CUDA drivers: a team per row and segment, or for some of them ---


@cuda_kernel(128)
def _keys_cuda(q, k, v, query_head, key_head, head, time, start, stop, factor, room, lse, out):
    p = cuda.blockIdx.x
    for item in range(p, lse.size, cuda.gridDim.x):
        _segment_item(item, q, k, v, query_head, key_head, head, time, start, stop, factor, room[p], lse, out)


@cuda_kernel(64)
def _merge_cuda(partial_lse, partial_out, start, stop, lse, out):
    r = cuda.blockIdx.x
    used = _segments(start[r], stop[r])
    value = -lse.dtype.type(np.inf)
    if used:
        value = _merge_segments(partial_lse[r], partial_out[r], used, out[r])
    else:
        for e in range(member(), out.shape[1], members()):
            out[r, e] = 0
    if member() == 0:
        lse[r] = value


@cuda_kernel(64)
def _blend_cuda(first, first_lse, second, second_lse, out, lse):
    r = cuda.blockIdx.x
    value = _blend(first[r], first_lse[r], second[r], second_lse[r], out[r])
    if member() == 0:
        lse[r] = value


# --- stages ---


class Queries(NamedTuple):
    """Rows of a step: row r is the query `time[r]` of head `head[r]`."""

    head: Any  # (rows,) int64
    time: Any


def over_keys(problem, queries, start, stop, longest):
    """Exact attention of the queries to the keys start .. stop of their heads, none longer than `longest`.

    Returns `out (rows, E)` and `lse (rows,)`.
    """
    device, element, (_, _, dim, values) = problem.device, problem.element, problem.shape
    count, segments = len(queries.head), max(1, -(-longest // SEGMENT))
    partial_lse = device.empty((count, segments), element)
    partial_out = device.empty((count, segments, values), element)
    room = device.empty((min(count * segments, device.pieces), ROOM, max(dim, TILE)), element)
    every = np.arange(len(problem.query_head))
    task = *problem.arrays(every), *queries, start, stop, problem.factor, room, partial_lse, partial_out
    device.run(_few_keys_cpu if count * longest < FEW else _keys_cpu, _keys_cuda, (len(room),), *task)
    lse, out = device.empty((count,), element), device.empty((count, values), element)
    device.run(_merge_cpu, _merge_cuda, (count,), partial_lse, partial_out, start, stop, lse, out)
    return out, lse


def over_ranges(problem, heads, start, stop):
    """The same for all T queries of some heads: the keys start[h] .. stop[t] of query t of each head.

    Both are NumPy arrays, (heads,) and (T,). A row at a time while there are few, else a panel at a time (`rows`).
    """
    count = len(stop)
    if count >= _PANEL:
        spans = np.empty((len(problem.query_head), count, 2), np.int32)
        spans[heads, :, 0], spans[:, :, 1] = start[:, None], stop
        seen = dataclasses.replace(problem, spans=spans, pattern=np.arange(len(spans)))
        out, lse, _ = rows(seen, heads)
        return out.reshape(-1, out.shape[2]), lse.reshape(-1)
    upload = problem.device.upload
    queries = Queries(upload(np.repeat(heads, count)), upload(np.tile(np.arange(count), len(heads))))
    ranges = upload(np.repeat(start, count)), upload(np.tile(stop, len(heads)))
    return over_keys(problem, queries, *ranges, int(stop[-1] - start.min()))


def blend(problem, first, second):
    """Two answers `(out, lse)` over disjoint keys as one."""
    device = problem.device
    out, lse = device.empty(first[0].shape, problem.element), device.empty(first[1].shape, problem.element)
    device.run(_blend_cpu, _blend_cuda, (len(lse),), *first, *second, out, lse)
    return out, lse
