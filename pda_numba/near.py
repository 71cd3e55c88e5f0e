"""Near field: the keys with |i - j| <= window of each query, exactly.

Here are the near sums of single sampled rows, which are taken out of the fit's targets:

    near_i = sum_{|i - j| <= w} exp(s_ij - lse_i) [v_j, 1]

The near field of all queries is part of the apply pass (`apply`).
"""

import numpy as np
from numba import prange

from ._jit import cpu_kernel, shared
from .kernels.scalar import exp2, fma, widen
from .kernels.simd import dot

# --- bodies ---


@shared
def _near_sums(q, k, v, row, lse, factor, windows, query, key, total, out):
    """One row, `windows` in rising order: each adds its ring to what the smaller ones hold."""
    total[:] = 0
    for d in range(q.shape[1]):
        query[0, d] = widen(q[row, d]) * factor
    values = v.shape[1]
    inner = -1
    for w in range(windows.shape[0]):
        for side in range(2):
            low, high = (row - windows[w], row - inner) if side == 0 else (row + inner + 1, row + windows[w] + 1)
            if inner < 0:
                low, high = (row - windows[w], row + windows[w] + 1) if side == 0 else (0, 0)
            for j in range(max(low, 0), min(high, k.shape[0])):
                for d in range(k.shape[1]):
                    key[0, d] = widen(k[j, d])
                weight = exp2(dot(query, 0, key, 0, k.shape[1]) - lse)
                for e in range(values):
                    total[e] = fma(weight, total.dtype.type(widen(v[j, e])), total[e])
                total[values] += weight
        inner = windows[w]
        for e in range(values + 1):
            out[w, e] = total[e]


# --- CPU driver ---


@cpu_kernel
def _near_sums_cpu(q, k, v, query_head, key_head, which, lse, factor, windows, out):
    heads, count = which.shape
    for item in prange(heads * count):
        h, i = item // count, item % count
        query, key = np.empty((1, q.shape[2]), lse.dtype), np.empty((1, q.shape[2]), lse.dtype)
        total = np.empty(v.shape[2] + 1, lse.dtype)
        _near_sums(
            q[query_head[h]],
            k[key_head[h]],
            v[key_head[h]],
            which[h, i],
            lse[h, i],
            factor,
            windows,
            query,
            key,
            total,
            out[h, i],
        )


# --- stage ---


def near_sums(problem, heads, which, lse, windows):
    """Near sums (heads, n, windows, E + 1) of the sampled rows `which (heads, n)`, for rising `windows`."""
    out = np.empty((*which.shape, len(windows), problem.v.shape[2] + 1), problem.element)
    _near_sums_cpu(*problem.arrays(heads), which, lse, problem.factor, np.asarray(windows, np.int64), out)
    return out
