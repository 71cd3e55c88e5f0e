"""The certificate: rows that no fit has seen are computed exactly, and say how wrong the output is.

Errors sit in few rows, so the rows are drawn by three independent designs, and a row counts with its probability of
being in any of them:

    uniform          the next entries of the row permutation
    leverage         inclusion ~ |x_i G|^2, the final fit's own leverage
    reach            inclusion ~ |q_i C^-1/2|^2, C the queries' second moment: queries far from the bulk

with pi_i the probability of the union and y_i = |out_i - o_i|^2, the error that is left once the drawn rows have been
replaced by their exact values is estimated by S = sum (1 - pi_i)/pi_i y_i (Horvitz and Thompson 1952), |o|^2 by the
difference estimator T. The upper limit treats S as gamma distributed with the estimated variance, after adding one
pseudo-row of the largest expanded error seen, held out or left out (the gamma limit of Fay and Feuer 1997; its quantile
by Wilson and Hilferty 1931).

From the uniform rows alone: with 95 % confidence at least a share 0.05^(1/n) of all rows is off by no more than the
worst of n rows (the one-sided distribution-free tolerance limit of Wilks 1941).
"""

import math
from typing import NamedTuple

import numpy as np
from numba import prange

from . import draw
from ._jit import cpu_kernel, shared
from .kernels.panel import multiply_keys, pack_query
from .kernels.scalar import normal, widen
from .kernels.simd import lane_count, padded
from .kernels.small_qr import moment_root, solve_upper

UNIFORM, LEVERAGE, REACH = 128, 48, 16  # rows of the three designs
EDGE = 4  # with a near field, the first and last rows have a band of another shape: always drawn
_Z95 = 1.6448536269514722
_MOMENT_ROWS, _MOMENT_RIDGE = 512, 1e-3  # queries from which their second moment is taken, and its relative ridge
_REACH_COLUMNS = 16  # the reach is estimated from this many random combinations
_LARGEST_WEIGHT = 1e12

# --- bodies ---


@shared
def _whitener(q, which, seed, head):
    """(D, columns): random combinations of C^-1/2, C being the second moment of the queries `which`."""
    n, dim = which.shape[0], q.shape[1]
    sample = np.empty((n, dim))
    for i in range(n):
        for d in range(dim):
            sample[i, d] = widen(q[which[i], d])
    out = np.empty((dim, _REACH_COLUMNS))
    scale = math.sqrt(n / (dim * _REACH_COLUMNS))
    for d in range(dim):
        for c in range(_REACH_COLUMNS):
            out[d, c] = scale * normal(seed, head, draw.REACH, d * _REACH_COLUMNS + c)
    solve_upper(moment_root(sample, _MOMENT_RIDGE), out)
    return out


# --- CPU driver ---


@cpu_kernel
def _reach_cpu(q, query_head, which, seed, whitener, reach):
    heads, n = reach.shape
    width = lane_count(reach)
    blocks = (n + width - 1) // width
    for h in prange(heads):
        combinations = _whitener(q[query_head[h]], which[h], seed, query_head[h])
        for c in range(_REACH_COLUMNS):
            for d in range(q.shape[2]):
                whitener[h, c, d] = combinations[d, c]
    one = reach.dtype.type(1)
    for item in prange(heads * blocks):
        h, first = item // blocks, item % blocks * width
        queries = np.zeros((q.shape[2], width), reach.dtype)
        combined = np.empty((_REACH_COLUMNS, width), reach.dtype)
        used = min(width, n - first)
        for x in range(used):
            pack_query(queries, x, q[query_head[h]], first + x, one)
        multiply_keys(combined, whitener[h], queries, _REACH_COLUMNS)
        for x in range(used):
            total = one - one
            for c in range(_REACH_COLUMNS):
                total += combined[c, x] * combined[c, x]
            reach[h, first + x] = total


# --- stages ---


def reach(problem, heads):
    """|q_i C^-1/2|^2 / D for every query (heads, N), estimated."""
    n, _, dim, _ = problem.shape
    which = draw.uniform_rows(problem, heads, min(_MOMENT_ROWS, n), stage=draw.REACH)
    out = np.empty((len(heads), n), problem.element)
    whitener = np.zeros((len(heads), padded(_REACH_COLUMNS), dim), problem.element)
    _reach_cpu(problem.q, problem.query_head[heads], which, problem.seed, whitener, out)
    return out


class Audit(NamedTuple):
    """One head's held-out rows."""

    rows: np.ndarray  # (n,) indices
    uniform: np.ndarray  # (n,) bool: drawn by the uniform design
    pi: np.ndarray  # (n,) probability of being drawn by any design
    uniform_pi: float  # inclusion probability of the uniform design
    scales: tuple  # t of the leverage and of the reach design


def draw_audit(problem, heads, first, exact, leverage, reach, edges, sizes=(UNIFORM, LEVERAGE, REACH), stage=draw.ROWS):
    """Held-out rows of every head: uniform ones from entry `first` of permutation `stage`, and two weighted designs.

    `exact (heads, N)` marks rows that are exact already; `leverage` and `reach` (heads, N) are the weights; `edges`
    (heads,) is how many rows at either end are always drawn.
    """
    n = exact.shape[1]
    open_rows = n - exact.sum(axis=1)
    wanted = min(n - first, int(1.5 * sizes[0] * n / max(open_rows.min(), 1)) + 8)
    candidates = draw.uniform_rows(problem, heads, wanted, first=first, stage=stage)
    weights = [np.where(exact, 0, np.clip(w, 1e-12, _LARGEST_WEIGHT)) for w in (leverage, reach)]
    drawn = [
        draw.weighted_rows(problem, heads, w, size, stage=stream)
        for w, size, stream in zip(weights, sizes[1:], (draw.AUDIT, draw.REACH), strict=True)
    ]
    audits = []
    for h in range(len(exact)):
        uniform_rows = candidates[h][~exact[h, candidates[h]]][: sizes[0]]
        uniform_pi = min(1.0, len(uniform_rows) / max(open_rows[h], 1))
        weighted = [chosen[h, : found[h]] for chosen, _, found, _ in drawn]
        ends = np.r_[0 : edges[h], n - edges[h] : n]
        rows = np.unique(np.concatenate([uniform_rows, *weighted, ends[~exact[h, ends]]]))
        scales = tuple(scale[h] for _, _, _, scale in drawn)
        pi = _union(uniform_pi, scales, [w[h, rows] for w in weights])
        pi[np.isin(rows, ends)] = 1.0
        audits.append(Audit(rows, np.isin(rows, uniform_rows), pi, uniform_pi, scales))
    return audits


def _union(uniform_pi, scales, weights):
    """1 - prod (1 - pi) over the designs."""
    outside = np.full(len(weights[0]), 1.0 - uniform_pi)
    for scale, weight in zip(scales, weights, strict=True):
        outside *= 1.0 - np.where(weight > 0, np.minimum(1.0, scale * weight), 0.0)
    return 1.0 - outside


def judge(audit, error, exact_norm, out_norm, rest_norm, known_norm, n, left_out, *, replaced=True):
    """The certificate of one head.

    `error`, `exact_norm` and `out_norm` are |out_i - o_i|^2, |o_i|^2 and |out_i|^2 of the audit's rows; `rest_norm` is
    the sum of |out_i|^2 over the rows that stay approximate, `known_norm` that of |o_i|^2 over rows exact before.
    `left_out` holds the squared error, leverage and reach of the fitted rows when each is left out. `replaced` says
    whether the audited rows are exact in the end, so that their own error does not count.
    """
    expand = (1.0 - audit.pi) / audit.pi
    expanded = expand * error
    left = expanded.sum() + (0.0 if replaced else error.sum())
    difference = exact_norm - out_norm
    known = known_norm + exact_norm.sum() + rest_norm
    total = max(known + (expand * difference).sum(), 0.2 * known)
    if total <= 0:
        wrong = math.inf if error.sum() > 0 else 0.0  # nothing to be right about: any error is infinitely large
        return wrong, wrong, wrong, share_of_rows(audit.uniform.sum())
    deviation = error - left / total * difference
    variance = (expand / audit.pi * deviation**2).sum()
    pseudo = max(expanded.max(initial=0.0), _left_out_pseudo(audit, *left_out))
    limit = _gamma_limit(left + pseudo, variance + pseudo**2)
    worst = math.sqrt(error[audit.uniform].max(initial=0.0) * n / total)
    return math.sqrt(left / total), math.sqrt(limit / total), worst, share_of_rows(audit.uniform.sum())


def share_of_rows(count):
    """With 95 % confidence at least this share of all rows is off by no more than the worst of `count` uniform ones."""
    return 0.05 ** (1.0 / count) if count else 0.0


def _left_out_pseudo(audit, error, leverage, reach):
    pi = np.maximum(_union(audit.uniform_pi, audit.scales, [np.clip(leverage, 1e-12, _LARGEST_WEIGHT), reach]), 1e-12)
    return ((1.0 - pi) / pi * error).max(initial=0.0)


def _gamma_limit(mean, variance):
    """95 % quantile of the gamma distribution with this mean and variance."""
    if variance <= 0:
        return mean
    shape = mean * mean / variance
    return mean * max(1.0 - 1.0 / (9.0 * shape) + _Z95 / (3.0 * math.sqrt(shape)), 0.0) ** 3
