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
from ._jit import cpu_kernel, serial_kernel, shared
from .kernels.panel import TILE, multiply_keys, pack_query
from .kernels.scalar import exp2, fma, uniform, widen
from .kernels.simd import dot, lane_count, padded

POOL_FACTOR, LARGEST_POOL = 8, 2048  # keys drawn by mass per landmark, and at most
REFINE_FACTOR = 32  # keys drawn uniformly per landmark, for the Lloyd step and the keys' mean

# --- bodies ---


@shared
def _score(q, row, k, j, factor):
    total = factor - factor
    for d in range(q.shape[1]):
        total += widen(q[row, d]) * factor * widen(k[j, d])
    return total


@shared
def _is_far(tile, row, apart):
    """Does a tile hold no key with |row - j| <= apart? All are far for apart < 0."""
    return apart < 0 or tile * TILE > row + apart or (tile + 1) * TILE <= row - apart


@shared
def _draw_key(q, row, k, lse, mass, apart, u, factor, scores):
    """A far key with probability ~ a_ij in one row: first its tile, by the tiles' masses, then the key in the tile."""
    total = 0.0
    for t in range(mass.shape[0]):
        if _is_far(t, row, apart):
            total += exp2(mass[t] - lse)
    if total <= 0.0:
        return min(int(u * k.shape[0]), k.shape[0] - 1)  # no far mass at all: any key
    target, tile, cumulative = u * total, -1, 0.0
    for t in range(mass.shape[0]):
        share = float(exp2(mass[t] - lse))
        if share > 0 and _is_far(t, row, apart):
            tile = t
            if cumulative + share > target:
                break
            cumulative += share
    start = tile * TILE
    count = min(TILE, k.shape[0] - start)
    for j in range(count):
        scores[j] = exp2(_score(q, row, k, start + j, factor) - lse)
    chosen = 0
    for j in range(count):
        if scores[j] > 0:
            chosen = j
            cumulative += scores[j]
            if cumulative > target:
                break
    return start + chosen


@shared
def _heaviest_key(q, row, k, mass, apart, factor):
    """The largest score in the row's heaviest far tile."""
    tile = -1
    for t in range(mass.shape[0]):
        if _is_far(t, row, apart) and (tile < 0 or mass[t] > mass[tile]):
            tile = t
    start = max(tile, 0) * TILE
    best, best_score = start, _score(q, row, k, start, factor)
    for j in range(start + 1, min(start + TILE, k.shape[0])):
        score = _score(q, row, k, j, factor)
        if score > best_score:
            best, best_score = j, score
    return best


@shared
def _pivot(columns, count, seed, head, chosen):
    """Randomly pivoted QR on the rows of `columns (pool, n)`; returns how many were chosen before rounding level."""
    pool, n = columns.shape
    square = np.empty(pool)
    start = 0.0
    for c in range(pool):
        square[c] = dot(columns, c, columns, c, n)
        start += square[c]
    epsilon = np.finfo(columns.dtype).eps
    pivot = np.empty((1, n), columns.dtype)
    for step in range(min(count, pool)):
        total = 0.0
        for c in range(pool):
            total += square[c]
        if total <= start * epsilon * epsilon * n or total <= 0.0:
            return step
        target, best = uniform(seed, head, draw.PIVOT, step) * total, -1
        for c in range(pool):
            if square[c] > 0:
                best = c
                target -= square[c]
                if target < 0:
                    break
        chosen[step] = best
        length = 1 / math.sqrt(square[best])
        for i in range(n):
            pivot[0, i] = columns[best, i] * length
        for c in range(pool):
            if square[c] <= 0:
                continue
            share = -dot(columns, c, pivot, 0, n)
            for i in range(n):
                columns[c, i] = fma(share, pivot[0, i], columns[c, i])
            left = square[c] - float(share) * float(share)  # Pythagoras, unless too much cancels
            square[c] = left if left > 0.1 * square[c] else dot(columns, c, columns, c, n)
        square[best] = 0.0
    return min(count, pool)


# --- CPU drivers ---


@cpu_kernel
def _pool_cpu(q, k, v, query_head, key_head, which, lse, mass, apart, draws, factor, seed, pool):
    heads, n = which.shape
    for item in prange(heads * (draws + n)):
        h, i = item // (draws + n), item % (draws + n)
        q_h, k_h = q[query_head[h]], k[key_head[h]]
        if i < draws:
            row = i % n
            u = uniform(seed, query_head[h], draw.POOL, i)
            scores = np.empty(TILE, lse.dtype)
            pool[h, i] = _draw_key(q_h, which[h, row], k_h, lse[h, row], mass[h, row], apart, u, factor, scores)
        else:
            row = i - draws
            pool[h, i] = _heaviest_key(q_h, which[h, row], k_h, mass[h, row], apart, factor)


@cpu_kernel
def _pivot_cpu(query_head, columns, size, count, seed, chosen, found):
    for h in prange(columns.shape[0]):
        found[h] = _pivot(columns[h, : size[h]], count, seed, query_head[h], chosen[h])


@serial_kernel
def _gather_cpu(source, head, which, size, out):
    for h in range(which.shape[0]):
        for i in range(size[h]):
            for d in range(source.shape[2]):
                out[h, i, d] = widen(source[head[h], which[h, i], d])


@cpu_kernel
def _nearest_cpu(k, key_head, which, centres, half_square, count, nearest):
    # nearest centre of every sampled key: argmax_c (c . k - |c|^2 / 2)
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
                best = c if scores[c, x] - half_square[h, c] > scores[best, x] - half_square[h, best] else best
            nearest[h, first + x] = best


@serial_kernel
def _average_cpu(k, key_head, which, nearest, centres, weight, mean):
    # sums in float64 and in the sample's order, so that nothing depends on the threads
    for h in range(which.shape[0]):
        for i in range(which.shape[1]):
            c = nearest[h, i]
            weight[h, c] += 1.0
            for d in range(k.shape[2]):
                value = float(widen(k[key_head[h], which[h, i], d]))
                centres[h, c, d] += value
                mean[h, d] += value
        for c in range(centres.shape[1]):
            for d in range(k.shape[2]):
                centres[h, c, d] /= weight[h, c]
        for d in range(k.shape[2]):
            mean[h, d] /= which.shape[1]


# --- stages ---


def gather(problem, heads, which, size, *, source=None):
    """Keys (or values) by index, widened, as tiles that the panel bodies can read: (heads, rows padded, D)."""
    source = problem.k if source is None else source
    out = np.zeros((len(which), padded(which.shape[1]), source.shape[2]), problem.element)
    _gather_cpu(source, problem.key_head[heads], which, size, out)
    return out


def draw_pool(problem, heads, which, lse, masses, count, *, apart=-1):
    """Candidate keys (heads, pool), sorted and distinct in front, and how many each head has.

    Keys in tiles within `apart` of the row they would be drawn for are left out: what a near field covers needs no
    landmark, and a row whose own key is a landmark flatters the fit.
    """
    pool = np.empty((len(which), count + which.shape[1]), np.int64)
    _pool_cpu(*problem.arrays(heads), which, lse, masses, apart, count, problem.factor, problem.seed, pool)
    size = np.empty(len(pool), np.int64)
    for h, row in enumerate(pool):
        distinct = np.unique(row)
        size[h] = len(distinct)
        row[: len(distinct)] = distinct
        row[len(distinct) :] = 0
    return pool, size


def choose(problem, heads, columns, pool, size, count):
    """Landmarks (heads, count) from the pool, and how many each head got (its effective rank if below `count`).

    `columns (heads, pool, n)` are the pool's exponential columns on the pilot rows; they are overwritten.
    """
    total = columns.sum(axis=2, keepdims=True)
    np.divide(columns, np.sqrt(total), out=columns, where=total > 0)
    chosen = np.zeros((len(pool), count), np.int64)
    found = np.zeros(len(pool), np.int64)
    _pivot_cpu(problem.query_head[heads], columns, size, count, problem.seed, chosen, found)
    return np.take_along_axis(pool, chosen, axis=1), found


def refine(problem, heads, keys, found, count):
    """The landmarks after one Lloyd step on `count` uniform keys, (heads, R padded, D); the keys' mean (heads, D)."""
    tiles = gather(problem, heads, keys, found)
    sample = min(count, problem.shape[1])
    which = draw.uniform_rows(problem, heads, sample, stage=draw.REFINE, size=problem.shape[1])
    nearest = np.empty(which.shape, np.int64)
    half_square = (np.square(tiles).sum(axis=2) / 2).astype(problem.element)
    key_head = problem.key_head[heads]
    _nearest_cpu(problem.k, key_head, which, tiles, half_square, found, nearest)
    centres, weight = tiles.astype(np.float64), np.ones(tiles.shape[:2])
    mean = np.zeros((len(heads), problem.shape[2]))
    _average_cpu(problem.k, key_head, which, nearest, centres, weight, mean)
    return centres, mean
