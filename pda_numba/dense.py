"""Products of small matrices, one for each head, in float64, and sums into chosen rows: what adjoints are made of.

C_h = factor A_h B_h        either factor may be given transposed
out[place_h, which_hi] += source_hi
"""

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .kernels.scalar import fma
from .kernels.team import member, members

# --- bodies ---


@shared
def _row(a, i, turned_a, b, turned_b, factor, out):
    """Row i of the product, by a team; what one factor has beyond the other does not count."""
    depth = min(a.shape[0] if turned_a else a.shape[1], b.shape[1] if turned_b else b.shape[0])
    for j in range(member(), out.shape[1], members()):
        out[i, j] = 0.0
    for c in range(depth):
        left = factor * np.float64(a[c, i] if turned_a else a[i, c])
        if turned_b:
            for j in range(member(), out.shape[1], members()):
                out[i, j] = fma(left, np.float64(b[j, c]), out[i, j])
        else:
            for j in range(member(), out.shape[1], members()):
                out[i, j] = fma(left, np.float64(b[c, j]), out[i, j])


@shared
def _add_row(source, out):
    for d in range(member(), out.shape[0], members()):
        out[d] += out.dtype.type(source[d])


@shared
def _scatter(h, part, parts, place, which, source, out):
    """The rows of one part of head h, in the order of the list: the rows i mod parts."""
    for i in range(part, which.shape[1], parts):
        _add_row(source[h, i], out[place[h], which[h, i]])


# --- drivers: a team per row, a team per head or part of it ---


@cpu_kernel
def _multiply_cpu(a, turned_a, b, turned_b, factor, out):
    heads, rows = out.shape[:2]
    for item in prange(heads * rows):
        h, i = item // rows, item % rows
        _row(a[h], i, turned_a, b[h], turned_b, factor, out[h])


@cuda_kernel(64)
def _multiply_cuda(a, turned_a, b, turned_b, factor, out):
    h = cuda.blockIdx.y
    _row(a[h], cuda.blockIdx.x, turned_a, b[h], turned_b, factor, out[h])


@cpu_kernel
def _scatter_cpu(place, which, parts, source, out):
    for item in prange(len(which) * parts):
        _scatter(item // parts, item % parts, parts, place, which, source, out)


@cuda_kernel(64)
def _scatter_cuda(place, which, parts, source, out):
    _scatter(cuda.blockIdx.y, cuda.blockIdx.x, parts, place, which, source, out)


# --- stages ---


def multiply(device, a, b, *, factor=1.0, turn_a=False, turn_b=False):
    """factor A B for every head; `turn_a` and `turn_b` say that A^T or B^T is given."""
    rows, columns = a.shape[2 if turn_a else 1], b.shape[1 if turn_b else 2]
    out = device.empty((len(a), rows, columns), np.float64)
    device.run(_multiply_cpu, _multiply_cuda, (rows, len(a)), a, turn_a, b, turn_b, factor, out)
    return out


def scatter_rows(device, place, which, source, out, *, distinct=False):
    """out[place[h], which[h, i]] += source[h, i]; rows that are not `distinct` in the order of i."""
    parts = min(1024, which.shape[1]) if distinct else 1
    device.run(_scatter_cpu, _scatter_cuda, (parts, len(which)), place, which, parts, source, out)
