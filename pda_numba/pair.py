"""The pair of projections from the data: one matrix for the queries, one for the keys.

Its product is the best rank-m factor of Q (K - mean)^T on a sample of rows. With C_Q = R_Q^T R_Q, C_K = R_K^T R_K the
two second moments and R_Q R_K^T = U S W^T:

    P_Q = R_Q^-1 U S^1/2        P_K = R_K^-1 W S^1/2        (first m columns)
"""

import math

import numpy as np
from numba import prange

from . import draw
from ._jit import CudaSteps, cpu_kernel, cuda, cuda_kernel, serial_kernel, shared
from .kernels.groups import group, group_size, groups, place
from .kernels.scalar import widen
from .kernels.simd import padded
from .kernels.small_qr import TEAM, moment_places, moment_root, schedule, solve_upper
from .kernels.small_svd import orthogonalise_rows
from .kernels.team import barrier, member, members
from .kernels.view import view

_SAMPLE = 4096  # rows of each side
_RIDGE = 1e-12  # relative ridge on the two second moments: directions without data stay finite

# --- bodies ---


@shared
def _gather(x, which, mean, centre, out):
    """Rows of one side; their mean is taken off if `centre`."""
    n, dim = out.shape
    for i in range(group(), n, groups()):
        for d in range(place(), dim, group_size()):
            out[i, d] = widen(x[which[i], d])
    barrier()
    for d in range(member(), dim, members()):
        total = 0.0
        for i in range(n):
            total += out[i, d]
        mean[d] = total / n if centre else 0.0
    barrier()
    for i in range(member(), n, members()):  # the owners of `moment_root`: no barrier
        for d in range(dim):
            out[i, d] -= mean[d]


@shared
def _pair_places(n, dim, count, width, team):
    """Where the roots, [R_Q R_K^T, I], its squared lengths, the pair and the workspace of `moment_root` begin."""
    root_q = n * dim
    root_k = root_q + dim * dim
    joint = root_k + dim * dim
    squares = joint + 2 * dim * dim
    pair_q = squares + dim
    pair_k = pair_q + dim * count
    rest = pair_k + dim * count
    return root_q, root_k, joint, squares, pair_q, pair_k, rest, rest + moment_places(n, dim, width, team)[1]


@shared
def _multiply_roots(root_q, root_k, joint):
    """[R_Q R_K^T, I]."""
    dim = root_q.shape[0]
    for i in range(group(), dim, groups()):
        for j in range(place(), dim, group_size()):
            joint[i, dim + j] = 1.0 if i == j else 0.0
            total = 0.0
            for c in range(max(i, j), dim):
                total += root_q[i, c] * root_k[j, c]
            joint[i, j] = total


@shared
def _pick(joint, squares, pair_q, pair_k):
    """U S^1/2 and W S^1/2 of the largest singular values, in falling order, from joint = [S W^T, U^T]."""
    dim, count = pair_q.shape
    for row in range(group(), dim, groups()):
        c = 0
        for other in range(dim):
            c += squares[other] > squares[row] or (squares[other] == squares[row] and other < row)
        root = math.sqrt(math.sqrt(squares[row]))
        if c < count:
            for d in range(place(), dim, group_size()):
                pair_q[d, c] = joint[row, dim + d] * root
                pair_k[d, c] = joint[row, d] / root if root > 0 else 0.0
    barrier()


# --- bodies: the steps, each a launch of its own on the GPU ---


@shared
def _roots(q, k, which_q, which_k, count, width, work, mean):
    """R_Q and R_K of one head; and the mean of the keys."""
    dim, most = mean.shape[0], max(which_q.shape[0], which_k.shape[0])
    at_q, at_k, _, _, _, _, rest, _ = _pair_places(most, dim, count, width, members())
    rows = view(work, 0, (which_q.shape[0], dim))
    _gather(q, which_q, mean, False, rows)
    moment_root(rows, _RIDGE, view(work, at_q, (dim, dim)), width, work[rest:])
    rows = view(work, 0, (which_k.shape[0], dim))
    _gather(k, which_k, mean, True, rows)
    moment_root(rows, _RIDGE, view(work, at_k, (dim, dim)), width, work[rest:])


@shared
def _rotate(most, dim, count, width, work):
    """[S W^T, U^T] and S^2 of the roots."""
    at_q, at_k, at_joint, at_squares, at_pair_q, _, _, _ = _pair_places(most, dim, count, width, members())
    joint = view(work, at_joint, (dim, 2 * dim))
    _multiply_roots(view(work, at_q, (dim, dim)), view(work, at_k, (dim, dim)), joint)
    orthogonalise_rows(joint, dim, work[at_squares:at_pair_q])


@shared
def _solve(most, width, work, p_q, p_k):
    """The pair, by the formulas above, as rows (count, D)."""
    count, dim = p_q.shape
    at_q, at_k, at_joint, at_squares, at_pair_q, at_pair_k, _, _ = _pair_places(most, dim, count, width, members())
    pair_q, pair_k = view(work, at_pair_q, (dim, count)), view(work, at_pair_k, (dim, count))
    _pick(view(work, at_joint, (dim, 2 * dim)), work[at_squares:at_pair_q], pair_q, pair_k)
    solve_upper(view(work, at_q, (dim, dim)), pair_q)
    solve_upper(view(work, at_k, (dim, dim)), pair_k)
    for c in range(group(), count, groups()):
        for d in range(place(), dim, group_size()):
            p_q[c, d], p_k[c, d] = pair_q[d, c], pair_k[d, c]


@shared
def _stack(p_q, mean, basis):
    """The rows of P_Q^T and the mean of the keys as the panel bodies read them, padded to whole register blocks."""
    count, dim = p_q.shape
    for c in range(group(), basis.shape[0], groups()):
        for d in range(place(), dim, group_size()):
            basis[c, d] = p_q[c, d] if c < count else mean[d] if c == count else 0.0


# --- CPU drivers ---


@cpu_kernel
def _balance_cpu(q, k, query_head, key_head, which_q, which_k, width, work, p_q, p_k, mean):
    _, count, dim = p_q.shape
    most = max(which_q.shape[1], which_k.shape[1])
    for slot in prange(work.shape[0]):
        for h in range(slot, p_q.shape[0], work.shape[0]):
            rows = q[query_head[h]], k[key_head[h]], which_q[h], which_k[h]
            _roots(*rows, count, width, work[slot], mean[h])
            _rotate(most, dim, count, width, work[slot])
            _solve(most, width, work[slot], p_q[h], p_k[h])


@serial_kernel
def _stack_cpu(p_q, mean, basis):
    for h in range(basis.shape[0]):
        _stack(p_q[h], mean[h], basis[h])


# --- CUDA drivers: the steps take the same arguments, and a workspace for each head ---


@cuda_kernel(TEAM)
def _roots_cuda(q, k, query_head, key_head, which_q, which_k, width, work, p_q, p_k, mean):
    h = cuda.blockIdx.x
    rows = q[query_head[h]], k[key_head[h]], which_q[h], which_k[h]
    _roots(*rows, p_q.shape[1], width, work[h], mean[h])


@cuda_kernel(TEAM)
def _rotate_cuda(q, k, query_head, key_head, which_q, which_k, width, work, p_q, p_k, mean):
    most = max(which_q.shape[1], which_k.shape[1])
    _rotate(most, p_q.shape[2], p_q.shape[1], width, work[cuda.blockIdx.x])


@cuda_kernel(TEAM)
def _solve_cuda(q, k, query_head, key_head, which_q, which_k, width, work, p_q, p_k, mean):
    h = cuda.blockIdx.x
    _solve(max(which_q.shape[1], which_k.shape[1]), width, work[h], p_q[h], p_k[h])


_BALANCE_CUDA = CudaSteps(_roots_cuda, _rotate_cuda, _solve_cuda)


@cuda_kernel(TEAM)
def _stack_cuda(p_q, mean, basis):
    h = cuda.blockIdx.x
    _stack(p_q[h], mean[h], basis[h])


# --- stages ---


def balanced_pairs(problem, heads, count):
    """P_Q and P_K (heads, count, D) by columns, and the mean of k (heads, D), from a sample of the rows; in float64."""
    device, (n, m, dim, _) = problem.device, problem.shape
    which_q, which_k = (
        draw.uniform_rows(problem, heads, min(_SAMPLE, rows), stage=draw.PROJECTION, size=rows) for rows in (n, m)
    )
    width, team, slots = schedule(device, len(heads))
    p_q, p_k = (device.empty((len(heads), count, dim), np.float64) for _ in range(2))
    mean = device.empty((len(heads), dim), np.float64)
    work = device.empty((slots, _pair_places(min(_SAMPLE, max(n, m)), dim, count, width, team)[-1]), np.float64)
    rows = problem.query_heads(heads), problem.key_heads(heads), which_q, which_k
    device.run(_balance_cpu, _BALANCE_CUDA, (slots,), problem.q, problem.k, *rows, width, work, p_q, p_k, mean)
    return p_q, p_k, mean


def query_basis(problem, p_q, mean):
    """P_Q by columns and the mean of k as the apply pass reads them: (heads, count + 1 padded, D)."""
    heads, count, dim = p_q.shape
    basis = problem.device.empty((heads, padded(count + 1), dim), problem.element)
    problem.device.run(_stack_cpu, _stack_cuda, (heads,), p_q, mean, basis)
    return basis
