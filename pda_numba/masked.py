"""Attention under a mask: exact leaves, low-rank or exact rectangles, merged; chosen rows exact; one certificate.

    leaves       start of the leaf .. end of each query's keys, exactly, in one pass              (`rows` with spans)
    rectangles   unmasked problems of their own, all of one shape together: low rank or exact     (`adaptive`)
    merged       by the log-sum-exp of every row                                                  (`merge`)

A rectangle is judged by its own rows and keys alone, all of which its queries may see: no output depends on a key that
it may not see, but for one decision. Where the certificate of the merged output is above `tol` the whole head is
computed exactly.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import certify, holdout, plan
from .adaptive import low_rank
from .merge import merge, place_lse, place_rows
from .rectangles import divide
from .results import HeadResult
from .rows import rows
from .scan import Ranges, scan_array

_SEED_STEP = 0x9E3779B97F4A7C15  # an odd number far from any simple fraction of 2^64 (Weyl): seeds of the levels


@dataclass
class Whole:
    """Some heads of a masked call, and their output so far."""

    problem: Any  # with the spans of all that may be seen
    heads: np.ndarray
    mask: Any
    options: Any
    out: Any  # (all heads, N, E)
    lse: Any  # (heads, N): log2 of every row's normaliser so far
    results: list
    clock: Any

    def patterns(self):
        """(pattern, places of the heads that have it) of each."""
        own = self.mask.pattern[self.heads]
        return [(self.mask.patterns[p], np.flatnonzero(own == p)) for p in np.unique(own)]


def masked_attention(problem, heads, mask, options, ranges, out, clock, judge, keep=None):
    """Fill `out (all heads, N, E)` for `heads`; returns a HeadResult each.

    `judge(problem, heads, out, n_rows, ranges)` is the certificate of an output; `keep`, if given, is told what the
    gradients need.
    """
    device, n = problem.device, problem.shape[0]
    lse = device.empty((len(heads), n), problem.element)
    reason = "asked for" if options.method == "exact" else "exact is cheaper"
    results = [HeadResult(method="exact", reason=reason, row_share=1.0) for _ in heads]
    seen = seen_problem(problem, heads, mask)
    whole = Whole(seen, heads, mask, options, out, lse, results, clock)
    layouts = [(places, divide(pattern.segments, n, worth(seen, options))) for pattern, places in whole.patterns()]
    _exact_leaves(whole, layouts)
    parts = []
    for low, which in ((True, 1), (False, 2)):
        for shape, members in _by_shape([(places, layout[which]) for places, layout in layouts]).items():
            parts += _rectangles(whole, shape, members, low, keep)
    exact = _exact_rows(whole)
    _certify(whole, ranges, judge)
    for (pattern, places), (_, layout) in zip(whole.patterns(), layouts, strict=True):
        _account(whole, pattern, places, layout)
    if keep:
        keep(whole, layouts, parts, exact)
    return results


# --- what is seen ---


def seen_problem(problem, heads, mask):
    """The problem with the spans of the mask; keys in between that nobody sees are taken out."""
    n = problem.shape[0]
    spans = np.stack([pattern.spans(n) for pattern in mask.patterns])
    problem = dataclasses.replace(problem, spans=spans, pattern=mask.pattern)
    return compacted(problem, heads, mask) if mask.compacts else problem


def compacted(problem, heads, mask):
    """The problem whose heads have keys and values of their own: those that may be seen, one behind the other."""
    pairs, which = compact_pairs(problem, heads, mask)
    index = np.zeros((len(pairs), problem.shape[1]), np.int64)
    for row, (_, p) in enumerate(pairs):
        keys = mask.patterns[p].keys
        keys = np.arange(problem.shape[1]) if keys is None else keys
        index[row, : len(keys)] = keys
        index[row, len(keys) :] = keys[0] if len(keys) else 0
    key_head = np.zeros_like(problem.key_head)
    key_head[heads] = which
    k, v = (problem.device.gather_rows(x, pairs[:, 0], index) for x in (problem.k, problem.v))
    return dataclasses.replace(problem, k=k, v=v, key_head=key_head)


def compact_pairs(problem, heads, mask):
    """(head of k, pattern) of every head, each pair once, and which of them each head has."""
    own = np.stack([problem.key_head[heads], mask.pattern[heads]], axis=1)
    pairs, which = np.unique(own, axis=0, return_inverse=True)
    return pairs, which.reshape(-1)


def worth(problem, options):
    """Does low rank pay for a rectangle? As a function of its queries and keys."""
    d, e = problem.shape[2:]
    return functools.cache(lambda queries, keys: bool(plan.decide(queries, keys, d, e, options)[1]))


# --- the parts ---


def _exact_leaves(whole, layouts):
    """Every query's leaf, and the rectangles that border on it and are exact; fills output and lse."""
    problem, heads = whole.problem, whole.heads
    spans, pattern = np.empty((len(layouts), problem.shape[0], 2), np.int32), np.zeros_like(problem.query_head)
    for p, (places, layout) in enumerate(layouts):
        spans[p], pattern[heads[places]] = layout[0], p
    own = dataclasses.replace(problem, spans=spans, pattern=pattern)
    with whole.clock.stage("exact"):
        runs = np.split(np.arange(len(heads)), np.flatnonzero(np.diff(heads) != 1) + 1)
        for run in runs:
            first, last = int(heads[run[0]]), int(heads[run[-1]])
            _, lse, _ = rows(own, heads[run], out=whole.out[first : last + 1])
            problem.device.put(lse, np.arange(len(run)), run, whole.lse)


def _by_shape(layouts):
    """{(queries, keys): [(place of a head, its rectangle), ...]}."""
    found: dict = {}
    for places, own in layouts:
        for rectangle in own:
            found.setdefault((rectangle.queries, rectangle.keys), []).extend((place, rectangle) for place in places)
    return {shape: sorted(members) for shape, members in found.items()}


@dataclass(frozen=True)
class Parts:
    """Rectangles of one shape as the heads of a problem of their own."""

    problem: Any
    place: np.ndarray  # of each one's head among the heads of the whole
    query: np.ndarray  # its first query, and key
    key: np.ndarray


def blocks(problem, heads, members, shape, level):
    """The `Parts` of rectangles [(place of a head, rectangle), ...] of one `shape (queries, keys)`."""
    place = np.array([place for place, _ in members])
    query, key = (np.array([getattr(r, name) for _, r in members]) for name in ("query", "key"))
    own = heads[place]
    q, query_head = _cut(problem, problem.q, problem.query_head[own], query, shape[0])
    (k, key_head), (v, _) = (_cut(problem, x, problem.key_head[own], key, shape[1]) for x in (problem.k, problem.v))
    seed = (problem.seed + level * _SEED_STEP) % 2**63
    rest = {"seed": seed, "spans": None, "pattern": None}
    part = dataclasses.replace(problem, q=q, k=k, v=v, query_head=query_head, key_head=key_head, **rest)
    return Parts(part, place, query, key)


def _cut(problem, source, head, first, size):
    """Blocks of `size` rows, and which of them each rectangle has: a view where they lie on a grid, else a copy."""
    n, columns = source.shape[1:]
    on_grid = not (first % size).any() and (n % size == 0 or source.shape[0] == 1)
    if on_grid and problem.device.is_contiguous(source):
        used = n // size
        whole = source if n % size == 0 else source[:, : used * size]
        return whole.reshape(source.shape[0] * used, size, columns), head * used + first // size
    pairs, which = np.unique(np.stack([head, first], axis=1), axis=0, return_inverse=True)
    return problem.device.cut(source, pairs[:, 0], pairs[:, 1], size), which.reshape(-1)


def _rectangles(whole, shape, members, low, keep):
    """Rectangles of one shape, some at a time, merged into the output; returns [(members, kept parts)] with `keep`."""
    d, e = whole.problem.shape[2:]
    element = whole.problem.element.itemsize
    own = dataclasses.replace(whole.options, window=0)
    ranks = plan.decide(*shape, d, e, own)[1] if low else ()
    memory = shape[0] * (e + 2) * element + (plan.head_workspace(*shape, d, e, ranks[-1], element) if ranks else 0)
    size, kept = max(1, int(whole.problem.device.group_bytes // memory)), []
    for first in range(0, len(members), size):
        some = members[first : first + size]
        found: list = []
        with whole.problem.device.scope():
            parts = blocks(whole.problem, whole.heads, some, shape, shape[0])
            done = np.zeros(len(some), bool)
            if ranks:
                done = _low_rank(whole, parts, own, ranks, found.append if keep else None)
            _exact_parts(whole, parts, np.flatnonzero(~done))
        kept.append((some, done, found))
    return kept


def _low_rank(whole, parts, options, ranks, keep):
    """The rectangles by low rank, merged; says of which this is so."""
    part, heads, clock = parts.problem, np.arange(len(parts.place)), whole.clock
    device, (n, _, _, e) = part.device, part.shape
    out, lse = device.empty((len(heads), n, e), part.element), device.empty((len(heads), n), part.element)
    results = low_rank(part, heads, options, ranks, _ranges(part), out, clock, keep, lse)
    done = np.array([result.method == "pda" for result in results])
    with clock.stage("merge"):
        _merge(whole, parts, heads, out, lse, done)
    for place, result in zip(parts.place, results, strict=True):
        _add(whole.results[place], result)
    return done


def _ranges(part):
    """Of the values of the rectangles' own keys. What rounding may cost is judged on the merged output."""
    report = part.device.empty((part.v.shape[0], 3), np.float64)
    low, high, _ = scan_array(part.device, part.element, part.v, 0, report)
    return Ranges(low, high, np.zeros(len(part.query_head)), 0.0)


def _exact_parts(whole, parts, which):
    """The rectangles `which`, exactly."""
    if len(which):
        with whole.clock.stage("exact"):
            out, lse, _ = rows(parts.problem, which)
            _merge(whole, parts, which, out, lse, np.ones(len(which), bool))


def _merge(whole, parts, which, out, lse, live):
    device, place = whole.problem.device, parts.place[which]
    own = (device.upload(x) for x in (live.astype(np.int64), whole.heads[place], place, parts.query[which]))
    merge(device, out, lse, *own, whole.out, whole.lse)


def _add(total, part):
    """What a rectangle was found to be, into its head's result."""
    if part.method == "pda":
        total.method = "pda"
        total.rank = max(total.rank, part.rank)
        total.effective_rank = max(total.effective_rank, part.effective_rank)
        total.leave_one_out = float(np.fmax(total.leave_one_out, part.leave_one_out))
        total.rectangles += 1
    total.flagged_rows += part.flagged_rows
    total.fallback_rows += part.fallback_rows
    total.flops += part.flops


def _exact_rows(whole):
    """The rows that are exact whatever the rest is; returns them as (rows, counts, lse)."""
    problem, device, count = whole.problem, whole.problem.device, len(whole.heads)
    lists = [(places, pattern.exact_rows) for pattern, places in whole.patterns()]
    low = [p for p in range(count) if whole.results[p].method == "pda"]
    longest = max((len(own) for places, own in lists if np.isin(places, low).any()), default=0)
    which, counts = np.zeros((count, longest), np.int64), np.zeros(count, np.int64)
    for places, own in lists:
        for p in np.intersect1d(places, low):
            which[p, : len(own)], counts[p] = own, len(own)
    which, used = device.upload(which), device.upload(counts)
    out = device.empty((count, longest, problem.shape[3]), problem.element)
    if not longest:
        return which, counts, out, device.empty((count, 0), problem.element)
    with whole.clock.stage("exact"):
        out, lse, _ = rows(problem, whole.heads, which, used=used)
        place_rows(device, which, used, device.upload(np.asarray(whole.heads)), out, whole.out)
        place_lse(device, which, used, device.upload(np.ones(count, np.int64)), lse, 0.0, whole.lse)
    return which, counts, out, lse


# --- the statement ---


def _certify(whole, ranges, judge):
    """The merged output's certificate; heads that do not keep `tol` are computed exactly."""
    problem, heads, options, results = whole.problem, whole.heads, whole.options, whole.results
    low = np.flatnonzero([result.method == "pda" for result in results])
    if len(low):
        with whole.clock.stage("certify"):
            judged = judge(problem, heads[low], whole.out, holdout.UNIFORM, ranges)
        for p, *row in zip(low, *judged, strict=True):
            r = results[p]
            r.error, r.error_limit, r.row_error, r.row_share, r.rows = row
            r.reason = f"{r.rectangles} rectangles by low rank, the rest exact"
            if options.tol and options.rank is None and options.method == "auto" and r.error_limit > options.tol:
                r.method, r.reason = "exact", "the merged output does not keep tol"
    again = [p for p in low if results[p].method == "exact"]
    with whole.clock.stage("exact"):
        for p in again:
            h = int(heads[p])
            _, lse, _ = rows(problem, heads[[p]], out=whole.out[h : h + 1])
            problem.device.put(lse, np.arange(1), np.array([p]), whole.lse)
    exact = np.flatnonzero([result.method == "exact" for result in results])
    sizes = np.sqrt(certify.sum_squares(problem, heads[exact], whole.out)) if ranges and len(exact) else ()
    for p, size in zip(exact, sizes, strict=False):
        r = results[p]
        r.rank = r.effective_rank = r.flagged_rows = r.fallback_rows = r.rectangles = 0
        r.row_share = 1.0
        r.error = r.error_limit = r.row_error = ranges.rounding(heads[p], problem.shape[0], size)


def _account(whole, pattern, places, layout):
    """Rows that are exact, rows without keys, and operations."""
    n, _, d, e = whole.problem.shape
    spans, low, rest = layout
    width = (spans[:, 1] - spans[:, 0]).clip(0).sum(dtype=np.int64) + sum(r.queries * r.keys for r in rest)
    every = sum(int((s.end - s.first).clip(0).sum(dtype=np.int64)) for s in pattern.segments)
    in_rectangle = np.zeros(n, bool)
    for r in low:
        in_rectangle[r.query : r.query + r.queries] = True
    empty = int((np.diff(pattern.spans(n))[:, 0] <= 0).sum())
    for p in places:
        result = whole.results[p]
        exact = result.method == "exact"
        result.rows = n if exact else n - int(in_rectangle.sum()) + int(in_rectangle[pattern.exact_rows].sum())
        result.empty_rows = empty
        result.flops += 2.0 * (every if exact else width) * (d + e)
