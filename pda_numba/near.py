"""Near field: the keys with |i - j| <= window of each query, exactly.

Here it is taken out of the targets of the sampled rows: what is left, the far field, is fitted.

    t_i = [o_i, 1] - sum_{|i - j| <= w} exp(s_ij - lse_i) [v_j, 1]

The near field of all queries is part of the apply pass (`apply`).
"""

from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .kernels.panel import TILE
from .kernels.scalar import exp2, fma, widen
from .kernels.score import place_query, score_keys
from .kernels.team import barrier, member, members

# --- bodies ---


@shared
def _mine(e):
    """Does entry e of a row belong to this member?"""
    return e % members() == member()


@shared
def add_keys(k, v, low, high, lse, room, near):
    """near += sum_j exp(s_j - lse) [v_j, 1] over the keys low .. high, some at a time: first their weights."""
    values = v.shape[1]
    weights = room[2]
    high = min(high, k.shape[0])
    for start in range(max(low, 0), high, TILE):
        count = min(TILE, high - start)
        score_keys(room, k, start, count)
        for j in range(member(), count, members()):
            weights[j] = exp2(weights[j] - lse)
        barrier()
        for j in range(count):
            weight = weights[j]
            for e in range(member(), values, members()):
                near[e] = fma(weight, widen(v[start + j, e]), near[e])
            if _mine(values):
                near[values] += weight
        barrier()


@shared
def _near_sums(k, v, row, lse, windows, room, near):
    """One row's near sums, (windows, E + 1): of windows in rising order each adds a ring to what the smaller hold."""
    inner = -1
    for w in range(windows.shape[0]):
        for e in range(member(), near.shape[1], members()):
            near[w, e] = near[w - 1, e] if w > 0 else near.dtype.type(0)
        if windows[w] >= 0:
            add_keys(k, v, row - windows[w], row - inner, lse, room, near[w])
            add_keys(k, v, row + max(inner, 0) + 1, row + windows[w] + 1, lse, room, near[w])
            inner = windows[w]


@shared
def _far_row(q, k, v, row, factor, exact, lse, windows, room, target):
    """The targets (windows, E + 1) of one row; `room (3, max(D, TILE))` is scratch."""
    place_query(room, q, row, factor)
    barrier()
    _near_sums(k, v, row, lse, windows, room, target)
    values = v.shape[1]
    for w in range(target.shape[0]):
        for e in range(member(), values, members()):
            target[w, e] = exact[e] - target[w, e]
        if _mine(values):
            target[w, values] = target.dtype.type(1) - target[w, values]


@shared
def _far_piece(q, k, v, query_head, key_head, which, factor, exact, lse, windows, piece, pieces, room, target):
    """Every `pieces`-th of all heads' rows."""
    heads, rows = which.shape
    for item in range(piece, heads * rows, pieces):
        h, i = item // rows, item % rows
        place = key_head[h]
        _far_row(
            q[query_head[h]],
            k[place],
            v[place],
            which[h, i],
            factor,
            exact[h, i],
            lse[h, i],
            windows[h],
            room,
            target[h, i],
        )


# --- drivers: a team for some rows ---


@cpu_kernel
def _far_cpu(q, k, v, query_head, key_head, which, factor, exact, lse, windows, room, target):
    for p in prange(len(room)):
        task = which, factor, exact, lse, windows
        _far_piece(q, k, v, query_head, key_head, *task, p, len(room), room[p], target)


@cuda_kernel(64)
def _far_cuda(q, k, v, query_head, key_head, which, factor, exact, lse, windows, room, target):
    p = cuda.blockIdx.x
    task = which, factor, exact, lse, windows
    _far_piece(q, k, v, query_head, key_head, *task, p, len(room), room[p], target)


# --- stage ---


def targets(problem, heads, which, exact, lse, windows):
    """[o_i, 1] less the near field of every window: (heads, n, windows, E + 1).

    `which (heads, n)` are rows with outputs `exact (heads, n, E)`; `windows (heads, W)` rise, -1 is no near field.
    """
    device, pieces = problem.device, min(which.size, problem.device.pieces)
    target = device.empty((*which.shape, windows.shape[1], problem.shape[3] + 1), problem.element)
    room = device.empty((pieces, 3, max(problem.shape[2], TILE)), problem.element)
    task = which, problem.factor, exact, lse, windows, room, target
    device.run(_far_cpu, _far_cuda, (pieces,), *problem.arrays(heads), *task)
    return target
