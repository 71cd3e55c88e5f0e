"""The GPU's inner loop: products of tiles in shared memory, accumulated in registers.

A block of THREADS threads works on as many queries. In registers each thread holds the scores of `a` queries with `b`
keys, and the sums of these queries for `a` value columns; a tile has a b keys and a a columns. Scores pass through
shared memory as `scores (keys, queries)`, where thread t owns query t: the softmax is then the same loop over one lane
as on the CPU (`kernels.panel`).

    queries (depth, THREADS)   one block of the queries' columns, transposed; stays if it holds them all
    buffers (2 rows, a a)      the next CHUNK columns of the keys, transposed, or the next rows of the values
    scores (a b, THREADS)      one tile of scores, then of weights

While one buffer is multiplied the next chunk is on its way from global memory into registers, and is put into the other
buffer (`kernels.staging`): one barrier a chunk.

With 8 x 4 scores and 8 x 8 sums in float32 nothing is spilled.
A tensor-core product would take the place of `_outer` here.
"""

from typing import NamedTuple

import numpy as np

from .._jit import device_body
from .panel import clipped, larger, weight
from .scalar import fma
from .span import sees
from .staging import (
    CHUNK,
    KEYS_PER_THREAD,
    THREADS,
    block_key,
    block_query,
    clean_piece,
    fetch,
    load,
    load4,
    put_keys,
    put_values,
    stage_columns,
    stage_queries,
    store,
    store4,
    swizzle,
)
from .team import barrier

MARKS = 20  # columns of the coefficient table that every query needs beside its values, rounded up
BLOCKS, PRODUCT_BLOCKS = 4, 6  # blocks that should fit on a multiprocessor: they limit a thread's registers


class Geometry(NamedTuple):
    """The sizes of a driver's arrays for one dtype."""

    a: int  # queries, and value columns, per thread
    keys: int  # of a tile
    columns: int  # value columns of a block
    block: int  # scores of a thread
    depth: int  # columns of the queries that are staged together
    buffer_rows: int  # of both buffers: CHUNK columns of the keys take up as much as half of them
    piece: int  # numbers of a chunk that a thread fetches


def geometry(element):
    small = np.dtype(element).itemsize == 4
    a = 8 if small else 4
    keys, columns = a * KEYS_PER_THREAD, a * a
    depth, rows = 64 if small else 32, 2 * CHUNK * keys // columns
    return Geometry(a, keys, columns, a * KEYS_PER_THREAD, depth, rows, keys * CHUNK // THREADS)


# --- products ---


@device_body
def _outer(acc, left, right, rows, i, query, buffers, j, key, a, b):
    """acc[x, y] += buffers[j, x] rows[i, y] for the thread's block of b x a; `query` and `key` are its first places."""
    for g in range(a // 4):  # the swizzle leaves the distance between a block's groups of four as it is
        x, y, z, w = load4(rows, i, query + block_query(4 * g, 0, a))
        left[4 * g], left[4 * g + 1], left[4 * g + 2], left[4 * g + 3] = x, y, z, w
    for g in range(b // 4):
        x, y, z, w = load4(buffers, j, key + block_key(4 * g, 0, a))
        right[4 * g], right[4 * g + 1], right[4 * g + 2], right[4 * g + 3] = x, y, z, w
    for x in range(b):
        for y in range(a):
            acc[x * a + y] = fma(right[x], left[y], acc[x * a + y])


@device_body
def _multiply_chunk(product, left, right, queries, first, buffers, current, t, a):
    """CHUNK steps of the scores: columns `first` .. of the staged queries with a buffer of keys."""
    b, keys, fold = KEYS_PER_THREAD, a * KEYS_PER_THREAD, a // KEYS_PER_THREAD
    for group in range(CHUNK // 4):  # the four rows of a group share their swizzle
        query = swizzle(first // 4 + group, block_query(0, t, a), THREADS)
        key = swizzle(group, block_key(0, t, a), keys)
        i, j = first + 4 * group, current * (buffers.shape[0] // 2) + 4 // fold * group
        _outer(product, left, right, queries, i, query, buffers, j, key, a, b)
        _outer(product, left, right, queries, i + 1, query, buffers, j + 1 // fold, key + 1 % fold * keys, a, b)
        _outer(product, left, right, queries, i + 2, query, buffers, j + 2 // fold, key + 2 % fold * keys, a, b)
        _outer(product, left, right, queries, i + 3, query, buffers, j + 3 // fold, key + 3 % fold * keys, a, b)


@device_body
def _add_chunk(acc, left, right, scores, first, buffers, current, t, a):
    """The keys `first` .. of the tile with a buffer of their values."""
    rows, column = buffers.shape[0] // 2, block_key(0, t, a)
    for group in range(rows // 4):
        query = swizzle(first // 4 + group, block_query(0, t, a), THREADS)
        i, j = first + 4 * group, current * rows + 4 * group
        _outer(acc, left, right, scores, i, query, buffers, j, column, a, a)
        _outer(acc, left, right, scores, i + 1, query, buffers, j + 1, column, a, a)
        _outer(acc, left, right, scores, i + 2, query, buffers, j + 2, column, a, a)
        _outer(acc, left, right, scores, i + 3, query, buffers, j + 3, column, a, a)


@device_body
def multiply_keys(product, left, right, piece, queries, buffers, keys, start, stop, first, t, a, vector):
    """product[x, y] += k_x . q_y over the staged columns from `first` on, keys start .. start + a b before `stop`."""
    depth = min(queries.shape[0], keys.shape[1] - first)
    fetch(piece, keys, start, stop, first, 4, t, vector)
    put_keys(buffers, 0, piece, t, a)
    barrier()
    current = 0
    for d in range(0, depth, CHUNK):
        fetch(piece, keys, start, stop, first + d + CHUNK, 4, t, vector)
        _multiply_chunk(product, left, right, queries, d, buffers, current, t, a)
        current = 1 - current
        put_keys(buffers, current, piece, t, a)
        barrier()


@device_body
def put_block(tile, acc, t, a):
    """The threads' blocks of a product into `tile (keys or columns, queries)`."""
    for x in range(acc.shape[0] // a):
        row = block_key(x, t, a)
        for g in range(a // 4):
            i = x * a + 4 * g
            place = swizzle(row // 4, block_query(4 * g, t, a), THREADS)
            store4(tile, row, place, acc[i], acc[i + 1], acc[i + 2], acc[i + 3])


@device_body
def score_block(memory, registers, q, row, factor, columns, i, projected, keys, j, stop, fresh, t, a, vectors):
    """The scores of keys j .. j + a b (before `stop`) with the block's queries, a thread's own in its `product`.

    `memory` is scores, queries and buffers, `registers` a thread's product, left, right and piece. The thread's query
    is q[row], or columns[:, i] if `projected` (any matrix if not); `fresh` says that none is staged yet.
    """
    (_, queries, buffers), (product, left, right, piece) = memory, registers
    fill(product, product.dtype.type(0))
    block = queries.shape[0]
    for first in range(0, keys.shape[1], block):
        if fresh or keys.shape[1] > block:
            if projected:
                stage_columns(queries, columns, i, first, t)
            else:
                stage_queries(queries, q, row, first, factor, t, vectors & 1)
        multiply_keys(product, left, right, piece, queries, buffers, keys, j, stop, first, t, a, vectors & 2)


@device_body
def score_tile(memory, registers, q, row, factor, columns, i, projected, keys, j, stop, fresh, t, a, vectors):
    """The same into shared memory, for every thread to see."""
    (scores, _, _), (product, _, _, _) = memory, registers
    score_block(memory, registers, q, row, factor, columns, i, projected, keys, j, stop, fresh, t, a, vectors)
    put_block(scores, product, t, a)
    barrier()


@device_body
def begin_values(memory, registers, values, start, stop, column, t, a, vector, clean=False):
    """The first chunk of the values of a tile into a buffer; a barrier must follow before `add_values`."""
    (_, _, buffers), (_, _, _, piece) = memory, registers
    fetch(piece, values, start, stop, column, a * a // 4, t, vector)
    if clean:
        clean_piece(piece)
    put_values(buffers, 0, piece, t, a)


@device_body
def add_values(acc, memory, registers, values, start, stop, column, t, a, vector, clean=False):
    """acc[x, y] += w_j v_jx over the keys of a tile: value columns column .. column + a a, weights in `scores`.

    With `clean`, here and in `begin_values`, values that are not finite count as 0.
    """
    (scores, _, buffers), (_, left, right, piece) = memory, registers
    current, rows = 0, buffers.shape[0] // 2
    for j in range(0, min(scores.shape[0], stop - start), rows):
        fetch(piece, values, start + j + rows, stop, column, a * a // 4, t, vector)
        if clean:
            clean_piece(piece)
        _add_chunk(acc, left, right, scores, j, buffers, current, t, a)
        current = 1 - current
        put_values(buffers, current, piece, t, a)
        barrier()


# --- the softmax: thread t on the scores of query t ---


@device_body
def score_place(key, t):
    """Where row `key` of `scores` keeps query t."""
    return swizzle(key // 4, t, THREADS)


@device_body
def hide_scores(scores, count, lowest, t):
    """The keys from `count` on get no weight."""
    for j in range(count, scores.shape[0]):
        store(scores, j, score_place(j, t), lowest)


@device_body
def hide_unseen(scores, spoils, first, low, high, hidden, t):
    """`hidden` for the keys first, first + 1, ... that the thread's query does not see, NaN for those that spoil it."""
    for j in range(scores.shape[0]):
        place = score_place(j, t)
        seen = load(scores, j, place) + spoils[j]
        store(scores, j, place, seen if sees(first + j, low, high) else hidden)


@device_body
def peak_of(scores, top, t):
    """The larger of `top` and a query's scores."""
    peak = top
    for j in range(0, scores.shape[0], 4):
        place = score_place(j, t)
        a = larger(load(scores, j, place), load(scores, j + 1, place))
        b = larger(load(scores, j + 2, place), load(scores, j + 3, place))
        peak = larger(larger(a, b), peak)
    return peak


@device_body
def weigh(scores, top, t):
    """A query's scores to weights, in place; returns their sum."""
    total = top - top
    for j in range(0, scores.shape[0], 4):
        place = score_place(j, t)
        a, b = weight(load(scores, j, place), top), weight(load(scores, j + 1, place), top)
        c, d = weight(load(scores, j + 2, place), top), weight(load(scores, j + 3, place), top)
        store(scores, j, place, a)
        store(scores, j + 1, place, b)
        store(scores, j + 2, place, c)
        store(scores, j + 3, place, d)
        total += (a + b) + (c + d)
    return total


@device_body
def put_marks(buffers, keys, table, start, stop, first, t):
    """Columns first .. first + MARKS of a tile's rows of the coefficient table into the (free) buffers."""
    width = buffers.shape[1]
    for i in range(t, keys * MARKS, THREADS):
        key, column = start + i // MARKS, first + i % MARKS
        inside = key < stop and column < table.shape[1]
        store(buffers, i // width, i % width, table[key, column] if inside else buffers.dtype.type(0))


@device_body
def add_marks(sums, part, scores, buffers, shrink, t):
    """sums_c = shrink sums_c + sum_j w_j mark_jc for the thread's own query, four columns at a time."""
    width = buffers.shape[1]
    for c in range(0, MARKS, 4):
        for x in range(4):
            part[x] = load(sums, c + x, t) * shrink
        for j in range(scores.shape[0]):
            w, i = load(scores, j, score_place(j, t)), j * MARKS + c
            x, y, z, u = load4(buffers, i // width, i % width)
            part[0], part[1] = fma(w, x, part[0]), fma(w, y, part[1])
            part[2], part[3] = fma(w, z, part[2]), fma(w, u, part[3])
        for x in range(4):
            store(sums, c + x, t, part[x])


@device_body
def fill(registers, value):
    for i in range(registers.shape[0]):
        registers[i] = value


@device_body
def scale_queries(acc, factors, t, a):
    """Each query's sums times its own factor."""
    for y in range(a):
        factor = factors[block_query(y, t, a)]
        for x in range(a):
            acc[x * a + y] *= factor


@device_body
def load_rows(acc, source, rows, factors, lowest, column, t, a):
    """The rows of `source` into the sums of their queries; zero, whatever they are, where no factor is above `lowest`.

    Columns beyond the last repeat it: nobody writes them.
    """
    zero, last = acc.dtype.type(0), source.shape[1] - 1
    for y in range(a):
        i = block_query(y, t, a)
        row, known = np.int64(rows[i]), factors[i] > lowest
        for x in range(a):
            value = load(source, row, min(column + block_key(x, t, a), last))
            acc[x * a + y] = value if known else zero


@device_body
def clip_columns(acc, low, high, column, t, a):
    """Each value column's sums into its own range."""
    for x in range(a):
        e = min(column + block_key(x, t, a), low.shape[0] - 1)
        least, most = low[e], high[e]
        for y in range(a):
            acc[x * a + y] = clipped(acc[x * a + y], least, most)


@device_body
def write_row(out, row, scores, column, t, a, vector):
    """The thread's own query out of a a rows of `scores (columns, queries)` into out[row, column:]."""
    for e in range(0, min(a * a, out.shape[1] - column), 4):
        place = score_place(e, t)
        if vector and column + e + 4 <= out.shape[1]:
            x, y = load(scores, e, place), load(scores, e + 1, place)
            store4(out, row, column + e, x, y, load(scores, e + 2, place), load(scores, e + 3, place))
        else:
            for c in range(min(4, out.shape[1] - column - e)):
                out[row, column + e + c] = load(scores, e + c, place)


@device_body
def span_range(lows, highs):
    """The keys that some lane sees, and those that every lane sees: (low, high, low, high); after a barrier."""
    low, high, inner_low, inner_high = np.int64(2**31), np.int64(0), np.int64(0), np.int64(2**31)
    for x in range(lows.shape[0]):
        a, b = np.int64(lows[x]), np.int64(highs[x])
        if a < b:
            low, high = min(low, a), max(high, b)
            inner_low, inner_high = max(inner_low, a), min(inner_high, b)
        else:
            inner_high = np.int64(0)
    return low, high, inner_low, inner_high


# --- on the host ---


def aligned(array):
    """Can four neighbours of the last axis be loaded at once, wherever a multiple of four begins?"""
    size = array.dtype.itemsize
    rows_fit = all(
        stride % (4 * size) == 0 for stride, n in zip(array.strides[:-1], array.shape[:-1], strict=True) if n > 1
    )
    return bool(array.size and array.strides[-1] == size and rows_fit and _address(array) % (4 * size) == 0)


def vectors(*arrays):
    """The answers as bits, for a kernel."""
    return sum(1 << i for i, array in enumerate(arrays) if aligned(array))


def _address(array):
    return (
        array.__cuda_array_interface__["data"][0] if hasattr(array, "__cuda_array_interface__") else array.ctypes.data
    )
