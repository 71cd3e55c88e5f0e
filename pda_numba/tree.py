"""The tree of centres that keys are sorted by: k-means level by level (Lloyd 1982), on some of the keys.

    a node's children begin as keys at equal distances along the sequence
    step       the sampled keys to the nearest centre, |k - c|^2 least; each centre to the mean of its own
    split      all keys to the nearest child of their node; a node has as many children as its keys fill

With L levels a key is compared with about L M^(1/L) centres. A step samples as many keys as leave each centre some
dozens: no more are needed for a good mean, but keys that are alone must be among them to become centres.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, serial_kernel, shared
from .grouping import list_groups
from .kernels.panel import add_square
from .kernels.prefetch import prefetch
from .kernels.scalar import widen
from .kernels.simd import padded
from .kernels.team import barrier, member, members, part, sum_before
from .probe import nothing_found, probe

_STEPS, _THIN = 1, 4  # steps, each with one in so many keys
_ENOUGH = 16  # keys of a centre that are sampled at least: with fewer, keys that are alone find no centre of their own
_ROOT = 3  # times the even fan-out is the root's
_FLAT, _TWO, _THREE = 256, 2**13, 2**19  # most buckets under one, two and three levels of centres
_AHEAD = 8  # keys that are asked for before they are needed, on the CPU
_PIECES = 64  # of the centres, on the CPU

# --- bodies ---


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
def _thin(entries, every, out):
    """One in so many entries of a list. By a team."""
    for i in range(member(), out.shape[0], members()):
        out[i] = entries[i * every] if i * every < entries.shape[0] else -1


@shared
def _log_size(size):
    return math.log2(float(size)) if size > 0 else -np.inf


@shared
def _move_centre(k, entries, start, size, by_size, sums, centre, centres, bias):
    """A centre to the mean of its keys. `bias` is log2 of their number, or what makes it the nearest. By a team."""
    for d in range(member(), k.shape[1], members()):
        sums[d] = 0.0
    for i in range(start, start + size):
        prefetch(k, entries[min(i + _AHEAD, start + size - 1)])
        for d in range(member(), k.shape[1], members()):
            sums[d] += np.float64(widen(k[entries[i], d]))
    for d in range(member(), k.shape[1], members()):
        if size > 0 or by_size:
            centres[centre, d] = sums[d] / max(size, 1)
    barrier()
    if member() == 0:
        if by_size:
            bias[centre] = _log_size(size)
        else:
            bias[centre] = _nearness(centres, centre)


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


@serial_kernel
def _thin_cpu(entries, every, out):
    for h in range(len(out)):
        _thin(entries[h], every, out[h])


@cpu_kernel
def _move_centres_cpu(k, place, entries, start, size, by_size, sums, centres, bias):
    heads, count = size.shape
    pieces = min(_PIECES, count)
    for item in prange(heads * pieces):
        h, first = item // pieces, item % pieces
        for c in range(first, count, pieces):  # not those beside each other: the last ones have no keys
            node = entries[h], start[h, c], size[h, c], by_size, sums[h, c], c
            _move_centre(k[place[h]], *node, centres[h], bias[h])


@serial_kernel
def _log_sizes_cpu(size, bias):
    for h in range(len(size)):
        for c in range(size.shape[1]):
            bias[h, c] = _log_size(size[h, c])


# --- CUDA drivers: a team per head or per node ---


@cuda_kernel(512)
def _plan_parts_cuda(size, target, ranges):
    h = cuda.blockIdx.x
    _plan_parts(size[h], target, ranges[h])


@cuda_kernel(64)
def _seed_children_cuda(k, place, entries, start, size, ranges, centres, bias):
    g, h = cuda.blockIdx.x, cuda.blockIdx.y
    node = entries[h], start[h, g], size[h, g], ranges[h, g, 0], ranges[h, g, 1]
    _seed_children(k[place[h]], *node, centres[h], bias[h])


@cuda_kernel(256)
def _thin_cuda(entries, every, out):
    h = cuda.blockIdx.x
    _thin(entries[h], every, out[h])


@cuda_kernel(64)
def _move_centres_cuda(k, place, entries, start, size, by_size, sums, centres, bias):
    c, h = cuda.blockIdx.x, cuda.blockIdx.y
    node = entries[h], start[h, c], size[h, c], by_size, sums[h, c], c
    _move_centre(k[place[h]], *node, centres[h], bias[h])


@cuda_kernel(256)
def _log_sizes_cuda(size, bias):
    h = cuda.blockIdx.x
    for c in range(member(), size.shape[1], members()):
        bias[h, c] = _log_size(size[h, c])


# --- stages ---


class Level(NamedTuple):
    """The centres of one level, and which of them are children of each node above."""

    ranges: Any  # (heads, nodes above, 2)
    centres: Any  # (heads, nodes padded, D)
    bias: Any  # (heads, nodes)


def targets_of(m, size):
    """How many keys a node of each level holds; the root has more children, for all rows look at the same ones."""
    count = max(m // size, 1)
    levels = 1 + (count > _FLAT) + (count > _TWO) + (count > _THREE)
    root = min(count, math.ceil(_ROOT * count ** (1 / levels))) if levels > 1 else count
    fan = (count / root) ** (1 / max(levels - 1, 1))
    return [max(size, round(size * fan ** (levels - 1 - i))) for i in range(levels)]


def most_nodes(m, targets):
    """The most nodes that the lowest level can have: every node above may leave one child half empty."""
    return 1 + sum(m // target for target in targets)


def room_for(problem, heads, count):
    """Room for centres and their bias; the padding is zero."""
    device = problem.device
    centres = device.zeros((heads, padded(count), problem.shape[2]), problem.element)
    return centres, device.zeros((heads, count), problem.element)


def move_centres(problem, k, place, lists, by_size, centres, bias):
    """Each centre to the mean of its keys; `bias` what a query looks for (log2 of their number), or a key."""
    sums = problem.device.empty((*lists.size.shape, problem.shape[2]), np.float64)
    task = k, place, lists.entries, lists.start, lists.size, by_size, sums, centres, bias
    problem.device.run(_move_centres_cpu, _move_centres_cuda, lists.size.shape[::-1], *task)


def plan_parts(device, size, target):
    """ranges (heads, nodes, 2): the parts of nodes of `size (heads, nodes)` keys, `target` keys each."""
    ranges = device.empty((*size.shape, 2), np.int64)
    device.run(_plan_parts_cpu, _plan_parts_cuda, (len(size),), size, target, ranges)
    return ranges


def log_sizes(problem, size):
    """log2 of how many keys each node has: with it q . c is about the log of what they weigh together."""
    device, bias = problem.device, problem.device.empty(size.shape, problem.element)
    device.run(_log_sizes_cpu, _log_sizes_cuda, (len(size),), size, bias)
    return bias


def split(problem, k, place, label, lists, target):
    """One level of the tree: the ranges of the nodes' children, each key's child, and how near it is.

    `lists` are the keys by their `label`, the node that each belongs to.
    """
    device, (heads, nodes), m, element = problem.device, lists.size.shape, problem.shape[1], problem.element
    ranges = plan_parts(device, lists.size, target)
    count = nodes + m // target
    centres, bias = room_for(problem, heads, count)
    seeds = k, place, lists.entries, lists.start, lists.size, ranges, centres, bias
    device.run(_seed_children_cpu, _seed_children_cuda, (nodes, heads), *seeds)
    thin = min(_THIN, max(1, target // _ENOUGH))
    few = device.empty((heads, m // thin), np.int64)
    device.run(_thin_cpu, _thin_cuda, (heads,), lists.entries, thin, few)
    for step in range(_STEPS + 1):
        nearness, found = nothing_found(device, element, heads, m, 1)
        entries = few if step < _STEPS else lists.entries
        probe(device, k, place, element.type(1), entries, label, ranges, centres, bias, nearness, found)
        if step < _STEPS:
            move_centres(problem, k, place, list_groups(device, found, 0, count, unit=1), False, centres, bias)
    return ranges, centres, found, nearness
