"""Exact attention rows: the streaming softmax over all keys, for chosen queries or for all of them.

    s_ij = scale q_i . k_j      lse_i = log sum_j exp(s_ij)      o_i = sum_j exp(s_ij - lse_i) v_j

One pass over the keys (online softmax, Milakov and Gimelshein 2018; tiled as in FlashAttention, Dao et al. 2022).
The keys are cut into `splits` of fixed size, so that a few rows over many keys still occupy every core; the partial
results are merged in a fixed order, so that the number of threads does not change a bit. Where the problem has spans
(`kernels.span`) j runs over the keys that a query sees; the output of one that sees none is 0, its lse minus infinity.
`lse` and the masses are in units of log 2.
"""

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .kernels import tile
from .kernels.panel import (
    PANELS,
    TILE,
    add_half,
    add_values,
    larger,
    load_tile,
    log_sum,
    multiply_half,
    multiply_keys,
    pack_query,
    raise_top,
    weigh,
    weight,
)
from .kernels.simd import half_lanes, lane_count, lanes, padded
from .kernels.span import add_seen, hide_unseen, inside, is_finite, outside, place_spans, spoil_of, spread
from .kernels.team import barrier, member, members
from .problem import Problem

# --- bodies ---


@shared
def _chosen(which, h, i):
    """The i-th query of a head's list; an empty list stands for all queries."""
    return which[h, i] if which.shape[1] else np.int64(i)


@shared
def _in_pairs(b, blocks):
    """The first block, the last, the second, the last but one, ...: under a causal mask two neighbours do the work of
    any other two, however threads share them out.
    """
    return b // 2 if b % 2 == 0 else blocks - 1 - b // 2


@shared
def _place_queries(q, which, h, first, count, factor, spans, start, stop, queries, lows, highs):
    """Queries into their lanes, with what they see of the keys start .. stop; returns the range that some see."""
    width, low, high = lane_count(queries), stop, start
    for i in range(count):
        p, x = i // width, i % width
        row = _chosen(which, h, first + i)
        pack_query(queries[p], x, q, row, factor)
        if spans.shape[0]:
            place_spans(spans, row, start, stop, lows[p], highs[p], x)
            if lows[p, x] < highs[p, x]:
                low, high = min(low, lows[p, x]), max(high, highs[p, x])
            spread(lows[p], highs[p], x, width)
    return (low, high) if spans.shape[0] else (start, stop)


@shared
def _attend(q, k, v, which, h, first, count, start, stop, factor, spans, place, out, lse, mass):
    """The queries first .. first + count of head h's list against keys start .. stop; row i of `out` is `place[i]`."""
    element = out.dtype
    width = lane_count(out)
    used = (count + width - 1) // width
    depth, values = q.shape[1], padded(v.shape[1])
    queries = np.zeros((used, depth, width), element)
    sums = np.zeros((used, values, width), element)
    top = np.full((used, width), np.finfo(element).min / 2, element)
    total = np.zeros((used, width), element)
    tile_total, peak = np.empty(width, element), np.empty(width, element)
    scores = np.zeros((TILE, width), element)
    key_tile, value_tile = np.empty((TILE, depth), element), np.empty((TILE, values), element)
    lows, highs = np.empty((used, width), np.int64), np.empty((used, width), np.int64)
    task = spans, start, stop, queries, lows, highs
    start, stop = _place_queries(q, which, h, first, count, factor, *task)
    for j in range(start, stop, TILE):
        keys = min(TILE, stop - j)
        load_tile(key_tile, k, j, keys)
        load_tile(value_tile, v, j, keys)
        for p in range(used):
            seen = not spans.shape[0] or inside(lows[p], highs[p], j, keys)
            if not seen and outside(lows[p], highs[p], j, keys):
                continue
            few = count - p * width <= half_lanes(out)
            if few:
                multiply_half(scores, key_tile, queries[p], 0, keys, 0)
            else:
                multiply_keys(scores, key_tile, queries[p], keys)
            if not seen:
                hide_unseen(scores, lows[p], highs[p], j, keys, -element.type(np.inf))
            raise_top(top[p], peak, total[p], sums[p], scores, keys)
            tile_total[:] = 0
            weigh(scores, top[p], tile_total, keys)
            total[p] += tile_total
            if not seen and not is_finite(value_tile, keys):
                add_seen(sums[p], value_tile, scores, lows[p], highs[p], j, keys)
            elif few:
                add_half(sums[p], value_tile, scores, 0, keys, 0)
            else:
                add_values(sums[p], value_tile, scores, keys)
            if mass.shape[0]:
                for x in range(min(width, count - p * width)):
                    mass[first + p * width + x, j // TILE] = log_sum(top[p, x], tile_total[x])
    for i in range(count):
        p, x = i // width, i % width
        some = total[p, x] > 0 or total[p, x] != total[p, x]
        lse[first + i] = log_sum(top[p, x], total[p, x]) if some else -np.inf
        share = element.type(1) / total[p, x] if some else element.type(0)
        row = _chosen(which, h, first + i) if place else first + i
        for e in range(v.shape[1]):
            out[row, e] = sums[p, e, x] * share


@shared
def _merge(partial_out, partial_lse, h, i, out, lse):
    """o = sum_s 2^(lse_s - lse) o_s, in the order of the splits, for one row by a team."""
    splits = partial_lse.shape[0]
    infinity, zero = partial_lse.dtype.type(np.inf), partial_lse.dtype.type(0)
    top = partial_lse[0, h, i]
    for s in range(1, splits):
        top = larger(partial_lse[s, h, i], top)
    none = top == -infinity  # a query that sees no key
    top = zero if none else top
    total = zero
    for s in range(splits):
        total += weight(partial_lse[s, h, i], top)
    if member() == 0:
        lse[h, i] = -infinity if none else log_sum(top, total)
    for e in range(member(), out.shape[2], members()):
        out[h, i, e] = 0
    for s in range(splits):
        share = zero if none else weight(partial_lse[s, h, i], top) / total
        for e in range(member(), out.shape[2], members()):
            out[h, i, e] += share * partial_out[s, h, i, e]


# --- CPU drivers ---


@cpu_kernel
def _rows_cpu(
    q, k, v, query_head, key_head, spans, pattern, which, used, place, scatter, split, factor, out, lse, mass
):
    splits, heads, count = lse.shape
    block = PANELS * lane_count(out)
    blocks = (count + block - 1) // block
    keys = k.shape[1]
    for item in prange(heads * blocks * splits):
        h, rest = item // (blocks * splits), item % (blocks * splits)
        b, s = _in_pairs(rest // splits, blocks), rest % splits
        first = b * block
        if first < used[h]:
            _attend(
                q[query_head[h]],
                k[key_head[h]],
                v[key_head[h]],
                which,
                h,
                first,
                min(block, used[h] - first),
                s * split,
                min(keys, (s + 1) * split),
                factor,
                spans[pattern[h]],
                scatter,
                out[s, place[h]],
                lse[s, h],
                mass[h],
            )


@cpu_kernel
def _merge_cpu(partial_out, partial_lse, used, out, lse):
    heads, count = lse.shape
    for item in prange(heads * count):
        h, i = item // count, item % count
        if i < used[h]:
            _merge(partial_out, partial_lse, h, i, out, lse)


# --- CUDA drivers ---


def _rows_driver(element, spanned):
    """One block for THREADS queries, one split of the keys and a a value columns of one head."""
    a, keys, columns_at_once, block, depth, rows_of_buffers, piece_size = tile.geometry(element)
    threads = tile.THREADS
    lowest, infinity = element.type(np.finfo(element).min / 2), element.type(np.inf)

    @cuda_kernel(tile.THREADS, tile.BLOCKS)
    def rows_cuda(
        q,
        k,
        v,
        query_head,
        key_head,
        spans,
        pattern,
        which,
        used,
        place,
        scatter,
        split,
        factor,
        vectors,
        out,
        lse,
        mass,
    ):
        t, h = cuda.threadIdx.x, cuda.blockIdx.z
        columns = (v.shape[2] + columns_at_once - 1) // columns_at_once
        s, column = cuda.blockIdx.y // columns, cuda.blockIdx.y % columns * columns_at_once
        i = cuda.blockIdx.x * threads + t
        if cuda.blockIdx.x * threads >= used[h]:
            return
        scores = cuda.shared.array((keys, threads), element, alignment=16)
        queries = cuda.shared.array((depth, threads), element, alignment=16)
        buffers = cuda.shared.array((rows_of_buffers, columns_at_once), element, alignment=16)
        factors = cuda.shared.array(threads, element)
        # Kept in shared memory, where only their own thread needs them: registers are scarcer.
        top = cuda.shared.array(threads, element)
        total = cuda.shared.array(threads, element)
        tile_total = cuda.shared.array(threads, element)
        acc = cuda.local.array(columns_at_once, element)
        product = cuda.local.array(block, element)
        piece = cuda.local.array(piece_size, element)
        left = cuda.local.array(a, element)
        right = cuda.local.array(a, element)
        spoils = cuda.shared.array(keys if spanned else 1, element)
        lows = cuda.shared.array(threads if spanned else 1, np.int32)
        highs = cuda.shared.array(threads if spanned else 1, np.int32)
        memory, registers = (scores, queries, buffers), (product, left, right, piece)
        q_h, k_h, v_h = q[query_head[h]], k[key_head[h]], v[key_head[h]]
        start, stop = s * split, min(k.shape[1], (s + 1) * split)
        row = _chosen(which, h, min(i, used[h] - 1))
        zero, one = acc.dtype.type(0), acc.dtype.type(1)
        top[t], total[t] = lowest, zero
        tile.fill(acc, zero)
        first, partly = start, False
        if spanned:
            lows[t], highs[t] = spans[pattern[h], row, 0], spans[pattern[h], row, 1]
            barrier()
            low, high, last_low, first_high = tile.span_range(lows, highs)
            first, stop = max(first, low), min(stop, high)
        for j in range(first, stop, keys):
            # queries are never projected here: `scores` stands for the matrix that would hold them
            tile.score_tile(
                memory, registers, q_h, row, factor, scores, t, False, k_h, j, stop, j == first, t, a, vectors
            )
            tile.hide_scores(scores, min(keys, stop - j), lowest, t)
            if spanned:
                partly = j < last_low or j + keys > first_high
                if partly:
                    if t < keys:
                        spoils[t] = spoil_of(v_h, j + t, stop, zero)
                    barrier()
                    tile.hide_unseen(scores, spoils, j, lows[t], highs[t], -infinity, t)
            peak = tile.peak_of(scores, top[t], t)
            shrink = weight(top[t], peak)
            top[t], factors[t] = peak, shrink
            added = tile.weigh(scores, peak, t)
            total[t] = total[t] * shrink + added
            tile_total[t] = added if j % TILE == 0 else tile_total[t] * shrink + added
            if mass.shape[1] and column == 0 and i < used[h] and (j + keys >= stop or (j + keys) % TILE == 0):
                mass[h, i, j // TILE] = log_sum(peak, tile_total[t])
            tile.begin_values(memory, registers, v_h, j, stop, column, t, a, vectors & 4, partly)
            barrier()
            tile.scale_queries(acc, factors, t, a)
            tile.add_values(acc, memory, registers, v_h, j, stop, column, t, a, vectors & 4, partly)
        none = total[t] == zero
        factors[t] = zero if none else one / total[t]
        if column == 0 and i < used[h]:
            lse[s, h, i] = -infinity if none else log_sum(top[t], total[t])
        barrier()
        tile.scale_queries(acc, factors, t, a)
        tile.put_block(queries, acc, t, a)
        barrier()
        if i < used[h]:
            tile.write_row(out[s, place[h]], row if scatter else i, queries, column, t, a, vectors & 8)

    return rows_cuda


def _rows_drivers(spanned):
    return {element: _rows_driver(np.dtype(element), spanned) for element in (np.float32, np.float64)}


_ROWS_CUDA, _SPANS_CUDA = _rows_drivers(False), _rows_drivers(True)


@cuda_kernel(64)
def _merge_cuda(partial_out, partial_lse, used, out, lse):
    if cuda.blockIdx.x < used[cuda.blockIdx.y]:
        _merge(partial_out, partial_lse, cuda.blockIdx.y, cuda.blockIdx.x, out, lse)


# --- stage ---


def rows(problem: Problem, heads, which=None, *, masses=False, out=None, used=None, place=None):
    """Exact attention for the queries `which (heads, n)` of the given heads, or for all of them.

    Of each head's list the first `used (heads,)` count, all by default. With `place (all heads, N, E)` row i of head h
    is written to place[heads[h], which[h, i]]; otherwise to `out (heads, n, E)`, which is made if not given.

    Returns `out` (or `place`), `lse (heads, n)` and, if asked for, `masses (heads, n, tiles)`: log2 of the sum of
    exp(s_ij) over each tile of keys, from which landmarks are drawn (not of a problem with spans).
    """
    device, element = problem.device, problem.element
    n, m, _, e = problem.shape
    count = n if which is None else which.shape[1]
    which = device.empty((len(heads), 0), np.int64) if which is None else which
    used = device.upload(np.full(len(heads), count)) if used is None else used
    scatter = place is not None
    target = device.upload(np.asarray(heads) if scatter else np.arange(len(heads)))
    splits, split = (1, m) if scatter else _splits(problem, len(heads) * -(-count // _block(problem)), m)
    if out is None:
        out = place if scatter else device.empty((len(heads), count, e), element)
    lse = device.empty((len(heads), count), element)
    mass = device.empty((len(heads), count if masses else 0, -(-m // TILE)), element)
    partial_out = device.empty((splits, *out.shape), element) if splits > 1 else out.reshape(1, *out.shape)
    partial_lse = device.empty((splits, *lse.shape), element) if splits > 1 else lse.reshape(1, *lse.shape)
    task = *problem.arrays(heads), *problem.seen(heads), which, used, target, scatter, split, problem.factor
    if device.name == "cpu":
        _rows_cpu(*task, partial_out, partial_lse, mass)
    else:
        grid = -(-count // tile.THREADS), splits * -(-e // tile.geometry(element).columns), len(heads)
        vectors = tile.vectors(problem.q, problem.k, problem.v, partial_out)
        drivers = _ROWS_CUDA if problem.spans is None else _SPANS_CUDA
        device.run(None, drivers[element.type], grid, *task, vectors, partial_out, partial_lse, mass)
    if splits > 1:
        device.run(_merge_cpu, _merge_cuda, (count, len(heads)), partial_out, partial_lse, used, out, lse)
    return out, lse, mass


def _block(problem):
    """Queries that are worked on together."""
    return PANELS * lanes(problem.element) if problem.device.name == "cpu" else tile.THREADS


def _splits(problem, items, keys):
    """Into how many ranges of whole tiles the keys are cut: enough pieces of work, at least 1024 keys each."""
    wanted = max(1, min(-(-problem.device.pieces // max(items, 1)), keys // 1024))
    split = -(-keys // (wanted * TILE)) * TILE
    return -(-keys // split), split
