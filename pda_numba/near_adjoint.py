"""The adjoint of the far targets (`near`): what the sampled rows owe to the keys in their band.

    t_i = [o_i, 1] - sum_{|i - j| <= w} a_ij [v_j, 1] - ...      a_ij = exp(s_ij - lse_i)

    y_ij = dt_i . [v_j, 1]      ds_ij = -a_ij y_ij      dlse_i += sum_j a_ij y_ij
    dq_i += scale sum_j ds_ij k_j      dk_j += scale ds_ij q_i      dv_j -= a_ij dt_i,:E

What dt_i owes to o_i goes with the exact rows (`rows_adjoint`), what it owes to the content near field, whose keys
are left out here, is `content_adjoint`. Rows share keys: each head is one team's work.
"""

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .content import nothing
from .kernels.panel import TILE, covered
from .kernels.scalar import LOG2_E, exp2, fma, widen
from .kernels.score import place_query, score_keys
from .kernels.team import barrier, member, members, team_sum

# --- bodies ---


@shared
def _weigh_keys(v, start, count, lse, bucket, heavy, probes, used, d_target, weights, slopes):
    """a_ij and ds_ij of some keys of one row, from their scores; returns what this member adds to dlse."""
    values, own = v.shape[1], np.float64(0)
    for j in range(member(), count, members()):
        weights[j] = exp2(weights[j] - lse)
        if used and covered(bucket[start + j, 0], heavy, probes, used):
            weights[j] = 0
        along = d_target[values]
        for e in range(values):
            along = fma(d_target[e], widen(v[start + j, e]), along)
        slopes[j] = -weights[j] * along
        own -= slopes[j]
    return own


@shared
def _add_band(k, start, count, scale, weights, slopes, query, d_target, dq, dk, dv):
    """A member has its own columns of queries, keys and values. `query` is scaled."""
    for d in range(member(), dq.shape[0], members()):
        total = dk.dtype.type(0)
        for j in range(count):
            total = fma(slopes[j], widen(k[start + j, d]), total)
            dk[start + j, d] += slopes[j] * query[d]
        dq[d] += np.float64(total * scale)
    for e in range(member(), dv.shape[1], members()):
        for j in range(count):
            dv[start + j, e] -= weights[j] * d_target[e]


@shared
def _row(q, k, v, row, factor, lse, window, bucket, heavy, probes, used, d_target, room, slopes, dq, dk, dv):
    """One row; `room (3, max(D, TILE))` and `slopes (TILE,)` are scratch. Returns dlse."""
    scale, total, near = room.dtype.type(factor / LOG2_E), 0.0, (bucket, heavy, probes, used)
    place_query(room, q, row, scale * room.dtype.type(LOG2_E))
    barrier()
    stop = min(row + window + 1, k.shape[0])
    for start in range(max(row - window, 0), stop, TILE):
        count = min(TILE, stop - start)
        score_keys(room, k, start, count)
        # the sum over the team is a barrier too: weights and slopes are there after it
        total += team_sum(_weigh_keys(v, start, count, lse, *near, d_target, room[2], slopes))
        for d in range(member(), q.shape[1], members()):
            room[1, d] = widen(q[row, d]) * scale
        _add_band(k, start, count, scale, room[2], slopes, room[1], d_target, dq, dk, dv)
        barrier()
    return total


@shared
def _head(q, k, v, which, factor, lse, window, bucket, heavy, probes, used, d_target, room, slopes, d_lse, dq, dk, dv):
    for i in range(which.shape[0] if window >= 0 else 0):
        row = which[i]
        near = bucket, heavy, probes[i if used else 0], used
        total = _row(q, k, v, row, factor, lse[i], window, *near, d_target[i], room, slopes, dq[i], dk, dv)
        if member() == 0:
            d_lse[i] += total


# --- drivers: a team per head ---


@cpu_kernel
def _near_cpu(
    q,
    k,
    v,
    query_head,
    key_head,
    which,
    factor,
    lse,
    window,
    probes,
    used,
    bucket,
    heavy,
    d_target,
    room,
    slopes,
    d_lse,
    dq,
    dk,
    dv,
):
    for h in prange(len(which)):
        a, b = query_head[h], key_head[h]
        near = bucket[h], heavy, probes[h], used[h]
        task = q[a], k[b], v[b], which[h], factor, lse[h], window[h], *near, d_target[h]
        _head(*task, room[h], slopes[h], d_lse[h], dq[h], dk[b], dv[b])


@cuda_kernel(TILE)
def _near_cuda(
    q,
    k,
    v,
    query_head,
    key_head,
    which,
    factor,
    lse,
    window,
    probes,
    used,
    bucket,
    heavy,
    d_target,
    room,
    slopes,
    d_lse,
    dq,
    dk,
    dv,
):
    h = cuda.blockIdx.x
    a, b = query_head[h], key_head[h]
    near = bucket[h], heavy, probes[h], used[h]
    task = q[a], k[b], v[b], which[h], factor, lse[h], window[h], *near, d_target[h]
    _head(*task, room[h], slopes[h], d_lse[h], dq[h], dk[b], dv[b])


# --- stage ---


def near_adjoint(problem, heads, which, lse, window, d_target, d_lse, d_queries, gradients, near=None):
    """Add what the rows `which (heads, n)` owe to their band of keys, to the gradients of keys and values.

    What they owe to their lse and to their own queries is added to `d_lse (heads, n)` and `d_queries (heads, n, D)`.

    `d_target` is (heads, n, E + 1), `near` the rows' `content.Near`, if they have one.
    """
    device, near = problem.device, nothing(problem, len(heads)) if near is None else near
    room = device.empty((len(heads), 3, max(problem.shape[2], TILE)), problem.element)
    slopes = device.empty((len(heads), TILE), problem.element)
    task = which, problem.factor, lse, window, *near[2:], d_target, room, slopes, d_lse
    device.run(_near_cpu, _near_cuda, (len(heads),), *problem.arrays(heads), *task, d_queries, gradients.k, gradients.v)
