"""The adjoint of attention on the GPU's tiles: three sums, each by a driver of its own.

    w_ij = exp(s_ij - lse_i)      ds_ij = w_ij (g_i . v_j + c_i b_j)

    to queries     scale sum_j ds_ij k_j      a block has THREADS queries and takes the keys in tiles
    to keys        scale sum_i ds_ij q_i      a block has THREADS keys and takes the queries in tiles
    to values      sum_i w_ij g_i

Queries may have spans (`kernels.span`): what one does not see enters no sum, whatever it holds.

A block owns its rows of the output, so that nothing is added up by two of them: scores are computed three times, but
no result depends on the order in which blocks happen to run. What stays with the block is called a lane, what passes
by in tiles (`kernels.tile`) a row.
"""

from typing import Any, NamedTuple

import numpy as np

from ._jit import cuda, cuda_kernel, device_body
from .content import nothing as nothing_near
from .kernels import tile
from .kernels.panel import covered, in_band, slope, weight
from .kernels.scalar import fma
from .kernels.span import sees
from .kernels.staging import block_key, block_query, load, load4, store, store4, swizzle
from .kernels.team import barrier

# --- the lanes' arrays, the rows' arrays in the same order, and which of the latter is summed up ---


@device_body
def to_queries(q, g, k, v):
    return q, g, k, v, k


@device_body
def to_keys(q, g, k, v):
    return k, v, q, g, q


@device_body
def to_values(q, g, k, v):
    return k, v, q, g, g


@device_body
def _entry(array, i, count, absent, beyond):
    """array[i]; `absent` of an array without entries, `beyond` from the end on."""
    value = beyond
    if i < count:
        value = array[i] if array.shape[0] else absent
    return value


@device_body
def _place_span(spans, i, count, counts, lows, highs, t):
    """What query i sees, into place t: nothing if it does not count, or there is no such query."""
    lows[t], highs[t] = np.int32(0), np.int32(0)
    if i < count and counts:
        lows[t], highs[t] = spans[i, 0], spans[i, 1]


# --- one tile of scores and slopes ---


@device_body
def _weigh_block(product, lse, by_lane, t, a):
    """Scores to weights in registers; `lse` has an entry for every lane, or for every row of the tile."""
    for x in range(product.shape[0] // a):
        for y in range(a):
            top = lse[block_query(y, t, a)] if by_lane else lse[block_key(x, t, a)]
            product[x * a + y] = weight(product[x * a + y], top)


@device_body
def _hide_block(product, lane, row, stop, window, t, a):
    """No weight for rows from `stop` on, nor outside of the band; `lane` and `row` are the first ones."""
    for x in range(product.shape[0] // a):
        place = row + block_key(x, t, a)
        for y in range(a):
            if place >= stop or (window >= 0 and not in_band(lane + block_query(y, t, a), place, window)):
                product[x * a + y] = product.dtype.type(0)


@device_body
def _hide_covered(scores, lane, row, stop, by_query, bucket, heavy, probes, used, t):
    """No weight for keys that are near to a query by content; lanes are queries and rows keys, or the other way.

    Between barriers: in shared memory, for a loop over probes would keep the registers from being registers.
    """
    barrier()
    for j in range(min(scores.shape[0], stop - row)):
        query, key = (lane + t, row + j) if by_query else (row + j, lane + t)
        inside = query < probes.shape[0] and key < bucket.shape[0]
        if inside and covered(bucket[key, 0], heavy, probes[query], used):
            store(scores, j, tile.score_place(j, t), scores.dtype.type(0))
    barrier()


@device_body
def _hide_spans(product, lane, row, lows, highs, by_lane, t, a):
    """No weight where a query does not see a key; the spans are of the lanes, which are queries, or of the rows."""
    for x in range(product.shape[0] // a):
        i = block_key(x, t, a)
        for y in range(a):
            j = block_query(y, t, a)
            seen = sees(row + i, lows[j], highs[j]) if by_lane else sees(lane + j, lows[i], highs[i])
            if not seen:
                product[x * a + y] = product.dtype.type(0)


@device_body
def _slope_block(scores, product, lanes, rows, t, a):
    """The products with the cotangents to slopes, in registers: by the thread's own weights, c = lanes * rows."""
    for x in range(product.shape[0] // a):
        row = block_key(x, t, a)
        for g in range(a // 4):
            lane, i = block_query(4 * g, t, a), x * a + 4 * g
            x0, x1, x2, x3 = load4(scores, row, swizzle(row // 4, lane, tile.THREADS))
            product[i] = slope(x0, product[i], lanes[lane] * rows[row])
            product[i + 1] = slope(x1, product[i + 1], lanes[lane + 1] * rows[row])
            product[i + 2] = slope(x2, product[i + 2], lanes[lane + 2] * rows[row])
            product[i + 3] = slope(x3, product[i + 3], lanes[lane + 3] * rows[row])


@device_body
def _sum_along(scores, rows, t):
    """sum_j w_j rows_j for the thread's own lane."""
    total = rows.dtype.type(0)
    for j in range(scores.shape[0]):
        total = fma(load(scores, j, tile.score_place(j, t)), rows[j], total)
    return total


@device_body
def _add_row(out, row, scores, factor, column, t, a, vector):
    """`factor` times the thread's own lane, added to out[row, column:] (see `tile.write_row`)."""
    for e in range(0, min(a * a, out.shape[1] - column), 4):
        place = tile.score_place(e, t)
        if vector and column + e + 4 <= out.shape[1]:
            x, y, z, w = load4(out, row, column + e)
            x, y = fma(load(scores, e, place), factor, x), fma(load(scores, e + 1, place), factor, y)
            z, w = fma(load(scores, e + 2, place), factor, z), fma(load(scores, e + 3, place), factor, w)
            store4(out, row, column + e, x, y, z, w)
        else:
            for c in range(min(4, out.shape[1] - column - e)):
                old = out[row, column + e + c]
                out[row, column + e + c] = fma(load(scores, e + c, place), factor, old)


# --- drivers ---


def _driver(element, purpose, spanned):
    """One block for THREADS lanes, one split of the rows and a a columns of the output of one head."""
    a, rows, columns_at_once, block, depth, rows_of_buffers, piece_size = tile.geometry(element)
    threads = tile.THREADS
    by_query, slopes = purpose is to_queries, purpose is not to_values
    zero, one, infinity = element.type(0), element.type(1), element.type(np.inf)

    @cuda_kernel(tile.THREADS, tile.BLOCKS)
    def adjoint_cuda(
        q,
        g,
        k,
        v,
        query_place,
        key_place,
        key_count,
        lse,
        offset,
        share,
        window,
        probes,
        used,
        bucket,
        heavy,
        spans,
        pattern,
        seers,
        factor,
        scale,
        split,
        vectors,
        place,
        out,
        along,
    ):
        t, h, first = cuda.threadIdx.x, cuda.blockIdx.z, cuda.blockIdx.x * threads
        columns = (out.shape[3] + columns_at_once - 1) // columns_at_once
        s, column = cuda.blockIdx.y // columns, cuda.blockIdx.y % columns * columns_at_once
        lanes = lse.shape[1] if by_query else key_count[h]
        start, stop = s * split, min(key_count[h] if by_query else lse.shape[1], (s + 1) * split)
        band = np.int64(-1)
        if window.shape[0]:
            band = window[h]
            start, stop = max(start, first - band), min(stop, first + threads + band)
            if band < 0:
                return
        if spanned and not by_query and seers.shape[1]:
            start = max(start, np.int64(seers[pattern[h], cuda.blockIdx.x, 0]))
            stop = min(stop, np.int64(seers[pattern[h], cuda.blockIdx.x, 1]))
        if first >= lanes:
            return
        scores = cuda.shared.array((rows, threads), element, alignment=16)
        staged = cuda.shared.array((depth, threads), element, alignment=16)
        beside = cuda.shared.array((depth if slopes else 4, threads), element, alignment=16)
        buffers = cuda.shared.array((rows_of_buffers, columns_at_once), element, alignment=16)
        tops = cuda.shared.array(threads, element)  # the lse of the lanes, or of the rows
        lane_factors = cuda.shared.array(threads, element)  # c_i and b_j, or b_j and c_i
        row_factors = cuda.shared.array(rows, element)
        lows = cuda.shared.array((threads if by_query else rows) if spanned else 1, np.int32)
        highs = cuda.shared.array((threads if by_query else rows) if spanned else 1, np.int32)
        acc = cuda.local.array(columns_at_once, element)
        product = cuda.local.array(block, element)
        piece = cuda.local.array(piece_size, element)
        left = cuda.local.array(a, element)
        right = cuda.local.array(a, element)
        memory, registers = (scores, staged, buffers), (product, left, right, piece)
        pair = purpose(q[query_place[h]], g[h], k[key_place[h]], v[key_place[h]])
        i = first + t
        row = min(i, lanes - 1)
        total = zero
        tile.fill(acc, zero)
        if by_query:
            tops[t] = _entry(lse[h], i, lanes, zero, infinity)
            lane_factors[t] = _entry(offset[h], i, lanes, zero, zero)
            if spanned:
                _place_span(spans[pattern[h]], i, lanes, tops[t] < infinity, lows, highs, t)
                barrier()
                low, high, _, _ = tile.span_range(lows, highs)
                start, stop = max(start, low), min(stop, high)
        else:
            lane_factors[t] = _entry(share[h], i, lanes, one, zero)
        for j in range(start, stop, rows):
            if t < rows:
                if by_query:
                    row_factors[t] = _entry(share[h], j + t, stop, one, zero)
                else:
                    tops[t] = _entry(lse[h], j + t, stop, zero, infinity)
                    row_factors[t] = _entry(offset[h], j + t, stop, zero, zero)
                    if spanned:
                        _place_span(spans[pattern[h]], j + t, stop, tops[t] < infinity, lows, highs, t)
            fresh = j == start
            tile.score_block(
                memory, registers, pair[0], row, factor, scores, t, False, pair[2], j, stop, fresh, t, a, vectors
            )
            _weigh_block(product, tops, by_query, t, a)
            if j + rows > stop or band >= 0:
                _hide_block(product, first, j, stop, band, t, a)
            if spanned:
                _hide_spans(product, first, j, lows, highs, by_query, t, a)
            tile.put_block(scores, product, t, a)
            if band >= 0 and used[h]:
                _hide_covered(scores, first, j, stop, by_query, bucket[h], heavy, probes[h], used[h], t)
            if slopes:
                other = scores, beside, buffers
                tile.score_block(
                    other, registers, pair[1], row, one, scores, t, False, pair[3], j, stop, fresh, t, a, vectors >> 2
                )
                _slope_block(scores, product, lane_factors, row_factors, t, a)
                if spanned:
                    _hide_spans(product, first, j, lows, highs, by_query, t, a)
                tile.put_block(scores, product, t, a)
            tile.begin_values(memory, registers, pair[4], j, stop, column, t, a, vectors & 16, spanned)
            barrier()
            if not slopes:
                total += _sum_along(scores, row_factors, t)
            tile.add_values(acc, memory, registers, pair[4], j, stop, column, t, a, vectors & 16, spanned)
        tile.put_block(staged, acc, t, a)
        barrier()
        if i < lanes:
            _add_row(out[s, place[h]], i, staged, scale, column, t, a, vectors & 32)
            if not slopes and column == 0 and along.shape[2]:
                along[s, h, i] = total

    return adjoint_cuda


def _drivers(purpose, spanned=False):
    return {element: _driver(np.dtype(element), purpose, spanned) for element in (np.float32, np.float64)}


_QUERIES_CUDA, _KEYS_CUDA, _VALUES_CUDA = _drivers(to_queries), _drivers(to_keys), _drivers(to_values)
_DRIVERS = {to_queries: _QUERIES_CUDA, to_keys: _KEYS_CUDA, to_values: _VALUES_CUDA}
_SEEN_QUERIES_CUDA, _SEEN_KEYS_CUDA = _drivers(to_queries, True), _drivers(to_keys, True)
_SEEN_VALUES_CUDA = _drivers(to_values, True)
_SEEN_DRIVERS = {to_queries: _SEEN_QUERIES_CUDA, to_keys: _SEEN_KEYS_CUDA, to_values: _SEEN_VALUES_CUDA}

# --- on the host ---


class Pairs(NamedTuple):
    """Queries and keys of some heads, and what is known of them."""

    q: Any  # (any heads, n, D), with `query_place` the head of each
    g: Any  # (heads, n, E)
    k: Any  # (any heads, M, D), with `key_place`
    v: Any  # (any heads, M, E)
    query_place: Any
    key_place: Any
    key_count: Any  # (heads,)
    lse: Any  # (heads, n), infinite for queries that count for nothing
    offset: Any  # c_i (heads, n)
    share: Any  # b_j (heads, M), or (heads, 0): 1
    window: Any  # (heads,), -1 is no pair at all; or (0,): all pairs
    beside: Any = None  # the queries' `content.Near`, whose keys are no pairs within a window; None: there is none
    seen: tuple | None = None  # spans (patterns, n, 2), pattern of each head, and `seers` of the keys; None: all pairs


def seers(spans, m):
    """(patterns, blocks, 2): of every THREADS keys a range of the queries that see one of them, from the spans."""
    patterns, n = spans.shape[:2]
    found = np.zeros((patterns, -(-m // tile.THREADS), 2), np.int32)
    found[..., 0] = n
    for p in range(patterns):
        for i in range(0, n, tile.THREADS):
            own = spans[p, i : i + tile.THREADS]
            own = own[own[:, 0] < own[:, 1]]
            if len(own):
                own = found[p, own[:, 0].min() // tile.THREADS : (own[:, 1].max() - 1) // tile.THREADS + 1]
                own[:, 0] = np.minimum(own[:, 0], i)
                own[:, 1] = min(i + tile.THREADS, n)
    return found


def add_adjoint(problem, purpose, pairs, factor, scale, place, out, *, split=None, along=None):
    """Add a sum to the rows of out[split, place[h]].

    Each of `out`'s splits is made of so many rows, by default one of all. `factor` makes scores of q . k, the sum is
    multiplied by `scale`. `along (splits, heads, M)` receives sum_i w_ij c_i with `to_values`.
    """
    device, element = problem.device, problem.element
    n, m, heads = pairs.lse.shape[1], pairs.k.shape[1], len(pairs.g)
    lanes, rows = (n, m) if purpose is to_queries else (m, n)
    along = device.empty((1, heads, 0), element) if along is None else along
    columns = -(-out.shape[3] // tile.geometry(element).columns)
    grid = -(-lanes // tile.THREADS), len(out) * columns, heads
    lane, beside, row, other, summed = purpose(*pairs[:4])
    vectors = tile.vectors(lane, row, beside, other, summed, out)
    nothing = device.empty((1, 0, 2), np.int32)
    seen = (nothing, device.empty(0, np.int64), nothing) if pairs.seen is None else pairs.seen
    drivers = _DRIVERS if pairs.seen is None else _SEEN_DRIVERS
    rest = element.type(factor), element.type(scale), split or rows, vectors, place, out, along
    near = (nothing_near(problem, heads) if pairs.beside is None else pairs.beside)[2:]
    device.run(None, drivers[purpose][element.type], grid, *pairs[:-2], *near, *seen, *rest)
