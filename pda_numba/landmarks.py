"""Landmarks: R keys whose exponential columns span the pilot rows, by randomly pivoted QR.

    pool: keys drawn by their far mass sum_i a_ij over the pilot rows, and the heaviest far key of every pilot row
    B = A[pilot, pool] with every column divided by the square root of its sum
    repeat R times: draw a column with probability ~ |residual|^2, orthogonalise all residuals against it

    one Lloyd step: every landmark becomes the mean of itself and the sampled keys nearest to it

Randomly pivoted QR as in randomly pivoted Cholesky (Chen, Epperly, Tropp and Webber 2023) on the Gram matrix B^T B.
The residuals are updated explicitly, so that they are accurate relative to the columns, not to their squares.
"""

import math

import numpy as np
from numba import prange

from . import draw
from ._jit import cpu_kernel, cuda, cuda_kernel, serial_kernel, shared
from .kernels.groups import group, group_dot, group_size, groups, place
from .kernels.panel import TILE
from .kernels.scalar import exp2, fma, uniform, widen
from .kernels.score import place_query, score_keys
from .kernels.simd import padded
from .kernels.team import barrier, member, members, team_max
from .products import nearest

POOL_FACTOR, LARGEST_POOL = 8, 2048  # keys drawn by mass per landmark, and at most
REFINE_FACTOR = 32  # keys drawn uniformly per landmark, for the Lloyd step and the keys' mean

# --- bodies: the pool ---


@shared
def _is_far(tile, row, apart):
    """Does a tile hold no key with |row - j| <= apart? All are far for apart < 0."""
    return apart < 0 or tile * TILE > row + apart or (tile + 1) * TILE <= row - apart


@shared
def first_largest(x, n):
    """Where x[:n] is largest, the first such place; of x a member reads what is its own in a loop over members."""
    best, largest = n, -x.dtype.type(np.inf)
    for i in range(member(), n, members()):
        if x[i] > largest or best == n:
            best, largest = i, x[i]
    top = team_max(largest)
    return -team_max(-best if largest == top else -n)


@shared
def _draw_key(k, shares, lse, u, room):
    """A far key with probability ~ a_ij in one row: first its tile, by their shares of the row, then the key in it."""
    tile, left, total = draw.pick(shares, shares.shape[0], u)
    if total <= 0.0:
        return min(int(u * k.shape[0]), k.shape[0] - 1)  # no far mass at all: any key
    start = tile * TILE
    count = min(TILE, k.shape[0] - start)
    score_keys(room, k, start, count)
    weights = room[2]
    for j in range(member(), count, members()):
        weights[j] = exp2(weights[j] - lse)
    barrier()
    key, _, _ = draw.pick(weights, count, left)
    return start + max(key, 0)


@shared
def _heaviest_key(k, tile, room):
    """The largest score in a tile."""
    start = tile * TILE
    count = min(TILE, k.shape[0] - start)
    score_keys(room, k, start, count)
    return start + first_largest(room[2], count)


@shared
def _draw_row(k, row, mass, lse, apart, seed, head, i, rows, draws, shares, room, pool):
    """What row i of `rows` adds to the pool: draws i, i + rows, ... of all `draws`, and behind them its heaviest key.

    The query is in `room`; `shares (tiles,)` is scratch.
    """
    for t in range(member(), shares.shape[0], members()):
        shares[t] = mass[t] - lse if _is_far(t, row, apart) else -shares.dtype.type(np.inf)
    # to find the largest the team meets, and so sees the whole query
    pool[draws + i] = _heaviest_key(k, first_largest(shares, shares.shape[0]), room)
    for t in range(member(), shares.shape[0], members()):
        shares[t] = exp2(shares[t])
    barrier()
    for x in range(i, draws, rows):
        pool[x] = _draw_key(k, shares, lse, uniform(seed, head, draw.POOL, x), room)


@shared
def _draw_piece(
    q, k, query_head, key_head, which, lse, mass, apart, draws, factor, seed, piece, pieces, shares, room, pool
):
    """Every `pieces`-th of all heads' rows."""
    heads, rows = which.shape
    for item in range(piece, heads * rows, pieces):
        h, i = item // rows, item % rows
        head, row = query_head[h], which[h, i]
        place_query(room, q[head], row, factor)
        _draw_row(k[key_head[h]], row, mass[h, i], lse[h, i], apart, seed, head, i, rows, draws, shares, room, pool[h])


@shared
def _sort_pool(drawn, count, pool):
    """drawn[:count] in order, each once, into `pool`; the rest of `drawn`, up to a power of two, is scratch."""
    for i in range(count + member(), drawn.shape[0], members()):
        drawn[i] = np.iinfo(np.int64).max
    barrier()
    draw.sort(drawn)
    return draw.distinct(drawn, count, pool)


@shared
def _gather_row(source, row, used, out):
    """One row of `source`, widened, or zeros."""
    for d in range(member(), out.shape[0], members()):
        out[d] = out.dtype.type(widen(source[row, d])) if used else out.dtype.type(0)


# --- bodies: pivoting; a column is the work of one group of the team ---


@shared
def _normalise(columns, c, count, ones):
    """Divide column c by the square root of its sum; returns its |c|^2 after."""
    total = group_dot(columns, c, ones, 0, count)
    if total > 0:
        factor = 1 / math.sqrt(total)
        for i in range(place(), count, group_size()):
            columns[c, i] *= factor
    return group_dot(columns, c, columns, c, count)


@shared
def _take_out(columns, c, count, pivot, square):
    """Column c less its part along the pivot; returns its |c|^2 after, by Pythagoras unless too much cancels."""
    along = -group_dot(columns, c, pivot, 0, count)
    for i in range(place(), count, group_size()):
        columns[c, i] = fma(along, pivot[0, i], columns[c, i])
    left = square - float(along) * float(along)
    if members() == 1 and left > 0.1 * square:  # a team has to come to the sum together
        return left
    again = float(group_dot(columns, c, columns, c, count))
    return left if left > 0.1 * square else again


@shared
def _pivot(columns, pool, size, count, seed, head, pivot, square, keys):
    """Randomly pivoted QR on the first `size` rows of `columns (pool, n)`; how many were chosen before rounding level.

    `pivot (1, n)` and `square (pool,)` are scratch.
    """
    n = columns.shape[1]
    for i in range(member(), n, members()):
        pivot[0, i] = 1
    barrier()
    for first in range(0, size, groups()):
        c = first + group()
        norm = _normalise(columns, min(c, size - 1), n if c < size else 0, pivot)
        if c < size:
            square[c] = norm
    start, epsilon = 0.0, float(np.finfo(columns.dtype).eps)
    for step in range(min(count, size)):
        barrier()
        best, _, total = draw.pick(square, size, uniform(seed, head, draw.PIVOT, step))
        start = total if step == 0 else start
        if total <= start * epsilon * epsilon * n or total <= 0.0:
            return step
        keys[step] = pool[best]
        length = 1 / math.sqrt(square[best])
        for i in range(member(), n, members()):
            pivot[0, i] = columns[best, i] * length
        barrier()
        for first in range(0, size, groups()):
            c = first + group()
            norm = square[c] if c < size else 0.0
            left = _take_out(columns, min(c, size - 1), n if norm > 0 else 0, pivot, norm)
            if c < size:
                square[c] = left if c != best else 0.0
    return min(count, size)


# --- bodies: the Lloyd step ---


@shared
def _average(k, which, nearest, c, averaged, tile, keys, centre):
    """Landmark c and the keys nearest to it: their mean, and the keys' sum; in float64, in the sample's order.

    If not `averaged` the landmark stays what it is.
    """
    size = 1
    for d in range(member(), k.shape[1], members()):
        keys[d] = 0.0
    for i in range(which.shape[0]):
        if nearest[i] == c:
            size += 1
            for d in range(member(), k.shape[1], members()):
                keys[d] += float(widen(k[which[i], d]))
    for d in range(member(), k.shape[1], members()):
        centre[d] = (float(tile[d]) + keys[d]) / size if averaged else float(tile[d])


@shared
def _mean(keys, size, mean):
    """Every sampled key is nearest to one centre."""
    for d in range(member(), keys.shape[1], members()):
        total = 0.0
        for c in range(keys.shape[0]):
            total += keys[c, d]
        mean[d] = total / size


@shared
def _shrink_row(centre, mean, temperature, out):
    for d in range(member(), out.shape[0], members()):
        out[d] = mean[d] + temperature * (centre[d] - mean[d])


# --- CPU drivers ---


@cpu_kernel
def _pool_cpu(q, k, v, query_head, key_head, which, lse, mass, apart, draws, factor, seed, shares, room, pool):
    pieces = len(shares)
    for p in prange(pieces):
        task = which, lse, mass, apart, draws, factor, seed
        _draw_piece(q, k, query_head, key_head, *task, p, pieces, shares[p], room[p], pool)


@serial_kernel
def _sort_pool_cpu(drawn, count, pool, size):
    for h in range(len(pool)):
        size[h] = _sort_pool(drawn[h], count, pool[h])


@serial_kernel
def _gather_cpu(source, head, which, size, out):
    for h in range(out.shape[0]):
        for i in range(out.shape[1]):
            _gather_row(source[head[h]], which[h, min(i, which.shape[1] - 1)], i < size[h], out[h, i])


@cpu_kernel
def _pivot_cpu(query_head, columns, pool, size, count, seed, pivot, square, keys, found):
    for h in prange(columns.shape[0]):
        found[h] = _pivot(columns[h], pool[h], size[h], count, seed, query_head[h], pivot[h], square[h], keys[h])


@cpu_kernel
def _average_cpu(k, key_head, which, nearest, averaged, tiles, keys, centres):
    heads, count = centres.shape[:2]
    for item in prange(heads * count):
        h, c = item // count, item % count
        _average(k[key_head[h]], which[h], nearest[h], c, averaged, tiles[h, c], keys[h, c], centres[h, c])


@serial_kernel
def _mean_cpu(keys, size, mean):
    for h in range(len(mean)):
        _mean(keys[h], size, mean[h])


@serial_kernel
def _shrink_cpu(centres, mean, temperatures, tiles):
    heads, count = centres.shape[:2]
    for item in range(heads * len(temperatures) * count):
        block, c = item // count, item % count
        h, t = block // len(temperatures), block % len(temperatures)
        _shrink_row(centres[h, c], mean[h], temperatures[t], tiles[block, c])


# --- CUDA drivers: a team for some rows; a team per head; a team per row ---


@cuda_kernel(TILE)
def _pool_cuda(q, k, v, query_head, key_head, which, lse, mass, apart, draws, factor, seed, shares, room, pool):
    p = cuda.blockIdx.x
    task = which, lse, mass, apart, draws, factor, seed
    _draw_piece(q, k, query_head, key_head, *task, p, cuda.gridDim.x, shares[p], room[p], pool)


@cuda_kernel(1024)
def _sort_pool_cuda(drawn, count, pool, size):
    h = cuda.blockIdx.x
    size[h] = _sort_pool(drawn[h], count, pool[h])


@cuda_kernel(64)
def _gather_cuda(source, head, which, size, out):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    _gather_row(source[head[h]], which[h, min(i, which.shape[1] - 1)], i < size[h], out[h, i])


@cuda_kernel(512)
def _pivot_cuda(query_head, columns, pool, size, count, seed, pivot, square, keys, found):
    h = cuda.blockIdx.x
    found[h] = _pivot(columns[h], pool[h], size[h], count, seed, query_head[h], pivot[h], square[h], keys[h])


@cuda_kernel(64)
def _average_cuda(k, key_head, which, nearest, averaged, tiles, keys, centres):
    c, h = cuda.blockIdx.x, cuda.blockIdx.y
    _average(k[key_head[h]], which[h], nearest[h], c, averaged, tiles[h, c], keys[h, c], centres[h, c])


@cuda_kernel(64)
def _mean_cuda(keys, size, mean):
    h = cuda.blockIdx.x
    _mean(keys[h], size, mean[h])


@cuda_kernel(64)
def _shrink_cuda(centres, mean, temperatures, tiles):
    c, block = cuda.blockIdx.x, cuda.blockIdx.y
    h, t = block // len(temperatures), block % len(temperatures)
    _shrink_row(centres[h, c], mean[h], temperatures[t], tiles[block, c])


# --- stages ---


def draw_pool(problem, heads, which, lse, masses, count, *, apart=-1):
    """Candidate keys (heads, pool), sorted and distinct in front and zero behind, and how many each head has.

    Keys in tiles within `apart` of the row they would be drawn for are left out: what a near field covers needs no
    landmark, and a row whose own key is a landmark flatters the fit.
    """
    device, total = problem.device, count + which.shape[1]
    drawn = device.empty((len(heads), 1 << (total - 1).bit_length()), np.int64)
    pieces = min(which.size, device.pieces)
    shares = device.empty((pieces, masses.shape[2]), problem.element)
    room = device.empty((pieces, 3, max(problem.shape[2], TILE)), problem.element)
    task = which, lse, masses, apart, count, problem.factor, problem.seed
    device.run(_pool_cpu, _pool_cuda, (pieces,), *problem.arrays(heads), *task, shares, room, drawn)
    pool, size = device.empty((len(heads), total), np.int64), device.empty((len(heads),), np.int64)
    device.run(_sort_pool_cpu, _sort_pool_cuda, (len(heads),), drawn, total, pool, size)
    return pool, size


def gather(problem, heads, which, size, *, source=None):
    """Keys (or values) by index, widened, as tiles that the panel bodies can read: (heads, rows padded, D).

    Of each head's list the first `size (heads,)` count; the other rows are zero.
    """
    device, source = problem.device, problem.k if source is None else source
    out = device.empty((len(heads), padded(which.shape[1]), source.shape[2]), problem.element)
    grid = out.shape[1], len(heads)
    device.run(_gather_cpu, _gather_cuda, grid, source, problem.key_heads(heads), which, size, out)
    return out


def choose(problem, heads, columns, pool, size, count):
    """Landmarks (heads, count) from the pool, and how many each head got (its effective rank if below `count`).

    `columns (heads, pool, n)` are the pool's exponential columns on the pilot rows; they are overwritten.
    """
    device = problem.device
    keys, found = device.zeros((len(heads), count), np.int64), device.empty((len(heads),), np.int64)
    pivot = device.empty((len(heads), 1, columns.shape[2]), problem.element)
    square = device.empty(columns.shape[:2], np.float64)
    task = columns, pool, size, count, problem.seed, pivot, square, keys, found
    device.run(_pivot_cpu, _pivot_cuda, (len(heads),), problem.query_heads(heads), *task)
    return keys, found


def assign(problem, heads, keys, found, count):
    """The landmarks' keys as tiles, `count` uniform keys (heads, n), and which landmark is nearest to each of them."""
    tiles = gather(problem, heads, keys, found)
    size = problem.shape[1]
    which = draw.uniform_rows(problem, heads, min(count, size), stage=draw.REFINE, size=size)
    return tiles, which, nearest(problem, heads, which, tiles, found)


def refine(problem, heads, keys, found, count):
    """The landmarks after one Lloyd step on `count` uniform keys, (heads, R padded, D); the keys' mean (heads, D).

    Without that step where the output is to be merged: under causal masks keys of much weight (sinks) are the rule, and
    averages blunt them.
    """
    device, (tiles, which, places) = problem.device, assign(problem, heads, keys, found, count)
    centres, sums = (device.empty(tiles.shape, np.float64) for _ in range(2))
    task = problem.k, problem.key_heads(heads), which, places, not problem.merged, tiles, sums
    device.run(_average_cpu, _average_cuda, (tiles.shape[1], len(heads)), *task, centres)
    mean = device.empty((len(heads), problem.shape[2]), np.float64)
    device.run(_mean_cpu, _mean_cuda, (len(heads),), sums, which.shape[1], mean)
    return centres, mean


def shrink(problem, heads, centres, mean, temperatures):
    """S = mean + c (C - mean) for every temperature c: (heads * temperatures, R padded, D)."""
    device, temperatures = problem.device, problem.device.upload(np.array(temperatures, np.float64))
    tiles = device.empty((len(heads) * len(temperatures), *centres.shape[1:]), problem.element)
    device.run(_shrink_cpu, _shrink_cuda, (tiles.shape[1], len(tiles)), centres, mean, temperatures, tiles)
    return tiles
