"""The fit at one rank: uniform rows, landmarks, temperature and window, leverage rows, the final fit.

Landmarks are moved towards the mean of the keys, S = mean + c (C - mean). The temperature c flattens the features
exp(s q . S): what is left of attention without the near field is smooth, and flat features span it far better than
those of the keys themselves. c and the window are chosen together, by the leave-one-out error of a trial fit on the
uniform rows with the leading landmarks. The same trial fit gives the leverage by which the other rows are drawn.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from . import draw, landmarks, plan
from .apply import apply, features
from .core import LEVERAGE_COLUMNS, Fit, fit
from .kernels.simd import lanes, padded
from .near import near_sums
from .project import head_bases
from .results import count_rows
from .rows import rows

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


@dataclass
class Sample:
    """Exact rows of the active heads: uniform ones (entries 0 .. of the permutation), then ones drawn by leverage."""

    uniform: np.ndarray
    uniform_out: np.ndarray
    uniform_lse: np.ndarray
    masses: np.ndarray
    uniform_pi: np.ndarray  # probability that the leverage design would have drawn the uniform row too
    drawn: np.ndarray
    drawn_out: np.ndarray
    drawn_lse: np.ndarray
    drawn_pi: np.ndarray

    def keep(self, which):
        """Only the heads `which`."""
        return Sample(*(getattr(self, f.name)[which] for f in dataclasses.fields(self)))

    def extended(self, **new):
        """With more rows behind those of the named arrays."""
        return dataclasses.replace(
            self, **{name: np.concatenate([getattr(self, name), rows], axis=1) for name, rows in new.items()}
        )

    @property
    def rows(self):
        return np.concatenate([self.uniform, self.drawn], axis=1)

    @property
    def out(self):
        return np.concatenate([self.uniform_out, self.drawn_out], axis=1)

    @property
    def lse(self):
        return np.concatenate([self.uniform_lse, self.drawn_lse], axis=1)


@dataclass
class Solved:
    """The fit of every active head at one rank."""

    sample: Sample
    keys: np.ndarray  # the keys that the landmarks began as (heads, R)
    found: np.ndarray  # landmarks that were not redundant
    basis: np.ndarray  # of the projection, (heads, 0, D) without
    tiles: np.ndarray  # landmarks as the panel bodies read them
    table: np.ndarray
    window: np.ndarray  # -1 for none
    loo: np.ndarray
    slope: np.ndarray  # log2 of the fall of the leave-one-out error from half the rank to this one
    row_error: np.ndarray
    row_leverage: np.ndarray


def uniform_part(problem, heads, sample, rank, results, clock):
    """Bring the uniform rows up to half of the rank's rows."""
    wanted = min(plan.ROWS_PER_RANK * rank // 2, problem.shape[0])
    have = 0 if sample is None else sample.uniform.shape[1]
    with clock.stage("rows"):
        new = draw.uniform_rows(problem, heads, wanted - have, first=have)
        out, lse, masses = rows(problem, heads, new, masses=True)
    count_rows(problem, heads, results, new.shape[1])
    pi = np.zeros(new.shape)
    if sample is None:
        return Sample(new, out, lse, masses, pi, new[:, :0], out[:, :0], lse[:, :0], pi[:, :0])
    return sample.extended(uniform=new, uniform_out=out, uniform_lse=lse, masses=masses, uniform_pi=pi)


def solve(problem, heads, sample, options, rank, results, clock, *, slope):
    """Everything between the uniform rows and the output, at one rank."""
    n = problem.shape[0]
    basis, project_landmarks = np.empty((len(heads), 0, problem.shape[2]), problem.element), None
    if options.proj_dim is not None and options.calibrate:
        with clock.stage("project"):
            basis, project_landmarks = head_bases(problem, heads, options.proj_dim, options.projection)
    with clock.stage("landmarks"):
        keys, found = _choose_landmarks(problem, heads, sample, rank, int(_windows(problem, options).max()))
        centres, mean = landmarks.refine(problem, heads, keys, found, landmarks.REFINE_FACTOR * rank)
    with clock.stage("fit"):
        trial, short, tiles, window = _trial(
            problem, heads, sample, options, centres, mean, found, basis, project_landmarks
        )
    with clock.stage("leverage"):
        sample = _leverage_rows(problem, heads, sample, rank, tiles, trial, short, window, basis, results)
    with clock.stage("fit"):
        target = _targets(problem, heads, sample.rows, sample.out, sample.lse, window)
        columns = features(problem, heads, sample.rows, sample.lse, tiles, found, basis)
        judged = {"used": np.full(len(heads), sample.rows.shape[1]), "first": sample.uniform.shape[1]}
        common = target, sample.out, _weights(sample, n)
        full = fit(problem, heads, columns, *common, found, **judged)
        fall = np.zeros(len(heads))
        if slope:
            half = fit(problem, heads, columns, *common, np.maximum(found // 2, 1), **judged)
            fall = np.log2(np.maximum(half.loo[:, 0], 1e-300) / np.maximum(full.loo[:, 0], 1e-300))
    picked = full.table[:, 0], window, full.loo[:, 0], fall, full.row_error[:, 0], full.row_leverage[:, 0]
    return Solved(sample, keys, found, basis, tiles, *picked)


def _choose_landmarks(problem, heads, sample, rank, apart):
    count = min(landmarks.POOL_FACTOR * rank, max(landmarks.LARGEST_POOL, 2 * rank))
    drawn = sample.uniform, sample.uniform_lse, sample.masses
    pool, size = landmarks.draw_pool(problem, heads, *drawn, count, apart=apart)
    tiles = landmarks.gather(problem, heads, pool, size)
    none = np.empty((len(heads), 0, problem.shape[2]), problem.element)
    columns = features(problem, heads, sample.uniform, sample.uniform_lse, tiles, size, none)
    return landmarks.choose(problem, heads, columns, pool, size, rank)


def _windows(problem, options):
    """Half widths to choose from, -1 for no near field."""
    n, m = problem.shape[:2]
    if options.window is not None:
        return np.array([options.window if options.window > 0 else -1])
    return np.array([-1, *(w for w in plan.WINDOWS if 0 < w < n)] if n == m else [-1])


def _targets(problem, heads, which, exact, lse, window):
    """[o_i, 1] less the near field of each head's window: (heads, n, 1, E + 1)."""
    every = np.unique(window)
    place = np.searchsorted(every, window)
    return _all_targets(problem, heads, which, exact, lse, every)[np.arange(len(heads)), :, place][:, :, None]


def _all_targets(problem, heads, which, exact, lse, windows):
    """[o_i, 1] less the near field, for rising windows: (heads, n, windows, E + 1)."""
    full = np.concatenate([exact, np.ones((*exact.shape[:2], 1), exact.dtype)], axis=2)[:, :, None]
    near = windows[windows >= 0]
    parts = [full] if windows[0] < 0 else []
    if len(near):
        parts.append(full - near_sums(problem, heads, which, lse, near))
    return np.concatenate(parts, axis=2)


def _trial(problem, heads, sample, options, centres, mean, found, basis, project_landmarks):
    """Trial fits with the leading landmarks at every temperature and window; the best one of each head.

    Returns that `Fit`, its rank, the landmarks' tiles at its temperature, and its window.
    """
    windows, count = _windows(problem, options), len(TEMPERATURES)
    mean = mean[:, None, None]
    shifted = mean + np.array(TEMPERATURES)[:, None, None] * (centres[:, None] - mean)
    tiles = np.ascontiguousarray(shifted.reshape(-1, *centres.shape[1:]), problem.element)
    if project_landmarks is not None:
        tiles = np.ascontiguousarray(project_landmarks(tiles, count), problem.element)
    which, exact, lse = sample.uniform, sample.uniform_out, sample.uniform_lse
    target = _all_targets(problem, heads, which, exact, lse, windows)
    rank = np.minimum(found, TRIAL_RANK)
    leading = np.ascontiguousarray(tiles[:, : padded(min(TRIAL_RANK, centres.shape[1]))])

    heads, which, lse, basis, target, exact, ranks = (
        np.repeat(x, count, axis=0) for x in (heads, which, lse, basis, target, exact, rank)
    )
    columns = features(problem, heads, which, lse, leading, ranks, basis)
    used = np.full(len(heads), which.shape[1])
    trial = fit(problem, heads, columns, target, exact, np.ones(which.shape), ranks, used=used)
    judged = trial.loo * _WIDER ** np.arange(len(windows))
    best = judged.reshape(len(rank), -1).argmin(axis=1)
    place = best % len(windows)
    chosen = np.arange(len(rank)) * count + best // len(windows)
    own = Fit(*(field[chosen, place][:, None] for field in trial))
    return own, rank, np.ascontiguousarray(tiles[chosen]), windows[place]


def _weights(sample, n):
    """w_i with w_i^2 = 1 / (pi_i N / n): rows that were likely to be drawn, by either design, count less."""
    share = sample.uniform.shape[1] / n
    pi = 1 - (1 - share) * (1 - np.concatenate([sample.uniform_pi, sample.drawn_pi], axis=1))
    return np.sqrt(pi.shape[1] / (pi * n))


def _leverage_rows(problem, heads, sample, rank, tiles, trial, short, window, basis, results):
    """Bring the rows drawn by the trial fit's leverage up to half of the rank's rows."""
    n, _, _, values = problem.shape
    candidates, weight, fraction = _candidates(problem, heads, tiles, trial.table[:, 0], short, window, basis, values)
    for h in range(len(heads)):
        taken = np.zeros(n, bool)
        taken[sample.uniform[h]] = taken[sample.drawn[h]] = True
        weight[h, taken[np.minimum(candidates[h], n - 1)]] = 0
    wanted = max(plan.ROWS_PER_RANK * rank // 2 - sample.drawn.shape[1], rank // 2)
    place, pi, got, scale = draw.weighted_rows(problem, heads, weight, wanted, stage=draw.LEVERAGE)
    count = int(got.min())  # the same number in every head keeps the arrays rectangular
    new = np.take_along_axis(candidates, place[:, :count], axis=1)
    out, lse, _ = rows(problem, heads, new)
    count_rows(problem, heads, results, count)
    # The uniform rows' own chance: by their leverage when left out, like the candidates', which no fit has seen.
    own = np.minimum(1.0, scale[:, None] * np.clip(trial.row_leverage[:, 0], 1e-12, None)) * fraction
    sample = dataclasses.replace(sample, uniform_pi=1 - (1 - sample.uniform_pi) * (1 - own))
    return sample.extended(drawn=new, drawn_out=out, drawn_lse=lse, drawn_pi=pi[:, :count] * fraction)


def _candidates(problem, heads, tiles, table, found, window, basis, values):
    """Queries among which the leverage rows are drawn, their leverage, and what fraction of all queries they are."""
    n, width = problem.shape[0], lanes(problem.element)
    panels = -(-n // width)
    used = min(panels, plan.CANDIDATES // width)
    starts = np.tile(np.arange(0, n, width), (len(heads), 1))
    if used < panels:
        starts = np.sort(draw.uniform_rows(problem, heads, used, stage=draw.PANELS, size=panels), axis=1) * width
    short = np.zeros((len(heads), table.shape[1], padded(1 + LEVERAGE_COLUMNS)), problem.element)
    short[:, :, : 1 + LEVERAGE_COLUMNS] = table[:, :, values : values + 1 + LEVERAGE_COLUMNS]
    leverage, _ = apply(problem, heads, starts, tiles, short, found, window, basis, None)
    candidates = (starts[:, :, None] + np.arange(width)).reshape(len(heads), -1)
    weight = np.clip(leverage, 1e-12, 1e6)
    weight[candidates >= n] = 0
    return candidates, weight, used / panels
