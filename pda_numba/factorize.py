"""`factorize`: the explicit factors of the paper, u_r (x) v_r, from the fit that `attention` applies.

Exact rows I of the softmax matrix are fitted by R landmarks (`solve`), with a random matrix in place of the values, so
that everything is chosen by the error of the matrix itself. With the features X of the rows, weights w, and
W X = U diag(sigma) V^T, the ridge solution is Z = C T for any targets T, so that

    A ~ U_L V_R^T      U_L = E / den (N, R)      V_R^T = C A[I] (R, M)      C = V diag(sigma / (sigma^2 + lambda)) U^T W

    E_ij = exp(s q_i . S_j - ref_i)      den = E C 1: rows sum to 1

    U_L = Q_1 R_1      A[I]^T (R_1 C)^T = P R_2      A ~ W P^T with the coordinates W = Q_1 R_2^T

in float64; the second product is well scaled where C itself is not. The sampled rows are exact, and so are R rows of
the largest norm and R of the largest leverage, which the fit is most likely to get wrong. They are mended: P gets R
columns more from what these rows have outside of its span, and they get the coordinates of their orthogonal projection,
A[mended] P. All other rows of W are cut to length 1, which no row of a softmax exceeds. In the end

    W = Q U diag(s) V^T      left = Q U, right = P V, both cut to the rank R

No N M numbers are ever held. Where one side of the matrix is at most as long as there would be exact rows, its SVD is
computed instead.
"""

import math
from typing import Any

import numpy as np

from . import _validate, certify, draw
from ._jit import announce_slow_compilation
from .factors import AttentionFactors
from .holdout import EXACT, hold_out
from .info import Clock
from .matrix import Softmax, heads_of
from .options import options
from .orthonormal import orthonormal
from .plan import ROWS_PER_RANK, head_workspace, pda_flops
from .problem import Problem
from .reach import reach
from .results import COLUMNS, ERROR, LIMIT, HeadResult
from .rows import rows
from .solve import solve, uniform_part

_VALUES = 8  # columns of the random matrix in place of values: as many as the fit looks at to choose its ridge
_BLOCK = 2**22  # numbers of exact rows that are held at a time
_LEAST_DEN = 1e-6  # of the sum of the absolute terms of a normaliser: below, it is rounding or worse


def factorize(q, k, *, rank, scale=None, n_rows=128, seed=0, device="auto", check_finite=True):
    """Explicit low-rank factors of the softmax matrix of every head, in time linear in the sequence.

    To be kept, truncated, saved, and applied to any number of values. One call of `attention` is more accurate at the
    same rank: it has a near field and keeps the exact rows, while here all is in the factors. The best possible ones
    take quadratic time: `spectrum` says what they would reach.

    Parameters
    ----------
    q : array, shape (..., Hq, N, D)
        Queries, as for `attention`: NumPy's or on a GPU. Two axes are one head.
    k : array, shape (..., Hkv, M, D)
        Keys. Every query sees all keys.
    rank : int
        R.
    scale : float, optional
        Factor on the logits, by default 1/sqrt(D).
    n_rows : int, default 128
        Rows per head, drawn uniformly, from which the error is measured; 5/8 as many are drawn towards rows that are
        likely to be wrong.
    seed : int
        Seed of all random draws.
    device : {"auto", "cpu", "cuda"}
        Where the exact rows are computed. The factors are put together on the host and are NumPy arrays.
    check_finite : bool, default True
        Raise if an input holds NaN or infinity.

    Returns
    -------
    AttentionFactors

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it must be and what it was.
    RuntimeError
        If `device="cuda"` is not available.

    Examples
    --------
    >>> import pda_numba, pda_numba.data
    >>> q, k, v = pda_numba.data.smooth_heads((2, 3000, 16))
    >>> factors = pda_numba.factorize(q, k, rank=32)
    >>> factors.left.shape, factors.right.shape, factors.apply(v).shape
    ((2, 3000, 32), (2, 3000, 32), (2, 3000, 16))
    """
    rank = _validate.whole("rank", rank, 1)
    n_rows = _validate.whole("n_rows", n_rows, 1)

    def flops(n, m, d):  # the fit, and two passes over up to six rows for each rank, with as many columns
        return pda_flops(n, m, d, _VALUES, rank) + 12 * rank * m * (2 * d + 3 * rank)

    with heads_of(q, k, scale, seed, device, check_finite, flops) as heads:
        n, m = heads.problem.shape[:2]
        _validate.whole("rank", rank, 1, min(n, m), high_name=f"the smaller of N and M, {min(n, m)}")
        announce_slow_compilation()
        count, element = len(heads.problem.query_head), heads.dtype
        found = AttentionFactors(
            np.empty((count, n, rank), element),
            np.empty((count, m, rank), element),
            np.empty((count, rank)),
            np.empty(count),
            np.empty(count),
            np.empty(count),
            np.empty(count, int),
        )
        short = min(n, m) <= ROWS_PER_RANK * rank
        fill = _fill_short if short else _fill_fitted
        if count:
            fill(heads, rank, n_rows, found)
    shaped: dict[str, Any] = {name: x.reshape((*heads.lead, *x.shape[1:])) for name, x in vars(found).items()}
    return AttentionFactors(**shaped)


# --- one side is short ---


def _fill_short(heads, rank, _n_rows, found):
    """By the SVD of the matrix itself, which is no larger than a few factors."""
    p = heads.problem
    for h, (query, key) in enumerate(zip(p.query_head, p.key_head, strict=True)):
        a = _exact_rows(p, p.q[query], p.k[key])
        u, s, vt = np.linalg.svd(a, full_matrices=False)
        _put(found, h, u[:, :rank], s[:rank], vt[:rank].T)
        size = math.sqrt(np.square(s).sum())
        found.frobenius_norm[h] = size
        found.error[h] = found.error_limit[h] = math.sqrt(np.square(s[rank:]).sum()) / size


def _exact_rows(problem, q, k):
    """The softmax over all keys of a few queries, in float64."""
    logits = problem.scale * (q.astype(float) @ k.astype(float).T)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _put(found, h, left, values, right):
    """One head's factors, with their signs."""
    signs = np.sign(right[np.abs(right).argmax(axis=0), np.arange(right.shape[1])])
    found.left[h], found.right[h], found.singular_values[h] = left * signs, right * signs, values
    found.effective_rank[h] = (values > 10 * np.finfo(found.left.dtype).eps * values[0]).sum()


# --- both are long ---


def _fill_fitted(heads, rank, n_rows, found):
    """By the fit, as many heads at a time as share the workspace."""
    p, device = heads.problem, heads.device
    n, m, d = p.shape[:3]
    wished = options(rank, None, 0, "auto", None, "pda", n=n, m=m, d=d)
    memory = head_workspace(n, m, d, _VALUES, rank, heads.dtype.itemsize) + 8 * (n + m) * (2 * rank + d)
    size = max(1, int(device.group_bytes // memory))
    values = np.stack([np.random.default_rng([p.seed, h]).standard_normal((m, _VALUES)) for h in range(len(p.k))])
    q, k, v = (device.hold(np.ascontiguousarray(x, heads.dtype)) for x in (p.q, p.k, values))
    problem = Problem(q, k, v, p.query_head, p.key_head, heads.dtype, p.scale, p.seed, device)
    for first in range(0, len(p.query_head), size):
        group = np.arange(first, min(first + size, len(p.query_head)))
        _fit_group(p, problem, group, wished, n_rows, found)
        device.recycle()


def _fit_group(host, problem, group, wished, n_rows, found):
    """The factors of some heads; `host` is the same problem with its arrays on the host."""
    device, rank = problem.device, wished.rank
    results, clock = {h: HeadResult() for h in group}, Clock()
    sample = uniform_part(problem, group, None, rank, results, clock)
    solved = solve(problem, group, sample, wished, rank, results, clock, slope=False)
    chosen, lse = solved.sample.rows, solved.sample.lse
    task = chosen, lse, solved.weight, solved.ridge, solved.tiles, solved.found
    chosen, lse, weight, ridge, tiles, landmarks = (np.array(device.download(x)) for x in task)
    leverage, known = np.empty((len(group), host.shape[0]), problem.element), []
    for i, h in enumerate(group):
        q, k = host.q[host.query_head[h]], host.k[host.key_head[h]]
        model = _Model(
            q, problem.factor, tiles[i, : landmarks[i]], chosen[i], lse[i].astype(float), weight[i], ridge[i]
        )
        x, lost = model.left()
        x[lost] = model.with_normaliser(lost, _normalisers(problem, h, lost))
        doubt = model.leverage(x)
        left, triangle = orthonormal(x[None])
        sampled = Softmax(device, np.ascontiguousarray(q[chosen[i]])[None], k[None], host.scale, host.seed)
        right, small = orthonormal(sampled.transposed_times((triangle[0] @ model.solution).T[None]))
        coordinates = left[0] @ small[0].T
        mended = _to_mend(coordinates, doubt, chosen[i], rank)
        exact = Softmax(device, np.ascontiguousarray(q[mended])[None], k[None], host.scale, host.seed)
        random = np.random.default_rng([host.seed, h]).standard_normal(
            (1, len(mended), min(rank, len(k) - landmarks[i]))
        )
        right, _ = orthonormal(np.concatenate([right, exact.transposed_times(random)], axis=2))
        coordinates = np.pad(coordinates, ((0, 0), (0, right.shape[2] - landmarks[i])))
        coordinates[mended] = exact.times(right)[0]
        known.append(mended)
        coordinates /= np.maximum(np.linalg.norm(coordinates, axis=1), 1)[:, None]
        left, triangle = orthonormal(coordinates[None])
        u, s, vt = np.linalg.svd(triangle[0])
        _put(found, h, left[0] @ u[:, :rank], s[:rank], right[0] @ vt[:rank].T)
        leverage[i] = np.minimum(doubt, np.finfo(problem.element).max / 4)
    _judge(host, problem, group, leverage, known, n_rows, found)


class _Model:
    """The fit of one head in float64: features, the ridge solution C, and G of the leverage |x G|^2."""

    def __init__(self, q, factor, landmarks, chosen, lse, weight, ridge):
        self.q, self.factor, self.landmarks = q, float(factor), landmarks.astype(float)
        weighted = weight[:, None] * np.exp2(self._scores(chosen) - lse[:, None])
        weighted[weight == 0] = 0
        u, s, vt = np.linalg.svd(weighted, full_matrices=False)
        penalty = s**2 + float(ridge) * s[0] ** 2
        penalty = np.where(penalty > 0, penalty, 1)
        self.solution = (vt.T * (s / penalty)) @ (u.T * weight)
        self.root = vt.T / np.sqrt(penalty)

    def _scores(self, which):
        return (self.factor * self.q[which].astype(float)) @ self.landmarks.T

    def left(self):
        """E / den, and the rows whose den is no positive number to speak of."""
        scores = self._scores(slice(None))
        e = np.exp2(scores - scores.max(axis=1, keepdims=True))
        total = self.solution.sum(axis=1)
        den = e @ total
        lost = np.flatnonzero(~(den > _LEAST_DEN * (e @ np.abs(total))))
        den[lost] = 1
        return e / den[:, None], lost

    def with_normaliser(self, which, lse):
        """The same rows by their exact normaliser."""
        return np.exp2(np.minimum(self._scores(which) - lse[:, None], 0.0))

    def leverage(self, x):
        """|x G|^2 of every row."""
        return np.square(x @ self.root).sum(axis=1)


def _to_mend(coordinates, leverage, chosen, count):
    """The sampled rows, and as many others as the rank twice: those of largest norm, and of largest leverage."""
    worst = [chosen]
    for doubt in (np.square(coordinates).sum(axis=1), leverage):
        doubt = doubt.copy()
        doubt[np.concatenate(worst)] = -1
        worst.append(np.argsort(-doubt, kind="stable")[:count])
    return np.unique(np.concatenate(worst))


def _normalisers(problem, head, which):
    """The exact lse of some rows, in units of log 2."""
    if not len(which):
        return np.zeros(0)
    device = problem.device
    _, lse, _ = rows(problem, np.array([head]), device.upload(which[None]))
    return np.array(device.download(lse))[0].astype(float)


def _judge(host, problem, group, leverage, known, n_rows, found):
    """Error, its limit and the exact matrix's norm, from rows that are drawn independently of the fit.

    What the `known` rows of each head are off by, those that were mended, is known too.
    """
    device, n, count = problem.device, host.shape[0], len(group)
    norm, state, missed = np.empty((count, n)), np.zeros((count, n), np.int32), np.empty(count)
    for i, (h, mended) in enumerate(zip(group, known, strict=True)):
        norm[i] = np.square(found.left[h] * found.singular_values[h]).sum(axis=1)
        squares = _squares(host, h, found, mended)
        missed[i], norm[i, mended], state[i, mended] = squares[:, 0].sum(), squares[:, 1], EXACT
    state, live = device.hold(state), device.upload(np.ones(count, np.int64))
    work, nowhere = device.empty((count, n), np.float64), device.zeros(count, np.int64)
    far, sizes = reach(problem, group), (min(n_rows, n), n_rows // 2, n_rows // 8)
    held = hold_out(problem, group, 0, state, device.hold(leverage), far, nowhere, live, work, sizes, draw.JUDGE)
    which, used, pi = (np.array(device.download(x)) for x in (held.rows, held.count, held.pi))
    squares, total = np.zeros((*which.shape, 3)), norm.sum(axis=1)
    for i, h in enumerate(group):
        squares[i, : used[i]] = _squares(host, h, found, which[i, : used[i]])
        drawn = squares[i, : used[i]]
        total[i] = max(total[i] + ((drawn[:, 1] - drawn[:, 2]) / pi[i, : used[i]]).sum(), 0.2 * total[i])
    report, every = device.zeros((count, COLUMNS), np.float64), device.empty((count, 0), np.int64)
    fitted = certify.Fitted(every, *(device.empty((count, 0), np.float64) for _ in range(2)))
    judged = device.hold(squares), device.hold(norm.astype(problem.element))
    certify.judge_squares(device, held, *judged, state, fitted, far, live, report, replaced=False)
    report = device.download(report)
    found.frobenius_norm[group] = np.sqrt(total)
    found.error[group] = np.sqrt(np.square(report[:, ERROR]) + missed / total)
    found.error_limit[group] = np.sqrt(np.square(report[:, LIMIT]) + missed / total)


def _squares(host, h, found, which):
    """(rows, 3): |guess - truth|^2, |truth|^2 and |guess|^2 of some rows of a head's matrix, in float64."""
    q, k = host.q[host.query_head[h]], host.k[host.key_head[h]]
    out, step = np.empty((len(which), 3)), max(1, _BLOCK // len(k))
    for first in range(0, len(which), step):
        some = which[first : first + step]
        truth = _exact_rows(host, q[some], k)
        guess = (found.left[h, some] * found.singular_values[h]) @ found.right[h].T
        for c, x in enumerate((guess - truth, truth, guess)):
            out[first : first + step, c] = np.square(x).sum(axis=1)
    return out
