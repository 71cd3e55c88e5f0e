"""The adjoint of the fit (`core`) and of its features: from dZ to the sampled rows and the landmarks, in float64.

    M = X^T W^2 X + lambda I        Z = M^-1 X^T W^2 T        Y = M^-1 dZ
    dT = W^2 X Y                    dX = W^2 ((T - X Z) Y^T - (X Y) Z^T)

    X_ij = exp(s_ij - lse_i):       ds = dX * X
    dq~_i += scale sum_j ds_ij S~_j       dS~_j += scale sum_i ds_ij q~_i       dlse_i -= sum_j ds_ij

The weights and lambda are held fixed. M^-1 is applied through the QR and SVD that the fit was made by, so that nothing
is ever divided by a gap between singular values.
"""

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .decompose import decompose, decomposition_places, largest_of
from .dense import multiply, scatter_rows
from .kernels.scalar import widen
from .kernels.simd import padded
from .kernels.small_qr import TEAM, schedule
from .kernels.team import barrier, member, members, team_sum
from .kernels.view import view
from .products import features

# --- bodies ---


@shared
def _decompose(features, target, weight, rank, width, squares, vt, right, work):
    """The decomposition of the fit's `rank` landmarks; zero for the others."""
    size = vt.shape[0]
    for i in range(member(), size, members()):
        squares[i] = 0.0
        for j in range(size):
            vt[i, j] = 0.0
        for j in range(right.shape[1]):
            right[i, j] = 0.0
    own_right = view(work, 0, (rank, right.shape[1]))
    own_vt = view(work, rank * right.shape[1], (padded(rank), rank))
    rest = work[rank * right.shape[1] + padded(rank) * rank :]
    decompose(features, target, weight, rank, width, squares, own_vt, own_right, rest)
    barrier()
    for i in range(member(), rank, members()):
        for j in range(rank):
            vt[i, j] = own_vt[i, j]
        for j in range(right.shape[1]):
            right[i, j] = own_right[i, j]


@shared
def _workspace(n, rank, columns, width, team):
    small, _ = decomposition_places(n, rank, columns, width, team)
    return small + rank * (rank + columns + min(rank, columns)) + rank * columns + padded(rank) * rank


@shared
def _divide(squares, level, rows):
    """Row c of `rows` times 1 / (sigma_c^2 + lambda), lambda = level sigma_1^2; where nothing is fitted, 0."""
    penalty = level * largest_of(squares)
    for c in range(member(), rows.shape[0], members()):
        total = squares[c] + penalty
        gain = 1.0 / total if total > 0 else 0.0
        for j in range(rows.shape[1]):
            rows[c, j] *= gain


@shared
def _subtract(target, fitted):
    """fitted = T - X Z, in place."""
    for i in range(member(), target.shape[0], members()):
        for j in range(target.shape[1]):
            fitted[i, j] = target[i, j] - fitted[i, j]


@shared
def _slope_row(i, weight, features, second, along, slopes, d_target, d_lse):
    """Row i: ds = w^2 ((T - X Z) Y^T - (X Y) Z^T) X from the two products, dT = w^2 X Y, and dlse; by a team."""
    square, total = weight[i] * weight[i], 0.0
    for j in range(member(), slopes.shape[1], members()):
        slopes[i, j] = square * (slopes[i, j] - second[i, j]) * features[j, i]
        total += slopes[i, j]
    total = team_sum(total)
    if member() == 0:
        d_lse[i] = -total
    for c in range(member(), along.shape[1], members()):
        d_target[i, c] = square * along[i, c]


@shared
def _gather_row(q, row, out):
    for d in range(member(), out.shape[0], members()):
        out[d] = widen(q[row, d])


# --- CPU drivers ---


@cpu_kernel
def _decompose_cpu(features, target, weight, rank, width, squares, vt, right, work):
    for slot in prange(work.shape[0]):
        for h in range(slot, rank.shape[0], work.shape[0]):
            task = features[h], target[h], weight[h], rank[h], width
            _decompose(*task, squares[h], vt[h], right[h], work[slot])


@cpu_kernel
def _divide_cpu(squares, level, rows):
    for h in prange(len(rows)):
        _divide(squares[h], level[h], rows[h])


@cpu_kernel
def _subtract_cpu(target, fitted):
    for h in prange(len(fitted)):
        _subtract(target[h], fitted[h])


@cpu_kernel
def _slope_cpu(weight, features, second, along, slopes, d_target, d_lse):
    heads, n = weight.shape
    for item in prange(heads * n):
        h, i = item // n, item % n
        _slope_row(i, weight[h], features[h], second[h], along[h], slopes[h], d_target[h], d_lse[h])


@cpu_kernel
def _gather_cpu(q, query_head, which, out):
    heads, n = which.shape
    for item in prange(heads * n):
        h, i = item // n, item % n
        _gather_row(q[query_head[h]], which[h, i], out[h, i])


# --- CUDA drivers ---


@cuda_kernel(TEAM)
def _decompose_cuda(features, target, weight, rank, width, squares, vt, right, work):
    h = cuda.blockIdx.x
    _decompose(features[h], target[h], weight[h], rank[h], width, squares[h], vt[h], right[h], work[h])


@cuda_kernel(256)
def _divide_cuda(squares, level, rows):
    h = cuda.blockIdx.x
    _divide(squares[h], level[h], rows[h])


@cuda_kernel(256)
def _subtract_cuda(target, fitted):
    h = cuda.blockIdx.x
    _subtract(target[h], fitted[h])


@cuda_kernel(64)
def _slope_cuda(weight, features, second, along, slopes, d_target, d_lse):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    _slope_row(i, weight[h], features[h], second[h], along[h], slopes[h], d_target[h], d_lse[h])


@cuda_kernel(64)
def _gather_cuda(q, query_head, which, out):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    _gather_row(q[query_head[h]], which[h, i], out[h, i])


# --- stages ---


def gather_queries(problem, heads, which):
    """The queries `which (heads, n)` in float64: (heads, n, D)."""
    device = problem.device
    out = device.empty((*which.shape, problem.shape[2]), np.float64)
    device.run(_gather_cpu, _gather_cuda, which.shape[::-1], problem.q, problem.query_heads(heads), which, out)
    return out


def fit_adjoint(problem, heads, which, lse, target, weight, level, model, d_landmarks, d_table):
    """From dZ to the sampled rows; adds to dS~ `d_landmarks (heads, R padded, coordinates)`.

    `which`, `lse`, `weight` (heads, n) and `target (heads, n, E + 1)` are the fit's, `level (heads,)` its ridge
    lambda / sigma_1^2, `model` (landmarks, rank, basis). Returns dT (heads, n, E + 1), dlse (heads, n), and what the
    features owe to the rows' queries (heads, n, D).
    """
    device, (landmarks, rank, basis) = problem.device, model
    x = features(problem, heads, which, lse, landmarks, rank, basis)
    squares, vt, right = _decomposition(device, x, target, weight, rank)
    along = multiply(device, vt, d_table)
    for rows in (right, along):
        device.run(_divide_cpu, _divide_cuda, (len(heads),), squares, level, rows)
    z, y = multiply(device, vt, right, turn_a=True), multiply(device, vt, along, turn_a=True)
    left, along = multiply(device, x, z, turn_a=True), multiply(device, x, y, turn_a=True)
    device.run(_subtract_cpu, _subtract_cuda, (len(heads),), target, left)
    slopes, second = multiply(device, left, y, turn_b=True), multiply(device, along, z, turn_b=True)
    d_target, d_lse = device.empty(along.shape, problem.element), device.empty(which.shape, np.float64)
    task = weight, x, second, along, slopes, d_target, d_lse
    device.run(_slope_cpu, _slope_cuda, which.shape[::-1], *task)

    queries = gather_queries(problem, heads, which)
    projected = multiply(device, queries, basis, turn_b=True) if basis.shape[1] else queries
    every = device.repeat(device.upload(np.arange(landmarks.shape[1])[None]), len(heads))
    d_rows = multiply(device, slopes, projected, factor=problem.scale, turn_a=True)
    scatter_rows(device, device.upload(np.arange(len(heads))), every, d_rows, d_landmarks, distinct=True)
    d_queries = multiply(device, slopes, landmarks, factor=problem.scale)
    return d_target, d_lse, multiply(device, d_queries, basis) if basis.shape[1] else d_queries


def _decomposition(device, x, target, weight, rank):
    """sigma^2 (heads, R padded), V^T (heads, R padded, R padded) and sigma U^T W T, zero behind each head's rank."""
    heads, n, columns = target.shape
    size = x.shape[1]
    width, team, slots = schedule(device, heads)
    squares, vt = device.empty((heads, size), np.float64), device.empty((heads, size, size), np.float64)
    right = device.empty((heads, size, columns), np.float64)
    work = device.empty((slots, _workspace(n, size, columns, width, team)), np.float64)
    task = x, target, weight, rank, width, squares, vt, right, work
    device.run(_decompose_cpu, _decompose_cuda, (slots,), *task)
    return squares, vt, right
