"""The compressed past: a low-rank model of what the recent queries see in it, with its heaviest keys kept as they are.

    exp(lse_i) [o_i, 1] = sum_h exp(s_ih) [v_h, 1]  +  E_i Z          i over queries, h over the heavy keys

The fit is `solve`'s, with targets that leave the heavy keys out: attention to keys that are few, heavy and anywhere
(the first token of a text, a separator) is no smooth function of the query, and costs little to keep. They are the
keys of largest sum_i exp(s_ih - lse_i)^2 over the uniform rows of the fit, looked for in the tiles where that is
largest.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from . import landmarks
from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .info import Clock
from .kernels.panel import TILE
from .kernels.score import place_query
from .kernels.team import barrier, member, members
from .leave_one_out import LEFT_ALONE
from .near import add_keys
from .options import options
from .products import features
from .results import HeadResult
from .solve import solve, uniform_part

_TILES, _TILE_SHARE = 32, 16  # the heavy keys are looked for in so many tiles, or in one for so many of them

# --- body ---


@shared
def _without_heavy(q, row, factor, keys, values, count, lse, exact, room, target):
    """[o, 1] less what the heavy keys hold of it, for one row by a team."""
    columns = exact.shape[0]
    place_query(room, q, row, factor)
    for e in range(member(), columns + 1, members()):
        target[e] = 0
    barrier()
    add_keys(keys, values, 0, count, lse, room, target)
    for e in range(member(), columns + 1, members()):
        target[e] = (exact[e] if e < columns else target.dtype.type(1)) - target[e]
    barrier()


# --- drivers: a team for some rows ---


@cpu_kernel
def _targets_cpu(q, query_head, which, factor, keys, values, count, lse, exact, room, target):
    heads, rows = which.shape
    for p in prange(len(room)):
        for item in range(p, heads * rows, len(room)):
            h, i = item // rows, item % rows
            task = which[h, i], factor, keys[h], values[h], count[h], lse[h, i], exact[h, i]
            _without_heavy(q[query_head[h]], *task, room[p], target[h, i])


@cuda_kernel(64)
def _targets_cuda(q, query_head, which, factor, keys, values, count, lse, exact, room, target):
    heads, rows = which.shape
    p = cuda.blockIdx.x
    for item in range(p, heads * rows, cuda.gridDim.x):
        h, i = item // rows, item % rows
        task = which[h, i], factor, keys[h], values[h], count[h], lse[h, i], exact[h, i]
        _without_heavy(q[query_head[h]], *task, room[p], target[h, i])


# --- stages ---


class Heavy(NamedTuple):
    """The heavy keys of some heads, widened."""

    k: Any  # (heads, H padded, D)
    v: Any  # (heads, H padded, E)
    count: Any  # (heads,) int64


class Past(NamedTuple):
    """What a fit leaves of the past for some heads, on the host."""

    tiles: Any  # (heads, R padded, D)
    table: Any  # (heads, R padded, columns)
    found: Any  # (heads,)
    heavy: Heavy
    leverage: Any  # (heads,): the largest of any fitted row when left out, relative to all of the past


def compress(problem, heads, rank, heavy_keys, seen=None):
    """Fit the heads' past, all keys of the `problem`, to all of its queries at one rank, beside so many heavy keys.

    Returns the `Past` and the rows it computed exactly, which a call at a higher rank may have as `seen`.
    """
    device, clock = problem.device, Clock()
    results = {h: HeadResult() for h in heads}
    sample = uniform_part(problem, heads, seen, rank, results, clock)
    heavy = _heaviest(problem, heads, sample, heavy_keys)

    def far(problem, heads, which, exact, lse, windows, near):
        return _targets(problem, heads, which, exact, lse, heavy)

    n, m, dim, _ = problem.shape
    chosen = options(rank, None, 0, "auto", None, "pda", n=n, m=m, d=dim)
    solved = solve(problem, heads, sample, chosen, rank, results, clock, slope=False, far=far)
    fitted = device.download(solved.row_leverage)
    largest = np.where(fitted < LEFT_ALONE, fitted, 0).max(axis=1)
    tiles, table, found = (device.download(x) for x in (solved.tiles, solved.table, solved.found))
    kept = Heavy(*(device.download(x) for x in heavy))
    return Past(tiles, table, found, kept, largest), solved.sample


def _heaviest(problem, heads, sample, wanted):
    device, tiles = problem.device, max(_TILES, wanted // _TILE_SHARE)
    mass, lse = device.download(sample.masses), device.download(sample.uniform_lse)
    share = np.square(np.exp2(mass - lse[:, :, None])).sum(axis=1)  # (heads, tiles)
    tiles = np.sort(np.argsort(-share, axis=1, kind="stable")[:, :tiles], axis=1)
    keys = (tiles[:, :, None] * TILE + np.arange(TILE)).reshape(len(heads), -1)
    size = (keys < problem.shape[1]).sum(axis=1)  # only the last tile may be short
    keys = np.minimum(keys, problem.shape[1] - 1)
    whole = device.upload(size)
    gathered = landmarks.gather(problem, heads, device.upload(keys), whole)
    none = device.empty((len(heads), 0, problem.shape[2]), problem.element)
    weights = features(problem, heads, sample.uniform, sample.uniform_lse, gathered, whole, none)
    held = np.square(device.download(weights)).sum(axis=2)[:, : keys.shape[1]]
    held[np.arange(keys.shape[1]) >= size[:, None]] = -1
    best = np.sort(np.argsort(-held, axis=1, kind="stable")[:, : min(wanted, size.min())], axis=1)
    which = device.upload(np.take_along_axis(keys, best, axis=1))
    count = device.upload(np.full(len(heads), which.shape[1]))
    values = landmarks.gather(problem, heads, which, count, source=problem.v)
    return Heavy(landmarks.gather(problem, heads, which, count), values, count)


def _targets(problem, heads, which, exact, lse, heavy):
    """What is left of [o_i, 1] without the heavy keys: (heads, n, 1, E + 1)."""
    device, pieces = problem.device, min(which.size, problem.device.pieces)
    target = device.empty((*which.shape, problem.shape[3] + 1), problem.element)
    room = device.empty((pieces, 3, max(problem.shape[2], TILE)), problem.element)
    task = which, problem.factor, *heavy, lse, exact, room, target
    device.run(_targets_cpu, _targets_cuda, (pieces,), problem.q, problem.query_heads(heads), *task)
    return target.reshape(*which.shape, 1, problem.shape[3] + 1)
