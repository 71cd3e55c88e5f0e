"""The public call: by method, length, head dimension, rank, and number of heads."""

import warnings

import numpy as np

import pda_numba
from pda_numba.data import smooth_heads


class _Call:
    """One call, warmed up, into an output array that exists."""

    def prepare(self, heads, tokens, dim, **options):
        warnings.simplefilter("ignore", pda_numba.AccuracyWarning)
        self.arrays = smooth_heads((heads, tokens, dim))
        self.out = np.empty_like(self.arrays[2])
        self.options = options
        self.run()

    def run(self):
        pda_numba.attention(*self.arrays, out=self.out, **self.options)


class Method(_Call):
    params = (["auto", "pda", "exact"], [4096, 16384])
    param_names = ("method", "tokens")

    def setup(self, method, tokens):
        self.prepare(1, tokens, 64, method=method)

    def time_attention(self, method, tokens):
        self.run()


class Length(_Call):
    params = (16384, 65536, 262144)
    param_names = ("tokens",)

    def setup(self, tokens):
        self.prepare(1, tokens, 64, rank=128, method="pda")

    def time_attention(self, tokens):
        self.run()

    def peakmem_attention(self, tokens):
        self.run()


class Rank(_Call):
    params = ([32, 64, 128, 256], [32, 64, 128])
    param_names = ("rank", "dim")

    def setup(self, rank, dim):
        self.prepare(1, 32768, dim, rank=rank, method="pda")

    def time_attention(self, rank, dim):
        self.run()


class Heads(_Call):
    """The same number of tokens in all, in few long or many short heads."""

    params = ([(1, 32768), (4, 8192), (16, 2048)],)
    param_names = ("heads_and_tokens",)

    def setup(self, heads_and_tokens):
        self.prepare(*heads_and_tokens, 64)

    def time_attention(self, heads_and_tokens):
        self.run()


class Near(_Call):
    """What near fields cost."""

    params = (["none", "window", "content", "both"],)
    param_names = ("near",)

    def setup(self, near):
        self.prepare(1, 32_768, 64, rank=64, tol=None, near=near)

    def time_attention(self, near):
        self.run()


class Gradient(_Call):
    """Backward passes over residuals that exist."""

    params = (["pda", "exact"], [4096, 16384])
    param_names = ("method", "tokens")

    def setup(self, method, tokens):
        self.prepare(1, tokens, 64, method=method, tol=None)
        out, self.residuals = pda_numba.attention_forward(*self.arrays, **self.options)
        self.dout = np.ones_like(out)
        self.time_backward(method, tokens)

    def time_backward(self, method, tokens):
        pda_numba.attention_backward(self.residuals, self.dout)

    def track_residuals(self, method, tokens):
        return self.residuals.nbytes

    track_residuals.unit = "bytes"  # type: ignore[attr-defined]
