"""The adjoint of the content near field (`content`): what queries owe to their near keys, and the other way round.

    p_ij = exp(s_ij - lse_i)      ds_ij = p_ij (g_i . v_j + c_i)         j over the near keys of query i

lse_i is that of the whole row, near and far, so that this is the adjoint of exact rows (`rows_adjoint`) over fewer
keys. Runs of queries that probe one bucket are heads of their own, some runs at a time; what they say of a bucket's
keys is added up in their order.
"""

import dataclasses

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .grouping import RUN, list_groups
from .kernels.scalar import exp2, widen
from .kernels.team import member, members, team_sum
from .rows_adjoint import Gradients, rows_adjoint

_RUNS = {"cpu": 512, "cuda": 2048}  # that are worked on together

# --- bodies, for a team ---


@shared
def _gather_run(
    x,
    k,
    v,
    rows,
    used,
    listed,
    count,
    lse,
    offset,
    cotangent,
    q_run,
    k_run,
    v_run,
    lse_run,
    offset_run,
    cotangent_run,
):
    """The queries and keys of a run; an infinite lse where there is no query."""
    for i in range(q_run.shape[0]):
        row = rows[min(i, max(used - 1, 0))] if used > 0 else np.int64(0)
        for d in range(member(), x.shape[1], members()):
            q_run[i, d] = x[row, d]
        for e in range(member(), cotangent.shape[1], members()):
            cotangent_run[i, e] = cotangent[row, e]
        if member() == 0:
            lse_run[i] = lse[row] if i < used else lse.dtype.type(np.inf)
            offset_run[i] = offset[row]
    for j in range(count):
        for d in range(member(), x.shape[1], members()):
            k_run[j, d] = widen(k[listed[j], d])
        for e in range(member(), cotangent.shape[1], members()):
            v_run[j, e] = widen(v[listed[j], e])


@shared
def _add_run(rows, used, lse, dq_run, dq):
    for i in range(used):
        if lse[i] < np.inf:
            for d in range(member(), dq.shape[1], members()):
                dq[rows[i], d] += dq_run[i, d]


@shared
def _add_bucket(first, last, begin, end, dk_run, dv_run, dk, dv):
    """What the runs first .. last say of the keys begin .. end, in their order."""
    for r in range(first, last):
        for j in range(end - begin):
            for d in range(member(), dk.shape[1], members()):
                dk[begin + j, d] += dk_run[r, j, d]
            for e in range(member(), dv.shape[1], members()):
                dv[begin + j, e] += dv_run[r, j, e]


@shared
def _owe_target(out, out_lse, lse, used, d_target, cotangent, i):
    """What a sampled row's target owes to its near keys: do_i, c_i and what it adds to dlse_i.

    t_i holds less exp(lse'_i - lse_i) [o'_i, 1], so that do = -dt_:E, c = -dt_E and dlse = share (dt_:E . o' + dt_E).
    """
    values, own = cotangent.shape[1], 0.0
    share = cotangent.dtype.type(0)
    if used and lse < np.inf:
        share = exp2(out_lse[i] - lse)
    for e in range(member(), values, members()):
        value = cotangent.dtype.type(d_target[e])
        cotangent[i, e] = -value
        own += np.float64(value) * np.float64(out[i, e]) if share > 0 else 0.0
    return (team_sum(own) + d_target[values]) * np.float64(share) if share > 0 else 0.0


@shared
def _own_rows(lse, slot, own, i):
    """The lse of rows whose output is the fit's, infinite for the others."""
    own[i] = lse[i] if slot[i] == 0 else np.inf


@shared
def _add_held(dq, first, guess, i):
    for d in range(member(), dq.shape[1], members()):
        guess[i, d] += dq[first + i, d]


@shared
def _settle_queries(dq, i, out, squares):
    """dq of a row onto what there is, and |dq|^2."""
    total = 0.0
    for d in range(member(), dq.shape[1], members()):
        out[i, d] += dq[i, d]
        total += np.float64(dq[i, d]) * np.float64(dq[i, d])
    total = team_sum(total)
    if member() == 0:
        squares[i] = total


# --- CPU drivers ---


@cpu_kernel
def _gather_runs_cpu(
    x,
    place,
    k,
    v,
    key_place,
    order,
    entries,
    owner,
    used,
    start,
    counts,
    turn,
    first,
    lse,
    offset,
    cotangent,
    q_run,
    k_run,
    v_run,
    lse_run,
    offset_run,
    cotangent_run,
    keys,
):
    runs, width = owner.shape[1], entries.shape[1] // owner.shape[1]
    for item in prange(len(keys)):
        h, r = (first + item) // runs, (first + item) % runs
        begin, end = start[h, owner[h, r]], start[h, owner[h, r] + 1]
        live = used[h, r] if counts[h] > turn else 0
        keys[item] = end - begin if live else 0
        near = order[h, begin:end], keys[item], lse[h], offset[h], cotangent[h]
        run = q_run[item], k_run[item], v_run[item], lse_run[item], offset_run[item], cotangent_run[item]
        keys_of = k[key_place[h]], v[key_place[h]]
        _gather_run(x[place[h]], *keys_of, entries[h, r * width : (r + 1) * width], live, *near, *run)


@cpu_kernel
def _add_runs_cpu(entries, owner, used, counts, turn, first, lse, dq_run, place, dq):
    runs, width = owner.shape[1], entries.shape[1] // owner.shape[1]
    for item in prange(len(dq_run)):
        h, r = (first + item) // runs, (first + item) % runs
        live = used[h, r] if counts[h] > turn else 0
        _add_run(entries[h, r * width : (r + 1) * width], live, lse[item], dq_run[item], dq[place[h]])


@cpu_kernel
def _add_buckets_cpu(list_start, unit, runs, counts, turn, first, start, dk_run, dv_run, dk, dv):
    heads, groups = start.shape[0], start.shape[1] - 1
    for item in prange(heads * groups):
        h, g = item // groups, item % groups
        low = max(list_start[h, g] // unit + h * runs - first, 0)
        high = min(list_start[h, g + 1] // unit + h * runs - first, len(dk_run))
        if counts[h] > turn and low < high:
            _add_bucket(low, high, start[h, g], start[h, g + 1], dk_run, dv_run, dk[h], dv[h])


@cpu_kernel
def _owe_targets_cpu(out, out_lse, lse, counts, d_target, cotangent, offset, d_lse):
    heads, n = lse.shape
    for item in prange(heads * n):
        h, i = item // n, item % n
        d_lse[h, i] += _owe_target(out[h], out_lse[h], lse[h, i], counts[h], d_target[h, i], cotangent[h], i)
        offset[h, i] = -d_target[h, i, cotangent.shape[2]]


@cpu_kernel
def _own_rows_cpu(lse, slot, own):
    heads, n = lse.shape
    for item in prange(heads * n):
        _own_rows(lse[item // n], slot[item // n], own[item // n], item % n)


@cpu_kernel
def _add_held_cpu(dq, first, guess):
    heads, n = guess.shape[:2]
    for item in prange(heads * n):
        _add_held(dq[item // n], first, guess[item // n], item % n)


@cpu_kernel
def _settle_queries_cpu(dq, place, out, squares):
    heads, n = squares.shape
    for item in prange(heads * n):
        h, i = item // n, item % n
        _settle_queries(dq[h], i, out[place[h]], squares[h])


# --- CUDA drivers: a team per run, per bucket, per row ---


@cuda_kernel(64)
def _gather_runs_cuda(
    x,
    place,
    k,
    v,
    key_place,
    order,
    entries,
    owner,
    used,
    start,
    counts,
    turn,
    first,
    lse,
    offset,
    cotangent,
    q_run,
    k_run,
    v_run,
    lse_run,
    offset_run,
    cotangent_run,
    keys,
):
    item, runs, width = cuda.blockIdx.x, owner.shape[1], entries.shape[1] // owner.shape[1]
    h, r = (first + item) // runs, (first + item) % runs
    begin, end = start[h, owner[h, r]], start[h, owner[h, r] + 1]
    live = used[h, r] if counts[h] > turn else np.int64(0)
    count = end - begin if live else np.int64(0)
    if member() == 0:
        keys[item] = count
    near = order[h, begin:end], count, lse[h], offset[h], cotangent[h]
    run = q_run[item], k_run[item], v_run[item], lse_run[item], offset_run[item], cotangent_run[item]
    keys_of = k[key_place[h]], v[key_place[h]]
    _gather_run(x[place[h]], *keys_of, entries[h, r * width : (r + 1) * width], live, *near, *run)


@cuda_kernel(64)
def _add_runs_cuda(entries, owner, used, counts, turn, first, lse, dq_run, place, dq):
    item, runs, width = cuda.blockIdx.x, owner.shape[1], entries.shape[1] // owner.shape[1]
    h, r = (first + item) // runs, (first + item) % runs
    live = used[h, r] if counts[h] > turn else np.int64(0)
    _add_run(entries[h, r * width : (r + 1) * width], live, lse[item], dq_run[item], dq[place[h]])


@cuda_kernel(64)
def _add_buckets_cuda(list_start, unit, runs, counts, turn, first, start, dk_run, dv_run, dk, dv):
    g, h = cuda.blockIdx.x, cuda.blockIdx.y
    low = max(list_start[h, g] // unit + h * runs - first, 0)
    high = min(list_start[h, g + 1] // unit + h * runs - first, len(dk_run))
    if counts[h] > turn and low < high:
        _add_bucket(low, high, start[h, g], start[h, g + 1], dk_run, dv_run, dk[h], dv[h])


@cuda_kernel(64)
def _owe_targets_cuda(out, out_lse, lse, counts, d_target, cotangent, offset, d_lse):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    own = _owe_target(out[h], out_lse[h], lse[h, i], counts[h], d_target[h, i], cotangent[h], i)
    if member() == 0:
        d_lse[h, i] += own
        offset[h, i] = -d_target[h, i, cotangent.shape[2]]


@cuda_kernel(64)
def _own_rows_cuda(lse, slot, own):
    i, h = cuda.blockIdx.x * members() + member(), cuda.blockIdx.y
    if i < lse.shape[1]:
        _own_rows(lse[h], slot[h], own[h], i)


@cuda_kernel(64)
def _add_held_cuda(dq, first, guess):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    _add_held(dq[h], first, guess[h], i)


@cuda_kernel(64)
def _settle_queries_cuda(dq, place, out, squares):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    _settle_queries(dq[h], i, out[place[h]], squares[h])


# --- stages ---


def content_adjoint(problem, heads, x, place, buckets, near, lse, offset, cotangent, dq_place, dq, sums):
    """Add what rows owe to their near keys to dq[dq_place[h]], and to `sums`: the keys' and values' in sorted order.

    The rows x[place[h]] have the near field `near`; `lse`, `offset` (heads, n) and `cotangent (heads, n, E)` describe
    them as in `rows_adjoint`.
    """
    device, groups = problem.device, buckets.heavy + 1
    count, n, most = near.probes.shape
    heavy = device.repeat(device.upload(np.full((count, 1), buckets.heavy, np.int32)), n).reshape(count, n, 1)
    keys = problem.k, problem.v, problem.key_heads(heads), buckets.keys
    for turn in range(-1, most):
        lists = list_groups(device, *((heavy, 0) if turn < 0 else (near.probes, turn)), groups)
        task = x, place, keys, buckets, lists, near.count, max(turn, 0), (lse, offset, cotangent)
        _turn(problem, *task, dq_place, dq, sums)


def _turn(problem, x, place, keys, buckets, lists, counts, turn, about, dq_place, dq, sums):
    """One bucket of every row."""
    device, element, (heads, runs) = problem.device, problem.element, lists.owner.shape
    widest, (_, _, d, e) = buckets.widest, problem.shape
    size, start, total = _RUNS[device.name], buckets.start, heads * runs
    runs_of = lists.entries, lists.owner, lists.used
    for first in range(0, total, size):
        count = min(size, total - first)
        with device.scope():
            q, cotangent = device.empty((count, RUN, d), element), device.empty((count, RUN, e), element)
            k, v = device.empty((count, widest, d), element), device.empty((count, widest, e), element)
            lse, offset = (device.empty((count, RUN), element) for _ in range(2))
            own = lse, offset, cotangent, device.empty(count, np.int64)
            task = x, place, *keys, *runs_of, start, counts, turn, first, *about, q, k, v, *own
            device.run(_gather_runs_cpu, _gather_runs_cuda, (count,), *task)
            every = np.arange(count)
            part = dataclasses.replace(
                problem, q=q, k=k, v=v, query_head=every, key_head=every, spans=None, pattern=None
            )
            written = tuple(device.zeros(a.shape, element) for a in (q, k, v))
            rows_adjoint(part, every, lse, offset, cotangent, Gradients(*written), keys=own[3])
            task = *runs_of, counts, turn, first, lse, written[0], dq_place, dq
            device.run(_add_runs_cpu, _add_runs_cuda, (count,), *task)
            task = lists.start, RUN, runs, counts, turn, first, start, *written[1:], *sums
            grid = start.shape[1] - 1, heads
            device.run(_add_buckets_cpu, _add_buckets_cuda, grid, *task)


def owed_by_targets(problem, near, lse, d_target, d_lse):
    """`offset` and `cotangent` of sampled rows by their targets' near field; adds to `d_lse` what these owe to it."""
    device, shape = problem.device, (*lse.shape, problem.shape[3])
    cotangent, offset = device.empty(shape, problem.element), device.empty(lse.shape, problem.element)
    task = near.out, near.lse, lse, near.count, d_target, cotangent, offset, d_lse
    device.run(_owe_targets_cpu, _owe_targets_cuda, lse.shape[::-1], *task)
    return offset, cotangent


def own_rows(device, lse, slot):
    """lse (heads, N), infinite for rows whose output is not the fit's."""
    own = device.empty(lse.shape, lse.dtype)
    device.run(_own_rows_cpu, _own_rows_cuda, (-(-lse.shape[1] // 64), len(lse)), lse, slot, own)
    return own


def add_held(device, dq, first, guess):
    """guess (heads, held, D) += dq (heads, n, D) from row `first` on."""
    device.run(_add_held_cpu, _add_held_cuda, guess.shape[1::-1], dq, first, guess)


def settle_queries(device, dq, place, out):
    """Add `dq (heads, N, D)` to out[place[h]]; returns |dq_i|^2 (heads, N)."""
    squares = device.empty(dq.shape[:2], np.float64)
    device.run(_settle_queries_cpu, _settle_queries_cuda, dq.shape[1::-1], dq, place, out, squares)
    return squares
