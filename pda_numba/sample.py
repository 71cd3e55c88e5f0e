"""The exact rows that a fit sees: uniform ones, and ones drawn by the leverage of a trial fit.

    pi_i = 1 - (1 - n_u / N) (1 - pi'_i)      w_i^2 = n_s / (pi_i N)

n_u is the number of uniform rows, n_s that of all rows, pi'_i the chance that the leverage design draws row i: rows
that were likely to be drawn, by either design, count less. The design's candidates are panels of consecutive queries,
drawn uniformly. A slot that no row was left for has pi' = 0, and weight 0.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import draw
from ._jit import cuda, cuda_kernel, serial_kernel, shared
from .device import CPU
from .kernels.team import barrier, member, members, team_sum
from .plan import CANDIDATES, PANEL

LEAST_WEIGHT, LARGEST_WEIGHT = 1e-12, 1e6  # of a candidate: its leverage within these

# --- bodies, each by a team ---


@shared
def _sort_starts(panels):
    """Numbers of panels to their first queries, rising; a power of two of them."""
    draw.sort(panels)
    for i in range(member(), panels.shape[0], members()):
        panels[i] *= PANEL


@shared
def _candidate(starts, c):
    """The query that is candidate c."""
    return starts[c // PANEL] + c % PANEL


@shared
def _find_candidate(starts, row):
    """Which candidate a query is, -1 if it is none."""
    low, high = -1, starts.shape[0] - 1
    while low < high:  # the last panel that begins at or before the query
        middle = (low + high + 1) // 2
        if starts[middle] <= row:
            low = middle
        else:
            high = middle - 1
    inside = low >= 0 and row < starts[low] + PANEL
    return low * PANEL + row - starts[low] if inside else -1


@shared
def _weigh_candidates(leverage, starts, taken, n, weight):
    """The leverage, within bounds; 0 past the last query and for the rows that are in the sample already."""
    for c in range(member(), weight.shape[0], members()):
        bounded = min(max(float(leverage[c]), LEAST_WEIGHT), LARGEST_WEIGHT)
        weight[c] = bounded if _candidate(starts, c) < n else 0.0
    barrier()
    for i in range(member(), taken.shape[0], members()):
        c = _find_candidate(starts, taken[i])
        if c >= 0:
            weight[c] = 0.0


@shared
def _note_draw(starts, chosen, probability, scale, fraction, left_out, before, drawn, drawn_pi, uniform_pi):
    """The drawn rows with their probability, and the uniform rows' own chance after this draw.

    By their leverage when left out (`left_out`), like the candidates', which no fit has seen.
    """
    for i in range(member(), chosen.shape[0], members()):
        drawn[i] = _candidate(starts, chosen[i])
        drawn_pi[i] = probability[i] * fraction
    for i in range(member(), left_out.shape[0], members()):
        own = min(1.0, scale * max(left_out[i], LEAST_WEIGHT)) * fraction
        uniform_pi[i] = 1 - (1 - before[i]) * (1 - own)


@shared
def _weigh(uniform_pi, drawn_pi, n, weight):
    """w_i of the uniform rows and, behind them, of the drawn ones."""
    uniform, filled = uniform_pi.shape[0], 0
    for i in range(member(), drawn_pi.shape[0], members()):
        filled += 1 if drawn_pi[i] > 0 else 0
    count, share = uniform + team_sum(filled), uniform / n
    for i in range(member(), weight.shape[0], members()):
        own = uniform_pi[i] if i < uniform else drawn_pi[i - uniform]
        pi = 1 - (1 - share) * (1 - own)
        weight[i] = math.sqrt(count / (pi * n)) if i < uniform or own > 0 else 0.0


# --- CPU drivers ---


@serial_kernel
def _sort_starts_cpu(panels):
    for h in range(len(panels)):
        _sort_starts(panels[h])


@serial_kernel
def _weigh_candidates_cpu(leverage, starts, taken, n, weight):
    for h in range(len(weight)):
        _weigh_candidates(leverage[h], starts[h], taken[h], n, weight[h])


@serial_kernel
def _note_draw_cpu(starts, chosen, probability, scale, fraction, left_out, before, drawn, drawn_pi, uniform_pi):
    for h in range(len(starts)):
        task = starts[h], chosen[h], probability[h], scale[h], fraction, left_out[h], before[h]
        _note_draw(*task, drawn[h], drawn_pi[h], uniform_pi[h])


@serial_kernel
def _weigh_cpu(uniform_pi, drawn_pi, n, weight):
    for h in range(len(weight)):
        _weigh(uniform_pi[h], drawn_pi[h], n, weight[h])


# --- CUDA drivers: a team per head ---


@cuda_kernel(64)
def _sort_starts_cuda(panels):
    _sort_starts(panels[cuda.blockIdx.x])


@cuda_kernel(512)
def _weigh_candidates_cuda(leverage, starts, taken, n, weight):
    h = cuda.blockIdx.x
    _weigh_candidates(leverage[h], starts[h], taken[h], n, weight[h])


@cuda_kernel(256)
def _note_draw_cuda(starts, chosen, probability, scale, fraction, left_out, before, drawn, drawn_pi, uniform_pi):
    h = cuda.blockIdx.x
    task = starts[h], chosen[h], probability[h], scale[h], fraction, left_out[h], before[h]
    _note_draw(*task, drawn[h], drawn_pi[h], uniform_pi[h])


@cuda_kernel(256)
def _weigh_cuda(uniform_pi, drawn_pi, n, weight):
    h = cuda.blockIdx.x
    _weigh(uniform_pi[h], drawn_pi[h], n, weight[h])


# --- what the stages hand on ---


@dataclass
class Sample:
    """Exact rows of the active heads: uniform ones (entries 0 .. of the permutation), then ones drawn by leverage."""

    uniform: Any
    uniform_out: Any
    uniform_lse: Any
    masses: Any
    uniform_pi: Any  # probability that the leverage design would have drawn the uniform row too
    drawn: Any
    drawn_out: Any
    drawn_lse: Any
    drawn_pi: Any  # 0 marks an empty slot: some row, which counts for nothing
    device: Any = CPU

    def _arrays(self):
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "device"}

    def keep(self, which):
        """Only the heads `which` (indices, or True for the ones to keep)."""
        which = np.arange(len(self.uniform))[which]
        if len(which) == len(self.uniform):
            return self
        return Sample(**{name: self.device.take(x, which) for name, x in self._arrays().items()}, device=self.device)

    def extended(self, **new):
        """With more rows behind those of the named arrays."""
        return dataclasses.replace(
            self, **{name: self.device.concatenate([getattr(self, name), rows]) for name, rows in new.items()}
        )

    @functools.cached_property
    def rows(self):
        return self.device.concatenate([self.uniform, self.drawn])

    @functools.cached_property
    def out(self):
        return self.device.concatenate([self.uniform_out, self.drawn_out])

    @functools.cached_property
    def lse(self):
        return self.device.concatenate([self.uniform_lse, self.drawn_lse])

    def weights(self, n):
        """w_i (heads, rows) of n queries."""
        weight = self.device.empty(self.rows.shape, np.float64)
        pi = self.uniform_pi, self.drawn_pi
        self.device.run(_weigh_cpu, _weigh_cuda, (len(weight),), *pi, n, weight)
        return weight


def candidates(problem, heads):
    """Panels of queries among which the leverage rows are drawn, and what fraction of all queries they are.

    The panels by their first queries (heads, panels), rising.
    """
    device, panels = problem.device, -(-problem.shape[0] // PANEL)
    used = CANDIDATES // PANEL  # a power of two
    if panels <= used:
        return device.repeat(device.upload(np.arange(panels)[None] * PANEL), len(heads)), 1.0
    starts = draw.uniform_rows(problem, heads, used, stage=draw.PANELS, size=panels)
    device.run(_sort_starts_cpu, _sort_starts_cuda, (len(heads),), starts)
    return starts, used / panels


def draw_by_leverage(problem, heads, sample, starts, fraction, leverage, left_out, count):
    """Up to `count` more rows among the candidates, none of them in the sample yet, by their `leverage`.

    Returns the rows and their probabilities, both (heads, count), and the sample with the uniform rows' own chance
    by their leverage when left out, `left_out (heads, uniform rows)`.
    """
    device, grid = problem.device, (len(heads),)
    weight = device.empty(leverage.shape, np.float64)
    weighed = leverage, starts, sample.rows, problem.shape[0], weight
    device.run(_weigh_candidates_cpu, _weigh_candidates_cuda, grid, *weighed)
    chosen, probability, scale = draw.weighted_rows(problem, heads, weight, count, stage=draw.LEVERAGE)
    drawn, drawn_pi = device.empty(chosen.shape, np.int64), device.empty(chosen.shape, np.float64)
    uniform_pi = device.empty(sample.uniform_pi.shape, np.float64)
    noted = starts, chosen, probability, scale, fraction, left_out, sample.uniform_pi, drawn, drawn_pi, uniform_pi
    device.run(_note_draw_cpu, _note_draw_cuda, grid, *noted)
    return drawn, drawn_pi, dataclasses.replace(sample, uniform_pi=uniform_pi)
