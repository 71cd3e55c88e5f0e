"""The content near field: heavy keys, and the keys of the buckets that a query probes, exactly.

    (out_i, lse_i) = attention of query i to the heavy keys and to the keys of its first t buckets (`buckets`)

One pass for each probe p = 1 .. t, the first also for the heavy keys: queries whose p-th bucket is the same make up
runs, and all work is dense tiles. A query is in one run of a pass, so that no two of them write one row. A pass goes on
from the output and the lse of the one before.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .buckets import Buckets, build, probes
from .grouping import RUN, list_groups
from .kernels import tile
from .kernels.block import ROOM, TILE_STRIDE, attend_rows
from .kernels.panel import TILE, larger, log_sum, weight
from .kernels.prefetch import AHEAD, prefetch
from .kernels.scalar import widen
from .kernels.simd import NARROW_ROWS, half_lanes, padded
from .kernels.team import barrier, member, members
from .metric import metric_of

_TOGETHER = 16  # runs that share their scratch

# --- bodies ---


@shared
def _gather_row(source, row, out):
    for d in range(member(), source.shape[1], members()):
        out[d] = widen(source[row, d])


@shared
def _pick(out, lse, probes, row, i, picked, picked_lse, picked_probes):
    """What is near to query `row` into entry i of a list; by a team."""
    for e in range(member(), out.shape[1], members()):
        picked[i, e] = out[row, e]
    for p in range(member(), probes.shape[1], members()):
        picked_probes[i, p] = probes[row, p]
    if member() == 0:
        picked_lse[i] = lse[row]


# --- drivers ---


@cpu_kernel
def _gather_cpu(source, place, which, out):
    heads, n = which.shape
    for item in prange(heads * n):
        h, i = item // n, item % n
        prefetch(source[place[h]], which[h, min(i + AHEAD, n - 1)])
        _gather_row(source[place[h]], which[h, i], out[h, i])


@cuda_kernel(64)
def _gather_cuda(source, place, which, out):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    _gather_row(source[place[h]], which[h, i], out[h, i])


@cpu_kernel
def _pick_cpu(out, lse, probes, which, picked, picked_lse, picked_probes):
    heads, n = which.shape
    for item in prange(heads * n):
        h, i = item // n, item % n
        _pick(out[h], lse[h], probes[h], which[h, i], i, picked[h], picked_lse[h], picked_probes[h])


@cuda_kernel(64)
def _pick_cuda(out, lse, probes, which, picked, picked_lse, picked_probes):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    _pick(out[h], lse[h], probes[h], which[h, i], i, picked[h], picked_lse[h], picked_probes[h])


@cpu_kernel
def _attend_cpu(x, place, k, v, key_place, keys, entries, owner, used, start, counts, turn, factor, out, lse):
    heads, runs = owner.shape
    heavy, element, columns = start.shape[1] - 2, x.dtype, padded(out.shape[2], half_lanes(x))
    blocks = (runs + _TOGETHER - 1) // _TOGETHER
    for item in prange(heads * blocks):
        h, block = item // blocks, item % blocks
        tile, values = np.empty((k.shape[2], TILE_STRIDE), element), np.zeros((TILE, columns), element)
        queries, sums = np.zeros((NARROW_ROWS, k.shape[2]), element), np.empty((NARROW_ROWS, columns), element)
        scores, state = np.empty((NARROW_ROWS, TILE), element), np.zeros((4, ROOM), element)
        room = tile, values, queries, scores, sums, (state[0], state[1], state[2], state[3])
        more = keys[h, start[h, heavy] : start[h, heavy + 1] if turn == 0 else start[h, heavy]]
        for r in range(block * _TOGETHER, min(runs, (block + 1) * _TOGETHER) if turn < counts[h] else 0):
            mine, other = owner[h, r], owner[h, min(r + 1, runs - 1)]
            own = keys[h, start[h, mine] : start[h, mine + 1]]
            following = keys[h, start[h, other] : start[h, other + 1] if other != mine else start[h, other]]
            fresh = r == block * _TOGETHER or mine != owner[h, r - 1]
            rows, keys_of = entries[h, r * RUN : (r + 2) * RUN], (k[key_place[h]], v[key_place[h]])
            near = *keys_of, own, more, following, fresh
            attend_rows(x[place[h]], rows, used[h, r], factor, *near, *room, out[h], lse[h])


def _attend_driver(element):
    """One block for the rows of a run and a a value columns."""
    a, keys, columns_at_once, block, depth, rows_of_buffers, piece_size = tile.geometry(element)
    threads = tile.THREADS
    lowest, zero, one = element.type(np.finfo(element).min / 2), element.type(0), element.type(1)

    @cuda_kernel(tile.THREADS, tile.BLOCKS)
    def attend_cuda(x, place, k, v, entries, owner, used, start, counts, turn, factor, vectors, out, lse, new_lse):
        t, r, h = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.z
        column, count = cuda.blockIdx.y * columns_at_once, used[h, r]
        if count == 0 or turn >= counts[h]:
            return
        scores = cuda.shared.array((keys, threads), element, alignment=16)
        queries = cuda.shared.array((depth, threads), element, alignment=16)
        buffers = cuda.shared.array((rows_of_buffers, columns_at_once), element, alignment=16)
        factors = cuda.shared.array(threads, element)
        places = cuda.shared.array(threads, np.int32)
        acc = cuda.local.array(columns_at_once, element)
        product = cuda.local.array(block, element)
        piece = cuda.local.array(piece_size, element)
        left = cuda.local.array(a, element)
        right = cuda.local.array(a, element)
        memory, registers = (scores, queries, buffers), (product, left, right, piece)
        row, g, heavy = entries[h, r * threads + min(t, count - 1)], owner[h, r], start.shape[1] - 2
        places[t] = row
        factors[t] = lse[h, row]
        top = larger(factors[t], lowest)
        total = one if factors[t] == top else zero
        barrier()
        tile.load_rows(acc, out[h], places, factors, lowest, column, t, a)
        begin, end = start[h, g], start[h, g + 1]
        first_heavy = start[h, heavy] if turn == 0 else start[h, heavy + 1]
        own = (end - begin + keys - 1) // keys
        for i in range(own + (start[h, heavy + 1] - first_heavy + keys - 1) // keys):
            j = begin + i * keys if i < own else first_heavy + (i - own) * keys
            stop = end if i < own else start[h, heavy + 1]
            where = x[place[h]], row, factor, scores, t, False, k[h], j, stop, i == 0, t, a, vectors
            tile.score_tile(memory, registers, *where)
            tile.hide_scores(scores, min(keys, stop - j), lowest, t)
            peak = tile.peak_of(scores, top, t)
            shrink = weight(top, peak)
            top = peak
            factors[t] = shrink
            total = total * shrink + tile.weigh(scores, top, t)
            tile.begin_values(memory, registers, v[h], j, stop, column, t, a, vectors & 4)
            barrier()
            tile.scale_queries(acc, factors, t, a)
            tile.add_values(acc, memory, registers, v[h], j, stop, column, t, a, vectors & 4)
        factors[t] = one / total
        barrier()
        tile.scale_queries(acc, factors, t, a)
        tile.put_block(queries, acc, t, a)
        barrier()
        if t < count:
            tile.write_row(out[h], row, queries, column, t, a, vectors & 8)
            if column == 0:
                new_lse[h, row] = log_sum(top, total)

    return attend_cuda


_ATTEND_CUDA = {element: _attend_driver(np.dtype(element)) for element in (np.float32, np.float64)}


# --- stages ---


class Near(NamedTuple):
    """What is near to some queries by content."""

    out: Any  # (heads, n, E): attention to the near keys alone; anything where lse is minus infinity
    lse: Any  # (heads, n)
    probes: Any  # (heads, n, most) int32: buckets, best first
    count: Any  # (heads,) int64: how many of the probes count; 0: nothing is near, not even the heavy keys
    bucket: Any  # (heads, M, 1) int32: of every key
    heavy: int  # the heavy keys' bucket


def nothing(problem, heads):
    """No content near field."""
    device, element = problem.device, problem.element
    out, lse = device.empty((heads, 0, problem.shape[3]), element), device.empty((heads, 0), element)
    probes, bucket = device.empty((heads, 1, 1), np.int32), device.empty((heads, 0, 1), np.int32)
    return Near(out, lse, probes, device.zeros(heads, np.int64), bucket, -1)


class Tried(NamedTuple):
    """The near field of some rows with so many probes."""

    most: int
    rows: Near


def gather_rows(problem, source, place, which, columns=None):
    """source[place[h], which[h, i]], widened; with zeros up to `columns`."""
    device = problem.device
    make = device.empty if columns is None else device.zeros
    out = make((*which.shape, columns or source.shape[2]), problem.element)
    device.run(_gather_cpu, _gather_cuda, which.shape[::-1], source, place, which, out)
    return out


def plain(problem, source, place):
    """`source` in the arithmetic's dtype and contiguous, and each head's place in it: the kernels compile but once."""
    device, (_, n, _) = problem.device, source.shape
    if source.dtype == problem.element and device.is_contiguous(source):
        return source, place
    every = device.repeat(device.upload(np.arange(n)[None]), len(place))
    return gather_rows(problem, source, place, every), device.upload(np.arange(len(place)))


def by_bucket(problem, heads, pool, wished):
    """The heads' keys by bucket; `pool` are the columns of keys on the pilot rows, which keys, and how many."""
    k, own = plain(problem, problem.k, problem.key_heads(heads))
    columns, keys, size = pool
    return build(problem, k, own, metric_of(problem, heads), columns, keys, size, wished)


def tried(problem, heads, which, buckets, choices):
    """A `Tried` of the queries `which (heads, n)` for each number of probes, rising; one after the other is used up."""
    device, count = problem.device, len(heads)
    x, own = gather_rows(problem, problem.q, problem.query_heads(heads), which), device.upload(np.arange(count))
    found = probes(problem, x, own, buckets, choices[-1])
    every = device.upload(np.full(count, choices[-1]))
    for turn, (out, lse) in enumerate(_passes(problem, heads, x, own, buckets, found, every)):
        if turn + 1 in choices:
            used = device.upload(np.full(count, turn + 1))
            yield Tried(turn + 1, Near(out, lse, found, used, buckets.bucket, buckets.heavy))


def near(problem, heads, buckets, counts, most, room=None):
    """The `Near` of all queries with counts[h] probes, `most` at most; its output lies in `room`, if that is given."""
    x, place = plain(problem, problem.q, problem.query_heads(heads))
    found = probes(problem, x, place, buckets, most)
    *_, (out, lse) = _passes(problem, heads, x, place, buckets, found, counts, room)
    return Near(out, lse, found, counts, buckets.bucket, buckets.heavy)


def again(problem, heads, part):
    """The keys by bucket and the `Near` of all queries of a forward pass, from what it left (`residuals.LowRank`)."""
    if not part.order.shape[1]:
        return None, nothing(problem, len(heads))
    found = Buckets((), part.bucket, part.order, part.start, part.widest)
    x, place = plain(problem, problem.q, problem.query_heads(heads))
    *_, (out, lse) = _passes(problem, heads, x, place, found, part.probes, part.counts)
    return found, Near(out, lse, part.probes, part.counts, part.bucket, found.heavy)


def of_rows(device, near, which):
    """The `Near` of the queries `which (heads, n)`."""
    if near.out.shape[1] == 0:
        return near
    out, lse, probes = (device.empty((*which.shape, *x.shape[2:]), x.dtype) for x in near[:3])
    task = near.out, near.lse, near.probes, which, out, lse, probes
    device.run(_pick_cpu, _pick_cuda, which.shape[::-1], *task)
    return near._replace(out=out, lse=lse, probes=probes)


def _passes(problem, heads, x, place, buckets, probes, counts, out=None):
    """Attention of the rows x[place[h]] to the heavy keys and the first bucket that they probe, then also to the next.

    Yields `out (heads, n, E)` and `lse (heads, n)` after each of them. Of the probes of head h only the first
    `counts (heads,)` count; with 0 not even the heavy keys do.
    """
    device, element, (count, n, most) = problem.device, problem.element, probes.shape
    if out is None:
        out = device.empty((count, n, problem.shape[3]), element)  # is not read where nothing was seen
    lse = device.repeat(device.upload(np.full((count, 1), -np.inf, element)), n).reshape(count, n)
    keys = _keys(problem, heads, buckets)
    for turn in range(most):
        lists = list_groups(device, probes, turn, buckets.heavy + 1)
        task = lists.entries, lists.owner, lists.used, buckets.start, counts, turn, problem.factor
        if device.name == "cpu":
            _attend_cpu(x, place, *keys, *task, out, lse)
        else:
            lse = _attend_on_gpu(device, (x, place), keys, task, out, lse)
        yield out, lse


def _keys(problem, heads, buckets):
    """Keys and values: for the CPU as they lie, with their places and order; for the GPU in the order of their buckets.

    The GPU's tiles are read row after row. The CPU asks for rows ahead, wherever they lie: a copy of all would be most
    of the memory that a call needs, and memory that is new to a process is dear.
    """
    place = problem.key_heads(heads)
    if problem.device.name == "cpu":
        return problem.k, problem.v, place, buckets.keys
    k = gather_rows(problem, problem.k, place, buckets.keys)
    return k, gather_rows(problem, problem.v, place, buckets.keys, padded(problem.shape[3]))


def _attend_on_gpu(device, queries, keys, task, out, lse):
    """The driver's launch; returns the new lse, for the blocks of one run read the old one side by side."""
    new_lse, owner = device.take(lse, np.arange(len(lse))), task[1]
    columns = -(-out.shape[2] // tile.geometry(out.dtype).columns)
    grid, vectors = (owner.shape[1], max(1, columns), len(owner)), tile.vectors(queries[0], *keys, out)
    device.run(None, _ATTEND_CUDA[out.dtype.type], grid, *queries, *keys, *task, vectors, out, lse, new_lse)
    return new_lse
