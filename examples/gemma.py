"""The forward pass of Gemma 3 (https://arxiv.org/abs/2503.19786) in NumPy, with the global layers' attention to choose.

Most layers see a window of the tokens before them only. The others, every sixth, see all of them; what computes those
is a function `attend(q, k, v, scale)` of arrays (heads, tokens, dim), (key heads, tokens, dim) twice, and a number.
"""

from dataclasses import dataclass

import numpy as np

ROWS = 2048  # tokens that pass through a layer's matrices at a time, so that nothing wide is as long as the text
LOCAL_BASE = 1e4  # wave lengths of the rotation in local layers; files do not say it


@dataclass
class Shape:
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    window: int  # keys that a local layer sees, the token's own among them
    base: float  # wave lengths of the rotation in global layers
    eps: float
    global_every: int = 6

    @classmethod
    def from_gguf(cls, file):
        about = {x.removeprefix("gemma3."): value for x, value in file.metadata.items() if x.startswith("gemma3.")}
        attention = {x.removeprefix("attention."): value for x, value in about.items()}
        if not about or attention["key_length"] != attention["value_length"]:
            raise ValueError(f"this file holds {file.metadata.get('general.architecture')!r}, not a Gemma 3 model")
        return cls(
            layers=about["block_count"],
            heads=attention["head_count"],
            key_heads=attention["head_count_kv"],
            head_dim=attention["key_length"],
            window=attention["sliding_window"],
            base=about["rope.freq_base"],
            eps=attention["layer_norm_rms_epsilon"],
        )


class Gemma:
    """A model of a `Shape` with its weights by their names in GGUF; matrices are (outputs, inputs)."""

    def __init__(self, shape, weights):
        self.shape, self.weights = shape, weights
        self.embedding = weights["token_embd.weight"]
        self.global_layers = [i for i in range(shape.layers) if (i + 1) % shape.global_every == 0]

    @classmethod
    def from_gguf(cls, file):
        return cls(Shape.from_gguf(file), {name: file.read(name) for name in file.tensors})

    def embed(self, tokens):
        return self.embedding[tokens] * np.float32(self.embedding.shape[1] ** 0.5)

    def through(self, x, layers, attend):
        """Hidden states `x`, (tokens, width), after some of the layers."""
        x = x.copy()
        for i in layers:
            q, k, v = self.heads_of(x, i)
            if i in self.global_layers:
                out = attend(q, k, v, self.shape.head_dim**-0.5)
            else:
                out = banded(q, k, v, self.shape.head_dim**-0.5, self.shape.window)
            self._add(x, out, i)
        return x

    def heads_of(self, x, i):
        """Rotated queries and keys, and values, of layer `i`; each (heads, tokens, dim)."""
        s, w = self.shape, {name: self.weights[f"blk.{i}.{name}.weight"] for name in QKV}
        turn = rotation(len(x), s.head_dim, s.base if i in self.global_layers else LOCAL_BASE)
        q, k, v = (np.empty((n, len(x), s.head_dim), np.float32) for n in (s.heads, s.key_heads, s.key_heads))
        for rows in slices(len(x), ROWS):
            y = normed(x[rows], w["attn_norm"], s.eps)
            for out, name, gain in ((q, "attn_q", "attn_q_norm"), (k, "attn_k", "attn_k_norm"), (v, "attn_v", None)):
                heads = np.moveaxis((y @ w[name].T).reshape(len(y), -1, s.head_dim), 1, 0)
                out[:, rows] = turned(normed(heads, w[gain], s.eps), turn, rows) if gain else heads
        return q, k, v

    def _add(self, x, out, i):
        """Add to `x` what layer `i` makes of its attention `out`, and then of its MLP."""
        eps, w = self.shape.eps, {name: self.weights[f"blk.{i}.{name}.weight"] for name in REST}
        for rows in slices(len(x), ROWS):
            y = np.moveaxis(out[:, rows], 0, 1).reshape(x[rows].shape[0], -1) @ w["attn_output"].T
            x[rows] += normed(y, w["post_attention_norm"], eps)
            y = normed(x[rows], w["ffn_norm"], eps)
            y = (gelu(y @ w["ffn_gate"].T) * (y @ w["ffn_up"].T)) @ w["ffn_down"].T
            x[rows] += normed(y, w["post_ffw_norm"], eps)

    def scores(self, x):
        """Logits of what comes after the hidden states `x`, (tokens, vocabulary): do not ask for many at once."""
        return normed(x, self.weights["output_norm.weight"], self.shape.eps) @ self.embedding.T

    def surprise(self, x, following, rows=128):
        """-log of the probabilities of the tokens `following`; whether each is the likeliest one.

        They are the tokens after the last `len(following)` hidden states of `x`.
        """
        x = x[len(x) - len(following) :]
        nats, first = np.empty(len(x)), np.empty(len(x), dtype=bool)
        for part in slices(len(x), rows):
            scores = self.scores(x[part])
            top = scores.max(axis=1, keepdims=True)
            chosen = np.take_along_axis(scores, following[part, None], axis=1)
            first[part] = (chosen == top)[:, 0]
            chosen, top = chosen[:, 0] - top[:, 0], np.exp(scores - top).sum(axis=1, dtype=np.float64)
            nats[part] = np.log(top) - chosen
        return nats, first


QKV = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm")
REST = ("attn_output", "post_attention_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "post_ffw_norm")


def slices(total, size):
    return [slice(at, min(total, at + size)) for at in range(0, total, size)]


def normed(x, gain, eps):
    """Root mean square norm. GGUF files hold one plus what the model calls its weight."""
    square = np.einsum("...i,...i->...", x, x)[..., None] * np.float32(1 / x.shape[-1])
    return x / np.sqrt(square + np.float32(eps)) * gain


def gelu(x):
    """By tanh, as this model was trained with."""
    x = x.astype(np.float32, copy=False)
    return x * (0.5 * (1 + np.tanh(np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x))))


def rotation(tokens, dim, base):
    """cos and sin of every position's angles, (tokens, dim / 2)."""
    angle = np.arange(tokens)[:, None] * base ** (-np.arange(0, dim, 2) / dim)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def turned(x, rotation, rows):
    """Turn the pairs (i, i + dim / 2) of `x`, whose positions are `rows`."""
    cos, sin = (part[rows] for part in rotation)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def softmax(scores):
    """In place, over the last axis; not yet divided by the sums, which are the second result."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return scores, scores.sum(axis=-1, keepdims=True)


def banded(q, k, v, scale, window):
    """Exact attention to the last `window` keys: blocks of as many queries see their own block and the one before."""
    heads, tokens, _ = q.shape
    offset = np.arange(window)[:, None] - np.arange(-window, window)
    hidden = (offset < 0) | (offset >= window)
    out, group = np.empty_like(q), heads // len(k)
    for rows in slices(tokens, window):
        keys = slice(max(0, rows.start - window), rows.stop)
        mask = hidden[: rows.stop - rows.start, keys.start - rows.start + window : keys.stop - rows.start + window]
        for h in range(heads):
            out[h, rows] = _block(q[h, rows] * np.float32(scale), k[h // group, keys], v[h // group, keys], mask)
    return out


def exact(q, k, v, scale, rows=256):
    """Exact causal attention, so many queries at a time."""
    out, group = np.empty_like(q), len(q) // len(k)
    for part in slices(q.shape[1], rows):
        mask = np.arange(part.stop) > np.arange(part.start, part.stop)[:, None]
        for h in range(len(q)):
            keys, values = k[h // group, : part.stop], v[h // group, : part.stop]
            out[h, part] = _block(q[h, part] * np.float32(scale), keys, values, mask[:, part.start :])
    return out


def _block(q, k, v, mask):
    """Attention of some queries; `mask` says which of the last keys are hidden."""
    scores = q @ k.T
    scores[:, len(k) - mask.shape[1] :][mask] = -np.inf
    weights, total = softmax(scores)
    return (weights @ v) / total
