"""The reach of every query: how far it lies from the bulk of the queries.

    reach_i = |q_i C^-1/2|^2 / D = |R^-T q_i|^2 / D      C = R^T R = X^T X / n + ridge, X being n sampled queries

estimated from random combinations of the columns of R^-1. Its mean is 1.
"""

import math

import numpy as np
from numba import prange

from . import draw
from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .kernels.scalar import normal, widen
from .kernels.simd import lanes, padded
from .kernels.small_qr import moment_places, moment_root, solve_upper
from .kernels.team import member, members
from .products import squares

_MOMENT_ROWS, _MOMENT_RIDGE = 512, 1e-3  # queries from which their second moment is taken, and its relative ridge
_COLUMNS = 16  # random combinations

# --- bodies ---


@shared
def _whiten(q, which, seed, head, width, sample, root, directions, work, whitener):
    """whitener (columns, D): random combinations of C^-1/2, C the second moment of the queries `which`; by a team.

    Workspaces are `sample (n, D)`, `root (D, D)`, `directions (D, columns)`, and that of `moment_root`.
    """
    n, dim = sample.shape
    scale = math.sqrt(n / (dim * _COLUMNS))
    for item in range(member(), dim * _COLUMNS, members()):
        d, c = item // _COLUMNS, item % _COLUMNS
        directions[d, c] = scale * normal(seed, head, draw.REACH, item)
    for i in range(member(), n, members()):  # row i is read by this member alone
        for d in range(dim):
            sample[i, d] = widen(q[which[i], d])
    moment_root(sample, _MOMENT_RIDGE, root, width, work)
    solve_upper(root, directions)
    for item in range(member(), dim * _COLUMNS, members()):
        whitener[item % _COLUMNS, item // _COLUMNS] = directions[item // _COLUMNS, item % _COLUMNS]


# --- CPU driver ---


@cpu_kernel
def _whiten_cpu(q, query_head, which, seed, width, sample, root, directions, work, whitener):
    for h in prange(which.shape[0]):
        task = q[query_head[h]], which[h], seed, query_head[h], width
        _whiten(*task, sample[h], root[h], directions[h], work[h], whitener[h])


# --- CUDA driver ---

_TEAM, _CUDA_WIDTH = 256, 64


@cuda_kernel(_TEAM)
def _whiten_cuda(q, query_head, which, seed, width, sample, root, directions, work, whitener):
    h = cuda.blockIdx.x
    task = q[query_head[h]], which[h], seed, query_head[h], width
    _whiten(*task, sample[h], root[h], directions[h], work[h], whitener[h])


# --- stage ---


def reach(problem, heads):
    """|q_i C^-1/2|^2 / D for every query (heads, N), estimated."""
    device, (n, _, dim, _) = problem.device, problem.shape
    which = draw.uniform_rows(problem, heads, min(_MOMENT_ROWS, n), stage=draw.REACH)
    width, team = (lanes(np.float64), 1) if device.name == "cpu" else (_CUDA_WIDTH, _TEAM)
    length = moment_places(which.shape[1], dim, width, team)[-1]
    shapes = (which.shape[1], dim), (dim, dim), (dim, _COLUMNS), (length,)
    work = (device.empty((len(heads), *shape), np.float64) for shape in shapes)
    whitener = device.zeros((len(heads), padded(_COLUMNS), dim), problem.element)
    whole = problem.q, problem.query_heads(heads), which, problem.seed, width, *work, whitener
    device.run(_whiten_cpu, _whiten_cuda, (len(heads),), *whole)
    return squares(problem, heads, whitener)
