"""The workspace of one head's fit (`core`): where each array begins, and the sizes that follow from choices alone."""

from typing import NamedTuple

from ._jit import shared
from .decompose import decomposition_places
from .kernels.simd import padded

LEVERAGE_COLUMNS = 16  # the leverage |x G|^2 is estimated from this many random combinations of G's columns
SKETCH = 8  # value columns, or random combinations of them, on which the candidates for lambda are compared
CANDIDATES = 9


class Places(NamedTuple):
    """Where each array begins in a head's workspace; the scratch of single steps comes first."""

    squares: int
    vt: int
    right: int
    gains: int
    coefficients: int
    sketch: int
    sketched_target: int
    sketched_exact: int
    sketched_right: int
    combination: int
    basis: int
    product: int
    loo: int
    end: int


@shared
def places(n, rank, windows, columns, width, team):
    """The layout for `rank` landmarks, n rows and panels of `width` lanes; no place falls when an argument rises."""
    size = min(columns - 1, SKETCH) + 1
    fitted = padded(max(CANDIDATES * windows * size, columns))
    small, _ = decomposition_places(n, rank, windows * columns, width, team)
    decomposition = small + rank * (rank + windows * columns + min(rank, windows * columns))
    judgement = (3 * padded(rank) + padded(CANDIDATES) + fitted + CANDIDATES * windows) * width
    squares = max(decomposition, judgement)
    vt = squares + rank
    right = vt + padded(rank) * rank
    gains = right + rank * windows * columns
    coefficients = gains + padded(CANDIDATES) * rank
    sketch = coefficients + fitted * rank
    sketched_target = sketch + columns * size
    sketched_exact = sketched_target + n * windows * size
    sketched_right = sketched_exact + n * (size - 1)
    combination = sketched_right + rank * windows * size
    basis = combination + rank * LEVERAGE_COLUMNS
    product = basis + rank * (columns + LEVERAGE_COLUMNS)
    loo = product + rank * (columns + LEVERAGE_COLUMNS)
    end = loo + CANDIDATES * windows
    return Places(
        squares,
        vt,
        right,
        gains,
        coefficients,
        sketch,
        sketched_target,
        sketched_exact,
        sketched_right,
        combination,
        basis,
        product,
        loo,
        end,
    )
