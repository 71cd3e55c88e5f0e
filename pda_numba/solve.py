"""The fit at one rank: uniform rows, landmarks, temperature and near field, leverage rows, the final fit.

Landmarks are moved towards the mean of the keys, S = mean + c (C - mean). The temperature c flattens the features
exp(s q . S): what is left of attention without the near field is smooth, and flat features span it far better than
those of the keys themselves. c and the near field are chosen together, by the leave-one-out error of a trial fit on the
uniform rows with the leading landmarks, times what the near field makes a head cost. The same trial fit gives the
leverage by which the other rows are drawn.

A near field by content is tried where single keys matter: where the mean over the uniform rows of their largest weight
says that as many keys as its smallest choice holds may have a part in the output. Where only few queries have keys of
their own (needles), no uniform row may be one of them: the rows drawn by leverage tell, and then choose once more.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import content, draw, landmarks, plan
from ._jit import cuda, cuda_kernel, serial_kernel, shared
from .apply import apply
from .core import LEVERAGE_COLUMNS, fit
from .kernels.scalar import exp2
from .kernels.simd import padded
from .kernels.team import member, members, team_sum
from .near import targets
from .products import features
from .project import head_bases
from .results import count_rows
from .rows import rows
from .sample import Sample, candidates, draw_by_leverage

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
_PEAKED = 0.25  # least product of the mean largest weight with the keys of a small content near field that is tried
_LEAST_ERROR = 1e-300
LEAST_BUCKETS = 16  # with fewer buckets of keys there is no near field by content

# --- bodies ---


@shared
def _halve(h, found, trial_rank, half):
    """Ranks of the trial fits and of a fit with half the landmarks."""
    trial_rank[h] = min(found[h], TRIAL_RANK)
    half[h] = max(found[h] // 2, 1)


@shared
def _choose_trial(h, loo, fields, costs, tile, table, window, probes, temperature):
    """The best of one head's trial fits: its place among all temperatures and all fits, near field and temperature.

    `loo (heads * temperatures, fields)`; `fields (fields, 2)` are windows and numbers of probes.
    """
    best = np.inf
    for t in range(len(TEMPERATURES)):
        place = h * len(TEMPERATURES) + t
        for f in range(fields.shape[0]):
            judged = loo[place, f] * costs[f]
            if judged < best or t + f == 0:
                best = judged
                tile[h], table[h] = place, place * fields.shape[0] + f
                window[h], probes[h] = fields[f, 0], fields[f, 1]
                temperature[h] = TEMPERATURES[t]


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
def _fall(h, half, full, slope):
    """log2 of the fall of the error from half the rank."""
    slope[h] = math.log2(max(half[h, 0], _LEAST_ERROR) / max(full[h, 0], _LEAST_ERROR))


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
def _choose_trial_cpu(loo, fields, costs, tile, table, window, probes, temperature):
    for h in range(len(window)):
        _choose_trial(h, loo, fields, costs, tile, table, window, probes, temperature)


@serial_kernel
def _peak_cpu(columns, size, peak):
    for h in range(len(peak)):
        peak[h] = _peak(columns[h], size[h])


@serial_kernel
def _rare_cpu(masses, lse, pi, n, share):
    for h in range(len(share)):
        share[h] = _rare(masses[h], lse[h], pi[h], n)


@serial_kernel
def _fall_cpu(half, full, slope):
    for h in range(len(slope)):
        _fall(h, half, full, slope)


@serial_kernel
def _copy_columns_cpu(source, first, count, out):
    for i in range(len(out)):
        _copy_columns(source[i], first, count, out[i])


# --- CUDA drivers: a thread per head; a team per row ---


@cuda_kernel(32)
def _halve_cuda(found, trial_rank, half):
    for h in range(cuda.grid(1), len(found), cuda.gridsize(1)):
        _halve(h, found, trial_rank, half)


@cuda_kernel(32)
def _choose_trial_cuda(loo, fields, costs, tile, table, window, probes, temperature):
    for h in range(cuda.grid(1), len(window), cuda.gridsize(1)):
        _choose_trial(h, loo, fields, costs, tile, table, window, probes, temperature)


@cuda_kernel(128)
def _peak_cuda(columns, size, peak):
    h = cuda.blockIdx.x
    peak[h] = _peak(columns[h], size[h])


@cuda_kernel(128)
def _rare_cuda(masses, lse, pi, n, share):
    h = cuda.blockIdx.x
    share[h] = _rare(masses[h], lse[h], pi[h], n)


@cuda_kernel(32)
def _fall_cuda(half, full, slope):
    for h in range(cuda.grid(1), len(slope), cuda.gridsize(1)):
        _fall(h, half, full, slope)


@cuda_kernel(128)
def _copy_columns_cuda(source, first, count, out):
    i = cuda.blockIdx.x
    _copy_columns(source[i], first, count, out[i])


# --- stage ---


@dataclass
class Solved:
    """The fit of every active head at one rank."""

    sample: Sample
    keys: Any  # the keys that the landmarks began as (heads, R)
    found: Any  # landmarks that were not redundant
    basis: Any  # of the projection, (heads, 0, D) without
    projection: Any  # P_K by columns
    tiles: Any  # landmarks as the panel bodies read them
    table: Any
    window: Any  # -1 for none
    near: Any  # `content.Near` of all queries
    by_bucket: Any  # `content.Sorted` and the queries' probes, where a near field by content was tried; else None
    temperature: Any
    weight: Any  # of the sample's rows
    ridge: Any  # relative to the largest squared singular value
    loo: Any
    slope: Any  # log2 of the fall of the leave-one-out error from half the rank to this one
    row_error: Any
    row_leverage: Any


class _Trial(NamedTuple):
    """The best trial fit of every head."""

    rank: Any
    table: Any
    row_leverage: Any
    tiles: Any  # all landmarks at its temperature
    window: Any
    probes: Any  # how many; 0 is no near field by content
    temperature: Any


def uniform_part(problem, heads, sample, rank, results, clock):
    """Bring the uniform rows up to half of the rank's rows."""
    wanted = min(plan.ROWS_PER_RANK * rank // 2, problem.shape[0])
    have = 0 if sample is None else sample.uniform.shape[1]
    with clock.stage("rows"):
        new = draw.uniform_rows(problem, heads, wanted - have, first=have)
        out, lse, masses = rows(problem, heads, new, masses=True)
    count_rows(problem, heads, results, new.shape[1])
    device = problem.device
    pi = device.zeros(new.shape, np.float64)
    if sample is not None:
        return sample.extended(uniform=new, uniform_out=out, uniform_lse=lse, masses=masses, uniform_pi=pi)
    rows0, out0, lse0, pi0 = (device.empty((len(heads), 0, *x.shape[2:]), x.dtype) for x in (new, out, lse, pi))
    return Sample(new, out, lse, masses, pi, rows0, out0, lse0, pi0, device)


def solve(problem, heads, sample, options, rank, results, clock, *, slope, far=targets, by_bucket=None):
    """Everything between the uniform rows and the output, at one rank; `far` says what the fit is to match.

    `by_bucket` is what an earlier rank knew of the keys.
    """
    device, count = problem.device, len(heads)
    basis, project_landmarks = device.empty((count, 0, problem.shape[2]), problem.element), None
    projection = device.empty(basis.shape, np.float64)
    if options.proj_dim is not None and options.calibrate:
        with clock.stage("project"):
            basis, projection, project_landmarks = head_bases(problem, heads, options.proj_dim, options.projection)
    fields = options.near.pairs()
    with clock.stage("landmarks"):
        pool = _draw_pool(problem, heads, sample, rank, max(w or -1 for w, _ in fields))
    if by_bucket is None and _may_pay(problem, options.near, pool):
        with clock.stage("buckets"):
            by_bucket = content.by_bucket(problem, heads, pool, options.near)
    with clock.stage("landmarks"):
        columns, keys_of_pool, size = pool
        keys, found = landmarks.choose(problem, heads, columns, keys_of_pool, size, rank)
        centres, mean = landmarks.refine(problem, heads, keys, found, landmarks.REFINE_FACTOR * rank)
        tiles = landmarks.shrink(problem, heads, centres, mean, TEMPERATURES)
        if project_landmarks is not None:
            tiles = project_landmarks(tiles, len(TEMPERATURES))
    with clock.stage("fit"):
        trial_rank, half_rank = (device.empty((count,), np.int64) for _ in range(2))
        device.run(_halve_cpu, _halve_cuda, (1,), found, trial_rank, half_rank)
        seen = sample.uniform, sample.uniform_out, sample.uniform_lse, device.upload(np.ones((1, 1)))
        task = tiles, trial_rank, basis, far, options.near
        trial = _trial(problem, heads, *seen, fields, by_bucket, *task)
    with clock.stage("near"):
        near, by_bucket = _near(problem, heads, trial, by_bucket, options.near.probes[-1])
    with clock.stage("leverage"):
        sample, drawn = _leverage_rows(problem, heads, sample, rank, trial, basis, near, results)
    if by_bucket is None and _rarely_peaked(problem, options.near, drawn):
        with clock.stage("buckets"):
            pool = _draw_pool(problem, heads, sample, rank, max(w or -1 for w, _ in fields))
            by_bucket = content.by_bucket(problem, heads, pool, options.near)
        with clock.stage("near"):
            seen = sample.rows, sample.out, sample.lse, sample.weights(problem.shape[0])
            trial = _trial(problem, heads, *seen, fields, by_bucket, *task)
            near, by_bucket = _near(problem, heads, trial, by_bucket, options.near.probes[-1])
    with clock.stage("fit"):
        own = content.of_rows(device, near, sample.rows)
        target = far(problem, heads, sample.rows, sample.out, sample.lse, trial.window.reshape(count, 1), own)
        columns = features(problem, heads, sample.rows, sample.lse, trial.tiles, found, basis)
        weight = sample.weights(problem.shape[0])
        common = problem, heads, columns, target, sample.out, weight
        full = fit(*common, found, first=sample.uniform.shape[1])
        fall = device.zeros((count,), np.float64)
        if slope:
            half = fit(*common, half_rank, first=sample.uniform.shape[1])
            device.run(_fall_cpu, _fall_cuda, (1,), half.loo, full.loo, fall)
    # of the one window
    table, ridge, loo, row_error, row_leverage = (x.reshape(count, *x.shape[2:]) for x in full)
    chosen = trial.window, near, by_bucket, trial.temperature
    model = keys, found, basis, projection, trial.tiles, table, *chosen, weight, ridge
    return Solved(sample, *model, loo, fall, row_error, row_leverage)


def _draw_pool(problem, heads, sample, rank, apart):
    """Candidates for landmarks: their columns on the uniform rows, which keys they are, and how many each head has."""
    count = min(landmarks.POOL_FACTOR * rank, max(landmarks.LARGEST_POOL, 2 * rank))
    drawn = sample.uniform, sample.uniform_lse, sample.masses
    pool, size = landmarks.draw_pool(problem, heads, *drawn, count, apart=apart)
    tiles = landmarks.gather(problem, heads, pool, size)
    none = problem.device.empty((len(heads), 0, problem.shape[2]), problem.element)
    columns = features(problem, heads, sample.uniform, sample.uniform_lse, tiles, size, none)
    return columns, pool, size


def _may_pay(problem, near, pool):
    """Is a near field by content worth a try? Waits for the device, if it must."""
    device, (columns, _, size) = problem.device, pool
    if not near.probes[-1] or problem.shape[1] < LEAST_BUCKETS * near.size:
        return False
    if 0 not in near.probes:
        return True
    peak = device.empty(len(size), np.float64)
    device.run(_peak_cpu, _peak_cuda, (len(size),), columns, size, peak)
    keys = near.heavy + near.probes[1] * near.size
    return bool((device.download(peak) * keys).max() >= _PEAKED)


def _rarely_peaked(problem, near, drawn):
    """Do the rows drawn by leverage say that a near field by content is worth a try? Waits for the device."""
    device, masses = problem.device, drawn[0]
    if not near.probes[-1] or problem.shape[1] < LEAST_BUCKETS * near.size:
        return False
    share = device.empty(len(masses), np.float64)
    device.run(_rare_cpu, _rare_cuda, (len(masses),), *drawn, problem.shape[0], share)
    return bool(device.download(share).max() >= _RARE)


def _costs(problem, fields, near, rank):
    """What every near field makes a head cost, relative to none."""
    n, m, d, e = problem.shape
    without = plan.pda_flops(n, m, d, e, rank)
    windows = sorted({w for w, _ in fields})
    return np.array(
        [_WIDER ** windows.index(w) * (1 + plan.content_flops(n, m, d, e, p, near) / without) for w, p in fields]
    )


def _trial(problem, heads, which, exact, lse, weight, fields, by_bucket, tiles, rank, basis, far, wished):
    """Trial fits with the leading landmarks at every temperature and near field; the best one of each head.

    On the rows `which (heads, n)`, of `weight (heads, n)`, or (1, 1) if all count alike.
    """
    device, count = problem.device, len(TEMPERATURES)
    if by_bucket is None:
        fields = [(w, p) for w, p in fields if not p] or [(w, 0) for w in wished.windows]
    windows = {p: np.array([[w or -1 for w, q in fields if q == p]]) for p in dict.fromkeys(p for _, p in fields)}
    around = {p: device.repeat(device.upload(w), len(heads)) for p, w in windows.items()}
    kinds = [far(problem, heads, which, exact, lse, around[0], None)] if 0 in around else []
    if by_bucket is not None:
        for near in content.tried(problem, heads, which, by_bucket, [p for p in around if p]):
            kinds.append(far(problem, heads, which, exact, lse, around[near.most], near.rows))
    target = device.concatenate([x.reshape(which.size, *x.shape[2:]) for x in kinds])
    target = target.reshape(*which.shape, *target.shape[1:])
    fields = [(int(w), p) for p, own in windows.items() for w in own[0]]
    costs = _costs(problem, fields, wished, tiles.shape[1])
    fields = np.array(fields)
    size = padded(min(TRIAL_RANK, tiles.shape[1]))
    leading = _columns(device, tiles.reshape(len(tiles), -1), 0, size * tiles.shape[2])
    leading = leading.reshape(len(tiles), size, tiles.shape[2])

    heads = np.repeat(heads, count)
    which, lse, basis, target, exact, ranks = (
        device.repeat(x, count) for x in (which, lse, basis, target, exact, rank)
    )
    columns = features(problem, heads, which, lse, leading, ranks, basis)
    if weight.shape[1] == 1:
        weight = device.repeat(device.upload(np.ones((1, which.shape[1]))), len(heads))
    else:
        weight = device.repeat(weight, count)
    trial = fit(problem, heads, columns, target, exact, weight, ranks)
    tile, table, window, probes = (device.empty((len(rank),), np.int64) for _ in range(4))
    temperature = device.empty((len(rank),), np.float64)
    given = trial.loo, device.upload(fields), device.upload(costs)
    device.run(_choose_trial_cpu, _choose_trial_cuda, (1,), *given, tile, table, window, probes, temperature)
    own, left_out = (device.take(x.reshape(-1, *x.shape[2:]), table) for x in (trial.table, trial.row_leverage))
    return _Trial(rank, own, left_out, device.take(tiles, tile), window, probes, temperature)


def _near(problem, heads, trial, by_bucket, most):
    """The near field by content of all queries, where a head has chosen one."""
    if by_bucket is None or (problem.device.name == "cpu" and not trial.probes.any()):
        return content.nothing(problem, len(heads)), by_bucket
    return content.near(problem, heads, by_bucket, trial.probes, most)


def _columns(device, source, first, count, width=None):
    """Columns first .. first + count of a matrix, and zeros up to `width`."""
    out = device.empty((len(source), count if width is None else width), source.dtype)
    device.run(_copy_columns_cpu, _copy_columns_cuda, (len(out),), source, first, count, out)
    return out


def _leverage_rows(problem, heads, sample, rank, trial, basis, near, results):
    """Bring the rows drawn by the trial fit's leverage up to half of the rank's rows."""
    starts, fraction = candidates(problem, heads)
    table = trial.table.reshape(-1, trial.table.shape[2])
    shown = 1 + LEVERAGE_COLUMNS  # all but the values' columns
    short = _columns(problem.device, table, problem.shape[3], shown, padded(shown))
    short = short.reshape(len(heads), -1, short.shape[1])
    leverage, _ = apply(problem, heads, starts, trial.tiles, short, trial.rank, trial.window, basis, None, near=near)
    wanted = max(plan.ROWS_PER_RANK * rank // 2 - sample.drawn.shape[1], rank // 2)
    new, pi, sample = draw_by_leverage(problem, heads, sample, starts, fraction, leverage, trial.row_leverage, wanted)
    out, lse, masses = rows(problem, heads, new, masses=True)
    count_rows(problem, heads, results, wanted)
    return sample.extended(drawn=new, drawn_out=out, drawn_lse=lse, drawn_pi=pi), (masses, lse, pi)
