"""QR of a tall matrix, per head, by blocked Householder reflections (Schreiber and Van Loan 1989), in float64.

The matrix lies in panels: `a (panels, n, lanes)`, column c in lane c % lanes of panel c // lanes, n a multiple of
ROW_PADDING. A block of reflections is I - U T U^T; both products of its application run through `multiply_rows`.

All bodies are a team's, and end at a barrier. What a caller writes into row i of the panels is best written by member
i mod members(), who is the first to read it.
"""

import math

import numba
import numpy as np

from .._jit import shared
from .groups import group, group_size, groups, mine, place
from .simd import ROW_PADDING, lanes, multiply_rows, padded
from .team import barrier, group_sum, member, members, team_sum
from .view import view

BLOCK = ROW_PADDING  # reflections applied together; divides the lanes and the rows' padding
TEAM, _CUDA_LANES = 256, 128


def schedule(device, heads):
    """Lanes of a panel of float64, the largest team, and how many of the heads have a workspace of their own."""
    if device.name == "cuda":
        return _CUDA_LANES, TEAM, heads
    return lanes(np.float64), 1, min(heads, numba.get_num_threads())


@shared
def qr_places(n, width, team):
    """Where t, w, tw, dots and the partial sums begin in the workspace of `triangularise` (u at 0), and its length."""
    t = n * BLOCK
    w = t + BLOCK * BLOCK
    tw = w + BLOCK * width
    dots = tw + BLOCK * width
    partial = dots + BLOCK
    return t, w, tw, dots, partial, partial + team * BLOCK


@shared
def triangularise(a, columns, work):
    """Reduce the first `columns` columns to upper triangular form, in place, applying the reflections to all columns.

    With a = [X, T] the top of the result is [R, Q^T T].
    """
    panels, n, width = a.shape
    at_t, at_w, at_tw, at_dots, at_partial, _ = qr_places(n, width, members())
    u, t = view(work, 0, (n, BLOCK)), view(work, at_t, (BLOCK, BLOCK))
    w, tw = view(work, at_w, (BLOCK, width)), view(work, at_tw, (BLOCK, width))
    dots, partial = work[at_dots:at_partial], view(work, at_partial, (members(), BLOCK))
    for start in range(0, min(columns, n), BLOCK):
        size = min(BLOCK, columns - start, n - start)
        home, lane = start // width, start % width
        _factor_block(
            a[home], start, lane, size, u, t, dots, partial
        )  # its own lanes, still being written, are not used
        for p in range(home, panels):
            multiply_rows(w, 0, BLOCK, u, start * BLOCK, 1, BLOCK, a[p, start:], n - start, False)
            barrier()
            _multiply_transposed(t, w, tw, size, lane + size if p == home else 0)
            barrier()
            multiply_rows(a[p], start, n - start, u, start * BLOCK, BLOCK, 1, tw, BLOCK, True)
        barrier()


@shared
def _multiply_transposed(t, w, tw, size, first_lane):
    """tw = -T^T w in the lanes from `first_lane` on, zero elsewhere: finished columns stay as they are."""
    for i in range(BLOCK):
        for x in range(member(), w.shape[1], members()):
            tw[i, x] = 0.0
    for i in range(size):
        for c in range(i + 1):
            for x in range(mine(first_lane), w.shape[1], members()):
                tw[i, x] -= t[c, i] * w[c, x]


@shared
def _factor_block(panel, start, lane, size, u, t, dots, partial):
    """Reflections for `size` columns of one panel, from row `start` down; `u` gets their vectors, `t` the factor T."""
    n = panel.shape[0]
    for i in range(mine(start), n, members()):
        for c in range(BLOCK):
            u[i, c] = 0.0
    for i in range(member(), BLOCK, members()):
        for c in range(BLOCK):
            t[i, c] = 0.0
    for c in range(size):
        top, column = start + c, lane + c
        square = 0.0
        for i in range(mine(top + 1), n, members()):
            square += panel[i, column] * panel[i, column]
        square = team_sum(square)
        if square == 0.0:
            continue  # already reduced: the reflection is the identity, with tau = 0
        head = panel[top, column]
        length = math.sqrt(head * head + square)
        beta = -length if head >= 0 else length
        tau = (beta - head) / beta
        _reflector(panel, top, column, c, 1.0 / (head - beta), u)
        _products(panel, top, lane, c, size, u, dots, partial)
        for i in range(mine(top), n, members()):
            if i == top:
                panel[i, column] = beta
            for j in range(c + 1, size):
                panel[i, lane + j] -= tau * dots[j] * u[i, c]
        for j in range(member(), c + 1, members()):  # T[:c, c] = -tau T[:c, :c] (U^T u_c)
            total = 0.0
            for l in range(j, c):
                total += t[j, l] * dots[l]
            t[j, c] = tau if j == c else -tau * total


@shared
def _reflector(panel, top, column, c, scale, u):
    """u_c = (1, x scale) of the column x below `top`, which becomes zero."""
    for i in range(mine(top), top + 1, members()):
        u[i, c] = 1.0
    for i in range(mine(top + 1), panel.shape[0], members()):
        u[i, c] = panel[i, column] * scale
        panel[i, column] = 0.0


@shared
def _products(panel, top, lane, c, size, u, dots, partial):
    """dots = u_c against the block's remaining columns and, for T, against the earlier vectors."""
    own = member()
    for j in range(BLOCK):
        partial[own, j] = 0.0
    for i in range(mine(top), panel.shape[0], members()):
        for j in range(c + 1, size):
            partial[own, j] += u[i, c] * panel[i, lane + j]
        for j in range(c):
            partial[own, j] += u[i, c] * u[i, j]
    barrier()
    for first in range(0, BLOCK, groups()):
        j, total = first + group(), 0.0
        if j < BLOCK:
            for m in range(place(), members(), group_size()):
                total += partial[m, j]
        total = group_sum(total, group_size())
        if j < BLOCK and place() == 0:
            dots[j] = total
    barrier()


@shared
def moment_places(n, dim, width, team):
    """Where the workspace of `moment_root` goes over from its panels to that of their QR, and its length."""
    rows = padded(n + dim)
    qr = (dim + width - 1) // width * rows * width
    return qr, qr + qr_places(rows, width, team)[5]


@shared
def moment_root(x, ridge, root, width, work):
    """Upper triangular root = R (D, D), R^T R = x^T x + ridge tr(x^T x)/D I: the QR of x (n, D) above a small diagonal.

    The ridge makes R invertible whatever the rows are; rows that are all zero get the identity. The panels have
    `width` lanes.
    """
    n, dim = x.shape
    rows, panels = padded(n + dim), (dim + width - 1) // width
    joint = view(work, 0, (panels, rows, width))
    trace = 0.0
    for i in range(member(), n, members()):
        for d in range(dim):
            trace += x[i, d] * x[i, d]
    trace = team_sum(trace)
    diagonal = math.sqrt(ridge * trace / dim) if trace > 0 else 1.0
    for p in range(panels):
        for i in range(member(), rows, members()):
            for lane in range(width):
                d = p * width + lane
                joint[p, i, lane] = x[i, d] if i < n and d < dim else 0.0
            if 0 <= i - n - p * width < min(width, dim - p * width):
                joint[p, i, i - n - p * width] = diagonal
    triangularise(joint, dim, work[moment_places(n, dim, width, members())[0] :])
    for i in range(member(), dim, members()):
        for d in range(dim):
            root[i, d] = joint[d // width, i, d % width] if i <= d else 0.0
    barrier()


@shared
def solve_upper(root, right):
    """right (D, m) to root^-1 right, in place, by back substitution; every member solves for columns of its own."""
    dim = root.shape[0]
    for i in range(dim - 1, -1, -1):
        for j in range(i + 1, dim):
            for c in range(member(), right.shape[1], members()):
                right[i, c] -= root[i, j] * right[j, c]
        for c in range(member(), right.shape[1], members()):
            right[i, c] /= root[i, i]
    barrier()
