"""What a mask leaves to be seen, as a tree of full rectangles: every query of one sees every key of it.

Query i of a segment sees the keys first .. end[i], and all that come before `start[i] <= end[i]` are seen by later
queries too (both rise with i). In blocks of b = LEAF, 2 LEAF, 4 LEAF, ... queries the second half of each pair of
blocks sees what the first half adds:

    queries h .. h + b      keys start[h - b] .. start[h]      h = b, 3 b, 5 b, ...

and all queries see first .. start[0]. What is left, start[leaf of i] .. end[i], is exact; so is every rectangle for
which low rank costs more.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LEAF = 256  # queries of the smallest blocks


@dataclass(frozen=True)
class Segment:
    """Consecutive queries that see a range of keys, or a growing part of it."""

    query: int  # the first
    first: int  # key
    start: np.ndarray  # of each query
    end: np.ndarray

    @property
    def rises(self):
        """Do some queries see more than others?"""
        return bool((self.start < self.end).any())

    @property
    def stop(self):
        return self.query + len(self.end)


class Rectangle(NamedTuple):
    query: int
    key: int
    queries: int
    keys: int
    whole: bool = False  # is it all of a segment, as many queries as keys, each at its own key?


def rectangles(segment):
    """The rectangles of a segment, small ones first."""
    n, start = len(segment.end), segment.start
    size = LEAF
    while size < n:
        for h in range(size, n, 2 * size):
            keys = int(start[h] - start[h - size])
            if keys:
                yield Rectangle(segment.query + h, int(start[h - size]), min(size, n - h), keys)
        size *= 2
    if n and start[0] > segment.first:
        keys = int(start[0]) - segment.first
        yield Rectangle(segment.query, segment.first, n, keys, n == keys and not segment.rises)


def leaf_spans(segment):
    """(n, 2): what is left of each query's keys when all rectangles are taken out."""
    n = len(segment.end)
    leaves = np.arange(n) // LEAF * LEAF
    return np.stack([np.minimum(segment.start[leaves], segment.end), segment.end], axis=1).astype(np.int32)


def divide(segments, n, worth):
    """(spans, rectangles, rest): keys of each of the n queries that are exact in one pass, rectangles for low rank, and
    rectangles that are exact too but do not border on the spans.

    `worth(queries, keys)` says whether low rank costs less.
    """
    spans = np.zeros((n, 2), np.int32)
    low, rest = [], []
    for segment in segments:
        own = spans[segment.query : segment.stop]
        own[:] = leaf_spans(segment)
        for rectangle in rectangles(segment):
            query, key, queries, keys, _ = rectangle
            if worth(queries, keys):
                low.append(rectangle)
                continue
            mine = spans[query : query + queries]
            if (mine[:, 0] == key + keys).all():
                mine[:, 0] = key
            else:
                rest.append(rectangle)
    return spans, low, rest
