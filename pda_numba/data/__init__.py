"""Heads to try things on: real ones, shipped (their origin is in README.md here), and made-up ones of any length."""

from importlib import resources

import numpy as np

SETS = {"text": "encoder_text_N4096_D32.npz", "speech": "encoder_speech_N1500_D64.npz"}


def real_heads(name):
    """q, k, v (heads, tokens, dim) in float32 and the model's scale, of the set "text" or "speech"."""
    with (resources.files(__name__) / SETS[name]).open("rb") as file, np.load(file) as arrays:
        q, k, v = (arrays[x].astype(np.float32) for x in "qkv")
        return q, k, v, float(arrays["scale"])


def smooth_heads(shape, seed=0):
    """q, k, v in float32 of `shape` (..., tokens, dim); column d of q and k has standard deviation 3 / (1 + d)."""
    rng = np.random.default_rng(seed)
    deviation = (3 / (1 + np.arange(shape[-1]))).astype(np.float32)
    q, k, v = (rng.standard_normal(shape, np.float32) for _ in range(3))
    q *= deviation
    k *= deviation
    return q, k, v
