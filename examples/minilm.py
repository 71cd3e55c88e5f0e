"""The forward pass of all-MiniLM-L6-v2, a BERT with mean pooling, in NumPy, with the attention to choose.

The model knows 512 positions. For longer texts their embeddings are interpolated, so that a text of 4,096 tokens has
eight tokens to a position; the model was not trained for that, and the example compares attentions, not models.
"""

import re

import numpy as np
import safetensors_file
from scipy.special import erf

HEADS, EPS = 12, 1e-12


class MiniLM:
    """The weights by their names in the file; see `embed`."""

    def __init__(self, weights, heads=HEADS):
        self.weights, self.heads = weights, heads
        self.layers = 1 + max(int(re.findall(r"layer\.(\d+)", name)[0]) for name in weights if ".layer." in name)

    @classmethod
    def from_file(cls, path):
        return cls(safetensors_file.read(path))

    def embed(self, tokens, lengths, attend, **options):
        """Unit vectors, (texts, width), of texts that are padded to one length.

        `attend(q, k, v, scale, **options)` gets arrays (texts, heads, tokens, dim). The options say which keys are
        padding; there need not be any where nothing is padded.
        """
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][tokens] + w["embeddings.token_type_embeddings.weight"][0]
        places = [positions(w["embeddings.position_embeddings.weight"], n, tokens.shape[1]) for n in lengths]
        x = self._normed(x + np.stack(places), "embeddings")
        for i in range(self.layers):
            x = self._layer(x, f"encoder.layer.{i}", attend, options)
        inside = np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None]
        mean = np.einsum("bn,bnw->bw", inside.astype(np.float32), x) / np.asarray(lengths, np.float32)[:, None]
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    def _layer(self, x, name, attend, options):
        texts, tokens, width = x.shape
        shape = texts, tokens, self.heads, width // self.heads
        parts = (self._dense(x, f"{name}.attention.self.{part}") for part in ("query", "key", "value"))
        q, k, v = (np.ascontiguousarray(np.moveaxis(part.reshape(shape), 2, 1)) for part in parts)
        out = np.moveaxis(attend(q, k, v, shape[-1] ** -0.5, **options), 1, 2).reshape(x.shape)
        x = self._normed(x + self._dense(out, f"{name}.attention.output.dense"), f"{name}.attention.output")
        inside = gelu(self._dense(x, f"{name}.intermediate.dense"))
        return self._normed(x + self._dense(inside, f"{name}.output.dense"), f"{name}.output")

    def _dense(self, x, name):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _normed(self, x, name):
        x = x - x.mean(axis=-1, keepdims=True)
        x /= np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(EPS))
        return x * self.weights[f"{name}.LayerNorm.weight"] + self.weights[f"{name}.LayerNorm.bias"]


def positions(known, length, tokens):
    """Embeddings of `length` positions, interpolated if more than are known, and zeros up to `tokens`."""
    at = np.arange(length, dtype=np.float32)
    if length > len(known):
        at = at * np.float32((len(known) - 1) / (length - 1))
    low = np.minimum(at.astype(int), len(known) - 2)
    share = (at - low)[:, None]
    out = np.zeros((tokens, known.shape[1]), dtype=np.float32)
    out[:length] = known[low] * (1 - share) + known[low + 1] * share
    return out


def gelu(x):
    return x * (0.5 * (1 + erf(x * np.float32(0.5**0.5))))


def exact(q, k, v, scale, key_lengths=None, rows=512):
    """Exact attention, so many queries at a time; of each text only the keys before its length."""
    out = np.empty_like(q)
    for text in range(len(q)):
        end = k.shape[2] if key_lengths is None else key_lengths[text]
        for at in range(0, q.shape[2], rows):
            scores = (q[text, :, at : at + rows] * np.float32(scale)) @ np.swapaxes(k[text, :, :end], 1, 2)
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            weighted = scores @ v[text, :, :end]
            out[text, :, at : at + rows] = weighted / scores.sum(axis=-1, keepdims=True)
    return out


def average(q, k, v, scale, key_lengths=None):
    """No attention: every token gets the mean of the values."""
    lengths = [k.shape[2]] * len(k) if key_lengths is None else key_lengths
    means = [v[i, :, :n].mean(axis=1, keepdims=True) for i, n in enumerate(lengths)]
    return np.broadcast_to(np.stack(means), q.shape)
