"""The oracle: every stage again in plain float64 NumPy and loops, without a line of the package's own code."""

import math

import numpy as np

# --- attention ---


def logits(q, k, scale=None):
    """scale q k^T of one head, in float64."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    return np.einsum("id,jd->ij", q, k) * (1 / math.sqrt(q.shape[1]) if scale is None else scale)


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def log_sum_exp(scores):
    top = scores.max(axis=1)
    return top + np.log(np.exp(scores - top[:, None]).sum(axis=1))


def attention(q, k, v, scale=None):
    """softmax(scale q k^T) v of one head, in float64."""
    return softmax(logits(q, k, scale)) @ np.asarray(v, np.float64)


def attention_heads(q, k, v, scale=None):
    """The same over leading axes that broadcast, query heads sharing key heads in groups: one head at a time."""
    if q.ndim == 2:
        return attention(q, k, v, scale)
    group = q.shape[-3] // k.shape[-3]
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    q = np.broadcast_to(q, (*batch, *q.shape[-3:]))
    k, v = (np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in (k, v))
    out = np.empty((*q.shape[:-1], v.shape[-1]))
    for head in np.ndindex(q.shape[:-2]):
        shared = (*head[:-1], head[-1] // group)
        out[head] = attention(q[head], k[shared], v[shared], scale)
    return out


def attention_in(dtype, q, k, v, scale=None):
    """What a plain NumPy implementation computes in `dtype`: the yardstick for rounding."""
    q, k, v = (np.asarray(x, dtype) for x in (q, k, v))
    scores = (q @ k.T) * dtype(1 / math.sqrt(q.shape[1]) if scale is None else scale)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True)) @ v


def gradients(q, k, v, dout, scale=None):
    """dq, dk, dv of one head, by dense matrices in the arithmetic of the arrays."""
    scale = q.dtype.type(1 / math.sqrt(q.shape[1]) if scale is None else scale)
    weights = softmax((q @ k.T) * scale)
    dp = dout @ v.T
    ds = weights * (dp - (dp * weights).sum(axis=1, keepdims=True))
    return scale * (ds @ k), scale * (ds.T @ q), weights.T @ dout


def relative(out, exact):
    """|out - exact|_F / |exact|_F."""
    exact = np.asarray(exact, np.float64)
    norm = np.linalg.norm(exact)
    return float(np.linalg.norm(np.asarray(out, np.float64) - exact) / (norm if norm > 0 else 1.0))


def row_errors(out, exact):
    """|out_i - exact_i|, relative to the root mean square of |exact_i|."""
    exact = np.asarray(exact, np.float64)
    typical = math.sqrt(np.square(exact).sum() / len(exact))
    return np.linalg.norm(np.asarray(out, np.float64) - exact, axis=1) / typical


def best_low_rank_error(q, k, v, rank, scale=None):
    """Relative error of the output with the best approximation of the attention matrix of that rank (its SVD)."""
    weights = softmax(logits(q, k, scale))
    u, s, vt = np.linalg.svd(weights, full_matrices=False)
    v = np.asarray(v, np.float64)
    return relative((u[:, :rank] * s[:rank]) @ (vt[:rank] @ v), weights @ v)


# --- the stages of the low-rank method ---


def near_sums(q, k, v, which, lse, window, scale):
    """sum over |i - j| <= window of exp(s_ij - lse_i) [v_j, 1], one row and one key at a time."""
    out = np.zeros((len(which), v.shape[1] + 1))
    for n, i in enumerate(which):
        for j in range(len(k)):
            if abs(i - j) <= window:
                weight = math.exp(scale * float(np.dot(q[i].astype(float), k[j].astype(float))) - lse[n])
                out[n, :-1] += weight * v[j].astype(float)
                out[n, -1] += weight
    return out


def features(q, landmarks, which, lse, scale):
    """exp(s_ij - lse_i) for sampled rows i and landmarks j: (landmarks, rows)."""
    return np.exp(logits(q[which], landmarks, scale) - np.asarray(lse)[:, None]).T


def apply(q, k, v, landmarks, z, window, scale):
    """(near + E Z) / (d_near + E z_den) by dense matrices, clipped to the range of the values; window < 0 for none."""
    landmark_scores = logits(q, landmarks, scale)
    top = landmark_scores.max(axis=1)
    near = np.zeros((len(q), len(k)), bool)
    if window >= 0:
        near = np.abs(np.arange(len(q))[:, None] - np.arange(len(k))) <= window
        scores = np.where(near, logits(q, k, scale), -np.inf)
        top = np.maximum(top, scores.max(axis=1))
        near = np.exp(scores - top[:, None])
    far = np.exp(landmark_scores - top[:, None])
    sums = near @ np.hstack([v, np.ones((len(v), 1))]).astype(float) + far @ z
    return np.clip(sums[:, :-1] / sums[:, -1:], v.min(axis=0), v.max(axis=0)), far / sums[:, -1:]


def ridge(x, target, weight, level):
    """Z of min |W (X Z - T)|^2 + level sigma_1^2 |Z|^2, by the augmented least-squares problem."""
    weighted = weight[:, None] * x
    penalty = math.sqrt(level) * np.linalg.norm(weighted, 2) * np.eye(x.shape[1])
    right = np.vstack([weight[:, None] * target, np.zeros((x.shape[1], target.shape[1]))])
    return np.linalg.lstsq(np.vstack([weighted, penalty]), right, rcond=None)[0]


def left_out_outputs(x, target, exact, weight, level):
    """Each row's output under the fit made without that row: as many fits as there are rows.

    The penalty is that of the full problem. target = [o, 1] less the near field, which the output adds back.
    """
    weighted = weight[:, None] * x
    penalty = math.sqrt(level) * np.linalg.norm(weighted, 2) * np.eye(x.shape[1])
    full = np.hstack([exact, np.ones((len(exact), 1))])
    out = np.empty_like(exact)
    for i in range(len(x)):
        keep = np.arange(len(x)) != i
        right = np.vstack([weight[keep, None] * target[keep], np.zeros((x.shape[1], target.shape[1]))])
        z = np.linalg.lstsq(np.vstack([weighted[keep], penalty]), right, rcond=None)[0]
        total = full[i] - target[i] + x[i] @ z
        out[i] = total[:-1] / total[-1]
    return out


def inclusion_probabilities(weight, count):
    """min(1, t w_i) with sum `count`, by bisection on t."""
    weight = np.asarray(weight, np.float64)
    if (weight > 0).sum() <= count:
        return (weight > 0).astype(float)
    low, high = 0.0, count / weight[weight > 0].min()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * weight).sum() < count else (low, middle)
    return np.minimum(1, high * weight)


# --- projections ---


def hadamard(size):
    """The Walsh-Hadamard matrix, H_2n = [[H, H], [H, -H]]."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


# --- statistics ---


def binomial_tail(count, least, p):
    """P(X >= least) for X ~ Binomial(count, p)."""
    return sum(math.comb(count, x) * p**x * (1 - p) ** (count - x) for x in range(least, count + 1))


def fewest_successes(count, p, failure):
    """The largest s with P(X < s) <= failure for X ~ Binomial(count, p): a test for s errs no more often than that."""
    below, s = 0.0, 0
    while s <= count:
        below += math.comb(count, s) * p**s * (1 - p) ** (count - s)
        if below > failure:
            return s
        s += 1
    return count
