"""Rectangles of one shape as the heads of a problem of their own.

Heads that share their keys, and see the same growing part of them, share their rectangles too: their queries, one
head's behind the other's, are those of one problem, so that one fit serves the whole group.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import plan
from .rectangles import divide
from .scan import Ranges, scan_array

_SEED_STEP = 0x9E3779B97F4A7C15  # an odd number far from any simple fraction of 2^64 (Weyl): seeds of the levels


@dataclass(frozen=True)
class Layout:
    """What is exact and what may be of low rank, for groups of heads that share it."""

    pattern: Any  # `mask.Pattern`
    groups: np.ndarray  # (groups, heads of each): places among the heads of the call
    spans: np.ndarray
    low: list  # rectangles
    rest: list

    @property
    def alone(self):
        """Is one rectangle of low rank all there is?"""
        return len(self.low) == 1 and self.low[0].whole and not self.rest


def layouts(problem, heads, mask, options):
    """The `Layout`s of a problem with spans (`masked.seen_problem`)."""
    d, e = problem.shape[2:]
    pays = functools.cache(lambda queries, keys: bool(plan.decide(queries, keys, d, e, options)[1]))
    own = np.stack([mask.pattern[heads], problem.key_head[heads]], axis=1)
    pairs, which = np.unique(own, axis=0, return_inverse=True)
    found: dict = {}
    for i, (p, _) in enumerate(pairs):
        group = np.flatnonzero(which.reshape(-1) == i)
        # A near field is a band of one head's queries and keys.
        for own_group in [group] if mask.patterns[p].rises else np.split(group, len(group)):
            found.setdefault((int(p), len(own_group)), []).append(own_group)
    done = []
    for (p, size), groups in found.items():
        pattern = mask.patterns[p]
        divided = divide(
            pattern.segments, problem.shape[0], lambda queries, keys, size=size: pays(size * queries, keys)
        )
        done.append(Layout(pattern, np.array(groups), *divided))
    return done


class Shape(NamedTuple):
    """What rectangles have in common that are computed together."""

    queries: int  # of one head
    keys: int
    group: int  # heads whose queries are together
    whole: bool  # are they all of a segment (`rectangles`)?
    alone: bool  # are they all that is of low rank, and is nothing beside them?


def by_shape(found, which):
    """{shape: [(places, rectangle), ...]} of the rectangles "low" or "rest"."""
    members: dict = {}
    for layout in found:
        for rectangle in getattr(layout, which):
            shape = Shape(rectangle.queries, rectangle.keys, layout.groups.shape[1], rectangle.whole, layout.alone)
            members.setdefault(shape, []).extend((tuple(places), rectangle) for places in layout.groups.tolist())
    return {shape: sorted(own) for shape, own in members.items()}


@dataclass(frozen=True)
class Parts:
    """The problem, and where its heads lie in the whole."""

    problem: Any
    place: np.ndarray  # (rectangles, heads of a group): places among the heads of the call
    query: np.ndarray  # first query of each rectangle
    origins: dict  # of the blocks of "q", "k", "v" that are copies: their heads and first rows; None: a view

    def apart(self, array):
        """What belongs to the groups' queries (rectangles, group n, ...), for each head by itself."""
        group = self.place.shape[1]
        return array.reshape(len(array) * group, array.shape[1] // group, *array.shape[2:])

    def together(self, array):
        """The inverse."""
        group = self.place.shape[1]
        return array.reshape(len(array) // group, array.shape[1] * group, *array.shape[2:])


def blocks(problem, heads, members, shape):
    """The `Parts` of rectangles [(places of a group's heads, rectangle), ...] of one `shape`."""
    queries, keys, group, whole, _ = shape
    place = np.array([places for places, _ in members]).reshape(-1, group)
    query, key = (np.array([getattr(r, name) for _, r in members]) for name in ("query", "key"))
    own = heads[place]
    if group == 1:
        q, query_head, from_q = _cut(problem, problem.q, problem.query_head[own[:, 0]], query, queries)
    else:
        from_q = problem.query_head[own.reshape(-1)], np.repeat(query, group)
        q = problem.device.cut(problem.q, *from_q, queries).reshape(len(members), group * queries, problem.q.shape[2])
        query_head = np.arange(len(members))
    key_head = problem.key_head[own[:, 0]]
    cut = [_cut(problem, x, key_head, key, keys) for x in (problem.k, problem.v)]
    if (cut[0][1] != cut[1][1]).any():  # a view of one of them alone: both have one number
        cut = [_copied(problem, x, key_head, key, keys) for x in (problem.k, problem.v)]
    (k, key_head, from_k), (v, _, from_v) = cut
    seed = (problem.seed + queries * _SEED_STEP) % 2**63
    rest = {"seed": seed, "spans": None, "pattern": None, "group": group, "merged": not whole}
    part = dataclasses.replace(problem, q=q, k=k, v=v, query_head=query_head, key_head=key_head, **rest)
    return Parts(part, place, query, {"q": from_q, "k": from_k, "v": from_v})


def _cut(problem, source, head, first, size):
    """Blocks of `size` rows, which of them each rectangle has, and their origins: a view where they lie on a grid."""
    n, columns = source.shape[1:]
    on_grid = not (first % size).any() and (n % size == 0 or source.shape[0] == 1)
    if on_grid and problem.device.is_contiguous(source):
        used = n // size
        whole = source if n % size == 0 else source[:, : used * size]
        return whole.reshape(source.shape[0] * used, size, columns), head * used + first // size, None
    return _copied(problem, source, head, first, size)


def _copied(problem, source, head, first, size):
    pairs, which = np.unique(np.stack([head, first], axis=1), axis=0, return_inverse=True)
    origins = pairs[:, 0], pairs[:, 1]
    if len(pairs) == 1 and problem.device.is_contiguous(source):  # one block alone need not be copied
        h, begin = (int(x) for x in pairs[0])
        return source[h : h + 1, begin : begin + size], which.reshape(-1), origins
    return problem.device.cut(source, *origins, size), which.reshape(-1), origins


def part_ranges(part, slip=None, half_unit=0.0):
    """Of the values of the rectangles' own keys; what rounding costs, unless given, is judged on the merged output."""
    device, first, last = part.device, part.key_head.min(), part.key_head.max() + 1
    report = device.empty((last - first, 3), np.float64)
    found = scan_array(device, part.element, part.v[first:last], 0, report)[:2]
    low, high = (device.empty((part.v.shape[0], part.v.shape[2]), part.element) for _ in range(2))
    for own, every in zip(found, (low, high), strict=True):  # of the blocks between, which other rectangles may have
        device.put(own, np.arange(last - first), np.arange(first, last), every)
    return Ranges(low, high, np.zeros(len(part.query_head)) if slip is None else slip, half_unit)


def gradient_blocks(seen, parts, array, name):
    """Where the gradients of the rectangles' q, k or v are added up, and what to add them to in the end."""
    source, sizes = getattr(seen, name), getattr(parts.problem, name).shape
    if parts.origins[name] is None:
        used = sizes[0] // source.shape[0] * sizes[1]
        return (array if used == source.shape[1] else array[:, :used]).reshape(sizes), (array, (), ())
    return seen.device.zeros(sizes, seen.element), (array, *parts.origins[name])
