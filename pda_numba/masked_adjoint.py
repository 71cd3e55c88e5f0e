"""The adjoint of attention under a mask (`masked`): every part by its own adjoint, with lse and g . out of the whole.

    a_ij = exp(s_ij - lse_i)      D_i = g_i . o_i      ds_ij = a_ij (g_i . v_j - D_i)

The softmax of a row is one, over all parts: what a part owes needs no more of the others than lse_i and D_i, so that
the merge itself has no adjoint. A row that is exact, or whose g is zero, has an infinite lse wherever it is not to
count, and then nothing that it sees is read.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .backward import Gradients, apart, backward, cotangents
from .dense import scatter_rows
from .kernels.team import member, members, team_max, team_sum
from .masked import compact_pairs, seen_problem
from .parts import blocks, gradient_blocks, layouts, part_ranges
from .rows_adjoint import rows_adjoint

# --- bodies, for a team ---


@shared
def _settle(given, out, lse, i, along, offset, quiet):
    """D_i, -D_i, and lse_i, infinite where g_i is zero."""
    total, some = 0.0, 0
    for e in range(member(), out.shape[1], members()):
        total += np.float64(given[i, e]) * np.float64(out[i, e]) if given[i, e] != 0 else 0.0
        some |= given[i, e] != 0
    total, some = team_sum(total), team_max(some)
    if member() == 0:
        along[i], offset[i] = total, -total
        quiet[i] = lse[i] if some else lse.dtype.type(np.inf)


@shared
def _list(which, count, quiet, parts, listed):
    """The lse of listed rows, infinite behind the list; these rows do not count in the parts."""
    for i in range(member(), which.shape[0], members()):
        listed[i] = quiet[which[i]] if i < count else listed.dtype.type(np.inf)
    for i in range(member(), count, members()):
        parts[which[i]] = np.inf


@shared
def _silence(lse):
    for i in range(member(), lse.shape[0], members()):
        lse[i] = np.inf


# --- drivers ---


@cpu_kernel
def _settle_cpu(place, given, out, lse, along, offset, quiet):
    heads, n = lse.shape
    for item in prange(heads * n):
        h, i = item // n, item % n
        _settle(given[place[h]], out[h], lse[h], i, along[h], offset[h], quiet[h])


@cuda_kernel(64)
def _settle_cuda(place, given, out, lse, along, offset, quiet):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    _settle(given[place[h]], out[h], lse[h], i, along[h], offset[h], quiet[h])


@cpu_kernel
def _list_cpu(which, count, exact, quiet, parts, listed):
    for h in prange(len(which)):
        _list(which[h], count[h], quiet[h], parts[h], listed[h])
        if exact[h]:
            _silence(parts[h])


@cuda_kernel(256)
def _list_cuda(which, count, exact, quiet, parts, listed):
    h = cuda.blockIdx.x
    _list(which[h], count[h], quiet[h], parts[h], listed[h])
    if exact[h]:
        _silence(parts[h])


# --- what is kept ---


@dataclass(frozen=True)
class Group:
    """Rectangles of one shape that were computed together."""

    shape: Any  # `parts.Shape`
    members: list  # (places of these heads, rectangle)
    low: np.ndarray  # which of them are of low rank
    parts: list  # `residuals.LowRank`, with their places as heads


@dataclass(frozen=True)
class Masked:
    """Some heads under a mask."""

    heads: np.ndarray
    out: Any  # (heads, N, E)
    lse: Any  # (heads, N)
    exact: np.ndarray  # which heads are exact as a whole
    which: Any  # exact rows of the others (heads, most), how many, and their outputs (heads, most, E)
    count: np.ndarray
    rows: Any
    groups: list

    def arrays(self):
        return {name: getattr(self, name) for name in ("out", "lse", "which", "rows")}

    def over(self, change):
        """With `change` made to every array but those of the groups."""
        return dataclasses.replace(self, **{name: change(x) for name, x in self.arrays().items()})

    @property
    def nbytes(self):
        own = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in self.arrays().values())
        return own + sum(part.nbytes for group in self.groups for part in group.parts)


def masked_residuals(whole, groups, exact):
    """What `masked_attention` leaves for the backward pass."""
    which, count, rows = exact
    groups = [Group(*group) for group in groups]
    fully = np.array([result.method == "exact" for result in whole.results])
    out = whole.problem.device.take(whole.out, np.asarray(whole.heads))
    return Masked(whole.heads, out, whole.lse, fully, which, np.where(fully, 0, count), rows, groups)


# --- stage ---


def masked_backward(problem, kept, mask, options, given, gradients):
    """Add the gradients of the heads of a `Masked` for `given (all heads, N, E)`."""
    device, heads = problem.device, kept.heads
    about, parts_lse, listed = _settled(device, kept, given)
    seen, own = seen_problem(problem, heads, mask), gradients
    if mask.compacts:
        own = Gradients(gradients.q, *(device.zeros(x.shape, problem.element) for x in (seen.k, seen.v)))
    leaves = _leaves(seen, kept, mask, options)
    lse = device.empty(kept.lse.shape, problem.element)
    device.put(parts_lse, np.flatnonzero(~kept.exact), np.flatnonzero(~kept.exact), lse)
    device.put(about.quiet, np.flatnonzero(kept.exact), np.flatnonzero(kept.exact), lse)
    for which in apart(problem, heads):
        cotangent = device.take(given, heads[which])
        rows_adjoint(leaves, heads[which], device.take(lse, which), device.take(about.offset, which), cotangent, own)
    counts = device.download(parts_lse) != np.inf
    for group in kept.groups:
        with device.scope():
            _rectangles(seen, kept, group, counts, about, parts_lse, given, own)
    _exact_rows(seen, kept, listed, given, own)
    if mask.compacts:
        _spread(problem, heads, mask, own, gradients)


@dataclass
class _About:
    along: Any
    offset: Any
    quiet: Any


def _settled(device, kept, given):
    """D, -D and lse of the rows; the lse of what counts in the parts; that of the exact rows."""
    along, offset, quiet = (device.empty(kept.lse.shape, kept.lse.dtype) for _ in range(3))
    grid = kept.lse.shape[::-1]
    place = device.upload(np.asarray(kept.heads))
    device.run(_settle_cpu, _settle_cuda, grid, place, given, kept.out, kept.lse, along, offset, quiet)
    parts, listed = device.take(quiet, np.arange(len(kept.heads))), device.empty(kept.which.shape, kept.lse.dtype)
    task = kept.which, device.upload(kept.count), device.upload(kept.exact.astype(np.int64)), quiet, parts, listed
    device.run(_list_cpu, _list_cuda, (len(kept.heads),), *task)
    return _About(along, offset, quiet), parts, listed


def _leaves(seen, kept, mask, options):
    """The problem whose spans are what was computed exactly in one pass."""
    found, pattern = layouts(seen, kept.heads, mask, options), mask.pattern.copy()
    spans = [layout.spans for layout in found]
    for p, layout in enumerate(found):
        pattern[kept.heads[layout.groups]] = p
    spans += [own.spans(seen.shape[0]) for own in mask.patterns]
    exact = kept.heads[kept.exact]
    pattern[exact] = len(found) + mask.pattern[exact]
    return dataclasses.replace(seen, spans=np.stack(spans), pattern=pattern)


def _rectangles(seen, kept, group, counts, about, parts_lse, given, gradients):
    """What the rectangles of a group owe, if any of their rows count: others may hold anything."""
    device, n = seen.device, group.shape[0]
    live = np.array([counts[list(places), r.query : r.query + n].any() for places, r in group.members])
    if not live.any():
        return
    parts = blocks(seen, kept.heads, group.members, group.shape)
    own, back = zip(*(gradient_blocks(seen, parts, x, name) for name, x in gradients._asdict().items()), strict=True)
    own, place, query = Gradients(*own), parts.place.reshape(-1), np.repeat(parts.query, group.shape[2])
    cut = [device.cut(x.reshape(*x.shape, 1), place, query, n) for x in (parts_lse, about.along, about.offset)]
    lse, along, offset = (parts.together(x.reshape(x.shape[:2])) for x in cut)
    cotangent = parts.together(device.cut(given, kept.heads[place], query, n))
    ranges = part_ranges(parts.problem)
    for part in group.parts:
        alive = np.flatnonzero(live[part.heads])
        for which in apart(parts.problem, part.heads[alive]):
            some = part.of(device, alive[which])
            whole = device.take(lse, some.heads), device.take(along, some.heads)
            backward(parts.problem, some, (ranges.low, ranges.high), cotangent, own, whole=whole)
    exact = np.flatnonzero(~group.low & live)
    for which in apart(parts.problem, exact):
        about_rows = *(device.take(x, exact[which]) for x in (lse, offset, cotangent)), own
        rows_adjoint(parts.problem, exact[which], *about_rows)
    for name, blocks_of, (array, head, first) in zip(own._fields, own, back, strict=True):
        blocks_of = parts.apart(blocks_of) if name == "q" and group.shape[2] > 1 else blocks_of
        for i in range(len(head)):
            device.add_rows(blocks_of[i], int(head[i]), int(first[i]), array)


def _exact_rows(seen, kept, listed, given, gradients):
    if kept.which.shape[1]:
        device, heads = seen.device, kept.heads
        offset, cotangent = cotangents(seen, heads, kept.which, listed, given, kept.rows)
        for which in apart(seen, heads):
            about = (device.take(x, which) for x in (listed, offset, cotangent))
            task = *about, gradients, device.take(kept.which, which)
            rows_adjoint(seen, heads[which], *task)


def _spread(problem, heads, mask, own, gradients):
    """The gradients of the keys that may be seen to their places among all."""
    device, (pairs, _) = problem.device, compact_pairs(problem, heads, mask)
    for i, (head, p) in enumerate(pairs):
        keys = mask.patterns[p].keys
        keys = np.arange(problem.shape[1]) if keys is None else keys
        which, place = device.upload(keys[None]), device.upload(np.array([head]))
        for source, target in ((own.k, gradients.k), (own.v, gradients.v)):
            scatter_rows(device, place, which, source[i : i + 1], target, distinct=True)
