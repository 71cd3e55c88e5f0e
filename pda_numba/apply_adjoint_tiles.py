"""The adjoint of the apply pass on the GPU (`apply_adjoint` has the equations).

The apply pass is run again for each row's normaliser and output. What rows owe to queries, keys and values, and to
landmarks and coefficients as if these were keys and values, are sums of `adjoint_tiles`.
"""

import numpy as np

from ._jit import cuda, cuda_kernel
from .adjoint_tiles import Pairs, add_adjoint, to_keys, to_queries, to_values
from .apply_tiles import apply_on_gpu
from .kernels.panel import clipped, is_kept
from .kernels.scalar import LOG2_E, fma
from .kernels.team import member, members, team_sum
from .plan import PANEL

# --- drivers: a team per row ---


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
        kept = counts and is_kept(out[h, i, e], low[b, e], high[b, e])
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


# --- on the host ---


def adjoint_on_gpu(problem, heads, model, bounds, given, slot, held, gradients, whole, ranges, split):
    """`apply_adjoint` there: what rows owe to the fit is first summed up in so many ranges of `split` rows each."""
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
