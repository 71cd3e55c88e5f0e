"""Which temperature and which near field: trial fits on a few rows with the leading landmarks.

    the least of  loo_tf cost_f            over temperatures t and near fields f

loo is the leave-one-out error of a fit, cost what the near field makes a head cost, relative to none. A near field by
content is tried where single keys matter: where the mean over the uniform rows of their largest weight is large. Where
only few queries have keys of their own (needles), no uniform row may be one of them: the rows drawn by leverage tell,
and then choose once more. What a head chooses does not depend on the others of the call.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from . import content, landmarks, plan
from ._jit import cpu_kernel, cuda, cuda_kernel, serial_kernel, shared
from .core import fit
from .kernels.panel import covered
from .kernels.scalar import exp2
from .kernels.simd import padded
from .kernels.team import member, members, team_sum
from .products import features

TEMPERATURES = (
    1.0,
    0.8,
    0.6,
    0.45,
    0.3,
)  # at most 1: landmarks in the hull of the keys have exp(s q . S) <= sum_j exp(s q . k_j)
TRIAL_RANK = 64  # leading landmarks of the trial fits
_WIDER = (
    1.1  # a wider window must lower the error by this factor: it costs time, and more landmarks help without it too
)
# Least share of queries, by the weights of all rows, that give one tile of keys at least so much of their attention.
_RARE, _ONE_TILE = 1e-3, 0.25
_PEAKED = 1 / 36  # least mean of the rows' largest weights with which a content near field is tried
_OF_EXACT = 0.25  # of what exact attention costs: no rectangle is taken to cost less when near fields are compared
LEAST_BUCKETS = 16  # with fewer buckets of keys there is no near field by content

# --- bodies ---


@shared
def _halve(h, found, trial_rank, half):
    """Ranks of the trial fits and of a fit with half the landmarks.

    Where a near field holds everything no landmark stands for anything, and any one will do.
    """
    found[h] = max(found[h], 1)
    trial_rank[h] = min(found[h], TRIAL_RANK)
    half[h] = max(found[h] // 2, 1)


@shared
def _choose_trial(h, loo, fields, costs, tile, table, window, probes, temperature, judged):
    """The best of one head's trial fits: its place among all temperatures and all fits, near field and temperature.

    `loo (heads * temperatures, fields)`; `fields (fields, 2)` are windows and numbers of probes.
    """
    best = np.inf
    for t in range(len(TEMPERATURES)):
        place = h * len(TEMPERATURES) + t
        for f in range(fields.shape[0]):
            own = loo[place, f] * costs[f]
            if own < best or t + f == 0:
                best = own
                tile[h], table[h] = place, place * fields.shape[0] + f
                window[h], probes[h] = fields[f, 0], fields[f, 1]
                temperature[h] = TEMPERATURES[t]
    judged[h] = best


@shared
def _peak(columns, size):
    """The mean over the rows of the largest weight of a key in the pool, which holds each row's heaviest. By a team."""
    own = 0.0
    for i in range(member(), columns.shape[1], members()):
        largest = columns.dtype.type(0)
        for c in range(size):
            largest = max(largest, columns[c, i])
        own += np.float64(largest)
    return team_sum(own) / columns.shape[1]


@shared
def _rare(masses, lse, pi, n):
    """The share of the n queries that give so much of their attention to one tile of keys, from rows drawn with
    probabilities pi (Horvitz and Thompson 1952). By a team.
    """
    some = 0.0
    for i in range(member(), masses.shape[0], members()):
        largest = masses[i, 0]
        for t in range(masses.shape[1]):
            largest = max(largest, masses[i, t])
        if pi[i] > 0 and exp2(largest - lse[i]) >= _ONE_TILE:
            some += 1.0 / (pi[i] * n)
    return team_sum(some)


@shared
def _hide_near(columns, pool, size, bucket, heavy, probes, used, c):
    """No weight of a candidate on the rows that it is near to: what a near field holds needs no landmark. By a team."""
    for i in range(member(), columns.shape[1] if c < size else 0, members()):
        if covered(bucket[pool[c], 0], heavy, probes[i], used):
            columns[c, i] = 0


@shared
def _copy_columns(source, first, count, out):
    """`count` entries from `first` on, and zeros behind; by a team."""
    for c in range(member(), out.shape[0], members()):
        out[c] = source[first + c] if c < count else out.dtype.type(0)


# --- CPU drivers ---


@serial_kernel
def _halve_cpu(found, trial_rank, half):
    for h in range(len(found)):
        _halve(h, found, trial_rank, half)


@serial_kernel
def _choose_trial_cpu(loo, fields, costs, tile, table, window, probes, temperature, judged):
    for h in range(len(window)):
        _choose_trial(h, loo, fields, costs, tile, table, window, probes, temperature, judged)


@serial_kernel
def _peak_cpu(columns, size, peak):
    for h in range(len(peak)):
        peak[h] = _peak(columns[h], size[h])


@serial_kernel
def _rare_cpu(masses, lse, pi, n, share):
    for h in range(len(share)):
        share[h] = _rare(masses[h], lse[h], pi[h], n)


@cpu_kernel
def _hide_near_cpu(columns, pool, size, bucket, heavy, probes):
    heads, count = columns.shape[:2]
    for item in prange(heads * count):
        h, c = item // count, item % count
        _hide_near(columns[h], pool[h], size[h], bucket[h], heavy, probes[h], probes.shape[2], c)


@serial_kernel
def _copy_columns_cpu(source, first, count, out):
    for i in range(len(out)):
        _copy_columns(source[i], first, count, out[i])


# --- CUDA drivers: a thread per head; a team per head; a team per row ---


@cuda_kernel(32)
def _halve_cuda(found, trial_rank, half):
    for h in range(cuda.grid(1), len(found), cuda.gridsize(1)):
        _halve(h, found, trial_rank, half)


@cuda_kernel(32)
def _choose_trial_cuda(loo, fields, costs, tile, table, window, probes, temperature, judged):
    for h in range(cuda.grid(1), len(window), cuda.gridsize(1)):
        _choose_trial(h, loo, fields, costs, tile, table, window, probes, temperature, judged)


@cuda_kernel(128)
def _peak_cuda(columns, size, peak):
    h = cuda.blockIdx.x
    peak[h] = _peak(columns[h], size[h])


@cuda_kernel(128)
def _rare_cuda(masses, lse, pi, n, share):
    h = cuda.blockIdx.x
    share[h] = _rare(masses[h], lse[h], pi[h], n)


@cuda_kernel(128)
def _hide_near_cuda(columns, pool, size, bucket, heavy, probes):
    c, h = cuda.blockIdx.x, cuda.blockIdx.y
    _hide_near(columns[h], pool[h], size[h], bucket[h], heavy, probes[h], probes.shape[2], c)


@cuda_kernel(128)
def _copy_columns_cuda(source, first, count, out):
    i = cuda.blockIdx.x
    _copy_columns(source[i], first, count, out[i])


# --- stages ---


class Setting(NamedTuple):
    """What the trials of a rank have in common."""

    wished: Any  # `options.Fields`
    basis: Any  # of the projection
    far: Any  # what a fit is to match (`near.targets`)
    rank: int
    project: Any  # landmarks to their projection, or None


class Trial(NamedTuple):
    """The best trial fit of every head, and its landmarks."""

    keys: Any  # that the landmarks began as (heads, R)
    found: Any  # landmarks that were not redundant
    rank: Any  # landmarks of the trial fit
    half: Any  # half of the landmarks
    tiles: Any  # all landmarks at its temperature
    table: Any  # of the trial fit
    window: Any  # -1 for none
    probes: Any  # how many; 0 is no near field by content
    temperature: Any
    judged: Any  # error times cost
    row_leverage: Any  # (heads, rows of the trial)


class Known(NamedTuple):
    """What is known of the heads' keys by bucket, and of which heads."""

    buckets: Any  # `buckets.Buckets`, None where no head asks
    tried: np.ndarray  # (heads,) bool


def look(problem, heads, wished, pool):
    """The keys by bucket, where some head's uniform rows say that a near field by content is worth a try.

    `pool` is the landmarks' candidates, as `landmarks.choose` takes them. Waits for the device, if it must.
    """
    tried = peaked(problem, heads, wished, pool)
    return Known(content.by_bucket(problem, heads, pool, wished) if tried.any() else None, tried)


def peaked(problem, heads, wished, pool):
    """For which heads a near field by content is worth a try. Waits for the device, if it must."""
    device, (columns, _, size) = problem.device, pool
    if not _has_buckets(problem, wished):
        return np.zeros(len(heads), bool)
    if 0 not in wished.probes:
        return np.ones(len(heads), bool)
    peak = device.empty(len(size), np.float64)
    device.run(_peak_cpu, _peak_cuda, (len(size),), columns, size, peak)
    return device.download(peak) >= _PEAKED


def look_again(problem, heads, wished, pool, known, again):
    """The same for the heads `again` as well."""
    buckets = content.by_bucket(problem, heads, pool, wished) if known.buckets is None else known.buckets
    return Known(buckets, known.tried | again)


def _has_buckets(problem, wished):
    return wished.probes[-1] > 0 and problem.shape[1] >= LEAST_BUCKETS * wished.size_for(problem.shape[1])


def best_of(problem, heads, sample, pools, known, rows, weight, setting):
    """The best trial of every head, without a near field by content or with one, and for which heads that is so.

    Each has landmarks of its own, for what is near needs none: `pools` are their candidates, one after the other. On
    the rows (which, outputs, lse), of `weight`, or all alike if that is None. Waits for the device, if both are tried.
    """
    task, device = (rows, weight, setting), problem.device
    if known.buckets is None:
        return choose(problem, heads, sample, next(pools), None, *task), known.tried & False
    near = choose(problem, heads, sample, next(pools), known, *task)
    if 0 not in setting.wished.probes:
        return near, known.tried
    best = choose(problem, heads, sample, next(pools), None, *task)
    better = known.tried & (device.download(near.judged) < device.download(best.judged))
    return put(device, near, np.flatnonzero(better), best), better


def choose(problem, heads, sample, pool, known, rows, weight, setting):
    """Landmarks out of the `pool`, and every head's best trial fit, all with a near field by content or all without.

    The pool's columns are overwritten.
    """
    device, count, (which, exact, lse) = problem.device, len(TEMPERATURES), rows
    columns, candidates, size = pool
    _hide(problem, heads, sample.uniform, pool, known, setting.wished)
    keys, found = landmarks.choose(problem, heads, columns, candidates, size, setting.rank)
    rank, half = (device.empty((len(heads),), np.int64) for _ in range(2))
    device.run(_halve_cpu, _halve_cuda, (1,), found, rank, half)
    centres, mean = landmarks.refine(problem, heads, keys, found, landmarks.REFINE_FACTOR * setting.rank)
    tiles = landmarks.shrink(problem, heads, centres, mean, TEMPERATURES)
    tiles = tiles if setting.project is None else setting.project(tiles, count)
    target, fields = _targets(problem, heads, which, exact, lse, known, setting)
    costs = _costs(problem, fields, setting.wished, tiles.shape[1])
    leading = padded(min(TRIAL_RANK, tiles.shape[1]))
    short = columns_of(device, tiles.reshape(len(tiles), -1), 0, leading * tiles.shape[2])
    short = short.reshape(len(tiles), leading, tiles.shape[2])
    weight = device.repeat(device.upload(np.ones((1, which.shape[1]))), len(heads)) if weight is None else weight
    every = np.repeat(heads, count)
    which, lse, basis, target, exact, ranks, weight = (
        device.repeat(x, count) for x in (which, lse, setting.basis, target, exact, rank, weight)
    )
    features_of = features(problem, every, which, lse, short, ranks, basis)
    fits = fit(problem, every, features_of, target, exact, weight, ranks)
    tile, table, window, probes = (device.empty((len(heads),), np.int64) for _ in range(4))
    temperature, judged = (device.empty((len(heads),), np.float64) for _ in range(2))
    given = fits.loo, device.upload(np.array(fields)), device.upload(costs)
    device.run(_choose_trial_cpu, _choose_trial_cuda, (1,), *given, tile, table, window, probes, temperature, judged)
    own, left_out = (device.take(x.reshape(-1, *x.shape[2:]), table) for x in (fits.table, fits.row_leverage))
    return Trial(keys, found, rank, half, device.take(tiles, tile), own, window, probes, temperature, judged, left_out)


def _hide(problem, heads, which, pool, known, wished):
    """No weight in the pool's columns for what would be near to the rows `which` anyway."""
    if known is None:
        return
    device, (columns, candidates, size), buckets = problem.device, pool, known.buckets
    x, own = content.gather_rows(problem, problem.q, problem.query_heads(heads), which), np.arange(len(heads))
    least = next(p for p in wished.probes if p)
    found = content.probes(problem, x, device.upload(own), buckets, least)
    task = columns, candidates, size, buckets.bucket, buckets.heavy, found
    device.run(_hide_near_cpu, _hide_near_cuda, columns.shape[1::-1], *task)


def few_have_keys_of_their_own(problem, wished, asked, drawn):
    """For which heads the rows drawn by leverage say that few queries attend to keys that no uniform row told of.

    Heads that have `asked` are left out. `drawn` are these rows' masses, lse and probabilities. Waits for the device.
    """
    device, (masses, *_) = problem.device, drawn
    if not _has_buckets(problem, wished) or asked.all() or problem.merged:  # a rectangle has few tiles
        return np.zeros(len(masses), bool)
    share = device.empty(len(masses), np.float64)
    device.run(_rare_cpu, _rare_cuda, (len(masses),), *drawn, problem.shape[0], share)
    return (device.download(share) >= _RARE) & ~asked


def put(device, source, places, into):
    """The heads at `places` out of another trial, into this one."""
    for new, mine in zip(source, into, strict=True):
        if new.shape == mine.shape:  # the leverage is that of the trial's own rows
            device.put(new, places, places, mine)
    return into


def near_of(problem, heads, best, known, wished, room):
    """The near field by content of all queries, where a head has chosen one; its output lies in `room`, if not None."""
    if known.buckets is None or (problem.device.name == "cpu" and not best.probes.any()):
        return content.nothing(problem, len(heads))
    return content.near(problem, heads, known.buckets, best.probes, wished.probes[-1], room)


def _targets(problem, heads, which, exact, lse, known, setting):
    """What the fits are to match (heads, n, fields, E + 1), and the fields (window or -1, probes) in their order."""
    device, wished, far = problem.device, setting.wished, setting.far
    fields = [(w, p) for w, p in wished.pairs() if bool(p) == (known is not None)] or [(w, 0) for w in wished.windows]
    windows: dict = {}
    for w, p in fields:
        windows.setdefault(p, []).append(w or -1)
    around = {p: device.repeat(device.upload(np.array([w])), len(heads)) for p, w in windows.items()}
    kinds = [far(problem, heads, which, exact, lse, around[0], None)] if 0 in around else []
    choices = [p for p in around if p]
    for near in content.tried(problem, heads, which, known.buckets, choices) if choices else ():
        kinds.append(far(problem, heads, which, exact, lse, around[near.most], near.rows))
    target = device.concatenate([x.reshape(which.size, *x.shape[2:]) for x in kinds])
    return target.reshape(*which.shape, *target.shape[1:]), [(w, p) for p, own in windows.items() for w in own]


def _costs(problem, fields, near, rank):
    """What every near field makes a head cost, relative to none.

    Where the output is to be merged it is one of several parts, and what would be a better one is exact attention.
    """
    n, m, d, e = problem.shape
    without = plan.pda_flops(n, m, d, e, rank)
    if problem.merged:
        without = max(without, _OF_EXACT * plan.exact_flops(n, m, d, e))
    windows = sorted({w for w, _ in fields})
    return np.array(
        [_WIDER ** windows.index(w) * (1 + plan.content_flops(n, m, d, e, p, near) / without) for w, p in fields]
    )


def columns_of(device, source, first, count, width=None):
    """Columns first .. first + count of a matrix, and zeros up to `width`."""
    out = device.empty((len(source), count if width is None else width), source.dtype)
    device.run(_copy_columns_cpu, _copy_columns_cuda, (len(out),), source, first, count, out)
    return out
