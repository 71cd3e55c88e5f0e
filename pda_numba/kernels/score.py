"""Scores of single keys, for bodies that look at some keys of one query.

s_j = room[0] . k_j      room[0]: the query, widened and scaled; room[1]: space for a key; room[2]: the scores
"""

from .._jit import shared
from .scalar import fma, widen
from .simd import dot, two_schedules
from .team import member, members


@shared
def place_query(room, q, row, factor):
    """Put a query into `room`; the team meets before it is used."""
    for d in range(member(), q.shape[1], members()):
        room[0, d] = widen(q[row, d]) * factor


@shared
def _score_as_vectors(room, k, j):
    for d in range(k.shape[1]):
        room[1, d] = widen(k[j, d])
    return dot(room, 0, room, 1, k.shape[1])


@shared
def _score_in_order(room, k, j):
    total = room.dtype.type(0)
    for d in range(k.shape[1]):
        total = fma(room[0, d], widen(k[j, d]), total)
    return total


@two_schedules(_score_as_vectors, _score_in_order)
def _score(room, k, j):
    return _score_in_order(room, k, j)


@shared
def score_keys(room, k, start, count):
    """The scores of the keys start .. start + count; entry j by the member that has it in a loop over members."""
    for j in range(member(), count, members()):
        room[2, j] = _score(room, k, start + j)
