"""Exact attention rows: the streaming softmax over all keys, for chosen queries or for all of them.

    s_ij = scale q_i . k_j      lse_i = log sum_j exp(s_ij)      o_i = sum_j exp(s_ij - lse_i) v_j

One pass over the keys (online softmax, Milakov and Gimelshein 2018; tiled as in FlashAttention, Dao et al. 2022).
The keys are cut into `splits` of fixed size, so that a few rows over many keys still occupy every core; the partial
results are merged in a fixed order, so that the number of threads does not change a bit.
`lse` and the masses are in units of log 2.
"""

import math

import numpy as np
from numba import prange

from ._jit import cpu_kernel, shared
from .kernels.panel import (
    PANELS,
    TILE,
    add_values,
    load_tile,
    multiply_keys,
    pack_query,
    raise_top,
    weigh,
)
from .kernels.scalar import exp2
from .kernels.simd import lane_count, lanes, padded
from .problem import Problem

# --- bodies ---


@shared
def _attend(q, k, v, which, first, count, start, stop, factor, out, lse, mass):
    """Queries first .. first + count of `which` against keys start .. stop of one head."""
    element = out.dtype
    width = lane_count(out)
    used = (count + width - 1) // width
    depth, values = q.shape[1], padded(v.shape[1])
    queries = np.zeros((used, depth, width), element)
    sums = np.zeros((used, values, width), element)
    top = np.full((used, width), np.finfo(element).min / 2, element)
    total = np.zeros((used, width), element)
    tile_total, peak = np.empty(width, element), np.empty(width, element)
    scores = np.empty((TILE, width), element)
    key_tile, value_tile = np.empty((TILE, depth), element), np.empty((TILE, values), element)
    for i in range(count):
        pack_query(queries[i // width], i % width, q, which[first + i], factor)
    for j in range(start, stop, TILE):
        keys = min(TILE, stop - j)
        load_tile(key_tile, k, j, keys)
        load_tile(value_tile, v, j, keys)
        for p in range(used):
            multiply_keys(scores, key_tile, queries[p], keys)
            raise_top(top[p], peak, total[p], sums[p], scores, keys)
            tile_total[:] = 0
            weigh(scores, top[p], tile_total, keys)
            total[p] += tile_total
            add_values(sums[p], value_tile, scores, keys)
            if mass.shape[0]:
                for x in range(min(width, count - p * width)):
                    mass[first + p * width + x, j // TILE] = top[p, x] + math.log2(tile_total[x])
    for i in range(count):
        p, x = i // width, i % width
        lse[first + i] = top[p, x] + math.log2(total[p, x])
        share = 1 / total[p, x]
        for e in range(v.shape[1]):
            out[first + i, e] = sums[p, e, x] * share


# --- CPU driver ---


@cpu_kernel
def _rows_cpu(q, k, v, query_head, key_head, which, split, factor, out, lse, mass):
    splits, heads, count = lse.shape
    block = PANELS * lane_count(out)
    blocks = (count + block - 1) // block
    keys = k.shape[1]
    for item in prange(heads * blocks * splits):
        h, rest = item // (blocks * splits), item % (blocks * splits)
        b, s = rest // splits, rest % splits
        first = b * block
        _attend(
            q[query_head[h]],
            k[key_head[h]],
            v[key_head[h]],
            which[h],
            first,
            min(block, count - first),
            s * split,
            min(keys, (s + 1) * split),
            factor,
            out[s, h],
            lse[s, h],
            mass[h],
        )


@cpu_kernel
def _merge_cpu(partial_out, partial_lse, out, lse):
    # o = sum_s 2^(lse_s - lse) o_s, in the order of the splits.
    splits, heads, count = partial_lse.shape
    for item in prange(heads * count):
        h, i = item // count, item % count
        top = partial_lse[0, h, i]
        for s in range(1, splits):
            top = max(top, partial_lse[s, h, i])
        total = top - top
        for s in range(splits):
            total += exp2(partial_lse[s, h, i] - top)
        lse[h, i] = top + math.log2(total)
        out[h, i, :] = 0
        for s in range(splits):
            share = exp2(partial_lse[s, h, i] - top) / total
            for e in range(out.shape[2]):
                out[h, i, e] += share * partial_out[s, h, i, e]


# --- stage ---


def rows(problem: Problem, heads, which, *, masses=False, out=None):
    """Exact attention for the queries `which (heads, n)` of the given heads.

    Returns `out (heads, n, E)`, `lse (heads, n)` and, if asked for, `masses (heads, n, tiles)`: log2 of the sum of
    exp(s_ij) over each tile of keys, from which landmarks are drawn.
    """
    element = problem.element
    count, values, keys = which.shape[1], problem.v.shape[2], problem.k.shape[1]
    splits, split = _splits(len(heads) * -(-count // (PANELS * lanes(element))), keys)
    out = np.empty((len(heads), count, values), element) if out is None else out
    lse = np.empty((len(heads), count), element)
    mass = np.empty((len(heads), count if masses else 0, -(-keys // TILE)), element)
    direct = splits == 1
    partial_out = out[None] if direct else np.empty((splits, *out.shape), element)
    partial_lse = lse[None] if direct else np.empty((splits, *lse.shape), element)
    _rows_cpu(*problem.arrays(heads), which, split, problem.factor, partial_out, partial_lse, mass)
    if not direct:
        _merge_cpu(partial_out, partial_lse, out, lse)
    return out, lse, mass


def _splits(items, keys):
    """Into how many ranges of whole tiles the keys are cut: enough for 32 pieces of work, at least 1024 keys each."""
    wanted = max(1, min(-(-32 // max(items, 1)), keys // 1024))
    split = -(-keys // (wanted * TILE)) * TILE
    return -(-keys // split), split
