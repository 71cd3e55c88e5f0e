"""Random draws of queries: uniform ones without replacement, and ones with given inclusion probabilities.

Every draw is a function of (seed, head, stage, index) alone (`kernels.scalar`), so the rows do not depend on the
device, the number of threads, or which other heads share the call. The permutation behind the uniform draws is
walked from its start: rows first .. first + count of one call never meet those of another range.
"""

import numpy as np

from ._jit import serial_kernel, shared
from .kernels.scalar import permuted, uniform

# Streams of random numbers; each stage has its own, so that no draw tells anything about another. A permutation uses
# four in a row (one per round of its network).
ROWS, LEVERAGE, POOL, PIVOT, SKETCH, COMBINE, PROJECTION, AUDIT, REACH, JUDGE, PANELS, REFINE = (
    0,
    16,
    17,
    18,
    19,
    20,
    24,
    32,
    36,
    40,
    48,
    52,
)

# --- bodies ---


@shared
def _inclusion_scale(weight, count):
    """t such that sum_i min(1, t w_i) = count (within rounding)."""
    total = 0.0
    positive = 0
    for i in range(weight.shape[0]):
        total += weight[i]
        positive += weight[i] > 0
    if positive <= count:
        return np.inf
    t = count / total
    for _ in range(50):
        capped, rest = 0, 0.0
        for i in range(weight.shape[0]):
            if t * weight[i] >= 1.0:
                capped += 1
            else:
                rest += weight[i]
        better = (count - capped) / rest if rest > 0 else t
        if better <= t * (1.0 + 1e-12):
            break
        t = better
    return t


@shared
def _systematic(weight, t, count, start, chosen, probability):
    """Walk the cumulative inclusion probabilities in unit steps (Madow 1949); returns how many were chosen."""
    cumulative, found = 0.0, 0
    for i in range(weight.shape[0]):
        if weight[i] <= 0:
            continue
        pi = min(1.0, t * weight[i])
        cumulative += pi
        if (cumulative > start + found or pi >= 1.0) and found < count:
            chosen[found] = i
            probability[found] = pi
            found += 1
    return found


# --- CPU drivers ---


@serial_kernel
def _uniform_cpu(query_head, size, seed, stage, first, chosen):
    for h in range(chosen.shape[0]):
        for i in range(chosen.shape[1]):
            chosen[h, i] = permuted(first + i, size, seed, query_head[h], stage)


@serial_kernel
def _systematic_cpu(query_head, seed, stage, weight, count, chosen, probability, found, scale):
    for h in range(weight.shape[0]):
        scale[h] = _inclusion_scale(weight[h], count)
        start = uniform(seed, query_head[h], stage, count)
        found[h] = _systematic(weight[h], scale[h], count, start, chosen[h], probability[h])


# --- stage ---


def uniform_rows(problem, heads, count, *, first=0, stage=ROWS, size=None):
    """Indices (heads, count), distinct within a head and distinct from those of any other range of `first`."""
    chosen = np.empty((len(heads), count), np.int64)
    _uniform_cpu(
        problem.query_head[heads], problem.q.shape[1] if size is None else size, problem.seed, stage, first, chosen
    )
    return chosen


def weighted_rows(problem, heads, weight, count, *, stage):
    """Draw `count` positions of `weight (heads, n)` with inclusion probability min(1, t weight).

    Returns the positions and their probabilities, both (heads, count), how many each head got (fewer than `count` only
    where fewer weights are positive), and t.
    """
    chosen = np.zeros((len(heads), count), np.int64)
    probability = np.ones((len(heads), count))
    found, scale = np.zeros(len(heads), np.int64), np.empty(len(heads))
    _systematic_cpu(problem.query_head[heads], problem.seed, stage, weight, count, chosen, probability, found, scale)
    return chosen, probability, found, scale
