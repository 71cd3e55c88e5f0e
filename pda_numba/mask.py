"""Which keys a query may see: the caller's wishes, checked, as segments of queries (`rectangles`) for each batch entry.

Query i sees the first ends[i] keys of its sequence, those at j <= i + M - N if causal. Keys that nobody may see are
taken out first where they may lie anywhere (`key_mask`): what is left is a sequence of its own, in the same order.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _validate
from .rectangles import Segment

LAST_ROWS = 64  # queries at the end of a causal sequence that are always exact: the next token depends on them


@dataclass(frozen=True)
class Pattern:
    """What the queries of one batch entry see."""

    segments: tuple
    keys: np.ndarray | None  # the keys that may be seen; None: those of the problem
    exact_rows: np.ndarray  # queries that are exact whatever the rest is

    @property
    def rises(self):
        """Do some queries of a sequence see more than others?"""
        return any(segment.rises for segment in self.segments)

    def spans(self, n):
        """(n, 2): the keys of every query, among those that may be seen."""
        spans = np.zeros((n, 2), np.int32)
        for segment in self.segments:
            spans[segment.query : segment.stop, 0] = segment.first
            spans[segment.query : segment.stop, 1] = segment.end
        return spans


@dataclass(frozen=True)
class Mask:
    """The patterns of a call, and for every head which is its own."""

    patterns: tuple
    pattern: np.ndarray

    def seen(self, problem):
        """(key heads, M): 1 for the keys that some query may see; None where these are all."""
        m = problem.shape[1]
        seen = np.zeros((problem.k.shape[0], m), np.uint8)
        for p, pattern in enumerate(self.patterns):
            own = np.zeros(m, np.uint8)
            for segment in pattern.segments:
                last = int(segment.end.max(initial=segment.first))
                own[segment.first : last] = 1
            if pattern.keys is not None:
                own = np.isin(np.arange(m), pattern.keys[own[: len(pattern.keys)] != 0]).astype(np.uint8)
            heads = np.unique(problem.key_head[self.pattern == p])
            seen[heads] |= own
        return None if seen.all() else seen

    @property
    def compacts(self):
        """Are there keys in between that nobody sees?"""
        return any(pattern.keys is not None for pattern in self.patterns)


def check(masks, lead, n, m):
    """The `Mask` of a call whose output has the leading axes `lead`; None if every query sees every key.

    `masks` are the caller's causal, query_lengths, key_lengths, key_mask, cu_seqlens and exact_rows.
    """
    causal, query_lengths, key_lengths, key_mask, cu_seqlens, exact_rows = masks
    causal = _validate.flag("causal", causal)
    _not_together(cu_seqlens=cu_seqlens, query_lengths=query_lengths)
    _not_together(key_lengths=key_lengths, key_mask=key_mask, cu_seqlens=cu_seqlens)
    batch, rows = lead[:-1], None if exact_rows is None else _rows(exact_rows, n)
    if cu_seqlens is not None:
        queries, keys = _cu_seqlens(cu_seqlens, n, m)
        which, patterns = np.zeros(math.prod(batch), int), [_packed(causal, queries, keys, rows)]
    elif causal or rows is not None or not (query_lengths is key_lengths is key_mask is None):
        counts = _lengths("query_lengths", query_lengths, batch, n, "queries").reshape(-1, 1)
        lengths = _lengths("key_lengths", key_lengths, batch, m, "keys").reshape(-1, 1)
        seen = np.ones((len(lengths), 0), bool) if key_mask is None else _key_mask(key_mask, batch, m).reshape(-1, m)
        unique, which = np.unique(np.hstack([counts, lengths, seen]), axis=0, return_inverse=True)
        kept = [None if key_mask is None else np.flatnonzero(own[2:]) for own in unique]
        sizes = [(int(own[0]), int(own[1])) for own in unique]
        patterns = [_pattern(causal, n, m, own, rows, *size) for own, size in zip(kept, sizes, strict=True)]
    else:
        return None
    return Mask(tuple(patterns), np.repeat(which.reshape(-1), lead[-1] if lead else 1))


def _not_together(**given):
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{names[0]} and {names[1]} must not be given together")


def _pattern(causal, n, m, keys, rows, queries, length):
    """One sequence: the first `queries` of n; of m keys the `keys`, or the first `length`."""
    place = np.arange(queries) + m - n  # a query's own position among the keys
    if keys is not None:
        count, first, last = len(keys), np.searchsorted(keys, place), np.searchsorted(keys, place + 1)
    else:
        count, first, last = length, *(np.clip(x, 0, length) for x in (place, place + 1))
    if not causal:
        first = last = np.full(queries, count)
    segments: tuple = (Segment(0, 0, first, last),)
    if not causal and keys is None and n == m and 0 < length < queries:  # the padding's queries are fitted apart
        segments = tuple(Segment(a, 0, first[a:b], last[a:b]) for a, b in ((0, length), (length, queries)))
    rows = (_last_rows(segments[0]) if causal else np.empty(0, np.int64)) if rows is None else rows
    return Pattern(segments, None if keys is None or len(keys) == m else keys, rows)


def _packed(causal, queries, keys, rows):
    """Several sequences, one behind the other; each is causal by itself, its ends aligned."""
    segments = []
    for a, b, c, d in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        place = np.arange(b - a) + (d - c) - (b - a)
        first, last = (c + np.clip(x, 0, d - c) if causal else np.full(b - a, d) for x in (place, place + 1))
        segments.append(Segment(int(a), int(c), first, last))
    if rows is None:
        found = [_last_rows(segment) for segment in segments] if causal else []
        rows = np.concatenate([np.empty(0, np.int64), *found])
    return Pattern(tuple(segments), None, rows)


def _last_rows(segment):
    """The last queries that see a key more than those before them: padding behind them does not count."""
    grows = np.flatnonzero(np.diff(segment.end, prepend=segment.first) > 0)
    return segment.query + grows[-LAST_ROWS:]


# --- checks ---


def _integers(name, value):
    array = np.asarray(value)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    return array.astype(np.int64)


def _broadcast(name, array, batch, rest=()):
    try:
        return np.broadcast_to(array, (*batch, *rest))
    except ValueError:
        wanted = f"{(*batch, *rest)}, one entry for each batch entry" if batch else f"{(*batch, *rest)}"
        raise ValueError(f"{name} must broadcast to shape {wanted}, got {array.shape}") from None


def _lengths(name, given, batch, most, what):
    """One length per batch entry; all of it by default."""
    if given is None:
        return np.full(batch, most, np.int64)
    lengths = _broadcast(name, _integers(name, given), batch)
    if lengths.size and (lengths.min() < 0 or lengths.max() > most):
        worst = lengths.min() if lengths.min() < 0 else lengths.max()
        raise ValueError(f"{name} must be between 0 and the number of {what} {most}, got {worst}")
    return lengths


def _key_mask(key_mask, batch, m):
    array = np.asarray(key_mask)
    if array.dtype != np.bool_:
        raise TypeError(f"key_mask must be boolean (True: attend), got dtype {array.dtype}")
    return _broadcast("key_mask", array, batch, (m,))


def _cu_seqlens(given, n, m):
    """Cumulative lengths of queries and keys."""
    pair: Any = given if isinstance(given, tuple) else (given, given)
    if len(pair) != 2:
        raise ValueError(f"cu_seqlens must be an array or a pair (of queries, of keys), got {len(pair)} arrays")
    arrays = [_integers("cu_seqlens", x) for x in pair]
    for array, length, what in zip(arrays, (n, m), ("queries", "keys"), strict=True):
        if array.ndim != 1 or len(array) < 2:
            raise ValueError(f"cu_seqlens must have one axis and at least two entries, got shape {array.shape}")
        if array[0] != 0 or array[-1] != length or (np.diff(array) < 0).any():
            raise ValueError(
                f"cu_seqlens must rise from 0 to the number of {what} {length}, got {array[0]} .. {array[-1]}"
                + (", falling in between" if (np.diff(array) < 0).any() else "")
            )
    if len(arrays[0]) != len(arrays[1]):
        raise ValueError(
            f"cu_seqlens must have as many entries for queries as for keys, got {len(arrays[0])} and {len(arrays[1])}"
        )
    return arrays


def _rows(exact_rows, n):
    """Indices of queries, rising, each once."""
    if isinstance(exact_rows, slice):
        try:
            return np.sort(np.arange(n)[exact_rows])
        except TypeError:
            raise TypeError(f"exact_rows must be a slice of integers, got {exact_rows!r}") from None
    try:
        rows = _integers("exact_rows", exact_rows)
    except (TypeError, ValueError):
        raise TypeError(f"exact_rows must be a slice or indices of queries, got {exact_rows!r}") from None
    if rows.ndim != 1:
        raise TypeError(f"exact_rows must be a slice or indices of queries, got an array of shape {rows.shape}")
    if rows.size and (rows.min() < -n or rows.max() >= n):
        worst = rows.min() if rows.min() < -n else rows.max()
        raise ValueError(f"exact_rows must be between {-n} and {n - 1}, got {worst}")
    return np.unique(np.where(rows < 0, rows + n, rows))
