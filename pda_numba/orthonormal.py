"""An orthonormal basis of a few long columns, on the host: of blocks that the softmax matrix is multiplied by.

    X = Q R      modified Gram-Schmidt, every column twice ("twice is enough": Giraud, Langou, Rozloznik 2005)

LAPACK would do the same by thousands of products too small to share: on a machine that is busy otherwise its threads
wait for each other most of the time. Here heads are what is shared.

A column that lies in the span of those before it, to rounding, has a diagonal entry of 0 in R; in its place Q has a
random direction, so that its columns are orthonormal whatever X holds.
"""

import numpy as np
from numba import prange

from . import draw
from ._jit import cpu_kernel, shared
from .kernels.scalar import fma, normal
from .kernels.simd import dot

_NOTHING = 1e-14  # of a column's length that is left: rounding

# --- bodies ---


@shared
def _subtract_earlier(x, j, triangle):
    """x_j less its part along the earlier rows, twice; what was subtracted is added to column j of the triangle."""
    for _ in range(2):
        for i in range(j):
            share = dot(x, i, x, j, x.shape[1])
            triangle[i, j] += share
            for c in range(x.shape[1]):
                x[j, c] = fma(-share, x[i, c], x[j, c])


@shared
def _orthonormalise(x, triangle, scratch, head):
    """The rows of x (columns of X) to orthonormal ones, in place."""
    count, length = x.shape
    for j in range(count):
        before = np.sqrt(dot(x, j, x, j, length))
        _subtract_earlier(x, j, triangle)
        size = np.sqrt(dot(x, j, x, j, length))
        triangle[j, j] = size
        if not size > _NOTHING * before:
            triangle[j, j] = 0
            for c in range(length):
                x[j, c] = normal(0, head, draw.COMBINE, j * length + c)
            _subtract_earlier(x, j, scratch)
            size = np.sqrt(dot(x, j, x, j, length))
        for c in range(length):
            x[j, c] /= size


# --- driver ---


@cpu_kernel
def _orthonormalise_cpu(x, triangle, scratch):
    for h in prange(x.shape[0]):
        _orthonormalise(x[h], triangle[h], scratch[h], h)


# --- stage ---


def orthonormal(x):
    """Q (heads, N, columns) and R (heads, columns, columns) of x (heads, N, columns), N being the largest."""
    rows = np.ascontiguousarray(np.swapaxes(x, 1, 2), float)
    rows = rows.copy() if np.may_share_memory(rows, x) else rows
    triangle, scratch = (np.zeros((len(rows), rows.shape[1], rows.shape[1])) for _ in range(2))
    _orthonormalise_cpu(rows, triangle, scratch)
    return np.swapaxes(rows, 1, 2), triangle
