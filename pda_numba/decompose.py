"""The weighted features of one head, decomposed: by QR of [W X, W T] and SVD of its triangle, in float64.

    [W X, W T] = Q [R, Y]     R = U diag(sigma) V^T

Every body is a team's (`core` has the driver).
"""

import math

import numpy as np

from ._jit import shared
from .kernels.groups import group, group_size, groups, place
from .kernels.scalar import fma
from .kernels.simd import lane_count, padded
from .kernels.small_qr import qr_places, triangularise
from .kernels.small_svd import orthogonalise_rows
from .kernels.team import barrier, member, members, team_max
from .kernels.view import view


@shared
def multiply(a, offset, row_stride, depth_stride, depth, b, out):
    """out = a b over the columns of `out`; a[i, c] is element offset + i row_stride + c depth_stride."""
    flat = view(a, 0, (a.size,))
    for i in range(group(), out.shape[0], groups()):
        for j in range(place(), out.shape[1], group_size()):
            out[i, j] = 0.0
        for c in range(depth):
            factor = np.float64(flat[offset + i * row_stride + c * depth_stride])
            for j in range(place(), out.shape[1], group_size()):
                out[i, j] = fma(factor, b[c, j], out[i, j])
    barrier()


@shared
def largest_of(x):
    """The largest element of a vector that is not negative, known to the whole team."""
    own = 0.0
    for i in range(member(), x.shape[0], members()):
        own = max(own, x[i])
    return team_max(own)


@shared
def decomposition_places(n, rank, columns, width, team):
    """Behind the panels, and behind the workspace of their QR."""
    panels = (rank + columns + width - 1) // width
    joint = panels * padded(n) * width
    return joint + qr_places(padded(n), width, team)[5], joint


@shared
def _fill_panels(features, target, weight, rank, joint):
    """[W X, W T] as panels."""
    width, columns = lane_count(joint), target.shape[1]
    n = weight.shape[0]
    for p in range(joint.shape[0]):
        for i in range(member(), joint.shape[1], members()):
            for c in range(width):
                joint[p, i, c] = 0.0
    for c in range(rank):
        for i in range(member(), n, members()):
            if weight[i] > 0:
                joint[c // width, i, c % width] = features[c, i] * weight[i]
    for i in range(member(), n, members()):
        if weight[i] > 0:
            for c in range(columns):
                joint[(rank + c) // width, i, (rank + c) % width] = target[i, c] * weight[i]


@shared
def _fill_triangle(joint, rank, n, small, upper):
    """From the reduced panels: `small` = [R, Y] or [R, I], whichever has fewer columns, and `upper` = Y."""
    width, columns = lane_count(joint), upper.shape[1]
    for i in range(group(), rank, groups()):
        for c in range(place(), rank, group_size()):
            small[i, c] = joint[c // width, i, c % width] if i < n else 0.0
        for c in range(place(), columns, group_size()):
            upper[i, c] = joint[(rank + c) // width, i, (rank + c) % width] if i < n else 0.0
        for c in range(place(), small.shape[1] - rank, group_size()):
            if columns <= rank:
                small[i, rank + c] = upper[i, c]
            else:
                small[i, rank + c] = 1.0 if i == c else 0.0


@shared
def decompose(features, target, weight, rank, width, squares, vt, right, work):
    """sigma^2 (R,), V^T (R padded, R) and sigma U^T Y (R, columns) of the weighted problem."""
    n, columns = target.shape
    more = min(rank, columns)
    at_small, at_qr = decomposition_places(n, rank, columns, width, members())
    at_upper = at_small + rank * (rank + more)
    joint = view(work, 0, (at_qr // (padded(n) * width), padded(n), width))
    small = view(work, at_small, (rank, rank + more))
    upper = view(work, at_upper, (rank, columns))
    _fill_panels(features, target, weight, rank, joint)
    triangularise(joint, rank, work[at_qr:])
    _fill_triangle(joint, rank, n, small, upper)
    orthogonalise_rows(small, rank, squares)  # [R, Y] to [diag(sigma) V^T, U^T Y]
    least = largest_of(squares) * 1e-32
    for c in range(group(), padded(rank), groups()):
        sigma = math.sqrt(squares[c]) if c < rank else 0.0
        for j in range(place(), rank, group_size()):
            vt[c, j] = small[c, j] / sigma if c < rank and squares[c] > least else 0.0
        for j in range(place(), more if c < rank else 0, group_size()):
            small[c, rank + j] *= sigma
            if columns <= rank:
                right[c, j] = small[c, rank + j]
    if columns > rank:
        barrier()
        multiply(small, rank, rank + more, 1, rank, upper, right)
