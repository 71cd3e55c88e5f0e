"""The fused low-rank apply with the near field.

    E_ij = exp(scale q_i . k_j - ref_i)      j over the landmarks, ref_i the row's largest score
    out_i = (sum_near exp(s_ij - ref_i) v_j + E_i Z[:, :E]) / (sum_near exp(s_ij - ref_i) + E_i Z[:, E])

The near keys are those of the window and those that are near by content. Attention to the latter is known (`content`):
the sums begin with it, and the window leaves its keys out.

Landmarks and near keys go through the same panel body as exact attention: the landmarks are a tile of keys whose
"values" are the rows of the coefficient table [Z, z_den, G]; G gives each row's leverage |E_i G|^2 / den_i^2.
"""

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, inlined
from .apply_tiles import apply_on_gpu
from .content import nothing
from .core_places import LEVERAGE_COLUMNS
from .kernels.panel import (
    TILE,
    add_half,
    add_square,
    add_values,
    clipped,
    in_band,
    log_sum,
    multiply_half,
    multiply_keys,
    pack_query,
    raise_top,
    tile_of,
    weigh,
)
from .kernels.simd import ROW_PADDING, half_lanes, lane_count, lanes, padded
from .plan import PANEL
from .products import check_padding

# --- bodies ---


@inlined
def _mask_band(scores, row, key, window, keys):
    """Minus infinity outside |i - j| <= window; queries row, row + 1, ... in the lanes, keys key, ... in the rows."""
    outside = -scores.dtype.type(np.inf)
    for j in range(keys):
        for x in range(lane_count(scores)):
            scores[j, x] = scores[j, x] if in_band(row + x, key + j, window) else outside


@inlined
def load_probes(probes, row, count, names):
    """names[p, x] = the p-th bucket of query row + x; none in the lanes from `count` on."""
    for x in range(names.shape[1]):
        for p in range(names.shape[0]):
            names[p, x] = probes[row + x, p] if x < count else np.int32(-2)


@inlined
def mask_covered(scores, key, keys, bucket, heavy, names, used):
    """Minus infinity for keys that are near by content already: in the heavy keys' bucket, or in one of `names`."""
    outside = -scores.dtype.type(np.inf)
    for j in range(keys):
        own = bucket[key + j, 0]
        if own == heavy:
            scores[j] = outside
        for p in range(used):
            for x in range(names.shape[1]):  # no constant: a loop of so few steps is unrolled, and then no vectors
                scores[j, x] = outside if names[p, x] == own else scores[j, x]


@inlined
def _ends(row, window, keys, half):
    """Of a tile's keys those before the first are in the band of the first half of the lanes alone, those from the
    second on in that of the other half; `row` is the first lane's, counted from the tile's first key.
    """
    left, right = (row + half - window) // ROW_PADDING * ROW_PADDING, padded(row + half + window)
    return min(max(left, 0), keys // ROW_PADDING * ROW_PADDING), min(max(right, 0), keys)


@inlined
def _near_field(
    k,
    v,
    row,
    count,
    window,
    bucket,
    heavy,
    names,
    used,
    values,
    queries,
    key_tile,
    value_tile,
    scores,
    top,
    peak,
    total,
    sums,
):
    """Sums over the band of the queries row .. row + count; the normaliser's into row `values` of `sums`."""
    stop = min(row + count + window, k.shape[0])
    for j in range(max(row - window, 0), stop, TILE):
        keys = min(TILE, stop - j)
        left, right = _ends(row - j, window, keys, half_lanes(total))
        tile = tile_of(key_tile, k, j, keys)
        multiply_half(scores, tile, queries, 0, left, 0)
        multiply_keys(scores[left:], tile[left:], queries, right - left)
        multiply_half(scores, tile, queries, right, keys, 1)
        _mask_band(scores, row, j, window, keys)
        if used:
            mask_covered(scores, j, keys, bucket, heavy, names, used)
        raise_top(top, peak, total, sums, scores, keys)
        weigh(scores, top, total, keys)
        if values:
            tile = tile_of(value_tile, v, j, keys)
            add_half(sums, tile, scores, 0, left, 0)
            add_values(sums, tile[left:], scores[left:], right - left)
            add_half(sums, tile, scores, right, keys, 1)
    for x in range(lane_count(total)):
        sums[values, x] = total[x]


@inlined
def _far_field(landmarks, table, rank, queries, scores, top, peak, total, sums):
    """sums += table^T E over the landmarks."""
    for j in range(0, rank, TILE):
        keys = min(TILE, rank - j)
        multiply_keys(scores, landmarks[j:], queries, keys)
        raise_top(top, peak, total, sums, scores, keys)
        weigh(scores, top, total, keys)
        add_values(sums, table[j:], scores, keys)


@inlined
def _begin_sums(out, lse, row, x, values, top, total, sums):
    """Lane x begins with what is known of a query: its output and lse over some of the keys."""
    if lse[row] > top[x]:
        top[x], total[x] = lse[row], 1
        for e in range(values):
            sums[e, x] = out[row, e]


@inlined
def _normalise(sums, values, low, high, share, square):
    """Sums to outputs, in place; what they were multiplied by, and the outputs' squared lengths."""
    for x in range(lane_count(sums)):
        share[x] = sums.dtype.type(1) / sums[values, x]
        square[x] = 0
    for e in range(values):
        for x in range(lane_count(sums)):
            sums[e, x] = clipped(sums[e, x] * share[x], low[e], high[e])
            square[x] = add_square(square[x], sums[e, x])


@inlined
def _add_leverage(sums, values, share, square):
    square[:] = 0
    for g in range(values + 1, values + 1 + LEVERAGE_COLUMNS):
        for x in range(lane_count(sums)):
            square[x] = add_square(square[x], sums[g, x] * share[x])


@inlined
def _apply_range(
    q,
    k,
    v,
    starts,
    factor,
    basis,
    landmarks,
    table,
    rank,
    window,
    near_out,
    near_lse,
    probes,
    used,
    bucket,
    heavy,
    values,
    low,
    high,
    out,
    leverage,
    norm,
    lse,
):
    """Some panels of one head; `leverage` and `norm` have lane_count entries for each of them, `lse` one per row."""
    element, width = table.dtype, lane_count(table)
    queries = np.zeros((q.shape[1], width), element)
    coordinates = landmarks.shape[1] if basis.shape[0] else 0
    projected = np.zeros((basis.shape[0], width), element)
    near_rows = TILE if window >= 0 else 0
    key_tile = np.empty((near_rows, q.shape[1]), element)
    value_tile = np.empty((near_rows, padded(v.shape[1])), element)
    scores, names = np.empty((TILE, width), element), np.empty((used, width), np.int32)
    top, peak, total = np.empty(width, element), np.empty(width, element), np.empty(width, element)
    share, square = np.empty(width, element), np.empty(width, element)
    sums = np.empty((max(table.shape[1], padded(v.shape[1])), width), element)
    for panel in range(starts.shape[0]):
        row = starts[panel]
        count = min(width, q.shape[0] - row)
        if count <= 0:
            continue
        top[:], total[:], sums[:] = np.finfo(element).min / 2, 0, 0
        for x in range(count):
            pack_query(queries, x, q, row + x, factor)
            if used:
                _begin_sums(near_out, near_lse, row + x, x, values, top, total, sums)
                sums[values, x] = total[x]
        if window >= 0:
            if used:
                load_probes(probes, row, count, names)
            band = row, count, window, bucket, heavy, names, used, values
            _near_field(k, v, *band, queries, key_tile, value_tile, scores, top, peak, total, sums)
        if basis.shape[0]:
            multiply_keys(projected, basis, queries, coordinates)
            _far_field(landmarks, table, rank, projected[:coordinates], scores, top, peak, total, sums)
        else:
            _far_field(landmarks, table, rank, queries, scores, top, peak, total, sums)
        _normalise(sums, values, low, high, share, square)
        for x in range(count):
            for e in range(values):
                out[row + x, e] = sums[e, x]
            norm[panel * width + x] = square[x]
            if lse.shape[0]:
                lse[row + x] = log_sum(top[x], sums[values, x]) if sums[values, x] > 0 else np.inf
        _add_leverage(sums, values, share, square)
        for x in range(count):
            leverage[panel * width + x] = square[x] if sums[values, x] > 0 else np.inf


# --- CPU drivers ---


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
    near_out,
    near_lse,
    probes,
    used,
    bucket,
    heavy,
    values,
    low,
    high,
    out,
    leverage,
    norm,
    lse,
):
    heads, panels = starts.shape
    width = lane_count(table)
    pieces = (panels + 7) // 8
    for item in prange(heads * pieces):
        h, first = item // pieces, item % pieces * 8
        last = min(panels, first + 8)
        if rank[h] > 0:
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
                near_out[h],
                near_lse[h],
                probes[h],
                used[h],
                bucket[h],
                heavy,
                values,
                low[key_head[h]],
                high[key_head[h]],
                out[place[h]],
                leverage[h, first * width : last * width],
                norm[h, first * width : last * width],
                lse[h],
            )


# --- CUDA driver (the pass itself is in `apply_tiles`) ---


@cuda_kernel(PANEL)
def _norm_cuda(place, starts, rank, values, out, norm):
    h, i = cuda.blockIdx.y, cuda.grid(1)
    if i < norm.shape[1] and rank[h] > 0:
        row = starts[h, i // PANEL] + i % PANEL
        if row < out.shape[1]:
            square = out.dtype.type(0)
            for e in range(values):
                square = add_square(square, out[place[h], row, e])
            norm[h, i] = square


# --- stage ---


def apply(problem, heads, starts, landmarks, table, rank, window, basis, bounds, out=None, lse=None, near=None):
    """Low rank plus near field for the panels of PANEL queries that begin at `starts (heads, panels)`.

    Fills `out (all heads, N, E)` at `heads` if given; returns each row's leverage and |out_i|^2, both
    (heads, panels * PANEL), the leverage infinite where the normaliser is not positive. `window (heads,)` is -1 where a
    head has no band of near keys, `near` the queries' `content.Near`, if they have one; a head of rank 0 is left out.
    Without `out`, `table` holds only the columns from the normaliser's on. `lse (heads, N)`, if given, receives log2 of
    each row's normaliser, infinite if not positive.
    """
    check_padding(landmarks, table, basis)
    near = nothing(problem, len(heads)) if near is None else near
    device, element = problem.device, problem.element
    lse = device.empty((len(heads), 0), element) if lse is None else lse
    values = 0 if out is None else out.shape[2]
    leverage, norm = (device.zeros((len(heads), starts.shape[1] * PANEL), element) for _ in range(2))
    if out is None:  # every head shares one empty output
        out, place = device.empty((1, 0, 0), element), np.zeros(len(heads), np.int64)
        low = high = device.empty((len(problem.k), 0), element)
    else:
        place, (low, high) = np.asarray(heads), bounds
    place = device.upload(place)
    if device.name == "cpu":
        task = *problem.arrays(heads), place
        parts = (starts[:, :, None] + np.arange(0, PANEL, lanes(element))).reshape(len(starts), -1)
        rest = landmarks, table, rank, window, *near, values, low, high, out, leverage, norm, lse
        _apply_cpu(*task, parts, problem.factor, basis, *rest)
        return leverage, norm
    model = landmarks, table, rank, window, basis, near
    apply_on_gpu(problem, heads, place, starts, model, (low, high), values, out, leverage, lse)
    if values:
        panels = norm.shape[1] // PANEL, len(heads)
        device.run(None, _norm_cuda, panels, place, starts, rank, values, out, norm)
    return leverage, norm
