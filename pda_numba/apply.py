"""Features, and the fused low-rank apply with the near field.

    E_ij = exp(scale q_i . k_j - ref_i)      j over the landmarks, ref_i the row's largest score
    out_i = (sum_near exp(s_ij - ref_i) v_j + E_i Z[:, :E]) / (sum_near exp(s_ij - ref_i) + E_i Z[:, E])

Landmarks and near keys go through the same panel body as exact attention: the landmarks are a tile of keys whose
"values" are the rows of the coefficient table [Z, z_den, G]; G gives each row's leverage |E_i G|^2 / den_i^2.
"""

import numpy as np
from numba import prange

from ._jit import cpu_kernel, shared
from .core import LEVERAGE_COLUMNS
from .kernels.panel import TILE, add_values, load_tile, multiply_keys, pack_query, raise_top, weigh
from .kernels.scalar import exp2
from .kernels.simd import ROW_PADDING, lane_count, lanes, padded

# --- bodies ---


@shared
def _mask_band(scores, row, key, window, keys):
    """Minus infinity outside |i - j| <= window; queries row, row + 1, ... in the lanes, keys key, ... in the rows."""
    outside = -scores.dtype.type(np.inf)
    for j in range(keys):
        for x in range(lane_count(scores)):
            distance = row + x - key - j
            scores[j, x] = outside if distance > window or distance < -window else scores[j, x]


@shared
def _near_field(k, v, row, count, window, values, queries, key_tile, value_tile, scores, top, peak, total, sums):
    """Sums over the band of the queries row .. row + count; the normaliser's into row `values` of `sums`."""
    stop = min(row + count + window, k.shape[0])
    for j in range(max(row - window, 0), stop, TILE):
        keys = min(TILE, stop - j)
        load_tile(key_tile, k, j, keys)
        multiply_keys(scores, key_tile, queries, keys)
        _mask_band(scores, row, j, window, keys)
        raise_top(top, peak, total, sums, scores, keys)
        weigh(scores, top, total, keys)
        if values:
            load_tile(value_tile, v, j, keys)
            add_values(sums, value_tile, scores, keys)
    for x in range(lane_count(total)):
        sums[values, x] = total[x]


@shared
def _far_field(landmarks, table, rank, queries, scores, top, peak, total, sums):
    """sums += table^T E over the landmarks."""
    for j in range(0, rank, TILE):
        keys = min(TILE, rank - j)
        multiply_keys(scores, landmarks[j:], queries, keys)
        raise_top(top, peak, total, sums, scores, keys)
        weigh(scores, top, total, keys)
        add_values(sums, table[j:], scores, keys)


@shared
def _apply_range(
    q, k, v, starts, factor, basis, landmarks, table, rank, window, values, low, high, out, leverage, norm
):
    """Some panels of one head; `leverage` and `norm` have lane_count entries for each of them."""
    element, width = table.dtype, lane_count(table)
    queries = np.zeros((q.shape[1], width), element)
    coordinates = landmarks.shape[1] if basis.shape[0] else 0
    projected = np.zeros((basis.shape[0], width), element)
    near_rows = TILE if window >= 0 else 0
    key_tile = np.empty((near_rows, q.shape[1]), element)
    value_tile = np.empty((near_rows, padded(v.shape[1])), element)
    scores = np.empty((TILE, width), element)
    top, peak, total = np.empty(width, element), np.empty(width, element), np.empty(width, element)
    sums = np.empty((max(table.shape[1], padded(v.shape[1])), width), element)
    for panel in range(starts.shape[0]):
        row = starts[panel]
        count = min(width, q.shape[0] - row)
        top[:], total[:], sums[:] = np.finfo(element).min / 2, 0, 0
        for x in range(count):
            pack_query(queries, x, q, row + x, factor)
        if window >= 0:
            _near_field(k, v, row, count, window, values, queries, key_tile, value_tile, scores, top, peak, total, sums)
        if basis.shape[0]:
            multiply_keys(projected, basis, queries, coordinates)
            _far_field(landmarks, table, rank, projected[:coordinates], scores, top, peak, total, sums)
        else:
            _far_field(landmarks, table, rank, queries, scores, top, peak, total, sums)
        for x in range(count):
            share = 1 / sums[values, x]
            square = share - share
            for e in range(values):
                mean = min(max(sums[e, x] * share, low[e]), high[e])
                out[row + x, e] = mean
                square += mean * mean
            norm[panel * width + x] = square
            square = share - share
            for g in range(LEVERAGE_COLUMNS):
                part = sums[values + 1 + g, x] * share
                square += part * part
            leverage[panel * width + x] = square if sums[values, x] > 0 else np.inf


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
                out[h, j, first + x] = exp2(scores[j, x] - lse[h, first + x])


@cpu_kernel
def _apply_cpu(
    q,
    k,
    v,
    query_head,
    key_head,
    place,
    starts,
    factor,
    basis,
    landmarks,
    table,
    rank,
    window,
    values,
    low,
    high,
    out,
    leverage,
    norm,
):
    heads, panels = starts.shape
    width = lane_count(table)
    pieces = (panels + 7) // 8
    for item in prange(heads * pieces):
        h, first = item // pieces, item % pieces * 8
        last = min(panels, first + 8)
        _apply_range(
            q[query_head[h]],
            k[key_head[h]],
            v[key_head[h]],
            starts[h, first:last],
            factor,
            basis[h],
            landmarks[h],
            table[h],
            rank[h],
            window[h],
            values,
            low[key_head[h]],
            high[key_head[h]],
            out[place[h]],
            leverage[h, first * width : last * width],
            norm[h, first * width : last * width],
        )


# --- stages ---


def features(problem, heads, which, lse, landmarks, rank, basis):
    """exp(s_ij - lse_i) for landmarks j and sampled rows i: (heads, landmarks, n), one contiguous column each."""
    _check_padding(landmarks, basis)
    out = np.zeros((*landmarks.shape[:2], which.shape[1]), problem.element)
    _features_cpu(*problem.arrays(heads), which, problem.factor, basis, landmarks, rank, lse, out)
    return out


def apply(problem, heads, starts, landmarks, table, rank, window, basis, bounds, out=None):
    """Low rank plus near field for the panels of queries that begin at `starts (heads, panels)`.

    Fills `out (all heads, N, E)` at `heads` if given; returns each row's leverage and |out_i|^2, both
    (heads, panels * lanes), the leverage infinite where the normaliser is not positive. `window (heads,)` is -1 where a
    head has no near field. Without `out`, `table` holds only the columns from the normaliser's on.
    """
    _check_padding(landmarks, table, basis)
    width = lanes(problem.element)
    values = 0 if out is None else out.shape[2]
    leverage, norm = (np.zeros((len(starts), starts.shape[1] * width), problem.element) for _ in range(2))
    if out is None:  # every head shares one empty output
        out, place = np.empty((1, 0, 0), problem.element), np.zeros(len(starts), np.int64)
        low = high = np.empty((len(problem.k), 0), problem.element)
    else:
        place, (low, high) = np.asarray(heads), bounds
    _apply_cpu(
        *problem.arrays(heads),
        place,
        starts,
        problem.factor,
        basis,
        landmarks,
        table,
        rank,
        window,
        values,
        low,
        high,
        out,
        leverage,
        norm,
    )
    return leverage, norm


def _check_padding(*tiles):
    # The register blocks read and write whole multiples of ROW_PADDING rows.
    for tile in tiles:
        if tile.shape[1] % ROW_PADDING or not tile.flags.c_contiguous:
            raise ValueError(f"tiles must be contiguous, with a multiple of {ROW_PADDING} rows, got {tile.shape}")
