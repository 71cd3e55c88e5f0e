"""Every stage on its own, on what the stages before it produced."""

import numpy as np

from pda_numba import _validate, draw, holdout
from pda_numba.apply import apply
from pda_numba.core import fit
from pda_numba.data import smooth_heads
from pda_numba.landmarks import POOL_FACTOR, REFINE_FACTOR, choose, draw_pool, gather, refine
from pda_numba.near import targets
from pda_numba.plan import PANEL, ROWS_PER_RANK
from pda_numba.products import features
from pda_numba.project import head_bases
from pda_numba.reach import reach
from pda_numba.rows import rows
from pda_numba.scan import find_ranges

WINDOW = 32


class Stage:
    """One head of 16,384 tokens, D = E = 64."""

    params = (64, 128)
    param_names = ("rank",)
    stages = ("rows", "landmarks", "near", "core", "apply", "certify")

    def setup(self, rank):
        arrays = smooth_heads((1, 16384, 64))
        self.problem, *_ = _validate.build_problem(*arrays, None, 0)
        ranges = find_ranges(self.problem, self.problem.element, check_finite=False)
        self.bounds = ranges.low, ranges.high
        self.heads, self.window = np.array([0]), np.array([WINDOW])
        self.where = draw.uniform_rows(self.problem, self.heads, ROWS_PER_RANK * rank)
        self.basis = np.empty((1, 0, 64), np.float32)
        self.starts = np.arange(0, 16384, PANEL)[None]
        self.out = np.empty_like(arrays[0])
        for stage in self.stages:  # each leaves what the next one needs, with its kernels compiled
            getattr(self, f"time_{stage}")(rank)

    def time_rows(self, rank):
        self.exact, self.lse, self.masses = rows(self.problem, self.heads, self.where, masses=True)

    def time_landmarks(self, rank):
        pool, size = draw_pool(self.problem, self.heads, self.where, self.lse, self.masses, POOL_FACTOR * rank)
        tiles = gather(self.problem, self.heads, pool, size)
        columns = features(self.problem, self.heads, self.where, self.lse, tiles, size, self.basis)
        keys, self.found = choose(self.problem, self.heads, columns, pool, size, rank)
        centres, _ = refine(self.problem, self.heads, keys, self.found, REFINE_FACTOR * rank)
        self.tiles = centres.astype(np.float32)

    def time_near(self, rank):
        self.target = targets(self.problem, self.heads, self.where, self.exact, self.lse, self.window[None])

    def time_core(self, rank):
        columns = features(self.problem, self.heads, self.where, self.lse, self.tiles, self.found, self.basis)
        weight = np.ones(self.where.shape)
        self.fit = fit(self.problem, self.heads, columns, self.target, self.exact, weight, self.found)

    def time_apply(self, rank):
        table = np.ascontiguousarray(self.fit.table[:, 0])
        arguments = self.starts, self.tiles, table, self.found, self.window, self.basis, self.bounds
        self.leverage, self.norm = apply(self.problem, self.heads, *arguments, self.out)

    def time_certify(self, rank):
        n, far = self.problem.shape[0], reach(self.problem, self.heads)
        state, work = np.zeros((1, n), np.int32), np.empty((1, n))
        first, edges = self.where.shape[1], np.array([0])
        holdout.hold_out(self.problem, self.heads, first, state, self.leverage, far, edges, self.found, work)


class Projection:
    params = ("pca", "srht", "gaussian", "orthogonal")
    param_names = ("kind",)

    def setup(self, kind):
        self.problem, *_ = _validate.build_problem(*smooth_heads((1, 16384, 256)), None, 0)
        self.time_bases(kind)

    def time_bases(self, kind):
        head_bases(self.problem, np.array([0]), 64, kind)
