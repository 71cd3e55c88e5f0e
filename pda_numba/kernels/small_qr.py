"""QR of a tall matrix, per head, by blocked Householder reflections (Schreiber and Van Loan 1989), in float64.

The matrix lies in panels: `a (panels, n, lanes)`, column c in lane c % lanes of panel c // lanes, n a multiple of
ROW_PADDING. A block of reflections is I - U T U^T; both products of its application run through `multiply_block`.
"""

import math

import numpy as np

from .._jit import shared
from .simd import ROW_PADDING, ROWS, lanes, multiply_block, padded

_WIDTH = lanes(np.float64)
BLOCK = ROW_PADDING  # reflections applied together; divides the lanes and the rows' padding


@shared
def triangularise(a, columns):
    """Reduce the first `columns` columns to upper triangular form, in place, applying the reflections to all columns.

    With a = [X, T] the top of the result is [R, Q^T T].
    """
    panels, n, width = a.shape
    u, minus_u = np.empty((n, BLOCK)), np.empty((n, BLOCK))
    t, w, tw = np.empty((BLOCK, BLOCK)), np.empty((BLOCK, width)), np.empty((BLOCK, width))
    for start in range(0, min(columns, n), BLOCK):
        size = min(BLOCK, columns - start, n - start)
        home, lane = start // width, start % width
        _factor_block(a[home], start, lane, size, u, t)
        for i in range(start, n):
            for c in range(BLOCK):
                minus_u[i, c] = -u[i, c]
        for p in range(home, panels):
            for c in range(0, BLOCK, ROWS):
                multiply_block(w, c, u, start * BLOCK + c, 1, BLOCK, a[p, start:], n - start, False)
            _multiply_transposed(t, w, tw, size, lane + size if p == home else 0)
            for i in range(start, n, ROWS):
                multiply_block(a[p], i, minus_u, i * BLOCK, BLOCK, 1, tw, BLOCK, True)


@shared
def _multiply_transposed(t, w, tw, size, first_lane):
    """tw = T^T w in the lanes from `first_lane` on, zero elsewhere: finished columns stay as they are."""
    tw[:, :] = 0.0
    for i in range(size):
        for c in range(i + 1):
            for x in range(first_lane, w.shape[1]):
                tw[i, x] += t[c, i] * w[c, x]


@shared
def _factor_block(panel, start, lane, size, u, t):
    """Reflections for `size` columns of one panel, from row `start` down; `u` gets their vectors, `t` the factor T."""
    n = panel.shape[0]
    dots = np.empty(BLOCK)
    u[start:, :] = 0.0
    t[:, :] = 0.0
    for c in range(size):
        top, column = start + c, lane + c
        square = 0.0
        for i in range(top + 1, n):
            square += panel[i, column] * panel[i, column]
        if square == 0.0:
            continue  # already reduced: the reflection is the identity, with tau = 0
        head = panel[top, column]
        length = math.sqrt(head * head + square)
        beta = -length if head >= 0 else length
        tau = (beta - head) / beta
        scale = 1.0 / (head - beta)
        u[top, c] = 1.0
        panel[top, column] = beta
        for i in range(top + 1, n):
            u[i, c] = panel[i, column] * scale
            panel[i, column] = 0.0
        dots[:] = 0.0  # u_c against the block's remaining columns and, for T, against the earlier vectors
        for i in range(top, n):
            for j in range(c + 1, size):
                dots[j] += u[i, c] * panel[i, lane + j]
            for j in range(c):
                dots[j] += u[i, c] * u[i, j]
        for i in range(top, n):
            for j in range(c + 1, size):
                panel[i, lane + j] -= tau * dots[j] * u[i, c]
        t[c, c] = tau
        for j in range(c):  # T[:c, c] = -tau T[:c, :c] (U^T u_c)
            total = 0.0
            for l in range(j, c):
                total += t[j, l] * dots[l]
            t[j, c] = -tau * total


@shared
def moment_root(x, ridge):
    """Upper triangular R (D, D), R^T R = x^T x + ridge tr(x^T x)/D I, from the QR of x (n, D) above a small diagonal.

    The ridge makes R invertible whatever the rows are; rows that are all zero get the identity.
    """
    n, dim = x.shape
    joint = np.zeros(((dim + _WIDTH - 1) // _WIDTH, padded(n + dim), _WIDTH))
    trace = 0.0
    for i in range(n):
        for d in range(dim):
            joint[d // _WIDTH, i, d % _WIDTH] = x[i, d]
            trace += x[i, d] * x[i, d]
    diagonal = math.sqrt(ridge * trace / dim) if trace > 0 else 1.0
    for d in range(dim):
        joint[d // _WIDTH, n + d, d % _WIDTH] = diagonal
    triangularise(joint, dim)
    root = np.empty((dim, dim))
    for i in range(dim):
        for d in range(dim):
            root[i, d] = joint[d // _WIDTH, i, d % _WIDTH] if i <= d else 0.0
    return root


@shared
def solve_upper(root, right):
    """right (D, m) to root^-1 right, in place, by back substitution."""
    dim = root.shape[0]
    for i in range(dim - 1, -1, -1):
        for j in range(i + 1, dim):
            for c in range(right.shape[1]):
                right[i, c] -= root[i, j] * right[j, c]
        for c in range(right.shape[1]):
            right[i, c] /= root[i, i]
