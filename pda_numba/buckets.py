"""Buckets of keys that lie close together, and which of them a query probes.

    tree       keys to the nearest of their node's centres, level by level: k-means with a few Lloyd steps
               (Lloyd 1982); a node has as many children as its keys fill
    buckets    the lowest nodes, cut in runs of the sequence where they hold more than twice their size
    singles    keys far from their centre: |k - c|^2 above some multiple of the mean; each a bucket of its own
    heavy      the keys with the largest sum_i a_ij over the pilot rows: near to every query, in no bucket

    probes of a query: the buckets of largest factor q . c_b + log2 n_b, where the tree is gone down with a beam

The keys are sorted by bucket, singles and heavy keys last, so that each bucket is a range of keys. Costs are O(log M)
for every key and every query.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, serial_kernel, shared
from .grouping import list_groups
from .kernels.panel import add_square
from .kernels.scalar import widen
from .kernels.simd import padded
from .kernels.team import barrier, member, members, part, sum_before, team_sum
from .landmarks import first_largest
from .probe import nothing_found, probe

_LARGEST = 2  # no bucket holds more than this multiple of the size
_LLOYD = 1  # steps
_ROOT = 3  # times the even fan-out is the root's
_BEAM = 6  # nodes of a level whose children a query looks at
_FLAT, _TWO, _THREE = 256, 2**13, 2**19  # most buckets under one, two and three levels of centres
_LONELY, _FAR = 2, 1e3  # keys of a node that are singles, as far away as so many times the mean
_OUTLYING = 4.0  # times the mean squared distance from the own centre makes a key a single
_MOST_SINGLES, _SINGLE_SHARE = 4096, 64  # singles at most, and as a share of the keys

# --- bodies: the tree ---


@shared
def _plan_parts(size, target, ranges):
    """ranges[g]: the parts of node g, as many as its keys fill at `target` keys each. By a team."""
    first, last = part(size.shape[0])
    own = 0
    for g in range(first, last):
        own += (size[g] + target - 1) // target
    place = sum_before(own)
    for g in range(first, last):
        ranges[g, 0] = place
        place += (size[g] + target - 1) // target
        ranges[g, 1] = place


@shared
def _seed_children(k, entries, start, size, first, last, centres, bias):
    """A node's children begin as keys at equal distances along the sequence. By a team."""
    for c in range(first, last):
        place = start + (2 * (c - first) + 1) * size // (2 * (last - first))
        for d in range(member(), k.shape[1], members()):
            centres[c, d] = widen(k[entries[place], d])
    barrier()
    for c in range(first + member(), last, members()):
        bias[c] = _nearness(centres, c)


@shared
def _nearness(centres, c):
    """-|c|^2 / 2: with it the largest c . k + bias is the nearest centre's."""
    total = centres.dtype.type(0)
    for d in range(centres.shape[1]):
        total = add_square(total, centres[c, d])
    return centres.dtype.type(-0.5) * total


@shared
def _move_centre(k, entries, start, size, by_size, sums, centre, centres, bias):
    """A centre to the mean of its keys. `bias` is log2 of their number, or what makes it the nearest. By a team."""
    for d in range(member(), k.shape[1], members()):
        sums[d] = 0.0
    for i in range(start, start + size):
        for d in range(member(), k.shape[1], members()):
            sums[d] += np.float64(widen(k[entries[i], d]))
    for d in range(member(), k.shape[1], members()):
        if size > 0 or by_size:
            centres[centre, d] = sums[d] / max(size, 1)
    barrier()
    if member() == 0:
        if by_size:
            bias[centre] = math.log2(float(size)) if size > 0 else -np.inf
        else:
            bias[centre] = _nearness(centres, centre)


# --- bodies: singles, pieces, heavy keys ---


@shared
def _residual(k, nearness, i):
    """|k - c|^2 of a key whose best score is k . c - |c|^2 / 2."""
    zero = nearness.dtype.type(0)
    total = zero
    for d in range(k.shape[1]):
        total = add_square(total, widen(k[i, d]))
    return max(total - (nearness[i, 0] + nearness[i, 0]), zero)


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
def _through_pieces(ranges, pieces, out):
    """Ranges of the lowest nodes to those of their buckets."""
    for g in range(member(), ranges.shape[0], members()):
        none = ranges[g, 0] == ranges[g, 1]
        out[g, 0] = 0 if none else pieces[ranges[g, 0], 0]
        out[g, 1] = 0 if none else pieces[ranges[g, 1] - 1, 1]


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


@serial_kernel
def _plan_parts_cpu(size, target, ranges):
    for h in range(len(size)):
        _plan_parts(size[h], target, ranges[h])


@cpu_kernel
def _seed_children_cpu(k, place, entries, start, size, ranges, centres, bias):
    heads, nodes = size.shape
    for item in prange(heads * nodes):
        h, g = item // nodes, item % nodes
        node = entries[h], start[h, g], size[h, g], ranges[h, g, 0], ranges[h, g, 1]
        _seed_children(k[place[h]], *node, centres[h], bias[h])


@cpu_kernel
def _move_centres_cpu(k, place, entries, start, size, by_size, sums, centres, bias):
    heads, count = size.shape
    for item in prange(heads * count):
        h, c = item // count, item % count
        node = entries[h], start[h, c], size[h, c], by_size, sums[h, c], c
        _move_centre(k[place[h]], *node, centres[h], bias[h])


@cpu_kernel
def _residuals_cpu(k, place, nearness, residual):
    heads, n = residual.shape
    for item in prange(heads * n):
        h, i = item // n, item % n
        residual[h, i] = _residual(k[place[h]], nearness[h], i)


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
def _through_pieces_cpu(ranges, pieces, out):
    for h in range(len(out)):
        _through_pieces(ranges[h], pieces[h], out[h])


@cpu_kernel
def _choose_heavy_cpu(columns, pool, size, wanted, mass, label, bucket, own):
    for h in prange(len(size)):
        _choose_heavy(columns[h], pool[h], size[h], wanted, mass[h], label[h], bucket[h], own)


@cpu_kernel
def _settle_cpu(singles, bucket):
    heads, n = singles.shape
    for item in prange(heads * n):
        _settle(singles[item // n], bucket[item // n], item % n)


@serial_kernel
def _single_range_cpu(found, first, ends):
    for h in range(len(found)):
        ends[h, 0, 0], ends[h, 0, 1] = first, first + found[h]


# --- CUDA drivers: a team per head, per node, or some keys per team ---


@cuda_kernel(512)
def _plan_parts_cuda(size, target, ranges):
    h = cuda.blockIdx.x
    _plan_parts(size[h], target, ranges[h])


@cuda_kernel(64)
def _seed_children_cuda(k, place, entries, start, size, ranges, centres, bias):
    g, h = cuda.blockIdx.x, cuda.blockIdx.y
    node = entries[h], start[h, g], size[h, g], ranges[h, g, 0], ranges[h, g, 1]
    _seed_children(k[place[h]], *node, centres[h], bias[h])


@cuda_kernel(64)
def _move_centres_cuda(k, place, entries, start, size, by_size, sums, centres, bias):
    c, h = cuda.blockIdx.x, cuda.blockIdx.y
    node = entries[h], start[h, c], size[h, c], by_size, sums[h, c], c
    _move_centre(k[place[h]], *node, centres[h], bias[h])


@cuda_kernel(64)
def _residuals_cuda(k, place, nearness, residual):
    i, h = cuda.blockIdx.x * members() + member(), cuda.blockIdx.y
    if i < residual.shape[1]:
        residual[h, i] = _residual(k[place[h]], nearness[h], i)


@cuda_kernel(512)
def _find_singles_cuda(residual, label, size, most, singles, first, count):
    h = cuda.blockIdx.x
    count[h] = _find_singles(residual[h], label[h], size[h], most, singles[h], first)


@cuda_kernel(64)
def _cut_cuda(entries, start, size, pieces, bucket):
    g, h = cuda.blockIdx.x, cuda.blockIdx.y
    _cut(entries[h], start[h, g], size[h, g], pieces[h, g, 0], pieces[h, g, 1], bucket[h])


@cuda_kernel(256)
def _through_pieces_cuda(ranges, pieces, out):
    h = cuda.blockIdx.x
    _through_pieces(ranges[h], pieces[h], out[h])


@cuda_kernel(256)
def _choose_heavy_cuda(columns, pool, size, wanted, mass, label, bucket, own):
    h = cuda.blockIdx.x
    _choose_heavy(columns[h], pool[h], size[h], wanted, mass[h], label[h], bucket[h], own)


@cuda_kernel(64)
def _settle_cuda(singles, bucket):
    i, h = cuda.blockIdx.x * members() + member(), cuda.blockIdx.y
    if i < singles.shape[1]:
        _settle(singles[h], bucket[h], i)


@cuda_kernel(32)
def _single_range_cuda(found, first, ends):
    for h in range(cuda.grid(1), len(found), cuda.gridsize(1)):
        ends[h, 0, 0], ends[h, 0, 1] = first, first + found[h]


# --- stages ---


class Level(NamedTuple):
    """The centres of one level, and which of them are children of each node above."""

    ranges: Any  # (heads, nodes above, 2)
    centres: Any  # (heads, nodes padded, D)
    bias: Any  # (heads, nodes)


class Buckets(NamedTuple):
    """The keys of some heads by bucket. The last bucket holds the heavy keys."""

    levels: tuple  # of centres above the buckets, the root's children first; the last one's are the buckets
    singles: Any  # (heads, 1, 2): the range of the buckets that hold a single key
    bucket: Any  # (heads, M, 1) int32: of each key
    keys: Any  # (heads, M) int64: in the order of their buckets
    start: Any  # (heads, buckets + 1): where each bucket begins in that order
    widest: int  # no bucket holds more keys

    @property
    def heavy(self):
        """The number of the heavy keys' bucket."""
        return self.start.shape[1] - 2


def _targets(m, size):
    """How many keys a node of each level holds; the root has more children, for all rows look at the same ones."""
    count = max(m // size, 1)
    levels = 1 + (count > _FLAT) + (count > _TWO) + (count > _THREE)
    root = min(count, math.ceil(_ROOT * count ** (1 / levels))) if levels > 1 else count
    fan = (count / root) ** (1 / max(levels - 1, 1))
    return [max(size, round(size * fan ** (levels - 1 - i))) for i in range(levels)]


def build(problem, k, place, columns, pool, pool_size, near):
    """The `Buckets` of the heads' keys k[place[h]], of the sizes that `near` says (`options.Fields`).

    `columns (heads, pool, n)` are the attention weights of the pilot rows to the keys of the `pool (heads, pool)`.
    """
    device, m, size = problem.device, problem.shape[1], near.size
    heads = len(pool)
    label, bucket = (device.zeros((heads, m, 1), np.int32) for _ in range(2))
    most_singles = min(_MOST_SINGLES, m // _SINGLE_SHARE)
    above: list = []
    nodes, targets = 1, _targets(m, size)
    lowest = _sum_of_bounds(m, targets)
    first_single = lowest + m // (_LARGEST * size)
    heavy = first_single + most_singles
    mass = device.empty(pool.shape, np.float64)
    task = columns, pool, pool_size, near.heavy, mass, label, bucket, heavy
    device.run(_choose_heavy_cpu, _choose_heavy_cuda, (heads,), *task)
    for target in targets:
        ranges, label, nearness = _split(problem, k, place, label, nodes, target)
        nodes += m // target
        lists = list_groups(device, label, 0, nodes, unit=1)
        if len(above) < len(targets) - 1:
            centres, bias = _centres(problem, heads, nodes)
            _move_centres(problem, k, place, lists, True, centres, bias)
            above.append(Level(ranges, centres, bias))
    singles = device.repeat(device.upload(np.full((heads, 1), -1, np.int32)), m).reshape(heads, m)
    residual, found = device.empty(singles.shape, problem.element), device.empty(heads, np.int64)
    some = -(-m // 64), heads
    device.run(_residuals_cpu, _residuals_cuda, some, k, place, nearness, residual)
    rest = residual, label, lists.size, most_singles, singles, first_single, found
    device.run(_find_singles_cpu, _find_singles_cuda, (heads,), *rest)
    own = list_groups(device, label, 0, nodes, unit=1)
    pieces = device.empty((heads, nodes, 2), np.int64)
    device.run(_plan_parts_cpu, _plan_parts_cuda, (heads,), own.size, _LARGEST * size, pieces)
    device.run(_cut_cpu, _cut_cuda, (nodes, heads), own.entries, own.start, own.size, pieces, bucket)
    device.run(_settle_cpu, _settle_cuda, some, singles, bucket)
    order = list_groups(device, bucket, 0, heavy + 1, unit=1)
    own_buckets = device.empty(ranges.shape, np.int64)
    device.run(_through_pieces_cpu, _through_pieces_cuda, (heads,), ranges, pieces, own_buckets)
    centres, bias = _centres(problem, heads, heavy + 1)
    _move_centres(problem, k, place, order, True, centres, bias)
    ends = device.empty((heads, 1, 2), np.int64)
    device.run(_single_range_cpu, _single_range_cuda, (1,), found, first_single, ends)
    levels = (*above, Level(own_buckets, centres, bias))
    return Buckets(levels, ends, bucket, order.entries, order.start, max(_LARGEST * size, near.heavy))


def _sum_of_bounds(m, targets):
    """The most nodes that the lowest level can have: every node above may leave one child half empty."""
    count = 1
    for target in targets:
        count += m // target
    return count


def _centres(problem, heads, count):
    """Room for centres and their bias; the padding is zero."""
    device = problem.device
    centres = device.zeros((heads, padded(count), problem.shape[2]), problem.element)
    return centres, device.zeros((heads, count), problem.element)


def _move_centres(problem, k, place, lists, by_size, centres, bias):
    sums = problem.device.empty((*lists.size.shape, problem.shape[2]), np.float64)
    task = k, place, lists.entries, lists.start, lists.size, by_size, sums, centres, bias
    problem.device.run(_move_centres_cpu, _move_centres_cuda, lists.size.shape[::-1], *task)


def _split(problem, k, place, label, nodes, target):
    """One level of the tree: the ranges of the nodes' children, each key's child, and how near it is."""
    device, heads, m, element = problem.device, len(label), problem.shape[1], problem.element
    lists = list_groups(device, label, 0, nodes, unit=1)
    ranges = device.empty((heads, nodes, 2), np.int64)
    device.run(_plan_parts_cpu, _plan_parts_cuda, (heads,), lists.size, target, ranges)
    count = nodes + m // target
    centres, bias = _centres(problem, heads, count)
    seeds = k, place, lists.entries, lists.start, lists.size, ranges, centres, bias
    device.run(_seed_children_cpu, _seed_children_cuda, (nodes, heads), *seeds)
    for step in range(_LLOYD + 1):
        nearness, found = nothing_found(device, element, heads, m, 1)
        task = k, place, element.type(1), lists.entries, label, ranges, centres, bias
        probe(device, *task, nearness, found)
        if step < _LLOYD:
            _move_centres(problem, k, place, list_groups(device, found, 0, count, unit=1), False, centres, bias)
    return ranges, found, nearness


def probes(problem, x, place, buckets, count):
    """The `count` best buckets of every row of x[place[h]]: (heads, n, count) int32, best first, -1 where none is."""
    device, element, heads, n = problem.device, problem.element, len(buckets.keys), x.shape[1]
    root = found = device.zeros((heads, n, 1), np.int32)
    nodes = 1
    for level in buckets.levels:
        beam, order = found, list_groups(device, found, 0, nodes, unit=1).entries
        scores, found = nothing_found(device, element, heads, n, count if level is buckets.levels[-1] else _BEAM)
        where = level.ranges, level.centres, level.bias
        probe(device, x, place, problem.factor, order, beam, *where, scores, found)
        nodes = level.bias.shape[1]
    last = buckets.levels[-1]
    probe(device, x, place, problem.factor, order, root, buckets.singles, last.centres, last.bias, scores, found)
    return found
