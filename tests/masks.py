"""Masks that calls can have, each with the matrix of what every query sees."""

from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    """Arguments of a call with `batch` entries of n queries and m keys, and what is seen (batch, n, m)."""

    options: dict
    seen: np.ndarray


def below(n, m):
    """The causal triangle, aligned at its end."""
    return np.arange(m)[None] <= np.arange(n)[:, None] + m - n


def causal(n, m, batch):
    return Case({"causal": True}, np.broadcast_to(below(n, m), (batch, n, m)))


def lengths(n, m, batch):
    """From all keys down to none."""
    lengths = np.linspace(m, 0, batch).astype(int)
    seen = np.arange(m)[None, None] < lengths[:, None, None]
    return Case({"key_lengths": lengths}, np.broadcast_to(seen, (batch, n, m)))


def holes(n, m, batch):
    """Three keys of four, none of the first third in every other entry, none at all in the last of many."""
    mask = np.random.default_rng(m).random((batch, m)) < 0.75
    mask[1::2, : m // 3] = False
    mask[2:] = False
    return Case({"key_mask": mask}, np.broadcast_to(mask[:, None], (batch, n, m)))


def packed(n, m, batch):
    """Four sequences, one of them empty; the first has more queries than keys."""
    q, k = np.array([0, n // 8, n // 8, n - n // 9, n]), np.array([0, m // 9, m // 9, m - m // 8, m])
    own_q, own_k = (np.searchsorted(x, np.arange(x[-1]), side="right") for x in (q, k))
    return Case({"cu_seqlens": (q, k)}, np.broadcast_to(own_q[:, None] == own_k[None], (batch, n, m)))


def rows(n, m, batch):
    return Case({"exact_rows": slice(n // 4, n // 2, 3)}, np.ones((batch, n, m), bool))


def with_causal(make):
    def both(n, m, batch):
        options, seen = make(n, m, batch)
        return Case({"causal": True} | options, seen & below(n, m))

    return both


def packed_causal(n, m, batch):
    """Every sequence is aligned at its own end."""
    options, seen = packed(n, m, batch)
    q, k = options["cu_seqlens"]
    triangle = np.zeros((n, m), bool)
    for a, b, c, d in zip(q[:-1], q[1:], k[:-1], k[1:], strict=True):
        triangle[a:b, c:d] = below(b - a, d - c)
    return Case({"causal": True} | options, seen & triangle)


def padded(n, m, batch):
    """Queries and keys, down to a third of them."""
    queries, keys = (np.linspace(x, x // 3, batch).astype(int) for x in (n, m))
    seen = (np.arange(n) < queries[:, None])[:, :, None] & (np.arange(m) < keys[:, None])[:, None]
    return Case({"query_lengths": queries, "key_lengths": keys}, seen)


MASKS = {
    "causal": causal,
    "lengths": lengths,
    "lengths, causal": with_causal(lengths),
    "padded": padded,
    "padded, causal": with_causal(padded),
    "holes": holes,
    "holes, causal": with_causal(holes),
    "packed": packed,
    "packed, causal": packed_causal,
    "rows": rows,
}


def attention(q, k, v, seen, scale=None):
    """Exact attention (batch, heads, n, e) by dense matrices in float64; 0 for queries that see nothing."""
    group, out = q.shape[1] // k.shape[1], np.zeros((*q.shape[:3], v.shape[3]))
    for b, h in np.ndindex(q.shape[:2]):
        out[b, h] = weights(q[b, h], k[b, h // group], seen[b], scale) @ clean(v[b, h // group], seen[b])
    return out


def weights(q, k, seen, scale=None):
    """The softmax over what is seen."""
    q, k = q.astype(np.float64), clean(k, seen)
    scores = np.where(seen, q @ k.T * (q.shape[1] ** -0.5 if scale is None else scale), -np.inf)
    top = np.maximum(scores.max(axis=1, initial=-np.inf, keepdims=True), np.finfo(float).min)
    e = np.exp(scores - top)
    total = e.sum(axis=1, keepdims=True)
    return e / np.where(total > 0, total, 1)


def plain(q, k, v, seen):
    """A head's output as a plain implementation has it, in the arithmetic of the arrays."""
    a = plain_weights(q, k, seen)
    return a @ v


def plain_weights(q, k, seen):
    kind = q.dtype.type
    scores = np.where(seen, q @ k.T * kind(q.shape[1] ** -0.5), kind(-np.inf))
    e = np.exp(scores - np.maximum(scores.max(axis=1, initial=kind(-np.inf), keepdims=True), np.finfo(kind).min))
    total = e.sum(axis=1, keepdims=True)
    return e / np.where(total > 0, total, kind(1))


def clean(x, seen):
    """Rows that nobody sees, of whatever they hold, as zeros."""
    return np.where(seen.any(axis=0)[:, None], x.astype(np.float64), 0)


def gradients(q, k, v, seen, dout, scale=None):
    """dq, dk, dv (batch, heads, ...) by dense matrices in float64."""
    scale, group = q.shape[3] ** -0.5 if scale is None else scale, q.shape[1] // k.shape[1]
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    for b, h in np.ndindex(q.shape[:2]):
        own_k, own_v = (clean(x[b, h // group], seen[b]) for x in (k, v))
        a, g = weights(q[b, h], own_k, seen[b], scale), dout[b, h].astype(np.float64)
        dp = g @ own_v.T
        ds = a * (dp - (dp * a).sum(axis=1, keepdims=True)) * scale
        dq[b, h] += ds @ own_k
        dk[b, h // group] += ds.T @ q[b, h].astype(np.float64)
        dv[b, h // group] += a.T @ g
    return dq, dk, dv


def problem(n, m, batch=3, group=2, d=7, e=5, seed=0, dtype=np.float32, key_heads=2):
    """q (batch, key_heads group, n, d), k and v (batch, key_heads, m, ...), smooth enough for low rank."""
    rng = np.random.default_rng([seed, n, m])
    q, k, v = (
        rng.standard_normal((batch, heads, rows, columns)) * 1.5 / (1 + np.arange(columns)) ** 0.5
        for heads, rows, columns in ((key_heads * group, n, d), (key_heads, m, d), (key_heads, m, e))
    )
    return q.astype(dtype), k.astype(dtype), (v + 0.3).astype(dtype)
