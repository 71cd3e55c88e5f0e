"""Streaming exact attention."""

import numpy as np

import pda_numba
from pda_numba.data import smooth_heads


class Exact:
    params = ([2048, 8192], [64, 128])
    param_names = ("tokens", "dim")

    def setup(self, tokens, dim):
        self.arrays = smooth_heads((1, tokens, dim))
        self.out = np.empty_like(self.arrays[2])
        self.time_exact(tokens, dim)

    def time_exact(self, tokens, dim):
        pda_numba.attention(*self.arrays, method="exact", out=self.out)

    def peakmem_exact(self, tokens, dim):
        self.time_exact(tokens, dim)
