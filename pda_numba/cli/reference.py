"""The truth that claims are held against: exact attention in plain NumPy and float64, none of the package's kernels."""

import math

import numpy as np

_ROWS, _KEYS = 256, 8192  # scores held at once: 16 MiB


def heads(q, k, v):
    """[(index, q_h, k_h, v_h)]: the two-dimensional problems of a call, grouped queries and broadcasting resolved."""
    if q.ndim == 2:
        return [((), q, k, v)]
    lead = (*np.broadcast_shapes(q.shape[:-3], k.shape[:-3]), q.shape[-3])
    group = q.shape[-3] // k.shape[-3]
    q = np.broadcast_to(q, (*lead, *q.shape[-2:]))
    k, v = (np.broadcast_to(x, (*lead[:-1], *x.shape[-3:])) for x in (k, v))
    found = []
    for h in np.ndindex(lead):
        shared = (*h[:-1], h[-1] // group)
        found.append((h, q[h], k[shared], v[shared]))
    return found


def exact_rows(q, k, v, which, scale, tick=lambda rows: None):
    """softmax(scale q_i . k) v for the rows `which`, (n, E) float64; `tick` is told how many rows were done."""
    out = np.empty((len(which), v.shape[1]))
    for first in range(0, len(which), _ROWS):
        part = which[first : first + _ROWS]
        out[first : first + len(part)] = _attend(q[part].astype(np.float64) * scale, k, v)
        tick(len(part))
    return out


def _attend(queries, k, v):
    """One block of rows, the keys in blocks: sums are rescaled whenever the running maximum rises."""
    top = np.full((len(queries), 1), -np.inf)
    total = np.zeros((len(queries), 1))
    sums = np.zeros((len(queries), v.shape[1]))
    for start in range(0, len(k), _KEYS):
        scores = queries @ k[start : start + _KEYS].T.astype(np.float64)
        raised = np.maximum(top, scores.max(axis=1, keepdims=True))
        old = np.exp(top - raised)
        weights = np.exp(scores - raised, out=scores)
        total = total * old + weights.sum(axis=1, keepdims=True)
        sums = sums * old + weights @ v[start : start + _KEYS].astype(np.float64)
        top = raised
    return sums / total


def default_scale(q):
    """1 / sqrt(D), as in `attention`."""
    return 1.0 / math.sqrt(q.shape[-1])


def relative_error(out, exact):
    """|out - exact|_F / |exact|_F; an all-zero truth counts as its own scale 1."""
    norm = np.linalg.norm(exact)
    return float(np.linalg.norm(out - exact) / (norm if norm > 0 else 1.0))


def row_errors(out, exact):
    """|out_i - exact_i| relative to the root mean square of |exact_i|."""
    rms = math.sqrt(np.mean(np.sum(np.square(exact), axis=1)))
    return np.linalg.norm(out - exact, axis=1) / (rms if rms > 0 else 1.0)
