"""The core: weighted ridge fit of the far targets to the landmark features, by QR and SVD, in float64.

    minimise |W (X Z - T)|^2 + lambda |Z|^2         X (n, R), T (n, E + 1), W = diag(w)
    [W X, W T] = Q [R, Y]     R = U diag(sigma) V^T     Z = V diag(sigma / (sigma^2 + lambda)) U^T Y

lambda = l sigma_1^2, l in 10^-16 .. 10^0, minimises the exact leave-one-out error of the *output*. With the residual
[dnum, dden] = (x_i Z - t_i) / (1 - h_i), h_i = w_i^2 |x_i G|^2, G = V diag((sigma^2 + lambda)^-1/2), and the true
normaliser 1 on the sampled rows, the output of the fit without row i is (o_i + dnum) / (1 + dden), so that

    loo = sum_i w_i^2 |dnum_i - o_i dden_i|^2 / (1 + dden_i)^2

The sum runs over the rows from `first` on: those before it chose the landmarks, and flatter the fit. Candidates are
compared on a random sketch of the value columns; the error that is reported is the full one. Several targets (one per
window) share the features, their QR and their SVD.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import prange

from . import draw
from ._jit import cpu_kernel, shared
from .kernels.scalar import fma, normal
from .kernels.simd import ROWS, lanes, multiply_block, padded
from .kernels.small_qr import triangularise
from .kernels.small_svd import orthogonalise_rows

LEVERAGE_COLUMNS = 16  # the leverage |x G|^2 is estimated from this many random combinations of G's columns
_SKETCH = 8  # value columns, or random combinations of them, on which the candidates for lambda are compared
_CANDIDATES = 9
_WIDTH = lanes(np.float64)
_ALONE = 1e-7  # 1 - h below this: the row is fitted by itself alone, and without it nothing is known (x_i Z = 0)
LEFT_ALONE = 1e12  # the leverage of such a row when it is left out
# The output is clipped to the range of the values, so no row's error counts for more than this, in rms |o|: twice the
# largest difference of two outputs of that size. A row whose normaliser is not positive counts as much.
_LARGEST_ERROR = 2.0

# --- bodies ---


@shared
def _sketch_matrix(values, seed, head):
    """(values + 1, s + 1): random combinations of the value columns, and the normaliser's column as it is."""
    size = min(values, _SKETCH)
    sketch = np.zeros((values + 1, size + 1))
    sketch[values, size] = 1.0
    for e in range(values):
        if values <= _SKETCH:
            sketch[e, e] = 1.0
        else:
            for j in range(size):
                sketch[e, j] = normal(seed, head, draw.SKETCH, e * size + j) / math.sqrt(size)
    return sketch


@shared
def _multiply(a, b):
    """a b, rows contiguous."""
    out = np.zeros((a.shape[0], b.shape[1]))
    for i in range(a.shape[0]):
        for c in range(a.shape[1]):
            factor = a[i, c]
            for j in range(b.shape[1]):
                out[i, j] = fma(factor, b[c, j], out[i, j])
    return out


@shared
def _multiply_panel(a, b, out):
    """out = a b for a panel b (k, lanes); the rows of `a (rows padded, k)` are contiguous."""
    for r in range(0, a.shape[0], ROWS):
        multiply_block(out, r, a, r * a.shape[1], a.shape[1], 1, b, a.shape[1], False)


@shared
def _decompose(features, target, weight, rank):
    """sigma^2 (R,), V^T (R padded, R) and sigma U^T Y (R, columns) of the weighted problem."""
    n, columns = target.shape
    total = rank + columns
    width = _WIDTH
    joint = np.zeros(((total + width - 1) // width, padded(n), width))
    for c in range(rank):
        for i in range(n):
            joint[c // width, i, c % width] = features[c, i] * weight[i]
    for i in range(n):
        for c in range(columns):
            joint[(rank + c) // width, i, (rank + c) % width] = target[i, c] * weight[i]
    triangularise(joint, rank)
    small, upper = np.zeros((rank, 2 * rank)), np.zeros((rank, columns))
    for i in range(min(rank, n)):
        for c in range(rank):
            small[i, c] = joint[c // width, i, c % width]
        for c in range(columns):
            upper[i, c] = joint[(rank + c) // width, i, (rank + c) % width]
    for i in range(rank):
        small[i, rank + i] = 1.0
    squares = np.empty(rank)
    orthogonalise_rows(small, rank, squares)  # [R, I] to [diag(sigma) V^T, U^T]
    vt, ut = np.zeros((padded(rank), rank)), small[:, rank:].copy()
    least = squares.max() * 1e-32
    for c in range(rank):
        sigma = math.sqrt(squares[c])
        for j in range(rank):
            vt[c, j] = small[c, j] / sigma if squares[c] > least else 0.0
            ut[c, j] *= sigma
    right_side = _multiply(ut, upper)
    return squares, vt, right_side


@shared
def _leave_one_out(features, vt, gains, coefficients, targets, exact, weight, first, loo, row_error, row_leverage):
    """loo[g, w] for ridge candidates g and windows w.

    `gains (candidates, R)` are 1 / (sigma^2 + lambda); `coefficients (rows, R)` are the transposed coefficients in
    the basis V, row (g * windows + w) * columns + j; `targets (n, windows, columns)`, `exact (n, columns - 1)`.
    The rows before `first` do not count in `loo`; `row_error` and `row_leverage` (n,), if not empty, get every row's
    squared error and leverage |x_i G|^2 / (1 - h_i) for the one candidate.
    """
    rank = vt.shape[1]
    windows, columns = targets.shape[1], targets.shape[2]
    width = _WIDTH
    x, coordinates = np.zeros((rank, width)), np.empty((vt.shape[0], width))
    squared, leverage = np.empty((rank, width)), np.empty((gains.shape[0], width))
    fitted = np.empty((coefficients.shape[0], width))
    loo[:, :] = 0.0
    largest = 0.0
    for i in range(exact.shape[0]):
        for j in range(exact.shape[1]):
            largest += exact[i, j] * exact[i, j] * _LARGEST_ERROR * _LARGEST_ERROR / exact.shape[0]
    begin = 0 if row_error.shape[0] else first
    for start in range(begin, weight.shape[0], width):
        used = min(width, weight.shape[0] - start)
        for c in range(rank):
            for i in range(used):
                x[c, i] = features[c, start + i]
        _multiply_panel(vt, x, coordinates)
        for c in range(rank):
            for i in range(width):
                squared[c, i] = coordinates[c, i] * coordinates[c, i]
        _multiply_panel(gains, squared, leverage)
        _multiply_panel(coefficients, coordinates[:rank], fitted)
        for g in range(loo.shape[0]):
            for i in range(used):
                row, w_square = start + i, weight[start + i] * weight[start + i]
                rest = 1.0 - leverage[g, i] * w_square
                alone = rest < _ALONE
                grow = 0.0 if alone else 1.0 / rest
                for w in range(windows):
                    base = (g * windows + w) * columns
                    dden = (fitted[base + columns - 1, i] - targets[row, w, columns - 1]) * grow
                    dden = -targets[row, w, columns - 1] if alone else dden
                    square = 0.0
                    for j in range(columns - 1):
                        dnum = (fitted[base + j, i] - targets[row, w, j]) * grow
                        dnum = -targets[row, w, j] if alone else dnum
                        error = dnum - exact[row, j] * dden
                        square += error * error
                    normaliser = 1.0 + dden
                    square = min(square / (normaliser * normaliser), largest) if normaliser > 0.0 else largest
                    if row >= first:
                        loo[g, w] += w_square * square
                    if row_error.shape[0]:
                        row_error[row] = square
                        row_leverage[row] = LEFT_ALONE if alone else leverage[g, i] * grow


@shared
def _candidate_gains(squares):
    gains = np.zeros((padded(_CANDIDATES), squares.shape[0]))
    largest = squares.max()
    for g in range(_CANDIDATES):
        for c in range(squares.shape[0]):
            gains[g, c] = 1.0 / (squares[c] + 10.0 ** (2 * (g - _CANDIDATES + 1)) * largest)
    return gains


@shared
def _scaled_coefficients(right_side, gains, count):
    """Rows of `_leave_one_out`'s coefficients: gains[g] * right_side, for every candidate, window and column."""
    rank, total = right_side.shape
    out = np.zeros((padded(count * total), rank))
    for g in range(count):
        for c in range(rank):
            for j in range(total):
                out[g * total + j, c] = gains[g, c] * right_side[c, j]
    return out


@shared
def _fit(features, target, exact, weight, first, rank, seed, head, table, ridge, error, row_error, row_leverage):
    """One head: tables (windows, R padded, columns), ridge and squared leave-one-out error for every window."""
    n, windows, columns = target.shape
    squares, vt, right_side = _decompose(features, target.reshape(n, windows * columns), weight, rank)
    gains = _candidate_gains(squares)

    sketch = _sketch_matrix(columns - 1, seed, head)
    size = sketch.shape[1]
    sketched_target = _multiply(target.reshape(n * windows, columns), sketch).reshape(n, windows, size)
    sketched_exact = _multiply(exact, sketch[: columns - 1, : size - 1].copy())
    sketched_right = _multiply(right_side.reshape(rank * windows, columns), sketch).reshape(rank, windows * size)
    loo = np.empty((_CANDIDATES, windows))
    coefficients = _scaled_coefficients(sketched_right, gains, _CANDIDATES)
    none = np.empty(0)
    _leave_one_out(features, vt, gains, coefficients, sketched_target, sketched_exact, weight, first, loo, none, none)

    combination, scaled = np.empty((rank, LEVERAGE_COLUMNS)), np.empty((rank, LEVERAGE_COLUMNS))
    for c in range(rank):
        for j in range(LEVERAGE_COLUMNS):
            combination[c, j] = normal(seed, head, draw.COMBINE, c * LEVERAGE_COLUMNS + j)
    v = vt[:rank].T.copy()
    for w in range(windows):
        best = 0
        for g in range(_CANDIDATES):
            best = g if loo[g, w] < loo[best, w] else best
        ridge[w] = 10.0 ** (2 * (best - _CANDIDATES + 1))
        own = right_side[:, w * columns : (w + 1) * columns].copy()
        chosen = np.zeros((padded(1), rank))
        chosen[0] = gains[best]
        full = np.empty((1, 1))
        _leave_one_out(
            features,
            vt,
            chosen,
            _scaled_coefficients(own, chosen, 1),
            target[:, w : w + 1],
            exact,
            weight,
            first,
            full,
            row_error[w],
            row_leverage[w],
        )
        error[w] = full[0, 0]
        for c in range(rank):
            own[c, :] *= gains[best, c]
            for j in range(LEVERAGE_COLUMNS):
                scaled[c, j] = math.sqrt(gains[best, c] / LEVERAGE_COLUMNS) * combination[c, j]
        z, g_columns = _multiply(v, own), _multiply(v, scaled)
        table[w, :, :] = 0
        for c in range(rank):
            for j in range(columns):
                table[w, c, j] = z[c, j]
            for j in range(LEVERAGE_COLUMNS):
                table[w, c, columns + j] = g_columns[c, j]


# --- CPU driver ---


@cpu_kernel
def _fit_cpu(
    query_head,
    features,
    target,
    exact,
    weight,
    first,
    rank,
    used,
    seed,
    table,
    ridge,
    error,
    scale,
    row_error,
    row_leverage,
):
    for h in prange(rank.shape[0]):
        n = used[h]
        _fit(
            features[h],
            target[h, :n],
            exact[h, :n],
            weight[h, :n],
            first,
            rank[h],
            seed,
            query_head[h],
            table[h],
            ridge[h],
            error[h],
            row_error[h],
            row_leverage[h],
        )
        scale[h] = 0.0
        for i in range(first, n):
            for e in range(exact.shape[2]):
                scale[h] += exact[h, i, e] * exact[h, i, e] * weight[h, i] * weight[h, i]


# --- stage ---


class Fit(NamedTuple):
    """The fits of some heads, one for every window."""

    table: np.ndarray  # (heads, windows, R padded, padded(E + 1 + LEVERAGE_COLUMNS)): [Z, G]
    ridge: np.ndarray  # (heads, windows): l
    loo: np.ndarray  # (heads, windows): leave-one-out relative error of the output
    row_error: np.ndarray  # (heads, windows, n): |error|^2 of each row's leave-one-out output
    row_leverage: np.ndarray  # (heads, windows, n): its leverage when left out


def fit(problem, heads, features, target, exact, weight, rank, *, used, first=0):
    """Fit every head and every window.

    `features (heads, R padded, n)`, `target (heads, n, windows, E + 1)`, `exact (heads, n, E)`, `weight (heads, n)`;
    of each head `rank (heads,)` landmarks and `used (heads,)` rows count, and the rows from `first` on judge the fit.
    Returns a `Fit`.
    """
    count, windows, columns = len(rank), target.shape[2], target.shape[3]
    table = np.empty((count, windows, features.shape[1], padded(columns + LEVERAGE_COLUMNS)), problem.element)
    ridge, error, scale = np.empty((count, windows)), np.empty((count, windows)), np.empty(count)
    row_error, row_leverage = (np.zeros((count, windows, weight.shape[1])) for _ in range(2))
    _fit_cpu(
        problem.query_head[heads],
        features,
        target.astype(np.float64),
        exact.astype(np.float64),
        weight,
        first,
        rank,
        used,
        problem.seed,
        table,
        ridge,
        error,
        scale,
        row_error,
        row_leverage,
    )
    relative = np.sqrt(error / np.where(scale > 0, scale, 1)[:, None])
    return Fit(table, ridge, relative, row_error, row_leverage)
