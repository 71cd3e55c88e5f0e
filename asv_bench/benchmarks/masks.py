"""Causal attention and padded batches."""

import warnings

import numpy as np

import pda_numba
from pda_numba.data import smooth_heads


class Causal:
    params = (["exact", "rank 64"], [16384, 65536])
    param_names = ("method", "tokens")

    def setup(self, method, tokens):
        warnings.simplefilter("ignore", pda_numba.AccuracyWarning)
        self.arrays = smooth_heads((1, tokens, 64))
        self.options = {"method": "exact"} if method == "exact" else {"rank": 64, "tol": None}
        self.out, self.residuals = pda_numba.attention_forward(*self.arrays, causal=True, **self.options)
        pda_numba.attention_backward(self.residuals, self.out)

    def time_forward(self, method, tokens):
        pda_numba.attention(*self.arrays, causal=True, **self.options)

    def time_backward(self, method, tokens):
        pda_numba.attention_backward(self.residuals, self.out)


class Padded:
    """Four sequences, half of them padding."""

    params = (["key_lengths", "cu_seqlens"],)
    param_names = ("given",)

    def setup(self, given):
        lengths = np.array([4096, 1024, 2048, 1024])
        q, k, v = (x[:, None] for x in smooth_heads((4, 4096, 64)))
        self.arrays, self.options = (q, k, v), {"key_lengths": lengths}
        if given == "cu_seqlens":
            self.arrays = [np.concatenate([x[b, :, :n] for b, n in enumerate(lengths)], axis=1) for x in (q, k, v)]
            self.options = {"cu_seqlens": np.concatenate([[0], np.cumsum(lengths)])}
        self.time_attention(given)

    def time_attention(self, given):
        pda_numba.attention(*self.arrays, causal=True, **self.options)
