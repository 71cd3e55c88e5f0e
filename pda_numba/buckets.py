"""Buckets of keys that lie close together, and which of them a query probes.

    tree       keys to the nearest of their node's centres, level by level (`tree`)
    buckets    the lowest nodes, cut in runs of the sequence where they hold more than 1.5 times their size
    singles    keys far from their centre: |k - c|^2 above some multiple of the mean; each a bucket of its own
    heavy      the keys with the largest sum_i a_ij over the pilot rows: near to every query, in no bucket

    probes of a query: the buckets of largest factor q . c_b + log2 n_b, where the tree is gone down with a beam

The keys are sorted by bucket, singles and heavy keys last, so that each bucket is a range of keys. Costs are O(log M)
for every key and every query.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, inlined, serial_kernel, shared
from .grouping import list_groups
from .kernels.panel import add_square
from .kernels.scalar import widen
from .kernels.team import member, members, part, sum_before, team_sum
from .landmarks import first_largest
from .probe import by_neighbourhood, probe
from .tree import Level, log_sizes, most_nodes, move_centres, plan_parts, room_for, split, targets_of

_LARGEST = 1.5  # no bucket holds more than this multiple of the size
_BEAM = 6  # nodes of a level whose children a query looks at
_LONELY, _FAR = 4, 1e3  # keys of a node that are singles, as far away as so many times the mean
_OUTLYING = 8.0  # times the mean squared distance from the own centre makes a key a single
_MOST_SINGLES, _SINGLE_SHARE = 4096, 64  # singles at most, and as a share of the keys

# --- bodies ---


@inlined
def _residual(k, i, centres, c):
    """|k - c|^2 of a key and its centre; 0 of a key without one. Four sums: each step of one waits for the last."""
    zero, columns = centres.dtype.type(0), k.shape[1] if c >= 0 else 0
    first, second, third, fourth, d = zero, zero, zero, zero, 0
    while d + 4 <= columns:
        first = add_square(first, widen(k[i, d]) - centres[c, d])
        second = add_square(second, widen(k[i, d + 1]) - centres[c, d + 1])
        third = add_square(third, widen(k[i, d + 2]) - centres[c, d + 2])
        fourth = add_square(fourth, widen(k[i, d + 3]) - centres[c, d + 3])
        d += 4
    while d < columns:
        first = add_square(first, widen(k[i, d]) - centres[c, d])
        d += 1
    return (first + second) + (third + fourth)


@shared
def _find_singles(residual, label, size, most, singles, first):
    """Keys that are far from their centre, at most so many, out of their node into a bucket of their own.

    So are those of a node with hardly any keys, whose centre is theirs: the nodes above it are far from them.

    Returns how many; `label` is -1 then. By a team.
    """
    n, own, count = residual.shape[0], 0.0, 0
    for i in range(member(), n, members()):
        if label[i, 0] >= 0:
            own += residual[i]
            count += 1
    mean = team_sum(own) / max(team_sum(count), 1)
    for i in range(member(), n, members()):
        if label[i, 0] >= 0 and size[label[i, 0]] <= _LONELY:
            residual[i] = max(residual[i], _FAR * mean)  # its own member counts it below; then the team meets
    limit = _OUTLYING * mean
    found = most + 1
    while found > most:
        count = 0
        for i in range(member(), n, members()):
            count += 1 if label[i, 0] >= 0 and residual[i] > limit else 0
        found = team_sum(count)
        limit = limit * 1.25 if found > most else limit
    start, stop = part(n)
    count = 0
    for i in range(start, stop):
        count += 1 if label[i, 0] >= 0 and residual[i] > limit else 0
    place = sum_before(count)
    for i in range(start, stop):
        if label[i, 0] >= 0 and residual[i] > limit:
            label[i, 0] = -1
            singles[i] = first + place
            place += 1
    return found


@shared
def _cut(entries, start, size, first, last, bucket):
    """The keys of a node into its buckets. By a team."""
    for i in range(member(), size, members()):
        bucket[entries[start + i], 0] = first + i * (last - first) // size


@shared
def _through_pieces(ranges, pieces, first_single, singles, out):
    """Ranges of the lowest nodes to those of their buckets; the singles are one node more."""
    nodes = ranges.shape[0]
    for g in range(member(), nodes, members()):
        none = ranges[g, 0] == ranges[g, 1]
        out[g, 0] = 0 if none else pieces[ranges[g, 0], 0]
        out[g, 1] = 0 if none else pieces[ranges[g, 1] - 1, 1]
    if member() == 0:
        out[nodes, 0], out[nodes, 1] = first_single, first_single + singles


@shared
def _choose_heavy(columns, pool, size, wanted, mass, label, bucket, own):
    """The pool's keys of largest sum over the rows get no label and the bucket `own`; `mass` is scratch. By a team."""
    for c in range(member(), size, members()):
        total = 0.0
        for i in range(columns.shape[1]):
            total += np.float64(columns[c, i])
        mass[c] = total
    for _ in range(min(wanted, size)):
        chosen = first_largest(mass, size)
        if chosen % members() == member() and mass[chosen] > 0:
            mass[chosen] = 0.0
            label[pool[chosen], 0] = -1
            bucket[pool[chosen], 0] = own


@shared
def _settle(singles, bucket, i):
    """A single's own bucket."""
    if singles[i] >= 0:
        bucket[i, 0] = singles[i]


# --- CPU drivers ---


@cpu_kernel
def _residuals_cpu(k, place, centres, label, residual):
    heads, n = residual.shape
    for item in prange(heads * n):
        h, i = item // n, item % n
        residual[h, i] = _residual(k[place[h]], i, centres[h], label[h, i, 0])


@cpu_kernel
def _find_singles_cpu(residual, label, size, most, singles, first, count):
    for h in prange(len(count)):
        count[h] = _find_singles(residual[h], label[h], size[h], most, singles[h], first)


@cpu_kernel
def _cut_cpu(entries, start, size, pieces, bucket):
    heads, nodes = size.shape
    for item in prange(heads * nodes):
        h, g = item // nodes, item % nodes
        _cut(entries[h], start[h, g], size[h, g], pieces[h, g, 0], pieces[h, g, 1], bucket[h])


@serial_kernel
def _through_pieces_cpu(ranges, pieces, first_single, singles, out):
    for h in range(len(out)):
        _through_pieces(ranges[h], pieces[h], first_single, singles[h], out[h])


@cpu_kernel
def _choose_heavy_cpu(columns, pool, size, wanted, mass, label, bucket, own):
    for h in prange(len(size)):
        _choose_heavy(columns[h], pool[h], size[h], wanted, mass[h], label[h], bucket[h], own)


@cpu_kernel
def _settle_cpu(singles, bucket):
    heads, n = singles.shape
    for item in prange(heads * n):
        _settle(singles[item // n], bucket[item // n], item % n)


# --- CUDA drivers: a team per head, per node, or some keys per team ---


@cuda_kernel(64)
def _residuals_cuda(k, place, centres, label, residual):
    i, h = cuda.blockIdx.x * members() + member(), cuda.blockIdx.y
    if i < residual.shape[1]:
        residual[h, i] = _residual(k[place[h]], i, centres[h], label[h, i, 0])


@cuda_kernel(512)
def _find_singles_cuda(residual, label, size, most, singles, first, count):
    h = cuda.blockIdx.x
    count[h] = _find_singles(residual[h], label[h], size[h], most, singles[h], first)


@cuda_kernel(64)
def _cut_cuda(entries, start, size, pieces, bucket):
    g, h = cuda.blockIdx.x, cuda.blockIdx.y
    _cut(entries[h], start[h, g], size[h, g], pieces[h, g, 0], pieces[h, g, 1], bucket[h])


@cuda_kernel(256)
def _through_pieces_cuda(ranges, pieces, first_single, singles, out):
    h = cuda.blockIdx.x
    _through_pieces(ranges[h], pieces[h], first_single, singles[h], out[h])


@cuda_kernel(256)
def _choose_heavy_cuda(columns, pool, size, wanted, mass, label, bucket, own):
    h = cuda.blockIdx.x
    _choose_heavy(columns[h], pool[h], size[h], wanted, mass[h], label[h], bucket[h], own)


@cuda_kernel(64)
def _settle_cuda(singles, bucket):
    i, h = cuda.blockIdx.x * members() + member(), cuda.blockIdx.y
    if i < singles.shape[1]:
        _settle(singles[h], bucket[h], i)


# --- stages ---


class Buckets(NamedTuple):
    """The keys of some heads by bucket. The last bucket holds the heavy keys."""

    levels: tuple  # of centres, the root's children first; the last one's are the buckets, with a node of singles
    bucket: Any  # (heads, M, 1) int32: of each key
    keys: Any  # (heads, M) int64: in the order of their buckets
    start: Any  # (heads, buckets + 1): where each bucket begins in that order
    widest: int  # no bucket holds more keys

    @property
    def heavy(self):
        """The number of the heavy keys' bucket."""
        return self.start.shape[1] - 2


def build(problem, k, place, metric, columns, pool, pool_size, near):
    """The `Buckets` of the heads' keys k[place[h]], of the sizes that `near` says (`options.Fields`).

    `metric (heads, D, D)` says which keys are alike (`metric`).
    `columns (heads, pool, n)` are the attention weights of the pilot rows to the keys of the `pool (heads, pool)`.
    """
    device, m, heads = problem.device, problem.shape[1], len(pool)
    size = near.size_for(m)
    largest = int(_LARGEST * size)
    label, bucket = (device.zeros((heads, m, 1), np.int32) for _ in range(2))
    most_singles = min(_MOST_SINGLES, m // _SINGLE_SHARE)
    above: list = []
    targets = targets_of(m, size)
    lowest = most_nodes(m, targets)
    first_single = lowest + m // largest
    heavy = first_single + most_singles
    mass = device.empty(pool.shape, np.float64)
    task = columns, pool, pool_size, near.heavy, mass, label, bucket, heavy
    device.run(_choose_heavy_cpu, _choose_heavy_cuda, (heads,), *task)
    lists = list_groups(device, label, 0, 1, unit=1)
    for target in targets:
        ranges, centres, label = split(problem, k, place, metric, label, lists, target)
        nodes = lists.size.shape[1] + m // target
        lists = list_groups(device, label, 0, nodes, unit=1)
        if len(above) < len(targets) - 1:
            above.append(Level(ranges, centres, log_sizes(problem, lists.size)))
    singles = device.repeat(device.upload(np.full((heads, 1), -1, np.int32)), m).reshape(heads, m)
    residual, found = device.empty(singles.shape, problem.element), device.empty(heads, np.int64)
    some = -(-m // 64), heads
    device.run(_residuals_cpu, _residuals_cuda, some, k, place, centres, label, residual)
    rest = residual, label, lists.size, most_singles, singles, first_single, found
    device.run(_find_singles_cpu, _find_singles_cuda, (heads,), *rest)
    own = list_groups(device, label, 0, nodes, unit=1)
    pieces = plan_parts(device, own.size, largest)
    device.run(_cut_cpu, _cut_cuda, (nodes, heads), own.entries, own.start, own.size, pieces, bucket)
    device.run(_settle_cpu, _settle_cuda, some, singles, bucket)
    order = list_groups(device, bucket, 0, heavy + 1, unit=1)
    own_buckets = device.empty((heads, ranges.shape[1] + 1, 2), np.int64)
    below = ranges, pieces, first_single, found, own_buckets
    device.run(_through_pieces_cpu, _through_pieces_cuda, (heads,), *below)
    centres = room_for(problem, heads, heavy + 1)
    move_centres(problem, k, place, order, centres)
    levels = (*above, Level(own_buckets, centres, log_sizes(problem, order.size)))
    return Buckets(levels, bucket, order.entries, order.start, max(largest, near.heavy))


def probes(problem, x, place, buckets, count):
    """The `count` best buckets of every row of x[place[h]]: (heads, n, count) int32, best first, -1 where none is."""
    device, heads, n = problem.device, len(buckets.keys), x.shape[1]
    *above, last = buckets.levels
    singles = last.ranges.shape[1] - 1  # the node that every row looks at
    start = np.array([[0]] if above else [[0, singles]], np.int32)
    beam = device.repeat(device.upload(start), heads * n).reshape(heads, n, start.size)
    nodes = 1
    for level in buckets.levels:
        given = singles if above and level is above[-1] else -1
        most = count if level is last else _BEAM + (given >= 0)
        order = by_neighbourhood(device, beam, nodes)
        where = level.ranges, level.centres, level.bias
        beam = probe(device, x, place, problem.factor, order, beam, *where, most, given)
        nodes = level.bias.shape[1] + (given >= 0)
    return beam
