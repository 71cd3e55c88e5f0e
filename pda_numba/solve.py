"""The fit at one rank: uniform rows, landmarks, temperature and near field, leverage rows, the final fit.

Landmarks are moved towards the mean of the keys, S = mean + c (C - mean). The temperature c flattens the features
exp(s q . S): what is left of attention without the near field is smooth, and flat features span it far better than
those of the keys themselves. c and the near field are chosen together, by the leave-one-out error of a trial fit on the
uniform rows with the leading landmarks, times what the near field makes a head cost. The same trial fit gives the
leverage by which the other rows are drawn (`trial`).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import content, draw, landmarks, plan, trial
from ._jit import cuda, cuda_kernel, serial_kernel, shared
from .apply import apply
from .core import fit
from .core_places import LEVERAGE_COLUMNS
from .kernels.simd import padded
from .near import targets
from .products import features
from .project import head_bases
from .results import count_rows
from .rows import rows
from .sample import Sample, draw_by_leverage
from .sample import candidates as sampled_panels

_LEAST_ERROR = 1e-300

# --- bodies ---


@shared
def _fall(h, half, full, slope):
    """log2 of the fall of the error from half the rank."""
    slope[h] = math.log2(max(half[h, 0], _LEAST_ERROR) / max(full[h, 0], _LEAST_ERROR))


# --- CPU drivers ---


@serial_kernel
def _fall_cpu(half, full, slope):
    for h in range(len(slope)):
        _fall(h, half, full, slope)


# --- CUDA drivers: a thread per head; a team per row ---


@cuda_kernel(32)
def _fall_cuda(half, full, slope):
    for h in range(cuda.grid(1), len(slope), cuda.gridsize(1)):
        _fall(h, half, full, slope)


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
    by_bucket: Any  # `buckets.Buckets`, where a near field by content was tried; else None
    temperature: Any
    weight: Any  # of the sample's rows
    ridge: Any  # relative to the largest squared singular value
    loo: Any
    slope: Any  # log2 of the fall of the leave-one-out error from half the rank to this one
    row_error: Any
    row_leverage: Any


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


def dear(problem, heads, sample, options, rank, clock):
    """Which heads seem to need a near field by content that costs more than exact attention: bool, on the host.

    Only where the output is to be merged: elsewhere a window may do as well.
    """
    wished, (n, m, d, e) = options.near, problem.shape
    most = plan.pda_flops(n, m, d, e, rank) + plan.content_flops(n, m, d, e, wished.probes[-1], wished)
    if not problem.merged or options.method == "pda" or most <= plan.exact_flops(n, m, d, e):
        return np.zeros(len(heads), bool)
    with clock.stage("landmarks"):
        return trial.peaked(problem, heads, wished, _draw_pool(problem, heads, sample, rank, -1))


def solve(problem, heads, sample, options, rank, results, clock, *, slope, far=targets, room=None):
    """Everything between the uniform rows and the output, at one rank; `far` says what the fit is to match.

    `room (heads, N, E)`, if given, is where attention to the keys near by content may lie until the output does.
    """
    device, count = problem.device, len(heads)
    basis, project_landmarks = device.empty((count, 0, problem.shape[2]), problem.element), None
    projection = device.empty(basis.shape, np.float64)
    if options.proj_dim is not None and options.calibrate:
        with clock.stage("project"):
            basis, projection, project_landmarks = head_bases(problem, heads, options.proj_dim, options.projection)
    wished, apart = options.near, max(w or -1 for w in options.near.windows)
    setting = trial.Setting(wished, basis, far, rank, project_landmarks)
    with clock.stage("landmarks"):
        pool = _draw_pool(problem, heads, sample, rank, apart)
    with clock.stage("buckets"):
        known = trial.look(problem, heads, wished, pool)
    with clock.stage("fit"):
        uniform = sample.uniform, sample.uniform_out, sample.uniform_lse
        pools = _pools(problem, heads, sample, rank, apart, pool)
        best, _ = trial.best_of(problem, heads, sample, pools, known, uniform, None, setting)
    with clock.stage("near"):
        near = trial.near_of(problem, heads, best, known, wished, room)
    with clock.stage("leverage"):
        sample, drawn = _leverage_rows(problem, heads, sample, rank, best, basis, near, results)
    again = trial.few_have_keys_of_their_own(problem, wished, known.tried, drawn)
    if again.any():  # now that such queries are among the rows
        with clock.stage("buckets"):
            pool = _draw_pool(problem, heads, sample, rank, apart)
            known = trial.look_again(problem, heads, wished, pool, known, again)
        with clock.stage("fit"):
            every, weight = (sample.rows, sample.out, sample.lse), sample.weights(problem.shape[0])
            pools = _pools(problem, heads, sample, rank, apart, pool)
            other, better = trial.best_of(problem, heads, sample, pools, known, every, weight, setting)
            best = trial.put(device, other, np.flatnonzero(again & better), best)
        with clock.stage("near"):
            near = trial.near_of(problem, heads, best, known, wished, room)
    with clock.stage("fit"):
        own = content.of_rows(device, near, sample.rows)
        target = far(problem, heads, sample.rows, sample.out, sample.lse, best.window.reshape(count, 1), own)
        columns = features(problem, heads, sample.rows, sample.lse, best.tiles, best.found, basis)
        weight = sample.weights(problem.shape[0])
        common = problem, heads, columns, target, sample.out, weight
        full = fit(*common, best.found, first=sample.uniform.shape[1])
        fall = device.zeros((count,), np.float64)
        if slope:
            half = fit(*common, best.half, first=sample.uniform.shape[1])
            device.run(_fall_cpu, _fall_cuda, (1,), half.loo, full.loo, fall)
    # of the one window
    table, ridge, loo, row_error, row_leverage = (x.reshape(count, *x.shape[2:]) for x in full)
    chosen = best.window, near, known.buckets, best.temperature
    model = best.keys, best.found, basis, projection, best.tiles, table, *chosen, weight, ridge
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


def _pools(problem, heads, sample, rank, apart, first):
    """The same candidates again and again: who chooses among them overwrites them."""
    yield first
    while True:
        yield _draw_pool(problem, heads, sample, rank, apart)


def _leverage_rows(problem, heads, sample, rank, best, basis, near, results):
    """Bring the rows drawn by the trial fit's leverage up to half of the rank's rows."""
    starts, fraction = sampled_panels(problem, heads)
    table = best.table.reshape(-1, best.table.shape[2])
    shown = 1 + LEVERAGE_COLUMNS  # all but the values' columns
    short = trial.columns_of(problem.device, table, problem.shape[3], shown, padded(shown))
    short = short.reshape(len(heads), -1, short.shape[1])
    leverage, _ = apply(problem, heads, starts, best.tiles, short, best.rank, best.window, basis, None, near=near)
    wanted = max(plan.ROWS_PER_RANK * rank // 2 - sample.drawn.shape[1], rank // 2)
    new, pi, sample = draw_by_leverage(problem, heads, sample, starts, fraction, leverage, best.row_leverage, wanted)
    out, lse, masses = rows(problem, heads, new, masses=True)
    count_rows(problem, heads, results, wanted)
    return sample.extended(drawn=new, drawn_out=out, drawn_lse=lse, drawn_pi=pi), (masses, lse, pi)
