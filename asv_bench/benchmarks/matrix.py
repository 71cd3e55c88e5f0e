"""The softmax matrix itself: its singular values, and explicit factors of it."""

import pda_numba
from pda_numba.data import smooth_heads


class Matrix:
    """One head, D = 64, rank 32."""

    params = (4096,)
    param_names = ("tokens",)

    def setup(self, tokens):
        self.q, self.k, self.v = smooth_heads((tokens, 64))
        self.time_spectrum(tokens)
        self.time_factorize(tokens)

    def time_spectrum(self, tokens):
        pda_numba.spectrum(self.q, self.k, rank=32)

    def time_factorize(self, tokens):
        self.factors = pda_numba.factorize(self.q, self.k, rank=32)

    def time_apply(self, tokens):
        self.factors.apply(self.v)

    def peakmem_spectrum(self, tokens):
        self.time_spectrum(tokens)

    def track_error(self, tokens):
        return float(self.factors.error)
