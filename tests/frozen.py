"""The low-rank forward pass with every choice held fixed, in plain NumPy that HIPS autograd can differentiate.

What is chosen (rows, landmarks, weights, ridge, window, temperature, projection, clipped outputs) comes from the
residuals of a real call; what is computed from queries, keys and values is written out here in dense matrices.
"""

import autograd.numpy as np
from autograd.scipy.special import logsumexp

from pda_numba import landmarks


def choices(problem, part, h):
    """The choices of the h-th head of a part (`pda_numba.residuals.LowRank`), as a dict."""
    head = part.heads[[h]]
    own = part.of(problem.device, np.array([h]))
    count = landmarks.REFINE_FACTOR * part.keys.shape[1]
    _, sample, nearest = landmarks.assign(problem, head, own.keys, own.found, count)
    fitted = part.weight.shape[1]
    found = int(part.found[h])
    return {
        "rows": part.rows[h],
        "slot": part.slot[h],
        "fitted": np.flatnonzero((part.weight[h] > 0) & np.isfinite(part.lse[h, :fitted])),
        "weight": part.weight[h],
        "level": float(part.ridge[h]),
        "keys": part.keys[h, :found],
        "sample": sample[0],
        "nearest": np.full(nearest[0].shape, -1) if problem.merged else nearest[0],
        "temperature": float(part.temperature[h]),
        "window": int(part.window[h]),
        "covered": _covered(part, h),
        "basis": part.basis[h],
        "projection": part.projection[h],
        "scale": problem.scale,
    }


def _covered(part, h):
    """Which keys are near to which queries by content."""
    probes, bucket = part.probes[h][:, : part.counts[h]], part.bucket[h][:, 0]
    near = (probes[:, :, None] == bucket).any(axis=1) | (bucket == part.start.shape[1] - 2)
    return near if part.counts[h] else None


def _near(c, n, m):
    near = np.abs(np.arange(n)[:, None] - np.arange(m)[None]) <= c["window"]
    return (near if c["covered"] is None else near | c["covered"]).astype(float)


def _landmarks(k, c):
    """S, or S~ with a projection."""
    member = (c["nearest"][None] == np.arange(len(c["keys"]))[:, None]).astype(float)
    centres = (k[c["keys"]] + member @ k[c["sample"]]) / (1 + member.sum(axis=1))[:, None]
    mean = np.mean(k[c["sample"]], axis=0)
    s = mean + c["temperature"] * (centres - mean)
    if not len(c["projection"]):
        return s
    m = len(c["projection"])
    if "mean" in c:  # of a pair from the data: one more coordinate carries q . mean
        return np.concatenate([(s - c["mean"]) @ c["projection"].T, np.ones((len(s), 1))], axis=1)
    return s @ c["projection"].T[:, :m]


def fit(q, k, v, c):
    """X, T, penalty-free normal matrix, and the coordinates that scores are made of."""
    s = _landmarks(k, c)
    coordinates = q @ c["basis"][: s.shape[1]].T if len(c["basis"]) else q
    rows = c["rows"][c["fitted"]]
    scores = c["scale"] * (q[rows] @ k.T)
    lse = logsumexp(scores, axis=1)[:, None]
    weights = np.exp(scores - lse)
    far = weights * (1 - _near(c, len(q), len(k))[rows])
    ones = np.ones((len(rows), 1))
    near = np.sum(weights - far, axis=1)[:, None]
    target = np.concatenate([far @ v, ones - near], axis=1)
    x = np.exp(c["scale"] * (coordinates[rows] @ s.T) - lse)
    return x, target, coordinates, s


def penalty(q, k, v, c):
    """lambda, which is held fixed."""
    x = fit(q, k, v, c)[0]
    return c["level"] * np.linalg.norm(c["weight"][c["fitted"]][:, None] * x, 2) ** 2


def fitted_rows(q, k, v, c, level):
    """The fit's output for every row, not clipped."""
    x, target, coordinates, s = fit(q, k, v, c)
    omega = (c["weight"][c["fitted"]] ** 2)[:, None]
    z = _ridge(omega**0.5 * x, omega**0.5 * target, level)
    if "round" in c:  # what a plain implementation in that precision takes from its fit, which is in float64
        s, coordinates = s.astype(c["round"]), coordinates.astype(c["round"])
    scores = c["scale"] * (coordinates @ s.T)
    near = _near(c, len(q), len(k))
    direct = c["scale"] * (q @ k.T)
    top = np.max(np.concatenate([scores, direct], axis=1), axis=1)[:, None]
    top = getattr(top, "_value", top)  # cancels between numerator and denominator
    e, en = np.exp(scores - top), np.exp(direct - top) * near
    return (en @ v + e @ z[:, :-1]) / (np.sum(en, axis=1)[:, None] + (e @ z[:, -1:]))


def normalisers(q, k, v, c, level):
    """log of every row's normaliser: the fit's, of an exact row its own, of a lost one the landmarks' alone."""
    x, target, coordinates, s = fit(q, k, v, c)
    omega = (c["weight"][c["fitted"]] ** 2)[:, None]
    z = _ridge(omega**0.5 * x, omega**0.5 * target, level)
    scores = c["scale"] * (coordinates @ s.T)
    top = np.max(scores, axis=1)[:, None]
    top = getattr(top, "_value", top)
    direct = np.exp(c["scale"] * (q @ k.T) - top) * _near(c, len(q), len(k))
    den = (np.sum(direct, axis=1)[:, None] + np.exp(scores - top) @ z[:, -1:])[:, 0]
    own = np.log(np.where(den > 0, den, 1.0)) + top[:, 0]
    exact = logsumexp(c["scale"] * (q[c["rows"]] @ k.T), axis=1)
    repeated = _repeated(c)
    alone = logsumexp(c["scale"] * (q @ k[repeated].T), axis=1) + np.log(len(k) / len(repeated))
    return _by_slot(c, np.concatenate([own, exact, alone]), len(q))


def _by_slot(c, every, n):
    """Of the rows by the fit, the exact ones and the lost ones, each row's own."""
    slot = c["slot"]
    return every[np.where(slot == 0, np.arange(n), np.where(slot > 0, n + slot - 1, n + len(c["rows"]) + np.arange(n)))]


def _ridge(a, b, level):
    """min |a z - b|^2 + level |z|^2 by [[t I, a], [a^T, -t I]] [r, z] = [b, 0] with t^2 = level: unlike the normal
    equations this does not square the condition number.
    """
    n, rank, t = *a.shape, level**0.5
    rows = np.concatenate([t * np.eye(n), a], axis=1), np.concatenate([a.T, -t * np.eye(rank)], axis=1)
    right = np.concatenate([b, np.zeros((rank, b.shape[1]))])
    return np.linalg.solve(np.concatenate(rows), right)[n:]


def forward(q, k, v, c, level, clipped):
    """The output; `clipped (N, E)` is NaN, or what an output was clipped to."""
    guess = fitted_rows(q, k, v, c, level)
    inside = np.isnan(clipped)
    guess = np.where(inside, guess, np.where(inside, 0.0, clipped))
    exact = _softmax(c["scale"] * (q[c["rows"]] @ k.T)) @ v
    alone = _softmax(c["scale"] * (q @ k[_repeated(c)].T)) @ v[_repeated(c)]
    return _by_slot(c, np.concatenate([guess, exact, alone]), len(q))


def _softmax(scores):
    return np.exp(scores - logsumexp(scores, axis=1)[:, None])


def _repeated(c):
    size = -(-c["asked"] // 8) * 8 if "asked" in c else len(c["keys"])
    return c["keys"][np.arange(size) % len(c["keys"])]
