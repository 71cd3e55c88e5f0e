"""A team seen as groups of up to 32 neighbours.

Work of many small independent pieces, each a sum over a row, is shared out over groups: one piece for each group, the
row's columns over the members of the group. On the CPU there is one group of one member.
"""

from .._jit import shared
from .scalar import fma
from .simd import dot, two_schedules
from .team import _on_both, group_sum, member, members

_LARGEST = 32


@shared
def _size():
    return min(_LARGEST, members())


@shared
def _group():
    return member() // _size()


@shared
def _groups():
    return members() // _size()


@shared
def _place():
    return member() & (_size() - 1)


@shared
def _mine(first):
    return first + ((member() - first) & (members() - 1))


@shared
def _neighbours(count):
    return min(count, members())


@shared
def _shared_dot(a, i, b, j, count):
    total = a.dtype.type(0)
    for x in range(_place(), count, _size()):
        total = fma(a[i, x], b[j, x], total)
    return group_sum(total, _size())


@shared
def _whole_dot(a, i, b, j, count):
    return dot(a, i, b, j, count)


# For the CPU as constants, or else its loops over a group would not vectorise.


@_on_both(lambda: lambda: 1, lambda: _size)
def group_size():
    """How many neighbours make a group."""
    return _size()


@_on_both(lambda: lambda: 0, lambda: _group)
def group():
    """The number of this member's group."""
    return _group()


@_on_both(lambda: lambda: 1, lambda: _groups)
def groups():
    """How many groups the team has."""
    return _groups()


@_on_both(lambda: lambda: 0, lambda: _place)
def place():
    """This member's place in its group."""
    return _place()


@_on_both(lambda first: lambda first: first, lambda first: _mine)
def mine(first):
    """The first index from `first` on that is this member's, where i belongs to member i mod members()."""
    return _mine(first)


@_on_both(lambda count: lambda count: 1, lambda count: _neighbours)
def neighbours(count):
    """How many of `count` neighbouring items the team takes at once (both powers of two)."""
    return _neighbours(count)


@two_schedules(_whole_dot, _shared_dot)
def group_dot(a, i, b, j, count):
    """sum_x a[i, x] b[j, x] over the first `count` columns, known to the whole group; every group must come here."""
    return _shared_dot(a, i, b, j, count)
