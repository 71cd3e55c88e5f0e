"""SVD of a small triangular factor, per head, by one-sided Jacobi rotations of its rows (Hestenes 1958).

For the factor of landmarks in the order in which random pivoting chose them the rows are graded, close to orthogonal
to begin with, and few sweeps suffice (Drmac and Veselic 2008).
"""

import math

from .._jit import shared
from .scalar import fma
from .simd import dot

_TOLERANCE = 1e-12  # cosine between two rows that counts as orthogonal: far below the ridge's own perturbation
_SWEEPS = 30


@shared
def orthogonalise_rows(a, columns, squares):
    """Rotate the rows of `a (r, columns + more)` until their first `columns` entries are orthogonal.

    With a = [R, Y] and R = U diag(sigma) V^T the result is [diag(sigma) V^T, U^T Y]; `squares` gets sigma^2, not
    sorted.
    """
    for _ in range(_SWEEPS):
        largest = 0.0
        for p in range(a.shape[0]):  # afresh in every sweep: the updated norms drift
            squares[p] = dot(a, p, a, p, columns)
            largest = max(largest, squares[p])
        rotated = False
        for p in range(a.shape[0] - 1):
            for q in range(p + 1, a.shape[0]):
                rotated |= _rotate(a, p, q, columns, squares, largest * 1e-32)
        if not rotated:
            break


@shared
def _rotate(a, p, q, columns, squares, negligible):
    """Make rows p and q orthogonal; False if they already are, or one of them is below rounding of the largest."""
    alpha, beta = squares[p], squares[q]
    if alpha <= negligible or beta <= negligible:
        return False
    gamma = dot(a, p, a, q, columns)
    if abs(gamma) <= _TOLERANCE * math.sqrt(alpha * beta):
        return False
    zeta = (beta - alpha) / (2.0 * gamma)
    tangent = math.copysign(1.0, zeta) / (abs(zeta) + math.sqrt(1.0 + zeta * zeta))
    cosine = 1.0 / math.sqrt(1.0 + tangent * tangent)
    sine = cosine * tangent
    for x in range(a.shape[1]):
        first, second = a[p, x], a[q, x]
        a[p, x] = fma(cosine, first, -sine * second)
        a[q, x] = fma(sine, first, cosine * second)
    squares[p] = alpha - tangent * gamma
    squares[q] = beta + tangent * gamma
    return True
