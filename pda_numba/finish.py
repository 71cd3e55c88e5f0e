"""From the fit to the output: apply it to all queries, mend the rows it cannot be trusted on, certify the rest."""

import dataclasses
import math

import numpy as np

from . import certify, landmarks, plan
from .apply import apply
from .kernels.simd import lanes
from .results import count_rows
from .rows import rows

# Leverage beyond which a row is flagged: this many times that of any fitted row when left out, and at least this.
_FAR_BEYOND, _LEAST_FLAG = 4.0, 10.0


def finish(problem, heads, worth, solved, rank, ranges, out, results):
    """Apply, mend what cannot be trusted, certify: for the active heads that are worth it."""
    which = np.flatnonzero(worth)
    heads = heads[which]
    n, _, d, e = problem.shape
    width = lanes(problem.element)
    starts = np.tile(np.arange(0, n, width), (len(which), 1))
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
        count_rows(problem, heads[h : h + 1], results, len(budget))
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
        result.error_limit = math.hypot(result.error_limit, ranges.rounding[head])
        out[head, audit.rows] = values[h, :used]
        exact[h, audit.rows] = True
        result.rows = int(exact[h].sum())
