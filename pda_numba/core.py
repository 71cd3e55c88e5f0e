"""The core: weighted ridge fit of the far targets to the landmark features, by QR and SVD, in float64.

    minimise |W (X Z - T)|^2 + lambda |Z|^2         X (n, R), T (n, E + 1), W = diag(w)
    [W X, W T] = Q [R, Y]     R = U diag(sigma) V^T     Z = V diag(sigma / (sigma^2 + lambda)) U^T Y

lambda = l sigma_1^2, l in 10^-16 .. 10^0, minimises the exact leave-one-out error of the *output*. With the residual
[dnum, dden] = (x_i Z - t_i) / (1 - h_i), h_i = w_i^2 |x_i G|^2, G = V diag((sigma^2 + lambda)^-1/2), and the true
normaliser 1 on the sampled rows, the output of the fit without row i is (o_i + dnum) / (1 + dden), so that

    loo = sum_i w_i^2 |dnum_i - o_i dden_i|^2 / (1 + dden_i)^2

The sum runs over the rows from `first` on: those before it chose the landmarks, and flatter the fit. Candidates are
compared on a random sketch of the value columns; the error that is reported is the full one. Several targets (one per
window) share the features, their QR and their SVD. Rows of weight 0 do not count, whatever they hold.

Every body is a team's.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from . import draw
from ._jit import CudaSteps, cpu_kernel, cuda, cuda_kernel, shared
from .core_places import CANDIDATES, LEVERAGE_COLUMNS, SKETCH, places
from .decompose import decompose, largest_of, multiply
from .kernels.groups import group, group_size, groups, place
from .kernels.scalar import normal
from .kernels.simd import padded
from .kernels.small_qr import TEAM, schedule
from .kernels.team import barrier, member, members, team_sum
from .kernels.view import view
from .leave_one_out import LEFT_ALONE as LEFT_ALONE
from .leave_one_out import leave_one_out

# Where outputs are merged, a normaliser's error changes them by as much of the difference between two outputs: of the
# size of an output, twice that at most.
_JOINT = 4.0

# --- bodies: the choice of lambda, and the table ---


@shared
def _fill_sketch(seed, head, sketch):
    """(values + 1, s + 1): random combinations of the value columns, and the normaliser's column as it is."""
    values, size = sketch.shape[0] - 1, sketch.shape[1] - 1
    for e in range(member(), values + 1, members()):
        for j in range(size + 1):
            sketch[e, j] = 1.0 if (e == values and j == size) or (values <= SKETCH and e == j) else 0.0
            if e < values and j < size and values > SKETCH:
                sketch[e, j] = normal(seed, head, draw.SKETCH, e * size + j) / math.sqrt(size)
    barrier()


@shared
def _level(g):
    """The candidates for l."""
    return 10.0 ** (2 * (g - CANDIDATES + 1))


@shared
def _fill_gains(squares, first, count, gains):
    """Rows 0 .. count are 1 / (sigma^2 + lambda) for the candidates from `first` on; the rest is padding."""
    largest = largest_of(squares)
    for g in range(gains.shape[0]):
        for c in range(member(), squares.shape[0], members()):
            gains[g, c] = 1.0 / (squares[c] + _level(first + g) * largest) if g < count else 0.0
    barrier()


@shared
def _fill_coefficients(right, begin, total, gains, count, out):
    """Rows of `leave_one_out`'s coefficients: gains[g] right[:, begin + j], for every candidate and column j."""
    for row in range(group(), out.shape[0], groups()):
        g, j = row // total, begin + row % total
        for c in range(place(), out.shape[1], group_size()):
            out[row, c] = gains[g, c] * right[c, j] if g < count else 0.0


@shared
def _compare(features, vt, gains, right, target, exact, weight, first, joint, width, seed, head, loo, at, work):
    """Leave-one-out errors (candidates * windows,) of all candidates, on the sketch of the outputs."""
    n, windows, columns = target.shape
    rank, size = vt.shape[1], min(columns - 1, SKETCH) + 1
    sketch = view(work, at.sketch, (columns, size))
    _fill_sketch(seed, head, sketch)
    targets = view(work, at.sketched_target, (n * windows, size))
    outputs = view(work, at.sketched_exact, (n, size - 1))
    rights = view(work, at.sketched_right, (rank * windows, size))
    multiply(target, 0, columns, 1, columns, sketch, targets)
    multiply(exact, 0, columns - 1, 1, columns - 1, sketch, outputs)
    multiply(right, 0, columns, 1, columns, sketch, rights)
    rows = padded(CANDIDATES * windows * size)
    coefficients = view(work, at.coefficients, (rows, rank))
    _fill_coefficients(view(rights, 0, (rank, windows * size)), 0, windows * size, gains, CANDIDATES, coefficients)
    none, targets = work[:0], view(targets, 0, (n, windows, size))
    judged = weight, first, joint, width
    leave_one_out(features, vt, gains, coefficients, targets, 0, windows, outputs, *judged, loo, none, none, work)


@shared
def _fill_table(vt, gains, right, w, combination, basis, product, table):
    """[Z, G] = V [gains * right, gains^1/2 * combination] of window w."""
    rank, columns = combination.shape[0], basis.shape[1] - LEVERAGE_COLUMNS
    for c in range(group(), rank, groups()):
        for j in range(place(), columns, group_size()):
            basis[c, j] = gains[0, c] * right[c, w * columns + j]
        for j in range(place(), LEVERAGE_COLUMNS, group_size()):
            basis[c, columns + j] = math.sqrt(gains[0, c] / LEVERAGE_COLUMNS) * combination[c, j]
    barrier()
    multiply(vt, 0, 1, rank, rank, basis, product)
    for c in range(group(), table.shape[0], groups()):
        for j in range(place(), table.shape[1], group_size()):
            table[c, j] = product[c, j] if c < rank and j < product.shape[1] else 0.0


@shared
def _output_square(exact, weight, first):
    """The weighted |o|^2 that leave-one-out errors are relative to; 1 where there is nothing."""
    total = 0.0
    for i in range(first + member(), exact.shape[0], members()):
        if weight[i] > 0:
            for e in range(exact.shape[1]):
                value = exact[i, e] * weight[i]
                total += value * value
    total = team_sum(total)
    return total if total > 0 else 1.0


# --- bodies: the steps of a fit, each a launch of its own on the GPU ---


@shared
def _decomposed(at, rank, columns, work):
    """sigma^2, V^T and sigma U^T Y of all windows, where `_decompose_head` leaves them."""
    right = view(work, at.right, (rank, columns))
    return work[at.squares : at.vt], view(work, at.vt, (padded(rank), rank)), right


@shared
def _decompose_head(h, features, target, weight, ranks, width, work):
    """sigma, V and U^T Y."""
    _, n, windows, columns = target.shape
    at = places(n, ranks[h], windows, columns, width, members())
    squares, vt, right = _decomposed(at, ranks[h], windows * columns, work)
    whole = view(target[h], 0, (n, windows * columns))
    decompose(features[h], whole, weight[h], ranks[h], width, squares, vt, right, work)


@shared
def _compare_head(h, heads, features, target, exact, weight, first, joint, ranks, seed, width, work):
    """The leave-one-out error of every candidate, for every window."""
    _, n, windows, columns = target.shape
    at = places(n, ranks[h], windows, columns, width, members())
    squares, vt, right = _decomposed(at, ranks[h], windows * columns, work)
    gains = view(work, at.gains, (padded(CANDIDATES), ranks[h]))
    _fill_gains(squares, 0, CANDIDATES, gains)
    sampled = target[h], exact[h], weight[h], first, joint, width
    _compare(features[h], vt, gains, right, *sampled, seed, heads[h], work[at.loo : at.end], at, work)


@shared
def _best(candidates, window, windows):
    """The candidate whose leave-one-out error is the least for this window."""
    best = 0
    for g in range(CANDIDATES):
        best = g if candidates[g * windows + window] < candidates[best * windows + window] else best
    return best


@shared
def _judge_head(
    h, features, target, exact, weight, first, joint, ranks, width, ridge, loo, row_error, row_leverage, work
):
    """Ridge, relative leave-one-out error and that of each row, for every window."""
    features, target, exact, weight, rank = features[h], target[h], exact[h], weight[h], ranks[h]
    n, windows, columns = target.shape
    at = places(n, rank, windows, columns, width, members())
    squares, vt, right = _decomposed(at, rank, windows * columns, work)
    chosen, own = view(work, at.gains, (padded(1), rank)), view(work, at.coefficients, (padded(columns), rank))
    square = _output_square(exact, weight, first)
    for w in range(windows):
        best = _best(work[at.loo : at.end], w, windows)
        _fill_gains(squares, best, 1, chosen)
        _fill_coefficients(right, w * columns, columns, chosen, 1, own)
        error, rows = loo[h, w : w + 1], (row_error[h, w], row_leverage[h, w])
        judged = weight, first, joint, width
        leave_one_out(features, vt, chosen, own, target, w, 1, exact, *judged, error, *rows, work)
        if member() == 0:
            ridge[h, w] = _level(best)
            error[0] = math.sqrt(error[0] / square)


@shared
def _table_head(h, heads, target, ranks, seed, width, table, work):
    """[Z, G] for every window."""
    (_, n, windows, columns), rank = target.shape, ranks[h]
    at = places(n, rank, windows, columns, width, members())
    squares, vt, right = _decomposed(at, rank, windows * columns, work)
    chosen = view(work, at.gains, (padded(1), rank))
    combination = view(work, at.combination, (rank, LEVERAGE_COLUMNS))
    basis = view(work, at.basis, (rank, columns + LEVERAGE_COLUMNS))
    product = view(work, at.product, (rank, columns + LEVERAGE_COLUMNS))
    for c in range(member(), rank, members()):
        for j in range(LEVERAGE_COLUMNS):
            combination[c, j] = normal(seed, heads[h], draw.COMBINE, c * LEVERAGE_COLUMNS + j)
    for w in range(windows):
        _fill_gains(squares, _best(work[at.loo : at.end], w, windows), 1, chosen)
        _fill_table(vt, chosen, right, w, combination, basis, product, table[h, w])


# --- drivers ---


@cpu_kernel
def _fit_cpu(
    heads,
    features,
    target,
    exact,
    weight,
    first,
    joint,
    rank,
    seed,
    width,
    table,
    ridge,
    loo,
    row_error,
    row_leverage,
    work,
):
    for slot in prange(work.shape[0]):
        for h in range(slot, rank.shape[0], work.shape[0]):
            sampled = features, target, exact, weight, first, joint, rank
            _decompose_head(h, features, target, weight, rank, width, work[slot])
            _compare_head(h, heads, *sampled, seed, width, work[slot])
            _judge_head(h, *sampled, width, ridge, loo, row_error, row_leverage, work[slot])
            _table_head(h, heads, target, rank, seed, width, table, work[slot])


# The steps: all with the same arguments, and a workspace for each head.


@cuda_kernel(TEAM)
def _decompose_cuda(
    heads,
    features,
    target,
    exact,
    weight,
    first,
    joint,
    rank,
    seed,
    width,
    table,
    ridge,
    loo,
    row_error,
    row_leverage,
    work,
):
    h = cuda.blockIdx.x
    _decompose_head(h, features, target, weight, rank, width, work[h])


@cuda_kernel(TEAM)
def _compare_cuda(
    heads,
    features,
    target,
    exact,
    weight,
    first,
    joint,
    rank,
    seed,
    width,
    table,
    ridge,
    loo,
    row_error,
    row_leverage,
    work,
):
    h = cuda.blockIdx.x
    _compare_head(h, heads, features, target, exact, weight, first, joint, rank, seed, width, work[h])


@cuda_kernel(TEAM)
def _judge_cuda(
    heads,
    features,
    target,
    exact,
    weight,
    first,
    joint,
    rank,
    seed,
    width,
    table,
    ridge,
    loo,
    row_error,
    row_leverage,
    work,
):
    h = cuda.blockIdx.x
    sampled = features, target, exact, weight, first, joint, rank
    _judge_head(h, *sampled, width, ridge, loo, row_error, row_leverage, work[h])


@cuda_kernel(TEAM)
def _table_cuda(
    heads,
    features,
    target,
    exact,
    weight,
    first,
    joint,
    rank,
    seed,
    width,
    table,
    ridge,
    loo,
    row_error,
    row_leverage,
    work,
):
    h = cuda.blockIdx.x
    _table_head(h, heads, target, rank, seed, width, table, work[h])


_FIT_CUDA = CudaSteps(_decompose_cuda, _compare_cuda, _judge_cuda, _table_cuda)


# --- stage ---


class Fit(NamedTuple):
    """The fits of some heads, one for every window."""

    table: Any  # (heads, windows, R padded, padded(E + 1 + LEVERAGE_COLUMNS)): [Z, G]
    ridge: Any  # (heads, windows): l
    loo: Any  # (heads, windows): leave-one-out relative error of the output
    row_error: Any  # (heads, windows, n): |error|^2 of each row's leave-one-out output
    row_leverage: Any  # (heads, windows, n): its leverage when left out


def fit(problem, heads, features, target, exact, weight, rank, *, first=0):
    """Fit every head and every window.

    `features (heads, R padded, n)`, `target (heads, n, windows, E + 1)`, `exact (heads, n, E)`, `weight (heads, n)`;
    of each head `rank (heads,)` landmarks count, and the rows of positive weight; those from `first` on judge the fit.
    Returns a `Fit`.
    """
    device = problem.device
    count, n, windows, columns = target.shape
    padded_rank = features.shape[1]
    width, team, slots = schedule(device, count)
    table = device.empty((count, windows, padded_rank, padded(columns + LEVERAGE_COLUMNS)), problem.element)
    ridge, loo = (device.empty((count, windows), np.float64) for _ in range(2))
    row_error, row_leverage = (device.empty((count, windows, n), np.float64) for _ in range(2))
    work = device.empty((slots, places(n, padded_rank, windows, columns, width, team).end), np.float64)
    joint = _JOINT if problem.merged else 0.0
    given = problem.query_heads(heads), features, target, exact, weight, first, joint, rank, problem.seed, width
    device.run(_fit_cpu, _FIT_CUDA, (slots,), *given, table, ridge, loo, row_error, row_leverage, work)
    return Fit(table, ridge, loo, row_error, row_leverage)
