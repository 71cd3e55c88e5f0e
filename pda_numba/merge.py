"""Attention over two sets of keys, merged into attention over both, row by row.

    lse = log(exp(lse_a) + exp(lse_b))      o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b

A part has its own heads, each a run of rows of a head of the whole. A part without weight has an lse of minus infinity.
"""

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .kernels.panel import larger, log_sum, weight
from .kernels.team import barrier, member, members

# --- bodies, for a team ---


@shared
def _merge_row(part, part_lse, i, out, lse, row):
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


@shared
def _place_lse(values, shift, row, i, lse):
    lse[row] = values[i] + lse.dtype.type(shift)


@shared
def _place_row(values, i, out, row):
    for e in range(member(), out.shape[1], members()):
        out[row, e] = values[i, e]


# --- drivers ---


@cpu_kernel
def _merge_cpu(part, part_lse, live, place, own, first, out, lse):
    heads, n = part_lse.shape
    for item in prange(heads * n):
        h, i = item // n, item % n
        if live[h]:
            _merge_row(part[h], part_lse[h], i, out[place[h]], lse[own[h]], first[h] + i)


@cuda_kernel(64)
def _merge_cuda(part, part_lse, live, place, own, first, out, lse):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    if live[h]:
        _merge_row(part[h], part_lse[h], i, out[place[h]], lse[own[h]], first[h] + i)


@cpu_kernel
def _place_lse_cpu(which, count, live, values, shift, lse):
    for h in prange(len(which)):
        if live[h]:
            for i in range(count[h]):
                _place_lse(values[h], shift, which[h, i], i, lse[h])


@cuda_kernel(128)
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


# --- stages ---


def merge(device, part, part_lse, live, place, own, first, out, lse):
    """Merge the parts `part (parts, n, E)`, `part_lse (parts, n)` that are `live` into `out` and `lse`.

    Part p is rows first[p], first[p] + 1, ... of head place[p] of `out (all heads, N, E)`, own[p] of `lse (heads, N)`.
    """
    task = part, part_lse, live, place, own, first, out, lse
    device.run(_merge_cpu, _merge_cuda, part_lse.shape[::-1], *task)


def place_lse(device, which, count, live, values, shift, lse):
    """lse[h, which[h, i]] = values[h, i] + shift for the first `count` rows of each live head's list."""
    grid = -(-which.shape[1] // 128), len(which)
    device.run(_place_lse_cpu, _place_lse_cuda, grid, which, count, live, values, float(shift), lse)


def place_rows(device, which, count, place, values, out):
    """out[place[h], which[h, i]] = values[h, i] for the first `count` rows of each head's list."""
    device.run(_place_rows_cpu, _place_rows_cuda, which.shape[::-1], which, count, place, values, out)
