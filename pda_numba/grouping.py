"""Rows listed by the group that each belongs to, in their order: a counting sort.

    counts_cg = rows of piece c in group g      start_g = sum_{g' < g} ceil(n_g' / unit) unit

A list begins at a multiple of `unit` entries, so that a run of `unit` entries holds rows of one group alone: such a run
is what one block of a kernel works on. Rows with a negative group are in no list.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, serial_kernel, shared
from .kernels.team import member, members, part, sum_before, team_sum

RUN = 64  # entries of a run: one block of the GPU, some panels of the CPU
_PIECE = 8192  # rows that one thread counts, at least
_MOST_PIECES = {"cpu": 8, "cuda": 256}

# --- bodies ---


@shared
def _count_piece(group, column, start, stop, counts):
    for i in range(start, stop):
        g = group[i, column]
        if g >= 0:
            counts[g] += 1


@shared
def _lay_out(counts, unit, start, size):
    """The lists' places; `counts (pieces, groups)` become the places where each piece's rows go. By a team."""
    first, last = part(size.shape[0])
    own = 0
    for g in range(first, last):
        total = 0
        for c in range(counts.shape[0]):
            total += counts[c, g]
        size[g] = total
        own += (total + unit - 1) // unit * unit
    place = sum_before(own)
    for g in range(first, last):
        start[g] = place
        own_place = place
        for c in range(counts.shape[0]):
            count = counts[c, g]
            counts[c, g] = own_place
            own_place += count
        place += (size[g] + unit - 1) // unit * unit
    total = team_sum(own)
    if member() == 0:
        start[size.shape[0]] = total


@shared
def _fill_piece(group, column, start, stop, counts, entries):
    for i in range(start, stop):
        g = group[i, column]
        if g >= 0:
            entries[counts[g]] = i
            counts[g] += 1


@shared
def _fill_runs(start, size, unit, entries, owner, used):
    """Whose the runs are and how many rows they hold, if that is wanted; -1 where a list has no row. By a team."""
    groups, runs = size.shape[0], owner.shape[0]
    for g in range(member(), groups, members()):
        for i in range(start[g] + size[g], start[g + 1]):
            entries[i] = -1
        for r in range(start[g] // unit, min(start[g + 1] // unit, runs)):
            owner[r] = g
            used[r] = min(unit, start[g] + size[g] - r * unit)
    for i in range(start[groups] + member(), entries.shape[0], members()):
        entries[i] = -1
    for r in range(start[groups] // unit + member(), runs, members()):
        owner[r] = 0
        used[r] = 0


# --- drivers: a thread for each piece; a team per head ---


@cpu_kernel
def _count_cpu(group, column, piece, counts):
    heads, pieces = counts.shape[:2]
    for item in prange(heads * pieces):
        h, c = item // pieces, item % pieces
        _count_piece(group[h], column, c * piece, min(group.shape[1], (c + 1) * piece), counts[h, c])


@serial_kernel
def _lay_out_cpu(counts, unit, start, size):
    for h in range(len(size)):
        _lay_out(counts[h], unit, start[h], size[h])


@cpu_kernel
def _fill_cpu(group, column, piece, counts, entries):
    heads, pieces = counts.shape[:2]
    for item in prange(heads * pieces):
        h, c = item // pieces, item % pieces
        _fill_piece(group[h], column, c * piece, min(group.shape[1], (c + 1) * piece), counts[h, c], entries[h])


@serial_kernel
def _fill_runs_cpu(start, size, unit, entries, owner, used):
    for h in range(len(size)):
        _fill_runs(start[h], size[h], unit, entries[h], owner[h], used[h])


@cuda_kernel(1)
def _count_cuda(group, column, piece, counts):
    c, h = cuda.blockIdx.x, cuda.blockIdx.y
    _count_piece(group[h], column, c * piece, min(group.shape[1], (c + 1) * piece), counts[h, c])


@cuda_kernel(512)
def _lay_out_cuda(counts, unit, start, size):
    h = cuda.blockIdx.x
    _lay_out(counts[h], unit, start[h], size[h])


@cuda_kernel(1)
def _fill_cuda(group, column, piece, counts, entries):
    c, h = cuda.blockIdx.x, cuda.blockIdx.y
    _fill_piece(group[h], column, c * piece, min(group.shape[1], (c + 1) * piece), counts[h, c], entries[h])


@cuda_kernel(512)
def _fill_runs_cuda(start, size, unit, entries, owner, used):
    h = cuda.blockIdx.x
    _fill_runs(start[h], size[h], unit, entries[h], owner[h], used[h])


# --- stage ---


class Lists(NamedTuple):
    """The rows of every group of some heads."""

    entries: Any  # (heads, slots) int64: rows, -1 where there is none
    start: Any  # (heads, groups + 1) int64: where each list begins
    size: Any  # (heads, groups) int64
    owner: Any  # (heads, runs) int64: the group of each run; no runs where the unit is 1
    used: Any  # (heads, runs) int64: rows of each run


def list_groups(device, group, column, groups, unit=RUN):
    """The `Lists` of rows by group[h, i, column], of `group (heads, n, columns)`, out of so many groups."""
    heads, n = group.shape[:2]
    pieces = max(1, min(_MOST_PIECES[device.name], n // _PIECE))
    piece = -(-n // pieces)
    counts = device.zeros((heads, pieces, groups), np.int64)
    start, size = device.empty((heads, groups + 1), np.int64), device.empty((heads, groups), np.int64)
    device.run(_count_cpu, _count_cuda, (pieces, heads), group, column, piece, counts)
    device.run(_lay_out_cpu, _lay_out_cuda, (heads,), counts, unit, start, size)
    if device.name == "cpu":
        slots = int(start[:, -1].max())
    else:  # no more than this, whatever the groups are
        slots = (n // unit + min(n, groups) + 1) * unit if unit > 1 else n
    entries = device.empty((heads, slots), np.int64)
    owner, used = (device.empty((heads, slots // unit if unit > 1 else 0), np.int64) for _ in range(2))
    device.run(_fill_cpu, _fill_cuda, (pieces, heads), group, column, piece, counts, entries)
    device.run(_fill_runs_cpu, _fill_runs_cuda, (heads,), start, size, unit, entries, owner, used)
    return Lists(entries, start, size, owner, used)
