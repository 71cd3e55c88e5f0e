"""Attention over two sets of keys, merged into attention over both, row by row.

    lse = log(exp(lse_a) + exp(lse_b))      o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b

Leverages, which say where errors may be, are added up by the squares of the shares that parts had when they came.

A part has its own heads, each a run of rows of a head of the whole. A part without weight has an lse of minus infinity.
"""

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .holdout import EXACT
from .kernels.panel import larger, log_sum, weight
from .kernels.team import barrier, member, members

_MOST = 1e6  # leverage of a row that nothing is known about

# --- bodies, for a team ---


@shared
def _merge_row(part, part_lse, part_leverage, i, out, lse, leverage, row):
    """Row i of a part into `row` of the whole."""
    a, b = lse[row], part_lse[i]
    if b > -np.inf or b != b:
        top = larger(a, b)
        left, right = weight(a, top), weight(b, top)
        total = left + right
        barrier()  # every member has read the row's lse
        for e in range(member(), out.shape[1], members()):
            old = left / total * out[row, e] if left > 0 else out.dtype.type(0)
            out[row, e] = old + right / total * part[i, e]
        if member() == 0:
            lse[row] = log_sum(top, total)
            leverage[row] += right / total * (right / total) * part_leverage[i]


@shared
def _keep_leverage(state, leverage, i, out):
    """0 where a row is exact; no more than a number whose square can be added up."""
    most = out.dtype.type(_MOST)
    bounded = leverage[i] if leverage[i] < most else most
    out[i] = out.dtype.type(0) if state[i] & EXACT else bounded


@shared
def _place_lse(values, shift, row, i, lse):
    lse[row] = values[i] + shift


@shared
def _place_row(values, i, out, row):
    for e in range(member(), out.shape[1], members()):
        out[row, e] = values[i, e]


@shared
def _clear_row(out, row):
    for e in range(member(), out.shape[1], members()):
        out[row, e] = 0


# --- drivers ---


@cpu_kernel
def _merge_cpu(part, part_lse, part_leverage, live, place, own, first, out, lse, leverage):
    heads, n = part_lse.shape
    for item in prange(heads * n):
        h, i = item // n, item % n
        if live[h]:
            parts = part[h], part_lse[h], part_leverage[h], i
            _merge_row(*parts, out[place[h]], lse[own[h]], leverage[own[h]], first[h] + i)


@cuda_kernel(64)
def _merge_cuda(part, part_lse, part_leverage, live, place, own, first, out, lse, leverage):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    if live[h]:
        parts = part[h], part_lse[h], part_leverage[h], i
        _merge_row(*parts, out[place[h]], lse[own[h]], leverage[own[h]], first[h] + i)


@cpu_kernel
def _place_lse_cpu(which, count, live, values, shift, lse):
    for h in prange(len(which)):
        if live[h]:
            for i in range(count[h]):
                _place_lse(values[h], shift, which[h, i], i, lse[h])


@cuda_kernel(64)
def _place_lse_cuda(which, count, live, values, shift, lse):
    i, h = cuda.blockIdx.x * members() + member(), cuda.blockIdx.y
    if live[h] and i < count[h]:
        _place_lse(values[h], shift, which[h, i], i, lse[h])


@cpu_kernel
def _place_rows_cpu(which, count, place, values, out):
    for h in prange(len(which)):
        for i in range(count[h]):
            _place_row(values[h], i, out[place[h]], which[h, i])


@cuda_kernel(64)
def _place_rows_cuda(which, count, place, values, out):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    if i < count[h]:
        _place_row(values[h], i, out[place[h]], which[h, i])


@cpu_kernel
def _keep_leverage_cpu(state, leverage, out):
    heads, n = out.shape
    for item in prange(heads * n):
        _keep_leverage(state[item // n], leverage[item // n], item % n, out[item // n])


@cuda_kernel(64)
def _keep_leverage_cuda(state, leverage, out):
    i, h = cuda.blockIdx.x * members() + member(), cuda.blockIdx.y
    if i < out.shape[1]:
        _keep_leverage(state[h], leverage[h], i, out[h])


@cpu_kernel
def _clear_around_cpu(place, first, stop, out):
    heads, n = len(place), out.shape[1]
    for item in prange(heads * n):
        h, i = item // n, item % n
        if not first[h] <= i < stop[h]:
            _clear_row(out[place[h]], i)


@cuda_kernel(64)
def _clear_around_cuda(place, first, stop, out):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    if not first[h] <= i < stop[h]:
        _clear_row(out[place[h]], i)


# --- stages ---


def merge(device, part, part_lse, part_leverage, live, place, own, first, out, lse, leverage):
    """Merge the parts `part (parts, n, E)`, `part_lse` and `part_leverage` (parts, n) that are `live`.

    Part p is rows first[p], first[p] + 1, ... of head place[p] of `out (all heads, N, E)`, own[p] of `lse` and
    `leverage` (heads, N).
    """
    task = part, part_lse, part_leverage, live, place, own, first, out, lse, leverage
    device.run(_merge_cpu, _merge_cuda, part_lse.shape[::-1], *task)


def place_lse(device, which, count, live, values, shift, lse):
    """lse[h, which[h, i]] = values[h, i] + shift for the first `count` rows of each live head's list."""
    grid = -(-which.shape[1] // 64), len(which)
    device.run(_place_lse_cpu, _place_lse_cuda, grid, which, count, live, values, np.dtype(lse.dtype).type(shift), lse)


def place_rows(device, which, count, place, values, out):
    """out[place[h], which[h, i]] = values[h, i] for the first `count` rows of each head's list."""
    device.run(_place_rows_cpu, _place_rows_cuda, which.shape[::-1], which, count, place, values, out)


def keep_leverage(device, state, leverage, out):
    """out (heads, N) = the leverages (heads, at least N), 0 where the bits of `state` say that a row is exact."""
    grid = -(-out.shape[1] // 64), len(out)
    device.run(_keep_leverage_cpu, _keep_leverage_cuda, grid, state, leverage, out)


def clear_around(device, place, first, stop, out):
    """0 in the rows before first[h] and from stop[h] on of out[place[h]]."""
    device.run(_clear_around_cpu, _clear_around_cuda, (out.shape[1], len(place)), place, first, stop, out)
