"""The adjoint of the fused low-rank apply with the near field (`apply`).

    p_ij = exp(s_ij - ref_i) / den_i      out_i = sum_near p_ij v_j + sum_landmarks p_ij Z_j,:E
    g_i = d out_i, 0 where it was clipped      D_i = g_i . out_i

    landmarks   dE_ij = g_i . Z_j,:E - D_i Z_j,E      ds_ij = p_ij dE_ij      dZ_j += p_ij [g_i, -D_i]
                dq~_i += scale ds_ij S~_j             dS~_j += scale ds_ij q~_i
    near        ds_ij = p_ij (g_i . v_j - D_i)
                dq_i += scale ds_ij k_j               dk_j += scale ds_ij q_i         dv_j += p_ij g_i

Where the output is one part of several (`merge`), with lse and D = g . out of the whole, p_ij = exp(s_ij - lse_i), and

    D_i = D - sum over clipped e of g_ie out_ie

Rows that are exact in the output owe nothing to the fit: only their dq as the fit would have it is kept, for those that
were held out, as a measure of the gradient's error.

Each thread takes a range of panels of a head. Keys of the near field are shared by neighbouring ranges alone, so that
the even ranges go first and the odd ones after them: no two threads write one row, in an order that is always the same.
"""

import numpy as np
from numba import prange

from ._jit import cpu_kernel, shared
from .apply import load_probes
from .apply_adjoint_panel import drop_clipped, keep_own, normalise, score_panel, slopes, take_part, write_queries
from .apply_adjoint_tiles import adjoint_on_gpu
from .content import nothing
from .kernels import tile
from .kernels.panel import add_outer, add_values, load_tile, multiply_keys, pack_query, pack_rows
from .kernels.scalar import LOG2_E
from .kernels.simd import lane_count, lanes, padded
from .rows_adjoint import _add_tile, _blocks

_RANGES, _LEAST_RANGE = 32, 512  # ranges of each head at most (each keeps R (D + E) sums), and queries in one at least

# --- body ---


@shared
def _adjoint_range(
    q,
    k,
    v,
    cotangent,
    slot,
    whole,
    along,
    start,
    stop,
    factor,
    basis,
    landmarks,
    table,
    den,
    rank,
    window,
    near_out,
    near_lse,
    probes,
    used,
    bucket,
    heavy,
    low,
    high,
    first_held,
    dq,
    dk,
    dv,
    guess,
    d_landmarks,
    d_table,
    d_den,
    row_lse,
    row_offset,
    row_given,
):
    """The queries start .. stop of one head. `landmarks`, `table` and `basis` have columns in whole register blocks;
    `d_landmarks (panels, R padded, lanes)` and `d_table` are sums in panels. Returns the sum of |dq_i|^2.
    """
    element, width = dq.dtype, lane_count(d_table)
    dim, values, coordinates = q.shape[1], v.shape[1], landmarks.shape[1]
    scale, back = element.type(factor / LOG2_E), element.type(1 / LOG2_E)
    band = padded(min(width + 2 * window, k.shape[0])) if window >= 0 else 0
    queries, outputs = np.zeros((dim, width), element), np.zeros((padded(values), width), element)
    projected = np.zeros((basis.shape[0], width), element)
    given = np.zeros((values, width), element)
    query_rows = np.zeros((_blocks(dim, width), width, width), element)
    projected_rows = np.zeros((d_landmarks.shape[0], width, width), element)
    given_rows = np.zeros((d_table.shape[0], width, width), element)
    key_tile, value_tile = np.empty((band, padded(dim)), element), np.empty((band, padded(values)), element)
    scores = np.empty((band + landmarks.shape[0], width), element)
    products = np.empty((band + landmarks.shape[0], width), element)
    key_sums = np.empty((query_rows.shape[0], band, width), element)
    value_sums = np.empty((given_rows.shape[0], band, width), element)
    sums, reduced = np.empty((padded(dim), width), element), np.empty((coordinates, width), element)
    top, total, delta = np.empty(width, element), np.empty(width, element), np.empty(width, element)
    own, beside = np.empty(width, element), np.empty(width, element)
    alive, names, square = np.empty(width, np.bool_), np.empty((used, width), np.int32), 0.0
    for row in range(start, stop, width):
        count, busy = min(width, stop - row), False
        for x in range(width):
            alive[x] = x < count and (slot[row + x] == 0 or slot[row + x] > first_held)
            busy |= alive[x]
        if not busy:
            continue
        for x in range(count):
            pack_query(queries, x, q, row + x, factor)
            pack_query(given, x, cotangent, row + x, element.type(1))
        for x in range(width):
            beside[x] = near_lse[row + x] if used and x < count else -np.inf
        first_key, keys = 0, 0
        if window >= 0:
            first_key = max(row - window, 0)
            keys = max(min(row + count + window, k.shape[0]) - first_key, 0)
            load_tile(key_tile, k, first_key, keys)
            load_tile(value_tile, v, first_key, keys)
        if used:
            load_probes(probes, row, count, names)
        where = row, first_key, keys, window, rank, bucket, heavy, names, used
        if basis.shape[0]:
            multiply_keys(projected, basis, queries, basis.shape[0])
            first = score_panel(scores, key_tile, landmarks, queries, projected, *where)
            pack_rows(projected_rows, projected, basis.shape[0])
        else:
            first = score_panel(scores, key_tile, landmarks, queries, queries, *where)
            pack_rows(projected_rows, queries, dim)
        normalise(scores, first, rank, den, alive, beside, top, total, own)
        outputs[:] = 0
        add_values(outputs, value_tile, scores, keys)
        add_values(outputs, table, scores[first:], rank)
        for x in range(count if used else 0):
            for e in range(values if beside[x] > 0 else 0):  # where nothing is near, its output may be anything
                outputs[e, x] += beside[x] * near_out[row + x, e]
        if whole.shape[0]:
            take_part(given, outputs, low, high, own, whole, along, row, count, scores, first + rank, delta)
        else:
            drop_clipped(given, outputs, low, high, delta)
        for x in range(count if used else 0):
            good = alive[x] and total[x] > 0
            row_lse[row + x] = (whole[row + x] if whole.shape[0] else own[x]) if good else np.inf
            row_offset[row + x] = -delta[x]
            for e in range(values):
                row_given[row + x, e] = given[e, x]
        multiply_keys(products, value_tile, given, keys)
        multiply_keys(products[first:], table, given, rank)
        products[first + rank :] = 0
        slopes(products, scores, first, rank, den, delta)
        sums[:], reduced[:] = 0, 0
        add_values(reduced, landmarks, products[first:], rank)
        if basis.shape[0]:
            add_values(sums, basis, reduced, basis.shape[0])
        else:
            for d in range(dim):
                for x in range(width):
                    sums[d, x] = reduced[d, x]
        add_values(sums, key_tile, products, keys)
        square += write_queries(dq, sums, slot, row, count, first_held, scale, guess)
        keep_own(scores, products, first + rank, slot, row, count)
        pack_rows(given_rows, given, values)
        add_outer(d_landmarks, products, first, rank, projected_rows)
        add_outer(d_table, scores, first, rank, given_rows)
        for j in range(rank):
            for x in range(width):
                d_den[j] -= scores[first + j, x] * delta[x]
        if keys:
            key_sums[:], value_sums[:] = 0, 0
            pack_rows(query_rows, queries, dim)
            add_outer(key_sums, products, 0, keys, query_rows)
            add_outer(value_sums, scores, 0, keys, given_rows)
            _add_tile(key_sums, back, keys, first_key, dk)
            _add_tile(value_sums, element.type(1), keys, first_key, dv)
    return square


# --- CPU drivers ---


@cpu_kernel
def _adjoint_cpu(
    q,
    k,
    v,
    query_head,
    key_head,
    place,
    cotangent,
    slot,
    whole,
    along,
    size,
    phase,
    phases,
    factor,
    basis,
    landmarks,
    table,
    den,
    rank,
    window,
    near_out,
    near_lse,
    probes,
    used,
    bucket,
    heavy,
    low,
    high,
    first_held,
    dq,
    dk,
    dv,
    guess,
    squares,
    d_landmarks,
    d_table,
    d_den,
    row_lse,
    row_offset,
    row_given,
):
    heads, ranges = d_den.shape[:2]
    turns = (ranges - phase + phases - 1) // phases
    for item in prange(heads * turns):
        h, r = item // turns, item % turns * phases + phase
        if rank[h] > 0:
            squares[h, r] = _adjoint_range(
                q[query_head[h]],
                k[key_head[h]],
                v[key_head[h]],
                cotangent[place[h]],
                slot[h],
                whole[h],
                along[h],
                r * size,
                min(q.shape[1], (r + 1) * size),
                factor,
                basis[h],
                landmarks[h],
                table[h],
                den[h],
                rank[h],
                window[h],
                near_out[h],
                near_lse[h],
                probes[h],
                used[h],
                bucket[h],
                heavy,
                low[key_head[h]],
                high[key_head[h]],
                first_held,
                dq[query_head[h]],
                dk[key_head[h]],
                dv[key_head[h]],
                guess[h],
                d_landmarks[h, r],
                d_table[h, r],
                d_den[h, r],
                row_lse[h],
                row_offset[h],
                row_given[h],
            )


@cpu_kernel
def _gather_ranges_cpu(sums, factor, out):
    """out (heads, rows, columns) = `factor` times the ranges' sums (heads, ranges, panels, rows, lanes), in float64."""
    heads, rows, columns = out.shape
    width = lane_count(sums)
    for item in prange(heads * rows):
        h, j = item // rows, item % rows
        for c in range(columns):
            total = 0.0
            for r in range(sums.shape[1]):
                total += sums[h, r, c // width, j, c % width]
            out[h, j, c] = total * factor


# --- stage ---


def apply_adjoint(problem, heads, model, bounds, cotangent, slot, held, gradients, whole=None, near=None):
    """Add to `gradients` what the rows owe whose output is the fit's, and say what they owe to the fit.

    `model` is (landmarks, table, rank, window, basis), as `apply` takes it and `near`; `cotangent (all heads, N, E)`;
    `slot (heads, N)` is 0 for these rows, else 1 + the row's place in a list of exact rows; `held` is the range of
    places whose rows were held out. `whole`, if the output is a part of another, is that one's lse and g . out, both
    (heads, N). No two of the heads may share queries or keys.

    Returns dS~ (heads, R padded, coordinates) and dZ (heads, R padded, E + 1) in float64, dq as the fit would have it
    for the held-out rows (heads, places, D), the sum of |dq_i|^2 over the fit's own rows in pieces (heads, ranges), and
    what `content_adjoint` is to know of these and of the held-out rows: lse, -D and g. What is near by content is left
    to that.
    """
    model = *model, nothing(problem, len(heads)) if near is None else near
    if whole is None:
        whole = (problem.device.empty((len(heads), 0), problem.element),) * 2
    task = problem, heads, model, bounds, cotangent, slot, held, gradients, whole
    if problem.device.name == "cpu":
        return _on_cpu(*task)
    return adjoint_on_gpu(*task, *_ranges(problem.shape[0], tile.THREADS))


def _ranges(n, unit, widest=0):
    """Into how many ranges a head's queries are cut, and how long these are: so many times `unit`."""
    ranges = max(1, min(_RANGES, n // max(_LEAST_RANGE, 2 * widest)))
    size = -(-n // (ranges * unit)) * unit
    return -(-n // size), size


def _on_cpu(problem, heads, model, bounds, cotangent, slot, held, gradients, whole):
    landmarks, table, rank, window, basis, near = model
    element, (n, _, d, e) = problem.element, problem.shape
    guess = np.zeros((len(heads), held[1] - held[0], d), element)
    width, widest = lanes(element), max(int(window.max()), 0)
    ranges, size = _ranges(n, width, widest)
    rows, coordinates = landmarks.shape[1:]
    d_landmarks = np.zeros((len(heads), ranges, _blocks(coordinates, width), rows, width), element)
    d_table = np.zeros((len(heads), ranges, _blocks(e, width), rows, width), element)
    d_den = np.zeros((len(heads), ranges, rows), element)
    place, den = np.asarray(heads), np.ascontiguousarray(table[:, :, e])
    read = *problem.arrays(heads), place, cotangent, slot, *whole, size
    tables = _whole_blocks(basis), _whole_blocks(landmarks), _whole_blocks(table[:, :, :e]), den
    rest = problem.factor, *tables, rank, window, *near, *bounds, held[0]
    rows_beside = n if near.out.shape[1] else 0
    size_beside = len(heads), rows_beside
    about = np.full(size_beside, np.inf, element), np.zeros(size_beside, element), np.zeros((*size_beside, e), element)
    squares = np.zeros((len(heads), ranges))
    written = *gradients, guess, squares, d_landmarks, d_table, d_den, *about
    phases = 2 if widest else 1
    for phase in range(phases):
        _adjoint_cpu(*read, phase, phases, *rest, *written)
    d_tiles, d_values = np.empty(landmarks.shape), np.empty((len(heads), rows, e + 1))
    _gather_ranges_cpu(d_landmarks, 1 / LOG2_E, d_tiles)
    _gather_ranges_cpu(d_table, 1.0, d_values[:, :, :e])
    d_values[:, :, e] = d_den.sum(axis=1, dtype=np.float64)
    return d_tiles, d_values, guess, squares, about


def _whole_blocks(x):
    """A copy whose last axis is padded to whole register blocks."""
    out = np.zeros((*x.shape[:2], padded(x.shape[2])), x.dtype)
    out[:, :, : x.shape[2]] = x
    return out
