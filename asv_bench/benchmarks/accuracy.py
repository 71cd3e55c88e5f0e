"""Errors on the shipped heads: a change that gains speed must not lose these."""

import warnings

import numpy as np

import pda_numba
from pda_numba.data import SETS, real_heads


class RealHeads:
    params = (list(SETS), [32, 64, 128])
    param_names = ("dataset", "rank")

    def setup_cache(self):
        exact = {}
        for name in SETS:
            *arrays, scale = real_heads(name)
            exact[name] = pda_numba.attention(*arrays, scale=scale, method="exact")
        return exact

    def setup(self, exact, dataset, rank):
        warnings.simplefilter("ignore", pda_numba.AccuracyWarning)
        *arrays, scale = real_heads(dataset)
        self.out, self.info = pda_numba.attention(*arrays, scale=scale, rank=rank, method="pda", return_info=True)
        difference = np.linalg.norm(self.out - exact[dataset], axis=(1, 2))
        self.error = difference / np.linalg.norm(exact[dataset], axis=(1, 2))

    def track_error(self, exact, dataset, rank):
        return float(np.median(self.error))

    def track_worst_error(self, exact, dataset, rank):
        return float(self.error.max())

    def track_limit_over_error(self, exact, dataset, rank):
        """How far the certificate's limit lies above the true error; below 1 it was missed."""
        return float(np.median(self.info.error_limit / self.error))

    track_error.unit = track_worst_error.unit = "relative error"
    track_limit_over_error.unit = "ratio"
