"""The compressed past in a decoding step: landmarks and heavy keys, and what they say beside the recent keys.

    over_model    [num, den] = E Z + sum_h exp(s_h) [v_h, 1]                           E_c = exp(scale q . S_c)
                  lev = |E G|^2                                                        h over the heavy keys
    with_model    d = e^lse + den                o = (e^lse o' + num) / d              leverage = lev / d^2

o' and lse are the recent keys' (`steps`). num and den are relative to 2^top, which is their row's largest exponential.
den may well be negative where the past has hardly any weight: only d has to be positive.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, serial_kernel, shared
from .core_places import LEVERAGE_COLUMNS
from .kernels.panel import TILE, add_square, larger, log_sum, weight
from .kernels.team import member, members
from .steps import FEW, ROOM, attend_keys, prepare

# --- bodies ---


@shared
def _model_row(q, row, factor, tiles, table, rank, heavy_k, heavy_v, heavy, room, far, near, out):
    """One query against landmarks and heavy keys: num into `out`; top, den and lev.

    `far (columns,)` and `near (E,)` are scratch.
    """
    values = out.shape[0]
    prepare(room, q, row, factor)
    far_top, _ = attend_keys(tiles, table, 0, rank, room, far)
    near_top, total = attend_keys(heavy_k, heavy_v, 0, heavy, room, near)
    top = larger(far_top, near_top)
    far_weight, near_weight = weight(far_top, top), weight(near_top, top)
    square = out.dtype.type(0)
    for g in range(LEVERAGE_COLUMNS):
        square = add_square(square, far[values + 1 + g] * far_weight)
    for e in range(member(), values, members()):
        out[e] = far[e] * far_weight + near[e] * near_weight
    return top, far[values] * far_weight + total * near_weight, square


@shared
def _model_item(
    r, q, query_head, head, time, factor, tiles, table, rank, heavy_k, heavy_v, heavy, room, far, near, out, parts
):
    """Row r, by a team; nothing where its head has no model."""
    h, zero = head[r], out.dtype.type(0)
    top, den, square = -out.dtype.type(np.inf), zero, zero
    if rank[h]:
        model = tiles[h], table[h], rank[h], heavy_k[h], heavy_v[h], heavy[h]
        top, den, square = _model_row(q[query_head[h]], time[r], factor, *model, room, far, near, out[r])
    else:
        for e in range(member(), out.shape[1], members()):
            out[r, e] = zero
    if member() == 0:
        parts[r, 0], parts[r, 1], parts[r, 2] = top, den, square


@shared
def _with_model(near, near_lse, num, top, den, square, out):
    """One row, by a team; returns its lse and leverage, infinite where d is not positive."""
    highest = larger(near_lse, top)
    a, b = weight(near_lse, highest), weight(top, highest)
    total = a + b * den
    good = total > 0
    for e in range(member(), out.shape[0], members()):
        out[e] = (a * near[e] + b * num[e]) / total if good else near[e]
    if not good:
        return near_lse, out.dtype.type(np.inf)
    return log_sum(highest, total), b * b * square / (total * total)


# --- CPU drivers ---


@cpu_kernel
def _model_cpu(
    q, query_head, head, time, factor, tiles, table, rank, heavy_k, heavy_v, heavy, room, far, near, out, parts
):
    pieces = room.shape[0]
    for p in prange(pieces):
        for r in range(p, out.shape[0], pieces):
            model = tiles, table, rank, heavy_k, heavy_v, heavy, room[p], far[p], near[p]
            _model_item(r, q, query_head, head, time, factor, *model, out, parts)


@serial_kernel
def _small_model_cpu(
    q, query_head, head, time, factor, tiles, table, rank, heavy_k, heavy_v, heavy, room, far, near, out, parts
):
    for r in range(out.shape[0]):
        model = tiles, table, rank, heavy_k, heavy_v, heavy, room[0], far[0], near[0]
        _model_item(r, q, query_head, head, time, factor, *model, out, parts)


@serial_kernel
def _with_model_cpu(near, near_lse, num, parts, out, lse, leverage):
    for r in range(lse.shape[0]):
        model = num[r], parts[r, 0], parts[r, 1], parts[r, 2]
        lse[r], leverage[r] = _with_model(near[r], near_lse[r], *model, out[r])


# --- CUDA drivers: a team for some rows; a team per row ---


@cuda_kernel(128)
def _model_cuda(
    q, query_head, head, time, factor, tiles, table, rank, heavy_k, heavy_v, heavy, room, far, near, out, parts
):
    p = cuda.blockIdx.x
    for r in range(p, out.shape[0], cuda.gridDim.x):
        model = tiles, table, rank, heavy_k, heavy_v, heavy, room[p], far[p], near[p]
        _model_item(r, q, query_head, head, time, factor, *model, out, parts)


@cuda_kernel(64)
def _with_model_cuda(near, near_lse, num, parts, out, lse, leverage):
    r = cuda.blockIdx.x
    value, lever = _with_model(near[r], near_lse[r], num[r], parts[r, 0], parts[r, 1], parts[r, 2], out[r])
    if member() == 0:
        lse[r], leverage[r] = value, lever


# --- stages ---


class Model(NamedTuple):
    """The compressed past of every head; `rank` 0 where a head has none."""

    tiles: Any  # (heads, R padded, D): landmarks
    table: Any  # (heads, R padded, columns): [Z, G]
    rank: Any  # (heads,) int64
    heavy_k: Any  # (heads, H padded, D): the past's heaviest keys
    heavy_v: Any
    heavy: Any  # (heads,) int64


def over_model(problem, queries, model):
    """The compressed past: num (rows, E), and (rows, 3): top, den, lev."""
    device, element, (_, _, dim, values) = problem.device, problem.element, problem.shape
    count = len(queries.head)
    pieces = min(count, device.pieces)
    room = device.empty((pieces, ROOM, max(dim, TILE)), element)
    far, near = device.empty((pieces, model.table.shape[2]), element), device.empty((pieces, values), element)
    out, parts = device.empty((count, values), element), device.empty((count, 3), element)
    place = problem.query_heads(np.arange(len(problem.query_head)))
    task = problem.q, place, *queries, problem.factor, *model, room, far, near, out, parts
    few = count * (model.tiles.shape[1] + model.heavy_k.shape[1]) < FEW
    device.run(_small_model_cpu if few else _model_cpu, _model_cuda, (pieces,), *task)
    return out, parts


def with_model(problem, near, past):
    """An answer `(out, lse)` and what `over_model` says of the rest: out (rows, E) and leverage (rows,)."""
    device, element = problem.device, problem.element
    out, lse, leverage = (device.empty(x.shape, element) for x in (near[0], near[1], near[1]))
    device.run(_with_model_cpu, _with_model_cuda, (len(lse),), *near, *past, out, lse, leverage)
    return out, leverage
