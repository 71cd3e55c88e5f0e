"""Attention under a mask: exact leaves, low-rank or exact rectangles, merged; chosen rows exact; one certificate.

    leaves       start of the leaf .. end of each query's keys, exactly, in one pass              (`rows` with spans)
    rectangles   unmasked problems of their own, all of one shape together: low rank or exact     (`adaptive`)
    merged       by the log-sum-exp of every row                                                  (`merge`)

A rectangle is judged by its own rows and keys alone, all of which its queries may see: no output depends on a key that
it may not see, but for one decision. Where the certificate of the merged output is above `tol` the whole head is
computed exactly.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import certify, plan
from .adaptive import low_rank
from .finish import Beside
from .merge import clear_around, merge, place_lse, place_rows
from .parts import blocks, by_shape, layouts, part_ranges
from .results import HeadResult
from .rows import rows

# Uniform rows of the certificate, with half as many by leverage. It knows nothing of what fits say of their own rows:
# with 128 the limit held in 88 % of 84 runs of all kinds, with 256 in 95 %.
_UNIFORM = 320


@dataclass
class Whole:
    """Some heads of a masked call, and their output so far."""

    problem: Any  # with the spans of all that may be seen
    heads: np.ndarray
    mask: Any
    options: Any
    out: Any  # (all heads, N, E)
    lse: Any  # (heads, N): log2 of every row's normaliser so far
    leverage: Any  # (heads, N): where errors may be, 0 where all is exact
    results: list
    judged: np.ndarray  # (heads,) bool: heads that are one rectangle of low rank, certified as such
    ranges: Any
    clock: Any
    blank: bool  # the output is 0 where nothing has been written


def masked_attention(problem, heads, mask, options, ranges, out, clock, judge, keep=None, blank=False):
    """Fill `out (all heads, N, E)` for `heads`; returns a HeadResult each.

    `judge(problem, heads, out, n_rows, ranges, leverage)` is the certificate of an output; `keep`, if given, is told
    what the gradients need. `blank` says that `out` is 0.
    """
    device, n = problem.device, problem.shape[0]
    lse = device.empty((len(heads), n), problem.element)
    reason = "asked for" if options.method == "exact" else "exact is cheaper"
    results = [HeadResult(method="exact", reason=reason, row_share=1.0) for _ in heads]
    seen = seen_problem(problem, heads, mask)
    leverage, judged = device.zeros(lse.shape, lse.dtype), np.zeros(len(heads), bool)
    whole = Whole(seen, heads, mask, options, out, lse, leverage, results, judged, ranges, clock, blank)
    found, kept = layouts(seen, heads, mask, options), []
    _exact_leaves(whole, found)
    for which in ("low", "rest"):
        for shape, members in by_shape(found, which).items():
            kept += _rectangles(whole, shape, members, which == "low", keep)
    exact = _exact_rows(whole, found)
    _certify(whole, judge)
    for layout in found:
        _account(whole, layout)
    if keep:
        keep(whole, kept, exact)
    return results


# --- what is seen ---


def seen_problem(problem, heads, mask):
    """The problem with the spans of the mask; keys in between that nobody sees are taken out."""
    used, own = np.unique(mask.pattern[heads], return_inverse=True)
    pattern = np.zeros_like(mask.pattern)
    pattern[heads] = own.reshape(-1)
    spans = np.stack([mask.patterns[p].spans(problem.shape[0]) for p in used])
    problem = dataclasses.replace(problem, spans=spans, pattern=pattern)
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


# --- the parts ---


def _lists(own):
    """Lists of rows as one array (lists, the longest's length), and how long they are."""
    counts = np.array([len(rows) for rows in own], np.int64)
    which = np.zeros((len(own), counts.max(initial=0)), np.int64)
    for row, listed in zip(which, own, strict=True):
        row[: len(listed)] = listed
    return which, counts


def _exact_leaves(whole, found):
    """Every query's leaf, and the rectangles that border on it and are exact; fills output and lse."""
    problem, heads = whole.problem, whole.heads
    spans, pattern = np.stack([layout.spans for layout in found]), np.zeros_like(problem.query_head)
    for p, layout in enumerate(found):
        pattern[heads[layout.groups]] = p
    own = dataclasses.replace(problem, spans=spans, pattern=pattern)
    alone = {int(p): layout for layout in found if layout.alone for p in layout.groups.reshape(-1)}
    some = np.array([p for p in range(len(heads)) if p not in alone], int)
    with whole.clock.stage("exact"):
        for run in np.split(some, np.flatnonzero(np.diff(heads[some]) != 1) + 1) if len(some) else ():
            first, last = int(heads[run[0]]), int(heads[run[-1]])
            _, lse, _ = rows(own, heads[run], out=whole.out[first : last + 1])
            problem.device.put(lse, np.arange(len(run)), run, whole.lse)
        if alone:
            _around(whole, own, alone)


def _around(whole, problem, alone):
    """Heads whose low rank is one rectangle: no weight before it comes; the rows around it exact, 0 without keys."""
    device, n, places = problem.device, problem.shape[0], np.array(list(alone))
    lowest = device.upload(np.full((1, n), -np.inf, problem.element))
    device.put(lowest, np.zeros(len(alone), int), places, whole.lse)
    first, stop = np.array([(r.query, r.query + r.queries) for r in (layout.low[0] for layout in alone.values())]).T
    heads, begin, end = whole.heads[places], device.upload(first.copy()), device.upload(stop.copy())
    if not whole.blank:
        clear_around(device, device.upload(heads), begin, end, whole.out)
    seen = [np.flatnonzero(layout.spans[:, 0] < layout.spans[:, 1]) for layout in alone.values()]
    which, counts = _lists([rows[(rows < a) | (rows >= b)] for rows, a, b in zip(seen, first, stop, strict=True)])
    if which.size:
        rows(problem, heads, device.upload(which), used=device.upload(counts), place=whole.out)


def _rectangles(whole, shape, members, low, keep):
    """Rectangles of one shape, some at a time, merged; returns [(shape, members, which are low rank, kept parts)]."""
    d, e = whole.problem.shape[2:]
    element = whole.problem.element.itemsize
    near = whole.options.near
    own = whole.options if shape.whole else dataclasses.replace(whole.options, near=near.without_windows())
    n, m = shape.queries * shape.group, shape.keys  # of a group's queries together
    ranks = plan.decide(n, m, d, e, own)[1] if low else ()
    memory = n * (e + 2) * element + (plan.head_workspace(n, m, d, e, ranks[-1], element) if ranks else 0)
    size, kept = max(1, int(whole.problem.device.group_bytes // memory)), []
    for first in range(0, len(members), size):
        some = members[first : first + size]
        found: list = []
        with whole.problem.device.scope():
            parts = blocks(whole.problem, whole.heads, some, shape)
            done = np.zeros(len(some), bool)
            if ranks:
                hold = keep and (lambda part, found=found: found.append(part.over(whole.problem.device.hold)))
                done = _low_rank(whole, parts, own, ranks, hold, shape.alone)
            _exact_parts(whole, parts, np.flatnonzero(~done))
        kept.append((shape, some, done, found))
    return kept


def _low_rank(whole, parts, options, ranks, keep, alone):
    """The rectangles by low rank, merged; says of which this is so. One that is `alone` is all of its head's output."""
    part, heads, clock = parts.problem, np.arange(len(parts.place)), whole.clock
    device, (n, _, _, e) = part.device, part.shape
    in_place = alone and len(heads) == 1  # nothing to merge with, and all rows of the output side by side
    out = _own_rows(whole, parts) if in_place else device.empty((len(heads), n, e), part.element)
    beside = Beside(*(device.zeros((len(heads), n), part.element) for _ in range(2)))
    own = whole.heads[parts.place[:, 0]]
    ranges = part_ranges(part, whole.ranges.slip[own], whole.ranges.half_unit) if alone else part_ranges(part)
    results = low_rank(part, heads, options, ranks, ranges, out, clock, keep, beside, alone)
    done = np.array([result.method == "pda" for result in results])
    with clock.stage("merge"):
        if in_place:
            _put_lse(whole, parts, done, beside.lse)
        else:
            _merge(whole, parts, heads, out, *beside, done)
    for places, result in zip(parts.place, results, strict=True):
        for place in places:
            _add(whole.results[place], result, len(places))
            if alone and result.method == "pda":
                _state(whole.results[place], result)
                whole.judged[place] = True
    return done


def _own_rows(whole, parts):
    """The rows of the output that are those of the only part."""
    head, first = int(whole.heads[parts.place[0, 0]]), int(parts.query[0])
    return whole.out[head : head + 1, first : first + parts.problem.shape[0]]


def _put_lse(whole, parts, done, lse):
    """The normalisers of the only part, if it was done."""
    device, place = whole.problem.device, int(parts.place[0, 0])
    which = device.upload(np.arange(lse.shape[1])[None] + parts.query[0])
    count, live = (device.upload(x.astype(np.int64)) for x in (np.full(1, lse.shape[1]), done))
    place_lse(device, which, count, live, lse, 0.0, whole.lse[place : place + 1])


def _state(total, part):
    """The error statement of a rectangle, which is that of its head."""
    for name in ("error", "error_limit", "row_error", "row_share", "rows", "reason"):
        setattr(total, name, getattr(part, name))


def _exact_parts(whole, parts, which):
    """The rectangles `which`, exactly."""
    if len(which):
        with whole.clock.stage("exact"):
            out, lse, _ = rows(parts.problem, which)
            nowhere = whole.problem.device.zeros(lse.shape, lse.dtype)
            _merge(whole, parts, which, out, lse, nowhere, np.ones(len(which), bool))


def _merge(whole, parts, which, out, lse, leverage, live):
    """The rectangles `which` into the output, each head of a group by itself."""
    device, group = whole.problem.device, parts.place.shape[1]
    place, live, query = parts.place[which].reshape(-1), np.repeat(live, group), np.repeat(parts.query[which], group)
    own = [device.upload(x) for x in (live.astype(np.int64), whole.heads[place], place, query)]
    task = *(parts.apart(x) for x in (out, lse, leverage)), *own, whole.out, whole.lse, whole.leverage
    merge(device, *task)


def _add(total, part, group):
    """What a rectangle was found to be, into the result of one head of the group."""
    if part.method == "pda":
        total.method = "pda"
        total.rank = max(total.rank, part.rank)
        total.effective_rank = max(total.effective_rank, part.effective_rank)
        total.leave_one_out = float(np.fmax(total.leave_one_out, part.leave_one_out))
        total.window, total.probes = max(total.window, part.window), max(total.probes, part.probes)
        total.rectangles += 1
    total.flagged_rows += part.flagged_rows
    total.fallback_rows += part.fallback_rows
    total.flops += part.flops / group


def _exact_rows(whole, found):
    """The rows that are exact whatever the rest is; returns them, how many they are, and their outputs."""
    problem, device, count = whole.problem, whole.problem.device, len(whole.heads)
    wanted = {int(p): layout.pattern.exact_rows for layout in found for p in layout.groups.reshape(-1)}
    which, counts = _lists([wanted[p] if whole.results[p].method == "pda" else () for p in range(count)])
    which, used = device.upload(which), device.upload(counts)
    out = device.empty((*which.shape, problem.shape[3]), problem.element)
    if not which.size:
        return which, counts, out
    with whole.clock.stage("exact"):
        out, lse, _ = rows(problem, whole.heads, which, used=used)
        place_rows(device, which, used, device.upload(np.asarray(whole.heads)), out, whole.out)
        every, nowhere = device.upload(np.ones(count, np.int64)), device.zeros(lse.shape, lse.dtype)
        place_lse(device, which, used, every, lse, 0.0, whole.lse)
        place_lse(device, which, used, every, nowhere, 0.0, whole.leverage)
    return which, counts, out


# --- the statement ---


def _certify(whole, judge):
    """The merged output's certificate; heads that do not keep `tol` are computed exactly."""
    problem, heads, options, results, ranges = whole.problem, whole.heads, whole.options, whole.results, whole.ranges
    low = np.flatnonzero([result.method == "pda" for result in results] & ~whole.judged)
    if len(low):
        with whole.clock.stage("certify"):
            leverage = problem.device.take(whole.leverage, low)
            judged = judge(problem, heads[low], whole.out, _UNIFORM, ranges, leverage)
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
        r.rank = r.effective_rank = r.window = r.probes = r.flagged_rows = r.fallback_rows = r.rectangles = 0
        r.row_share = 1.0
        r.error = r.error_limit = r.row_error = ranges.rounding(heads[p], problem.shape[0], size)


def _account(whole, layout):
    """Rows that are exact, rows without keys, and operations."""
    n, _, d, e = whole.problem.shape
    pattern, spans, low, rest = layout.pattern, layout.spans, layout.low, layout.rest
    width = (spans[:, 1] - spans[:, 0]).clip(0).sum(dtype=np.int64) + sum(r.queries * r.keys for r in rest)
    every = sum(int((s.end - s.first).clip(0).sum(dtype=np.int64)) for s in pattern.segments)
    in_rectangle = np.zeros(n, bool)
    for r in low:
        in_rectangle[r.query : r.query + r.queries] = True
    empty = int((np.diff(pattern.spans(n))[:, 0] <= 0).sum())
    for p in layout.groups.reshape(-1):
        result = whole.results[p]
        exact = result.method == "exact"
        around = n - int(in_rectangle.sum()) + int(in_rectangle[pattern.exact_rows].sum())
        result.rows = n if exact else min(n, around + (result.rows if whole.judged[p] else 0))
        result.empty_rows = empty
        result.flops += 2.0 * (every if exact else width) * (d + e)
