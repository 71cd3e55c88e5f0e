"""Scores of queries with a few rows (landmarks, centres, directions), and what is made of them.

    features    exp(s_ij - lse_i)                      landmarks j, sampled rows i
    nearest     argmax_c (c . k - |c|^2 / 2)           centres c, keys k: the nearest centre
    squares     sum_c (w_c . q_i)^2                    directions w_c

The rows are tiles: `(heads, rows padded to whole register blocks, D)`.
"""

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .kernels import tile
from .kernels.panel import add_square, multiply_keys, pack_query, weight
from .kernels.simd import ROW_PADDING, lane_count

# --- bodies ---


@shared
def half_square(rows, c):
    """|c|^2 / 2."""
    total = rows.dtype.type(0)
    for d in range(rows.shape[1]):
        total = add_square(total, rows[c, d])
    return total * rows.dtype.type(0.5)


# --- CPU drivers ---


@cpu_kernel
def _features_cpu(q, k, v, query_head, key_head, which, factor, basis, landmarks, rank, lse, out):
    heads, count = which.shape
    width = lane_count(out)
    blocks = (count + width - 1) // width
    for item in prange(heads * blocks):
        h, first = item // blocks, item % blocks * width
        queries = np.zeros((q.shape[2], width), out.dtype)
        coordinates = landmarks.shape[2]
        projected = np.zeros((basis.shape[1], width), out.dtype)
        scores = np.empty((landmarks.shape[1], width), out.dtype)
        used = min(width, count - first)
        for x in range(used):
            pack_query(queries, x, q[query_head[h]], which[h, first + x], factor)
        if basis.shape[1]:
            multiply_keys(projected, basis[h], queries, coordinates)
            multiply_keys(scores, landmarks[h], projected[:coordinates], rank[h])
        else:
            multiply_keys(scores, landmarks[h], queries, rank[h])
        for j in range(rank[h]):
            for x in range(used):
                out[h, j, first + x] = weight(scores[j, x], lse[h, first + x])


@cpu_kernel
def _half_squares_cpu(rows, count, out):
    for h in prange(rows.shape[0]):
        for c in range(count[h]):
            out[h, c] = half_square(rows[h], c)


@cpu_kernel
def _nearest_cpu(k, key_head, which, centres, count, half, nearest):
    heads, sample = which.shape
    width = lane_count(centres)
    blocks = (sample + width - 1) // width
    one = centres.dtype.type(1)
    for item in prange(heads * blocks):
        h, first = item // blocks, item % blocks * width
        keys = np.zeros((k.shape[2], width), centres.dtype)
        scores = np.empty((centres.shape[1], width), centres.dtype)
        used = min(width, sample - first)
        for x in range(used):
            pack_query(keys, x, k[key_head[h]], which[h, first + x], one)
        multiply_keys(scores, centres[h], keys, count[h])
        for x in range(used):
            best = 0
            for c in range(1, count[h]):
                best = c if scores[c, x] - half[h, c] > scores[best, x] - half[h, best] else best
            nearest[h, first + x] = best


@cpu_kernel
def _squares_cpu(q, query_head, directions, out):
    heads, n = out.shape
    count = directions.shape[1]
    width = lane_count(out)
    blocks = (n + width - 1) // width
    one = out.dtype.type(1)
    for item in prange(heads * blocks):
        h, first = item // blocks, item % blocks * width
        queries = np.zeros((q.shape[2], width), out.dtype)
        scores = np.empty((count, width), out.dtype)
        used = min(width, n - first)
        for x in range(used):
            pack_query(queries, x, q[query_head[h]], first + x, one)
        multiply_keys(scores, directions[h], queries, count)
        for x in range(used):
            total = out.dtype.type(0)
            for c in range(count):
                total = add_square(total, scores[c, x])
            out[h, first + x] = total


# --- CUDA drivers: one block for THREADS queries of one head ---

_PLAIN, _WEIGHTS, _NEAREST, _SQUARES = 0, 1, 2, 3


def _products_driver(element, purpose):
    """The scores of a block of queries with all rows of a head's tile, and what `purpose` makes of them, per query.

    `extra` is the queries' normalisers for the weights, half the rows' squares for the nearest one.
    `out` is (heads, rows, queries) for the scores themselves and the weights, (heads, queries) otherwise.
    """
    a, keys, columns_at_once, block, depth, rows_of_buffers, piece_size = tile.geometry(element)
    threads = tile.THREADS

    @cuda_kernel(tile.THREADS, tile.PRODUCT_BLOCKS)
    def products_cuda(q, query_head, which, columns, factor, rows, count, extra, vectors, out):
        t, h = cuda.threadIdx.x, cuda.blockIdx.y
        scores = cuda.shared.array((keys, threads), element, alignment=16)
        queries = cuda.shared.array((depth, threads), element, alignment=16)
        buffers = cuda.shared.array((rows_of_buffers, columns_at_once), element, alignment=16)
        product = cuda.local.array(block, element)
        piece = cuda.local.array(piece_size, element)
        left = cuda.local.array(a, element)
        right = cuda.local.array(a, element)
        memory, registers = (scores, queries, buffers), (product, left, right, piece)
        total = out.shape[out.ndim - 1]
        i = cuda.blockIdx.x * threads + t
        inside = i < total
        i = min(i, total - 1)
        row = which[h, i] if which.shape[1] else np.int64(i)
        best, result = np.int64(0), product.dtype.type(0)
        for j in range(0, count[h], keys):
            tile.score_tile(
                memory,
                registers,
                q[query_head[h]],
                row,
                factor,
                columns[h],
                i,
                columns.shape[1] > 0,
                rows[h],
                j,
                count[h],
                j == 0,
                t,
                a,
                vectors,
            )
            for c in range(min(keys, count[h] - j)):
                score = tile.load(scores, c, tile.score_place(c, t))
                if purpose == _PLAIN and inside:
                    out[h, j + c, i] = score
                elif purpose == _WEIGHTS and inside:
                    out[h, j + c, i] = weight(score, extra[h, i])
                elif purpose == _NEAREST:
                    score -= extra[h, j + c]
                    if j + c == 0 or score > result:
                        best, result = np.int64(j + c), score
                elif purpose == _SQUARES:
                    result = add_square(result, score)
        if purpose == _NEAREST and inside:
            out[h, i] = best
        elif purpose == _SQUARES and inside:
            out[h, i] = result

    return products_cuda


@cuda_kernel(64)
def _half_squares_cuda(rows, count, out):
    c, h = cuda.grid(1), cuda.blockIdx.y
    if c < count[h]:
        out[h, c] = half_square(rows[h], c)


def _drivers(purpose):
    return {element: _products_driver(np.dtype(element), purpose) for element in (np.float32, np.float64)}


_PLAIN_CUDA, _WEIGHTS_CUDA = _drivers(_PLAIN), _drivers(_WEIGHTS)
_NEAREST_CUDA, _SQUARES_CUDA = _drivers(_NEAREST), _drivers(_SQUARES)

# --- stages ---


def features(problem, heads, which, lse, landmarks, rank, basis):
    """exp(s_ij - lse_i) for landmarks j and sampled rows i: (heads, landmarks, n), one contiguous column each.

    Of each head's landmarks `rank (heads,)` count, the others are zero. `basis (heads, m padded, D)` projects the
    queries to the landmarks' coordinates; without a projection it has no rows.
    """
    check_padding(landmarks, basis)
    device = problem.device
    out = device.zeros((*landmarks.shape[:2], which.shape[1]), problem.element)
    if device.name == "cpu":
        _features_cpu(*problem.arrays(heads), which, problem.factor, basis, landmarks, rank, lse, out)
    else:
        columns = project_queries(problem, heads, which, basis, landmarks.shape[2])
        _run(_WEIGHTS_CUDA, problem, problem.q, heads, which, (columns, lse), problem.factor, landmarks, rank, out)
    return out


def project_queries(problem, heads, which, basis, coordinates):
    """On the GPU: the queries' projection, transposed, times the logits' factor; no rows without a basis."""
    columns, lse = _none(problem, heads)
    if not basis.shape[1]:
        return columns
    out = problem.device.empty((len(heads), coordinates, which.shape[1]), problem.element)
    count = problem.device.upload(np.full(len(heads), coordinates))
    _run(_PLAIN_CUDA, problem, problem.q, heads, which, (columns, lse), problem.factor, basis, count, out)
    return out


def _none(problem, heads):
    """No projected queries, and no normalisers."""
    empty = problem.device.empty
    return empty((len(heads), 0, 0), problem.element), empty((len(heads), 0), problem.element)


def nearest(problem, heads, which, centres, count):
    """The nearest of each head's `count (heads,)` centres to the keys `which (heads, n)`: (heads, n)."""
    check_padding(centres)
    device = problem.device
    out = device.empty(which.shape, np.int64)
    half = device.empty(centres.shape[:2], problem.element)
    grid = -(-centres.shape[1] // 64), len(heads)
    device.run(_half_squares_cpu, _half_squares_cuda, grid, centres, count, half)
    if device.name == "cpu":
        _nearest_cpu(problem.k, problem.key_heads(heads), which, centres, count, half, out)
    else:
        columns, _ = _none(problem, heads)
        one = problem.element.type(1)
        _run(_NEAREST_CUDA, problem, problem.k, heads, which, (columns, half), one, centres, count, out)
    return out


def squares(problem, heads, directions):
    """sum_c (w_c . q_i)^2 over each head's directions, for every query: (heads, N)."""
    check_padding(directions)
    device = problem.device
    out = device.empty((len(heads), problem.shape[0]), problem.element)
    if device.name == "cpu":
        _squares_cpu(problem.q, problem.query_heads(heads), directions, out)
    else:
        every = device.empty((len(heads), 0), np.int64)
        count = device.upload(np.full(len(heads), directions.shape[1]))
        one = problem.element.type(1)
        _run(_SQUARES_CUDA, problem, problem.q, heads, every, _none(problem, heads), one, directions, count, out)
    return out


def _run(drivers, problem, source, heads, which, beside, factor, rows, count, out):
    """`beside` is the projected queries, and what the kernel calls `extra`; empty where there are none."""
    columns, extra = beside
    place = problem.key_heads(heads) if source is problem.k else problem.query_heads(heads)
    grid = -(-out.shape[out.ndim - 1] // tile.THREADS), len(heads)
    vectors = tile.vectors(source, rows)
    driver = drivers[problem.element.type]
    problem.device.run(None, driver, grid, source, place, which, columns, factor, rows, count, extra, vectors, out)


def check_padding(*tiles):
    """The CPU's register blocks read and write whole multiples of ROW_PADDING rows."""
    for rows in tiles:
        if rows.shape[1] % ROW_PADDING or not rows.flags["C_CONTIGUOUS"]:
            raise ValueError(f"tiles must be contiguous, with a multiple of {ROW_PADDING} rows, got {rows.shape}")
