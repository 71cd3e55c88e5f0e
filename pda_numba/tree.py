"""The tree of centres that keys are sorted by: k-means level by level (Lloyd 1982), on some of the keys.

    a node's children begin as keys at equal distances along the sequence
    step       the sampled keys to the nearest centre, |k - c|_M^2 least (`metric`); each centre to the mean of its own
    split      all keys to the nearest child of their node; a node has as many children as its keys fill

With L levels a key is compared with about L M^(1/L) centres. A step samples as many keys as leave each centre some
dozens: no more are needed for a good mean, but keys that are alone must be among them to become centres.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, inlined, serial_kernel, shared
from .grouping import list_groups
from .kernels.prefetch import AHEAD, prefetch
from .kernels.scalar import widen
from .kernels.simd import padded
from .kernels.team import member, members, part, sum_before
from .metric import see
from .probe import probe

_STEPS, _THIN = 1, 4  # steps, each with one in so many keys at most
_ENOUGH = 16  # keys of a centre that are sampled at least: with fewer, keys that are alone find no centre of their own
_ROOT = 2  # times the even fan-out is the root's
_FLAT, _TWO, _THREE = 256, 2**13, 2**19  # most buckets under one, two and three levels of centres
_PIECES, _BESIDE = 64, 16  # of the centres, on the CPU, and how many of one piece lie beside each other at most

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
def _seed_children(k, entries, start, size, first, last, centres):
    """A node's children begin as keys at equal distances along the sequence. By a team."""
    for c in range(first, last):
        place = start + (2 * (c - first) + 1) * size // (2 * (last - first))
        for d in range(member(), k.shape[1], members()):
            centres[c, d] = widen(k[entries[place], d])


@shared
def _thin(entries, every, out):
    """One in so many entries of a list. By a team."""
    for i in range(member(), out.shape[0], members()):
        out[i] = entries[i * every] if i * every < entries.shape[0] else -1


@shared
def _log_size(size):
    return math.log2(float(size)) if size > 0 else -np.inf


@inlined
def _move_centre(k, entries, start, size, sums, centre):
    """A centre to the mean of its keys, if there are any. By a team."""
    for d in range(member(), k.shape[1], members()):
        sums[d] = 0.0
    for i in range(start, start + size):
        prefetch(k, max(entries[min(i + AHEAD, entries.shape[0] - 1)], 0))  # the next centre's keys come next
        key = entries[i]  # read in the loop below it would keep this from becoming vectors
        for d in range(member(), k.shape[1], members()):
            sums[d] += np.float64(widen(k[key, d]))
    for d in range(member(), k.shape[1] if size > 0 else 0, members()):
        centre[d] = sums[d] / size


# --- CPU drivers ---


@serial_kernel
def _plan_parts_cpu(size, target, ranges):
    for h in range(len(size)):
        _plan_parts(size[h], target, ranges[h])


@cpu_kernel
def _seed_children_cpu(k, place, entries, start, size, ranges, centres):
    heads, nodes = size.shape
    for item in prange(heads * nodes):
        h, g = item // nodes, item % nodes
        node = entries[h], start[h, g], size[h, g], ranges[h, g, 0], ranges[h, g, 1]
        _seed_children(k[place[h]], *node, centres[h])


@serial_kernel
def _thin_cpu(entries, every, out):
    for h in range(len(out)):
        _thin(entries[h], every, out[h])


@cpu_kernel
def _move_centres_cpu(k, place, entries, start, size, sums, centres):
    heads, count = size.shape
    pieces = min(_PIECES, count)
    beside = max(1, min(_BESIDE, count // pieces))  # every piece has some
    for item in prange(heads * pieces):
        h, piece = item // pieces, item % pieces
        for first in range(piece * beside, count, pieces * beside):  # the last centres of all have no keys
            for c in range(first, min(first + beside, count)):
                _move_centre(k[place[h]], entries[h], start[h, c], size[h, c], sums[h, c], centres[h, c])


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
def _seed_children_cuda(k, place, entries, start, size, ranges, centres):
    g, h = cuda.blockIdx.x, cuda.blockIdx.y
    node = entries[h], start[h, g], size[h, g], ranges[h, g, 0], ranges[h, g, 1]
    _seed_children(k[place[h]], *node, centres[h])


@cuda_kernel(256)
def _thin_cuda(entries, every, out):
    h = cuda.blockIdx.x
    _thin(entries[h], every, out[h])


@cuda_kernel(64)
def _move_centres_cuda(k, place, entries, start, size, sums, centres):
    c, h = cuda.blockIdx.x, cuda.blockIdx.y
    _move_centre(k[place[h]], entries[h], start[h, c], size[h, c], sums[h, c], centres[h, c])


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
    """Room for centres; the padding is zero."""
    return problem.device.zeros((heads, padded(count), problem.shape[2]), problem.element)


def move_centres(problem, k, place, lists, centres):
    """Each centre that has keys to their mean."""
    sums = problem.device.empty((*lists.size.shape, problem.shape[2]), np.float64)
    task = k, place, lists.entries, lists.start, lists.size, sums, centres
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


def split(problem, k, place, metric, label, lists, target):
    """One level of the tree: the ranges of the nodes' children, their centres, and each key's child.

    `lists` are the keys by their `label`, the node that each belongs to.
    """
    device, (heads, nodes), m, element = problem.device, lists.size.shape, problem.shape[1], problem.element
    ranges = plan_parts(device, lists.size, target)
    count = nodes + m // target
    centres, seen = (room_for(problem, heads, count) for _ in range(2))
    bias = device.empty((heads, count), element)
    seeds = k, place, lists.entries, lists.start, lists.size, ranges, centres
    device.run(_seed_children_cpu, _seed_children_cuda, (nodes, heads), *seeds)
    thin = min(_THIN, max(1, target // _ENOUGH))
    few = device.empty((heads, m // thin), np.int64)
    device.run(_thin_cpu, _thin_cuda, (heads,), lists.entries, thin, few)
    for step in range(_STEPS + 1):
        entries = few if step < _STEPS else lists.entries
        see(device, metric, centres, seen, bias)
        found = probe(device, k, place, element.type(1), entries, label, ranges, seen, bias, 1)
        if step < _STEPS:
            move_centres(problem, k, place, list_groups(device, found, 0, count, unit=1), centres)
    return ranges, centres, found
