"""Near field: the keys with |i - j| <= window of each query, and those that are near by content, exactly.

Here it is taken out of the targets of the sampled rows: what is left, the far field, is fitted.

    t_i = [o_i, 1] - exp(lse'_i - lse_i) [o'_i, 1] - sum_{|i - j| <= w} exp(s_ij - lse_i) [v_j, 1]

o' and lse' are attention to the content near field (`content`), whose keys the window's sum leaves out. The near field
of all queries is part of the apply pass (`apply`).
"""

from numba import prange

from . import content
from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .kernels.panel import TILE, covered
from .kernels.scalar import exp2, fma, widen
from .kernels.score import place_query, score_keys
from .kernels.team import barrier, member, members

# --- bodies ---


@shared
def _mine(e):
    """Does entry e of a row belong to this member?"""
    return e % members() == member()


@shared
def weigh_keys(k, start, count, lse, room):
    """exp(s_j - lse) of some keys into room[2]; the team meets before they are used."""
    score_keys(room, k, start, count)
    for j in range(member(), count, members()):
        room[2, j] = exp2(room[2, j] - lse)


@shared
def _add_weighted(v, start, count, weights, near):
    """near += sum_j w_j [v_j, 1]."""
    values = v.shape[1]
    for j in range(count):
        weight = weights[j]
        for e in range(member(), values, members()):
            near[e] = fma(weight, widen(v[start + j, e]), near[e])
        if _mine(values):
            near[values] += weight


@shared
def add_keys(k, v, low, high, lse, room, near):
    """near += sum_j exp(s_j - lse) [v_j, 1] over the keys low .. high, some at a time: first their weights."""
    high = min(high, k.shape[0])
    for start in range(max(low, 0), high, TILE):
        count = min(TILE, high - start)
        weigh_keys(k, start, count, lse, room)
        barrier()
        _add_weighted(v, start, count, room[2], near)
        barrier()


@shared
def hide_covered(weights, start, count, bucket, heavy, probes, used):
    """No weight for the keys that the content near field holds."""
    for j in range(member(), count if used else 0, members()):
        if covered(bucket[start + j, 0], heavy, probes, used):
            weights[j] = 0


@shared
def _add_ring(k, v, low, high, lse, bucket, heavy, probes, used, room, near):
    """The same without the keys that are near by content."""
    high = min(high, k.shape[0])
    for start in range(max(low, 0), high, TILE):
        count = min(TILE, high - start)
        weigh_keys(k, start, count, lse, room)
        hide_covered(room[2], start, count, bucket, heavy, probes, used)
        barrier()
        _add_weighted(v, start, count, room[2], near)
        barrier()


@shared
def _near_sums(k, v, row, lse, windows, bucket, heavy, probes, used, room, near):
    """One row's near sums, (windows, E + 1): of windows in rising order each adds a ring to what the smaller hold.

    The first one begins with what `near[0]` holds.
    """
    inner = -1
    for w in range(windows.shape[0]):
        for e in range(member(), near.shape[1] if w > 0 else 0, members()):
            near[w, e] = near[w - 1, e]
        if windows[w] >= 0:
            content = bucket, heavy, probes, used
            _add_ring(k, v, row - windows[w], row - inner, lse, *content, room, near[w])
            _add_ring(k, v, row + max(inner, 0) + 1, row + windows[w] + 1, lse, *content, room, near[w])
            inner = windows[w]


@shared
def _begin(out, out_lse, lse, i, used, near):
    """What the content near field holds of a row."""
    share = exp2(out_lse[i] - lse) if used else near.dtype.type(0)
    for e in range(member(), near.shape[0], members()):
        value = near.dtype.type(1)
        if e + 1 < near.shape[0] and used:
            value = out[i, e]
        near[e] = share * value if used else near.dtype.type(0)


@shared
def _far_row(q, k, v, row, factor, exact, lse, windows, bucket, heavy, probes, used, room, target):
    """The targets (windows, E + 1) of one row, from what `_begin` left; `room (3, max(D, TILE))` is scratch."""
    place_query(room, q, row, factor)
    barrier()
    _near_sums(k, v, row, lse, windows, bucket, heavy, probes, used, room, target)
    values = v.shape[1]
    for w in range(target.shape[0]):
        for e in range(member(), values, members()):
            target[w, e] = exact[e] - target[w, e]
        if _mine(values):
            target[w, values] = target.dtype.type(1) - target[w, values]


@shared
def _far_piece(
    q,
    k,
    v,
    query_head,
    key_head,
    which,
    factor,
    exact,
    lse,
    windows,
    out,
    out_lse,
    probes,
    used,
    bucket,
    heavy,
    piece,
    pieces,
    room,
    target,
):
    """Every `pieces`-th of all heads' rows."""
    heads, rows = which.shape
    for item in range(piece, heads * rows, pieces):
        h, i = item // rows, item % rows
        place = key_head[h]
        _begin(out[h], out_lse[h], lse[h, i], i, used[h], target[h, i, 0])
        _far_row(
            q[query_head[h]],
            k[place],
            v[place],
            which[h, i],
            factor,
            exact[h, i],
            lse[h, i],
            windows[h],
            bucket[h],
            heavy,
            probes[h, i if used[h] else 0],
            used[h],
            room,
            target[h, i],
        )


# --- drivers: a team for some rows ---


@cpu_kernel
def _far_cpu(
    q,
    k,
    v,
    query_head,
    key_head,
    which,
    factor,
    exact,
    lse,
    windows,
    out,
    out_lse,
    probes,
    used,
    bucket,
    heavy,
    room,
    target,
):
    for p in prange(len(room)):
        task = which, factor, exact, lse, windows, out, out_lse, probes, used, bucket, heavy
        _far_piece(q, k, v, query_head, key_head, *task, p, len(room), room[p], target)


@cuda_kernel(64)
def _far_cuda(
    q,
    k,
    v,
    query_head,
    key_head,
    which,
    factor,
    exact,
    lse,
    windows,
    out,
    out_lse,
    probes,
    used,
    bucket,
    heavy,
    room,
    target,
):
    p = cuda.blockIdx.x
    task = which, factor, exact, lse, windows, out, out_lse, probes, used, bucket, heavy
    _far_piece(q, k, v, query_head, key_head, *task, p, len(room), room[p], target)


# --- stage ---


def targets(problem, heads, which, exact, lse, windows, near=None):
    """[o_i, 1] less the near field of every window: (heads, n, windows, E + 1).

    `which (heads, n)` are rows with outputs `exact (heads, n, E)`; `windows (heads, W)` rise, -1 is no band of keys.
    `near`, if given, is the rows' `content.Near`.
    """
    near = content.nothing(problem, len(heads)) if near is None else near
    device, pieces = problem.device, min(which.size, problem.device.pieces)
    target = device.empty((*which.shape, windows.shape[1], problem.shape[3] + 1), problem.element)
    room = device.empty((pieces, 3, max(problem.shape[2], TILE)), problem.element)
    task = which, problem.factor, exact, lse, windows, *near, room, target
    device.run(_far_cpu, _far_cuda, (pieces,), *problem.arrays(heads), *task)
    return target
