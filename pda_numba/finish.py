"""From the fit to the output: apply it to all queries, mend the rows it cannot be trusted on, certify the rest."""

import dataclasses
import math

import numpy as np

from . import certify, landmarks, plan
from .apply import apply
from .core import LEFT_ALONE
from .kernels.simd import lanes
from .results import count_rows
from .rows import rows

# A row is flagged if its leverage exceeds this multiple of any fitted row's when left out, and this value; or if its
# query lies further out than this multiple of any fitted row's, and than this multiple of the queries' mean square.
_FAR_LEVERAGE, _LEAST_LEVERAGE = 4.0, 10.0
_FAR_REACH, _LEAST_REACH = 2.0, 4.0


def finish(problem, heads, worth, solved, rank, ranges, out, results, clock):
    """Apply, mend what cannot be trusted, certify: for the active heads that are worth it."""
    which = np.flatnonzero(worth)
    heads = heads[which]
    n, _, d, e = problem.shape
    width = lanes(problem.element)
    starts = np.tile(np.arange(0, n, width), (len(which), 1))
    tiles, table, found, window, basis = (
        x[which] for x in (solved.tiles, solved.table, solved.found, solved.window, solved.basis)
    )
    with clock.stage("apply"):
        bounds = ranges.low, ranges.high
        leverage, norm = apply(problem, heads, starts, tiles, table, found, window, basis, bounds, out)
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
        result.rank, result.effective_rank = rank, int(found[h])
        result.window = max(int(window[h]), 0)
        result.flops += plan.apply_flops(n, d, e, rank, result.window)
    with clock.stage("mend"):
        reach = certify.reach(problem, heads)
        doubt = _doubt(solved, which, leverage, reach)
        _mend(problem, heads, solved, which, doubt, leverage, rank, exact, known, norm, out, results)
    with clock.stage("certify"):
        _certify(problem, heads, solved, which, leverage, reach, exact, known, norm, ranges, out, results)


def _doubt(solved, which, leverage, reach):
    """How far each row lies outside the fitted ones, (heads, N): above 1 the fit says nothing about it."""
    own = solved.row_leverage[which]
    own = np.where(own < LEFT_ALONE, own, 0.0).max(axis=1)
    furthest = np.take_along_axis(reach, solved.sample.rows[which], axis=1).max(axis=1)
    by_leverage = leverage / np.maximum(_FAR_LEVERAGE * own, _LEAST_LEVERAGE)[:, None]
    return np.maximum(by_leverage, reach / np.maximum(_FAR_REACH * furthest, _LEAST_REACH)[:, None])


def _mend(problem, heads, solved, which, doubt, leverage, rank, exact, known, norm, out, results):
    """Doubtful rows: exact while the budget of R rows lasts; past it, if without normaliser, landmark softmax."""
    for h, head in enumerate(heads):
        flagged = np.flatnonzero((doubt[h] > 1.0) & ~exact[h])
        if not len(flagged):
            continue
        flagged = flagged[np.argsort(-doubt[h, flagged], kind="stable")]
        broken = flagged[rank:][~np.isfinite(leverage[h, flagged[rank:]])]
        budget = flagged[:rank]
        values, _, _ = rows(problem, heads[h : h + 1], budget[None])
        out[head, budget] = values[0]
        exact[h, budget] = True
        known[h] += np.square(values, dtype=np.float64).sum()
        count_rows(problem, heads[h : h + 1], results, len(budget))
        if len(broken):
            keys = solved.keys[which[h] : which[h] + 1, : solved.found[which[h]]]
            values = _landmark_softmax(problem, heads[h : h + 1], broken, keys)
            out[head, broken] = values
            norm[h, broken] = np.square(values).sum(axis=1)
        results[head].flagged_rows, results[head].fallback_rows = len(budget) + len(broken), len(broken)


def _landmark_softmax(problem, head, which, keys):
    """Attention of the queries `which` to the landmarks alone: a convex combination of values, whatever the fit."""
    count = np.array([keys.shape[1]])
    small = dataclasses.replace(
        problem,
        k=landmarks.gather(problem, head, keys, count)[:, : keys.shape[1]],
        v=landmarks.gather(problem, head, keys, count, source=problem.v)[:, : keys.shape[1]],
        key_head=np.zeros_like(problem.key_head),
    )
    return rows(small, head, which[None])[0][0]


def _certify(problem, heads, solved, which, leverage, reach, exact, known, norm, ranges, out, results):
    n = problem.shape[0]
    edges = np.where(solved.window[which] >= 0, certify.EDGE, 0)
    audits = certify.draw_audit(problem, heads, solved.sample.uniform.shape[1], exact, leverage, reach, edges)
    count = max(max(len(a.rows) for a in audits), 1)
    index = np.stack([np.resize(a.rows if len(a.rows) else [0], count) for a in audits])
    values, _, _ = rows(problem, heads, index)
    count_rows(problem, heads, results, count)
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
        size = math.sqrt(known[h] + norm[h][~exact[h]].sum(dtype=np.float64))
        result.error_limit = math.hypot(result.error_limit, ranges.rounding(head, n, size))
        out[head, audit.rows] = values[h, :used]
        exact[h, audit.rows] = True
        result.rows = int(exact[h].sum())
