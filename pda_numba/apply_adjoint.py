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

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .adjoint_tiles import Pairs, add_adjoint, to_keys, to_queries, to_values
from .apply import mask_covered
from .apply_tiles import apply_on_gpu
from .content import nothing
from .kernels import tile
from .kernels.panel import (
    add_outer,
    add_values,
    clipped,
    in_band,
    larger,
    load_tile,
    log_sum,
    multiply_keys,
    pack_query,
    pack_rows,
    slope,
    weight,
)
from .kernels.scalar import LOG2_E, fma
from .kernels.simd import lane_count, lanes, padded
from .kernels.team import member, members, team_sum
from .plan import PANEL
from .rows_adjoint import _add_tile, _blocks

_RANGES, _LEAST_RANGE = 32, 512  # ranges of each head at most (each keeps R (D + E) sums), and queries in one at least

# --- bodies ---


@shared
def _kept(x, low, high):
    """Was an output left as it is, not clipped?"""
    return low <= x <= high


@shared
def _score_panel(
    scores, key_tile, landmarks, queries, projected, row, low, keys, window, rank, count, bucket, heavy, probes, used
):
    """Scores of the band, then of the landmarks; minus infinity for what is neither. Returns where the second begin."""
    nothing, first = -scores.dtype.type(np.inf), padded(keys)
    multiply_keys(scores, key_tile, queries, keys)
    for j in range(first):
        for x in range(lane_count(scores)):
            near = j < keys and in_band(row + x, low + j, window)
            scores[j, x] = scores[j, x] if near else nothing
    if used:
        mask_covered(scores, row, count, low, keys, bucket, heavy, probes, used)
    multiply_keys(scores[first:], landmarks, projected, rank)
    return first


@shared
def _normalise(scores, first, rank, den, alive, beside, top, total, own):
    """Scores to p_ij, in place; 0 in the lanes that are not alive or have no positive normaliser; `own` is its log.

    `beside` is the lse of the content near field, which becomes its share.
    """
    top[:] = np.finfo(scores.dtype).min / 2
    for x in range(lane_count(scores)):
        top[x] = larger(beside[x], top[x])
        total[x] = 0
    for j in range(first + rank):
        for x in range(lane_count(scores)):
            top[x] = larger(scores[j, x], top[x])
    for j in range(first + rank):
        share = den[j - first] if j >= first else scores.dtype.type(1)
        for x in range(lane_count(scores)):
            scores[j, x] = weight(scores[j, x], top[x])
            total[x] += scores[j, x] * share
    for x in range(lane_count(scores)):
        beside[x] = weight(beside[x], top[x])
        total[x] += beside[x]
        own[x] = log_sum(top[x], total[x]) if total[x] > 0 else scores.dtype.type(0)
        share = 1 / total[x] if total[x] > 0 and alive[x] else scores.dtype.type(0)
        total[x] = share if share < np.inf else scores.dtype.type(0)
        beside[x] *= total[x]
    for j in range(first + rank):
        for x in range(lane_count(scores)):
            scores[j, x] *= total[x]
    scores[first + rank : first + padded(rank)] = 0


@shared
def _drop_clipped(cotangent, outputs, low, high, delta):
    """g = 0 where the output was clipped; D = g . out."""
    delta[:] = 0
    for e in range(low.shape[0]):
        for x in range(lane_count(outputs)):
            kept = _kept(outputs[e, x], low[e], high[e])
            cotangent[e, x] = cotangent[e, x] if kept else cotangent.dtype.type(0)
            delta[x] += cotangent[e, x] * outputs[e, x]


@shared
def _take_part(cotangent, outputs, low, high, own, whole, along, row, count, scores, rows, delta):
    """The same for a part of the output: p_ij to its share of the whole."""
    for x in range(lane_count(outputs)):
        delta[x] = along[row + x] if x < count else delta.dtype.type(0)
        own[x] = weight(own[x], whole[row + x]) if x < count else delta.dtype.type(0)
    for e in range(low.shape[0]):
        for x in range(lane_count(outputs)):
            kept = _kept(outputs[e, x], low[e], high[e])
            delta[x] -= delta.dtype.type(0) if kept else cotangent[e, x] * clipped(outputs[e, x], low[e], high[e])
            cotangent[e, x] = cotangent[e, x] if kept else cotangent.dtype.type(0)
    for j in range(rows):
        for x in range(lane_count(scores)):
            scores[j, x] *= own[x]


@shared
def _slopes(products, scores, first, rank, den, delta):
    """g . v_j and g . Z_j,:E to ds_ij, in place."""
    for j in range(first + rank):
        share = den[j - first] if j >= first else scores.dtype.type(1)
        for x in range(lane_count(scores)):
            products[j, x] = slope(scores[j, x], products[j, x], -delta[x] * share)


@shared
def _write_queries(dq, sums, slot, row, count, first_held, scale, guess):
    """dq of a panel's rows; of those that were held out into `guess`. Returns the sum of |dq_i|^2 of the others."""
    square = 0.0
    for x in range(count):
        held = slot[row + x] - 1 - first_held
        if slot[row + x] == 0:
            for d in range(dq.shape[1]):
                value = sums[d, x] * scale
                dq[row + x, d] += value
                square += np.float64(value) * np.float64(value)
        elif held >= 0:
            for d in range(dq.shape[1]):
                guess[held, d] = sums[d, x] * scale
    return square


@shared
def _keep_own(scores, products, rows, slot, row, count):
    """Nothing of the rows that are exact goes further than this."""
    for x in range(count):
        if slot[row + x] != 0:
            for j in range(rows):
                scores[j, x] = 0
                products[j, x] = 0


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
    alive, square = np.empty(width, np.bool_), 0.0
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
        where = row, first_key, keys, window, rank, count, bucket, heavy, probes, used
        if basis.shape[0]:
            multiply_keys(projected, basis, queries, basis.shape[0])
            first = _score_panel(scores, key_tile, landmarks, queries, projected, *where)
            pack_rows(projected_rows, projected, basis.shape[0])
        else:
            first = _score_panel(scores, key_tile, landmarks, queries, queries, *where)
            pack_rows(projected_rows, queries, dim)
        _normalise(scores, first, rank, den, alive, beside, top, total, own)
        outputs[:] = 0
        add_values(outputs, value_tile, scores, keys)
        add_values(outputs, table, scores[first:], rank)
        for x in range(count if used else 0):
            for e in range(values):
                outputs[e, x] += beside[x] * near_out[row + x, e]
        if whole.shape[0]:
            _take_part(given, outputs, low, high, own, whole, along, row, count, scores, first + rank, delta)
        else:
            _drop_clipped(given, outputs, low, high, delta)
        for x in range(count if used else 0):
            good = alive[x] and total[x] > 0
            row_lse[row + x] = (whole[row + x] if whole.shape[0] else own[x]) if good else np.inf
            row_offset[row + x] = -delta[x]
            for e in range(values):
                row_given[row + x, e] = given[e, x]
        multiply_keys(products, value_tile, given, keys)
        multiply_keys(products[first:], table, given, rank)
        products[first + rank :] = 0
        _slopes(products, scores, first, rank, den, delta)
        sums[:], reduced[:] = 0, 0
        add_values(reduced, landmarks, products[first:], rank)
        if basis.shape[0]:
            add_values(sums, basis, reduced, basis.shape[0])
        else:
            for d in range(dim):
                for x in range(width):
                    sums[d, x] = reduced[d, x]
        add_values(sums, key_tile, products, keys)
        square += _write_queries(dq, sums, slot, row, count, first_held, scale, guess)
        _keep_own(scores, products, first + rank, slot, row, count)
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


# --- CUDA drivers: a team per row (the sums themselves are made by `adjoint_tiles`) ---


@cuda_kernel(64)
def _settle_cuda(
    key_head, place, slot, whole, along, first_held, rank, low, high, given, out, lse, own_lse, cotangent, offset
):
    """g and -D of a row; an infinite lse where it counts for nothing, in `own_lse` also where it was held out."""
    i, h, b = cuda.blockIdx.x, cuda.blockIdx.y, key_head[cuda.blockIdx.y]
    infinity, zero = lse.dtype.type(np.inf), lse.dtype.type(0)
    counts = rank[h] > 0 and (slot[h, i] == 0 or slot[h, i] > first_held)
    total = zero
    if counts:
        counts = lse[h, i] < np.inf
    for e in range(member(), cotangent.shape[2], members()):
        kept = counts and _kept(out[h, i, e], low[b, e], high[b, e])
        value = given[place[h], i, e] if kept else zero
        cotangent[h, i, e] = value
        if whole.shape[1] == 0:
            total += value * out[h, i, e] if kept else zero
        elif counts and not kept:
            total -= given[place[h], i, e] * clipped(out[h, i, e], low[b, e], high[b, e])
    total = team_sum(total)  # by then every member has seen the row's lse
    if whole.shape[1]:
        total += along[h, i]
    if member() == 0:
        if whole.shape[1]:
            lse[h, i] = whole[h, i]
        lse[h, i] = lse[h, i] if counts else infinity
        own_lse[h, i] = lse[h, i] if slot[h, i] == 0 else infinity
        offset[h, i] = -total


@cuda_kernel(64)
def _turn_cuda(columns, rows):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    for c in range(member(), rows.shape[2], members()):
        rows[h, i, c] = columns[h, c, i]


@cuda_kernel(64)
def _cut_cuda(table, values, den):
    """A table's columns of values, and the normaliser's."""
    j, h = cuda.blockIdx.x, cuda.blockIdx.y
    for e in range(member(), values.shape[2], members()):
        values[h, j, e] = table[h, j, e]
    if member() == 0:
        den[h, j] = table[h, j, values.shape[2]]


@cuda_kernel(64)
def _write_queries_cuda(query_head, slot, first_held, near, reduced, basis, dq, guess, squares):
    """dq of a row, and |dq|^2; of one that was held out into `guess`. `reduced (heads, N, m)` has its own basis."""
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    held, square = slot[h, i] - 1 - first_held, 0.0
    for d in range(member(), near.shape[2], members()):
        total = near[h, i, d]
        for c in range(reduced.shape[2]):
            total = fma(reduced[h, i, c], basis[h, c, d], total)
        if slot[h, i] == 0:
            dq[query_head[h], i, d] += total
            square += np.float64(total) * np.float64(total)
        elif held >= 0:
            guess[h, held, d] = total
    square = team_sum(square)
    if member() == 0:
        squares[h, i] = square


@cuda_kernel(64)
def _gather_ranges_cuda(sums, first, out):
    """The ranges' sums (ranges, heads, rows, columns) into the columns from `first` on, in their order."""
    j, h = cuda.blockIdx.x, cuda.blockIdx.y
    for c in range(member(), sums.shape[3], members()):
        total = 0.0
        for r in range(sums.shape[0]):
            total += sums[r, h, j, c]
        out[h, j, first + c] = total


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
    run = _on_cpu if problem.device.name == "cpu" else _on_cuda
    model = *model, nothing(problem, len(heads)) if near is None else near
    if whole is None:
        whole = (problem.device.empty((len(heads), 0), problem.element),) * 2
    return run(problem, heads, model, bounds, cotangent, slot, held, gradients, whole)


def _on_cpu(problem, heads, model, bounds, cotangent, slot, held, gradients, whole):
    landmarks, table, rank, window, basis, near = model
    element, (n, _, d, e) = problem.element, problem.shape
    guess = np.zeros((len(heads), held[1] - held[0], d), element)
    width, widest = lanes(element), max(int(window.max()), 0)
    ranges = max(1, min(_RANGES, n // max(_LEAST_RANGE, 2 * widest)))
    size = -(-n // (ranges * width)) * width
    ranges = -(-n // size)
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


def _on_cuda(problem, heads, model, bounds, given, slot, held, gradients, whole):
    device, element, (landmarks, table, rank, window, basis, beside) = problem.device, problem.element, model
    q, k, v, query_place, key_place = problem.arrays(heads)
    n, m, d, e = problem.shape
    count, rows, coordinates = landmarks.shape
    rows_of_heads, own = (n, count), device.upload(np.arange(count))
    none, everything = device.empty((count, 0), element), device.empty(0, np.int64)

    about, columns = _settle(problem, heads, model, bounds, given, slot, held, whole)
    lse, own_lse, cotangent, offset = about
    values, den = device.empty((count, rows, e), element), device.empty((count, rows), element)
    device.run(None, _cut_cuda, (rows, count), table, values, den)
    projected, place, factor, back = q, query_place, problem.factor, problem.scale
    if basis.shape[1]:
        projected, place, factor, back = device.empty((count, n, coordinates), element), own, 1, 1 / LOG2_E
        device.run(None, _turn_cuda, rows_of_heads, columns, projected)

    all_keys = device.upload(np.full(count, m))
    near = Pairs(q, cotangent, k, v, query_place, key_place, all_keys, lse, offset, none, window, beside=beside)
    far = Pairs(projected, cotangent, landmarks, values, place, own, rank, lse, offset, den, everything)
    d_queries, scale = device.zeros((1, count, n, d), element), problem.scale
    reduced = device.zeros((1, count, n, coordinates), element) if basis.shape[1] else d_queries
    add_adjoint(problem, to_queries, near, problem.factor, scale, own, d_queries)
    add_adjoint(problem, to_queries, far, factor, scale, own, reduced)
    guess = device.zeros((count, held[1] - held[0], d), element)
    reduced = reduced[0] if basis.shape[1] else device.empty((count, n, 0), element)
    squares = device.empty((count, n), np.float64)
    task = query_place, slot, held[0], d_queries[0], reduced, basis, gradients.q, guess, squares
    device.run(None, _write_queries_cuda, rows_of_heads, *task)

    near, far = near._replace(lse=own_lse), far._replace(lse=own_lse)
    add_adjoint(problem, to_keys, near, problem.factor, scale, key_place, gradients.k[None])
    add_adjoint(problem, to_values, near, problem.factor, 1, key_place, gradients.v[None])
    ranges = max(1, min(_RANGES, n // _LEAST_RANGE))
    split = -(-n // (ranges * tile.THREADS)) * tile.THREADS
    ranges = -(-n // split)
    d_landmarks = device.zeros((ranges, count, rows, coordinates), element)
    d_table, d_den = device.zeros((ranges, count, rows, e), element), device.zeros((ranges, count, rows), element)
    add_adjoint(problem, to_keys, far, factor, back, own, d_landmarks, split=split)
    add_adjoint(problem, to_values, far, factor, 1, own, d_table, split=split, along=d_den)
    d_tiles, d_values = device.empty(landmarks.shape, np.float64), device.empty((count, rows, e + 1), np.float64)
    for sums, first, out in ((d_landmarks, 0, d_tiles), (d_table, 0, d_values), (d_den[..., None], e, d_values)):
        device.run(None, _gather_ranges_cuda, (rows, count), sums, first, out)
    return d_tiles, d_values, guess, squares, (lse, offset, cotangent)


def _settle(problem, heads, model, bounds, given, slot, held, whole):
    """What `adjoint_tiles` needs to know of the rows, and the projected queries by columns.

    lse of rows that are the fit's or were held out, of those that are the fit's, g and -D.
    """
    device, element, (n, _, _, e) = problem.device, problem.element, problem.shape
    count, infinity = len(heads), np.full((len(problem.k), e), np.inf, element)
    starts = device.upload(np.tile(np.arange(0, n, PANEL), (count, 1)))
    out, own = device.empty((count, n, e), element), device.upload(np.arange(count))
    lse, own_lse, offset = (device.empty((count, n), element) for _ in range(3))
    leverage, cotangent = device.empty((count, starts.shape[1] * PANEL), element), device.empty(out.shape, element)
    open_bounds = device.upload(-infinity), device.upload(infinity)
    columns = apply_on_gpu(problem, heads, own, starts, model, open_bounds, e, out, leverage, lse)
    about = problem.key_heads(heads), device.upload(np.asarray(heads)), slot, *whole, held[0], model[2], *bounds, given
    device.run(None, _settle_cuda, (n, count), *about, out, lse, own_lse, cotangent, offset)
    return (lse, own_lse, cotangent, offset), columns
