"""SVD of a small triangular factor, per head, by one-sided Jacobi rotations of its rows (Hestenes 1958).

For the factor of landmarks in the order in which random pivoting chose them the rows are graded, close to orthogonal
to begin with, and few sweeps suffice (Drmac and Veselic 2008).

A sweep takes all pairs p < q of rows, on the CPU row by row, which keeps row p in the cache. The team of the GPU takes
them by rounds of p + q = const, whose pairs have no row in common: every row meets the others in the same order as on
the CPU, so the rotations are the same (Luk and Park 1989).
"""

import math

from .._jit import shared
from .groups import group, group_dot, group_size, groups, place
from .scalar import fma
from .simd import two_schedules
from .team import barrier, team_max

_TOLERANCE = 1e-14  # cosine between two rows that counts as orthogonal: rounding of the sums makes about 1e-15
_SWEEPS = 30


@shared
def _rotate(a, p, q, columns, squares, negligible):
    """Make rows p < q orthogonal; 0 if they already are, or one of them is below rounding of the largest."""
    alpha, beta = squares[p], squares[q]
    large = p < q and alpha > negligible and beta > negligible
    gamma = group_dot(a, p, a, q, columns if large else 0)
    if not large or abs(gamma) <= _TOLERANCE * math.sqrt(alpha * beta):
        return 0.0
    zeta = (beta - alpha) / (2.0 * gamma)
    tangent = math.copysign(1.0, zeta) / (abs(zeta) + math.sqrt(1.0 + zeta * zeta))
    cosine = 1.0 / math.sqrt(1.0 + tangent * tangent)
    sine = cosine * tangent
    for x in range(place(), a.shape[1], group_size()):
        first, second = a[p, x], a[q, x]
        a[p, x] = fma(cosine, first, -sine * second)
        a[q, x] = fma(sine, first, cosine * second)
    if place() == 0:
        squares[p] = alpha - tangent * gamma
        squares[q] = beta + tangent * gamma
    return 1.0


@shared
def _norms(a, columns, squares):
    """The squared lengths afresh, since the updated ones drift; returns the largest."""
    largest = 0.0
    for start in range(0, a.shape[0], groups()):
        p = start + group()
        square = group_dot(a, p, a, p, columns if p < a.shape[0] else 0)
        largest = max(largest, square)
        if p < a.shape[0] and place() == 0:
            squares[p] = square
    return team_max(largest)


@shared
def _sweep_by_rows(a, columns, squares, negligible):
    rotated = 0.0
    for p in range(a.shape[0] - 1):
        for q in range(p + 1, a.shape[0]):
            rotated = max(rotated, _rotate(a, p, q, columns, squares, negligible))
    return rotated


@shared
def _sweep_by_rounds(a, columns, squares, negligible):
    rows, rotated = a.shape[0], 0.0
    for total in range(1, 2 * rows - 2):
        first, count = max(0, total - rows + 1), (total + 1) // 2  # p from `first` to below `count`
        for start in range(first, count, groups()):
            p = start + group()
            p, q = (p, total - p) if p < count else (0, 0)  # a group without a pair comes along
            rotated = max(rotated, _rotate(a, p, q, columns, squares, negligible))
        barrier()
    return rotated


@two_schedules(_sweep_by_rows, _sweep_by_rounds)
def _sweep(a, columns, squares, negligible):
    """Rotate every pair of rows; 1 if any was not orthogonal already."""
    return _sweep_by_rounds(a, columns, squares, negligible)


@shared
def orthogonalise_rows(a, columns, squares):
    """Rotate the rows of `a (r, columns + more)` until their first `columns` entries are orthogonal.

    With a = [R, Y] and R = U diag(sigma) V^T the result is [diag(sigma) V^T, U^T Y]; `squares` gets sigma^2, not
    sorted. Row p is first read by its group, p mod groups(), column x by its place in it: x mod group_size().
    """
    for _ in range(_SWEEPS):
        negligible = 1e-32 * _norms(a, columns, squares)
        if team_max(_sweep(a, columns, squares, negligible)) == 0.0:
            break
