"""Low-rank attention of some heads: the stages in their order at one rank, and the loop over ranks that keeps `tol`.

    rank R:  uniform rows -> landmarks -> pilot fit -> leverage rows -> fit, window by leave-one-out error
             -> apply -> rows the fit cannot be trusted on -> certificate

The loop doubles R, keeping the rows it has, until the certificate's upper limit is at most `tol`. Where the
leave-one-out error says that no affordable rank will get there, it gives up early and leaves the head to the exact
method.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from . import certify, draw, landmarks, plan
from .apply import apply, features
from .core import LEVERAGE_COLUMNS, fit
from .kernels.simd import lanes, padded
from .near import near_sums
from .project import head_bases
from .rows import rows

# A rank whose leave-one-out error exceeds this multiple of tol is not worth a certificate.
_HOPE = 2.0
# The error is taken to fall by at least this factor (log2) per doubling of the rank when the next rank is judged.
_LEAST_SLOPE, _SLACK = 0.3, 1.0
# Leverage beyond which a row is flagged: this many times that of any fitted row when left out, and at least this.
_FAR_BEYOND, _LEAST_FLAG = 4.0, 10.0


@dataclass
class Sample:
    """Exact rows of the active heads: uniform ones (entries 0 .. of the permutation), then ones drawn by leverage."""

    uniform: np.ndarray
    uniform_out: np.ndarray
    uniform_lse: np.ndarray
    masses: np.ndarray
    drawn: np.ndarray
    drawn_out: np.ndarray
    drawn_lse: np.ndarray
    drawn_pi: np.ndarray

    def keep(self, which):
        """Only the heads `which`."""
        return Sample(*(getattr(self, f.name)[which] for f in dataclasses.fields(self)))

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
class HeadResult:
    """What became of one head."""

    method: str = "pda"
    reason: str = ""
    rank: int = 0
    effective_rank: int = 0
    rows: int = 0
    window: int = 0
    error: float = 0.0
    error_limit: float = 0.0
    row_error: float = 0.0
    row_share: float = 1.0
    leave_one_out: float = math.nan
    flagged_rows: int = 0
    fallback_rows: int = 0
    flops: float = 0.0


def low_rank(problem, heads, options, ranks, ranges, out, clock):
    """Fill `out (all heads, N, E)` for `heads`; returns a HeadResult each, with method "exact" where that is left to do."""
    results = {h: HeadResult() for h in heads}
    active, sample, previous = np.asarray(heads), None, None
    for step, rank in enumerate(ranks):
        sample = _uniform_part(problem, active, sample, rank, results, clock)
        solved = _solve(problem, active, sample, options, rank, results, clock)
        sample = solved.sample
        for h, head in enumerate(active):
            results[head].leave_one_out = float(solved.loo[h])
        last = step == len(ranks) - 1
        fixed = options.tol is None or len(ranks) == 1
        worth = np.ones(len(active), bool) if fixed or (last and options.method == "pda") else solved.loo <= _HOPE * options.tol
        if worth.any():
            with clock.stage("apply"):
                _finish(problem, active, worth, solved, rank, ranges, out, results)
        done = worth.copy()
        if not fixed:
            limits = np.array([results[h].error_limit for h in active])
            done &= limits <= options.tol
        for h, head in enumerate(active):
            if done[h]:
                results[head].reason = "fixed rank" if fixed else "tol is met"
        if done.all():
            break
        left = ~done
        if last:
            for head in active[left]:
                _give_up(results[head], options, "no affordable rank meets tol")
            break
        slope = solved.slope if previous is None else np.log2(previous / np.maximum(solved.loo, 1e-300))
        hopeless = left & ~_may_reach(solved.loo, slope, options.tol, ranks[-1] / rank)
        if options.method != "pda":
            for head in active[hopeless]:
                _give_up(results[head], options, "low rank would not meet tol")
            left &= ~hopeless
        active, sample, previous = active[left], sample.keep(left), solved.loo[left]
        if not len(active):
            break
    return [results[h] for h in heads]


def _give_up(result, options, reason):
    if options.method != "pda":
        result.method = "exact"
    result.reason = reason


def _may_reach(loo, slope, tol, growth):
    """Could the error fall to tol by the last rank, going on as it did (with some slack)?"""
    return np.log2(np.maximum(loo, 1e-300) / tol) <= np.log2(growth) * np.maximum(1.5 * slope, _LEAST_SLOPE) + _SLACK


# --- one rank ---


def _uniform_part(problem, heads, sample, rank, results, clock):
    """Bring the uniform rows up to half of the rank's rows."""
    wanted = min(plan.ROWS_PER_RANK * rank // 2, problem.shape[0])
    have = 0 if sample is None else sample.uniform.shape[1]
    with clock.stage("rows"):
        new = draw.uniform_rows(problem, heads, wanted - have, first=have)
        new_out, new_lse, new_masses = rows(problem, heads, new, masses=True)
    _count_rows(problem, heads, results, new.shape[1])
    if sample is None:
        none = new[:, :0]
        return Sample(new, new_out, new_lse, new_masses, none, new_out[:, :0], new_lse[:, :0], none.astype(float))
    return dataclasses.replace(
        sample,
        uniform=np.concatenate([sample.uniform, new], axis=1),
        uniform_out=np.concatenate([sample.uniform_out, new_out], axis=1),
        uniform_lse=np.concatenate([sample.uniform_lse, new_lse], axis=1),
        masses=np.concatenate([sample.masses, new_masses], axis=1),
    )


@dataclass
class Solved:
    """The fit of every active head at one rank, for its chosen window."""

    sample: Sample
    keys: np.ndarray  # landmarks' indices (heads, R)
    found: np.ndarray  # landmarks that were not redundant
    basis: np.ndarray
    tiles: np.ndarray  # landmarks as the panel bodies read them
    table: np.ndarray
    window: np.ndarray  # -1 for none
    loo: np.ndarray
    slope: np.ndarray  # log2 of the fall of the leave-one-out error from half the rank to this one
    row_error: np.ndarray
    row_leverage: np.ndarray


def _solve(problem, heads, sample, options, rank, results, clock):
    """Landmarks, pilot fit, leverage rows and the final fit at one rank."""
    n, _, dim, values = problem.shape
    windows = _windows(problem, options)
    basis = np.empty((len(heads), 0, dim), problem.element)
    project_landmarks = None
    if options.proj_dim is not None and options.calibrate:
        with clock.stage("project"):
            basis, project_landmarks = head_bases(problem, heads, options.proj_dim, options.projection)
    with clock.stage("landmarks"):
        keys, found = _choose_landmarks(problem, heads, sample, rank)
        tiles = landmarks.gather(problem, heads, keys, found)
        if project_landmarks is not None:
            tiles = np.ascontiguousarray(project_landmarks(tiles), problem.element)
    with clock.stage("fit"):
        pilot_target = _targets(problem, heads, sample.uniform, sample.uniform_out, sample.uniform_lse, windows[:1])
        pilot_features = features(problem, heads, sample.uniform, sample.uniform_lse, tiles, found, basis)
        count = np.full(len(heads), sample.uniform.shape[1])
        ones = np.ones(sample.uniform.shape)
        pilot = fit(problem, heads, pilot_features, pilot_target, sample.uniform_out, ones, found, count)
    with clock.stage("leverage"):
        sample = _leverage_rows(problem, heads, sample, rank, tiles, pilot.table[:, 0], found, windows[0], basis, results)
    with clock.stage("fit"):
        where, exact, lse = sample.rows, sample.out, sample.lse
        target = _targets(problem, heads, where, exact, lse, windows)
        columns = features(problem, heads, where, lse, tiles, found, basis)
        weight, judged = _weights(sample, n), sample.uniform.shape[1]
        count = np.full(len(heads), where.shape[1])
        full = fit(problem, heads, columns, target, exact, weight, found, count, first=judged)
        half = fit(problem, heads, columns, target, exact, weight, np.maximum(found // 2, 1), count, first=judged)
    best = full.loo.argmin(axis=1)
    pick = np.arange(len(heads)), best
    slope = np.log2(np.maximum(half.loo.min(axis=1), 1e-300) / np.maximum(full.loo[pick], 1e-300))
    return Solved(
        sample,
        keys,
        found,
        basis,
        tiles,
        np.ascontiguousarray(full.table[pick]),
        np.asarray(windows)[best],
        full.loo[pick],
        slope,
        full.row_error[pick],
        full.row_leverage[pick],
    )


def _windows(problem, options):
    """Half widths to choose from, -1 for no near field."""
    n, m = problem.shape[:2]
    if options.window is not None:
        return [options.window if options.window > 0 else -1]
    return [-1, *(w for w in plan.WINDOWS if 0 < w < n)] if n == m else [-1]


def _choose_landmarks(problem, heads, sample, rank):
    dim = problem.shape[2]
    pool, size = landmarks.draw_pool(
        problem, heads, sample.uniform, sample.uniform_lse, sample.masses, landmarks.POOL_FACTOR * rank
    )
    tiles = landmarks.gather(problem, heads, pool, size)
    none = np.empty((len(heads), 0, dim), problem.element)
    columns = features(problem, heads, sample.uniform, sample.uniform_lse, tiles, size, none)
    return landmarks.choose(problem, heads, columns, pool, size, rank)


def _targets(problem, heads, which, exact, lse, windows):
    """[o_i, 1] less the near field, for every window: (heads, n, windows, E + 1)."""
    full = np.concatenate([exact, np.ones((*exact.shape[:2], 1), exact.dtype)], axis=2)[:, :, None]
    near = [w for w in windows if w >= 0]
    parts = [full] if -1 in windows else []
    return np.concatenate([*parts, full - near_sums(problem, heads, which, lse, near)] if near else parts, axis=2)


def _weights(sample, n):
    """w_i with w_i^2 = 1 / (pi_i N / n): rows that were likely to be drawn count less."""
    uniform, drawn = sample.uniform.shape[1], sample.drawn.shape[1]
    share = uniform / n
    pi = np.concatenate([np.full(sample.uniform.shape, share), 1 - (1 - share) * (1 - sample.drawn_pi)], axis=1)
    return np.sqrt((uniform + drawn) / (pi * n))


def _leverage_rows(problem, heads, sample, rank, tiles, table, found, window, basis, results):
    """Bring the rows drawn by the pilot fit's leverage up to half of the rank's rows."""
    n, _, _, values = problem.shape
    width = lanes(problem.element)
    panels = -(-n // width)
    used = min(panels, plan.CANDIDATES // width)
    if used == panels:
        starts = np.broadcast_to(np.arange(panels) * width, (len(heads), panels))
    else:
        starts = np.sort(draw.uniform_rows(problem, heads, used, stage=draw.PANELS, size=panels), axis=1) * width
    short = np.zeros((len(heads), table.shape[1], padded(1 + LEVERAGE_COLUMNS)), problem.element)
    short[:, :, : 1 + LEVERAGE_COLUMNS] = table[:, :, values : values + 1 + LEVERAGE_COLUMNS]
    windows = np.full(len(heads), window)
    leverage, _ = apply(problem, heads, starts, tiles, short, found, windows, basis, None)
    candidates = (starts[:, :, None] + np.arange(width)).reshape(len(heads), -1)
    weight = np.clip(leverage, 1e-12, 1e6)
    weight[candidates >= n] = 0
    for h in range(len(heads)):
        taken = np.zeros(n, bool)
        taken[sample.uniform[h]] = taken[sample.drawn[h]] = True
        weight[h, taken[np.minimum(candidates[h], n - 1)]] = 0
    wanted = max(plan.ROWS_PER_RANK * rank // 2 - sample.drawn.shape[1], rank // 2)
    place, pi, got, _ = draw.weighted_rows(problem, heads, weight, wanted, stage=draw.LEVERAGE)
    count = int(got.min())  # the same number in every head keeps the arrays rectangular
    new = np.take_along_axis(candidates, place[:, :count], axis=1)
    new_out, new_lse, _ = rows(problem, heads, new)
    _count_rows(problem, heads, results, count)
    return dataclasses.replace(
        sample,
        drawn=np.concatenate([sample.drawn, new], axis=1),
        drawn_out=np.concatenate([sample.drawn_out, new_out], axis=1),
        drawn_lse=np.concatenate([sample.drawn_lse, new_lse], axis=1),
        drawn_pi=np.concatenate([sample.drawn_pi, pi[:, :count] * used / panels], axis=1),
    )


def _count_rows(problem, heads, results, count):
    _, m, d, e = problem.shape
    for head in heads:
        results[head].flops += plan.row_flops(count, m, d, e)


# --- the output ---


def _finish(problem, heads, worth, solved, rank, ranges, out, results):
    """Apply, mend what cannot be trusted, certify: for the active heads that are worth it."""
    which = np.flatnonzero(worth)
    heads = heads[which]
    n, _, d, e = problem.shape
    width = lanes(problem.element)
    starts = np.broadcast_to(np.arange(-(-n // width)) * width, (len(which), -(-n // width)))
    leverage, norm = apply(
        problem,
        heads,
        starts,
        solved.tiles[which],
        solved.table[which],
        solved.found[which],
        solved.window[which],
        solved.basis[which],
        (ranges.low, ranges.high),
        out,
    )
    leverage, norm = leverage[:, :n], norm[:, :n]
    exact = np.zeros((len(which), n), bool)
    sample = solved.sample.keep(which)
    known = np.empty(len(which))
    for h, head in enumerate(heads):
        index, values = sample.rows[h], sample.out[h]
        out[head, index] = values
        exact[h, index] = True
        known[h] = np.square(values, dtype=np.float64).sum()
        result = results[head]
        result.rank, result.effective_rank = rank, int(solved.found[which[h]])
        result.window = max(int(solved.window[which[h]]), 0)
        result.flops += plan.apply_flops(n, d, e, rank, result.window)
    _mend(problem, heads, solved, which, leverage, rank, exact, known, norm, out, results)
    _certify(problem, heads, solved, which, leverage, exact, known, norm, ranges, out, results)


def _mend(problem, heads, solved, which, leverage, rank, exact, known, norm, out, results):
    """Rows far outside the fitted ones: exact while the budget of R rows lasts, else the softmax over the landmarks."""
    for h, head in enumerate(heads):
        limit = max(_LEAST_FLAG, _FAR_BEYOND * solved.row_leverage[which[h]].max())
        flagged = np.flatnonzero((leverage[h] > limit) & ~exact[h])
        if not len(flagged):
            continue
        flagged = flagged[np.argsort(-leverage[h, flagged], kind="stable")]
        broken = flagged[rank:][~np.isfinite(leverage[h, flagged[rank:]])]
        budget = flagged[:rank]
        values, _, _ = rows(problem, heads[h : h + 1], budget[None])
        out[head, budget] = values[0]
        exact[h, budget] = True
        known[h] += np.square(values, dtype=np.float64).sum()
        _count_rows(problem, heads[h : h + 1], results, len(budget))
        if len(broken):
            keys = solved.keys[which[h] : which[h] + 1, : solved.found[which[h]]]
            values = _landmark_softmax(problem, heads[h : h + 1], broken, keys)
            out[head, broken] = values
            norm[h, broken] = np.square(values).sum(axis=1)
        results[head].flagged_rows, results[head].fallback_rows = len(budget) + len(broken), len(broken)


def _landmark_softmax(problem, head, which, keys):
    """Attention of the queries `which` to the landmarks alone: a convex combination of values, whatever the fit says."""
    count = np.array([keys.shape[1]])
    small = dataclasses.replace(
        problem,
        k=landmarks.gather(problem, head, keys, count)[:, : keys.shape[1]],
        v=landmarks.gather(problem, head, keys, count, source=problem.v)[:, : keys.shape[1]],
        key_head=np.zeros_like(problem.key_head),
    )
    return rows(small, head, which[None])[0][0]


def _certify(problem, heads, solved, which, leverage, exact, known, norm, ranges, out, results):
    n = problem.shape[0]
    reach = certify.reach(problem, heads)
    edges = np.where(solved.window[which] >= 0, certify.EDGE, 0)
    audits = certify.draw_audit(problem, heads, solved.sample.uniform.shape[1], exact, leverage, reach, edges)
    count = max(max(len(a.rows) for a in audits), 1)
    index = np.stack([np.resize(a.rows if len(a.rows) else [0], count) for a in audits])
    values, _, _ = rows(problem, heads, index)
    _count_rows(problem, heads, results, count)
    fitted = solved.sample.rows
    for h, (head, audit) in enumerate(zip(heads, audits, strict=True)):
        used = len(audit.rows)
        truth, guess = values[h, :used].astype(np.float64), out[head, audit.rows].astype(np.float64)
        rest = ~exact[h]
        rest[audit.rows] = False
        place = which[h]
        left_out = solved.row_error[place], solved.row_leverage[place], reach[h, fitted[place]]
        result = results[head]
        result.error, result.error_limit, result.row_error, result.row_share = certify.judge(
            audit,
            np.square(guess - truth).sum(axis=1),
            np.square(truth).sum(axis=1),
            np.square(guess).sum(axis=1),
            norm[h][rest].sum(dtype=np.float64),
            known[h],
            n,
            left_out,
        )
        result.error_limit = math.hypot(result.error_limit, ranges.rounding[head])
        out[head, audit.rows] = values[h, :used]
        exact[h, audit.rows] = True
        result.rows = int(exact[h].sum())
