"""Random draws of queries: uniform ones without replacement, and ones with given inclusion probabilities.

    pi_i = min(1, t w_i)      c_i = sum_{j <= i} pi_j      drawn: c_i - pi_i <= u + m < c_i for a whole m

Every draw is a function of (seed, head, stage, index) alone (`kernels.scalar`), so the rows do not depend on the
device, the number of threads, or which other heads share the call. The permutation behind the uniform draws is
walked from its start: rows first .. first + count of one call never meet those of another range.
"""

import math

import numpy as np

from ._jit import cuda, cuda_kernel, serial_kernel, shared
from .kernels.scalar import permuted, uniform
from .kernels.team import barrier, member, members, part, sum_before, team_max, team_sum

# Streams of random numbers; each stage has its own, so that no draw tells anything about another. A permutation uses
# four in a row (one per round of its network).
ROWS, LEVERAGE, POOL, PIVOT, SKETCH, COMBINE, PROJECTION, AUDIT, REACH, JUDGE, PANELS, REFINE, METRIC = (
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
    56,
)

# --- bodies ---


@shared
def pick(weight, n, u):
    """One of 0 .. n - 1 with probability ~ weight, by u in [0, 1): the place, what is left of u, the sum of weights.

    The place is -1 where no weight is positive. What is left is uniform in [0, 1) again.
    """
    start, stop = part(n)
    own = 0.0
    for i in range(start, stop):
        own += float(weight[i])
    total = team_sum(own)
    target, cumulative = u * total, sum_before(own)
    place, before = -1, 0.0
    for i in range(start, stop):
        if cumulative > target:
            break
        if weight[i] > 0:
            place, before = i, cumulative
        cumulative += float(weight[i])
    last = team_max(place)
    left = team_sum((target - before) / float(weight[place]) if place == last and last >= 0 else 0.0)
    return last, left, total


@shared
def sort(x):
    """Sort x in place; its length is a power of two. Bitonic (Batcher 1968), so that a team can share every step."""
    size = 2
    while size <= x.shape[0]:
        step = size // 2
        while step > 0:
            for i in range(member(), x.shape[0] // 2, members()):
                low = 2 * i - i % step
                high = low + step
                a, b = x[low], x[high]
                if (a > b) == (low & size == 0):
                    x[low], x[high] = b, a
            barrier()
            step //= 2
        size *= 2


@shared
def distinct(x, count, out):
    """What x[:count], sorted, holds, each once and zeros behind, into `out`; returns how many there are."""
    start, stop = part(count)
    own = 0
    for i in range(start, stop):
        own += i == 0 or x[i] != x[i - 1]
    place, size = sum_before(own), team_sum(own)
    for i in range(start, stop):
        if i == 0 or x[i] != x[i - 1]:
            out[place] = x[i]
            place += 1
    for i in range(size + member(), out.shape[0], members()):
        out[i] = 0
    return size


@shared
def _inclusion_scale(weight, count):
    """t such that sum_i min(1, t w_i) = count (within rounding)."""
    total = 0.0
    positive = 0
    for i in range(member(), weight.shape[0], members()):
        total += weight[i]
        positive += weight[i] > 0
    if team_sum(positive) <= count:
        return np.inf
    t = count / team_sum(total)
    for _ in range(50):
        capped, rest = 0, 0.0
        for i in range(member(), weight.shape[0], members()):
            if t * weight[i] >= 1.0:
                capped += 1
            else:
                rest += weight[i]
        capped, rest = team_sum(capped), team_sum(rest)
        better = (count - capped) / rest if rest > 0 else t
        if better <= t * (1.0 + 1e-12):
            break
        t = better
    return t


@shared
def _share(weight, t, i):
    return min(1.0, t * weight[i]) if weight[i] > 0 else 0.0  # t may be infinite


@shared
def _systematic(weight, t, count, start, chosen, probability):
    """Walk the cumulative inclusion probabilities in unit steps (Madow 1949).

    The points below c are ceil(c - start), so every member can begin in the middle.
    """
    first, stop = part(weight.shape[0])
    own = 0.0
    for i in range(first, stop):
        own += _share(weight, t, i)
    cumulative = sum_before(own)
    slot = np.int64(math.ceil(cumulative - start))
    for i in range(first, stop):
        pi = _share(weight, t, i)
        cumulative += pi
        after = np.int64(math.ceil(cumulative - start))
        if after > slot and slot < count:
            chosen[slot] = i
            probability[slot] = pi
        slot = after


@shared
def _weighted(weight, count, seed, head, stage, chosen, probability):
    """One head; returns t."""
    t = _inclusion_scale(weight, count)
    _systematic(weight, t, count, uniform(seed, head, stage, count), chosen, probability)
    return t


# --- CPU drivers ---


@serial_kernel
def _uniform_cpu(query_head, size, seed, stage, first, chosen):
    for h in range(chosen.shape[0]):
        for i in range(chosen.shape[1]):
            chosen[h, i] = permuted(first + i, size, seed, query_head[h], stage)


@serial_kernel
def _weighted_cpu(query_head, seed, stage, weight, count, chosen, probability, scale):
    for h in range(weight.shape[0]):
        scale[h] = _weighted(weight[h], count, seed, query_head[h], stage, chosen[h], probability[h])


# --- CUDA drivers: a thread per entry; a team per head ---


@cuda_kernel(128)
def _uniform_cuda(query_head, size, seed, stage, first, chosen):
    for item in range(cuda.grid(1), chosen.size, cuda.gridsize(1)):
        h, i = item // chosen.shape[1], item % chosen.shape[1]
        chosen[h, i] = permuted(first + i, size, seed, query_head[h], stage)


@cuda_kernel(1024)
def _weighted_cuda(query_head, seed, stage, weight, count, chosen, probability, scale):
    h = cuda.blockIdx.x
    scale[h] = _weighted(weight[h], count, seed, query_head[h], stage, chosen[h], probability[h])


# --- stage ---


def uniform_rows(problem, heads, count, *, first=0, stage=ROWS, size=None):
    """Indices (heads, count), distinct within a head and distinct from those of any other range of `first`."""
    device, size = problem.device, problem.q.shape[1] if size is None else size
    chosen = device.empty((len(heads), count), np.int64)
    grid = (-(-chosen.size // 128),)
    device.run(_uniform_cpu, _uniform_cuda, grid, problem.query_heads(heads), size, problem.seed, stage, first, chosen)
    return chosen


def weighted_rows(problem, heads, weight, count, *, stage):
    """Draw `count` positions of `weight (heads, n)` with inclusion probability min(1, t weight).

    Returns the positions and their probabilities, both (heads, count), and t (heads,). Where fewer than `count` weights
    are positive, the slots that are left over hold position 0 and probability 0.
    """
    device = problem.device
    chosen, probability = device.zeros((len(heads), count), np.int64), device.zeros((len(heads), count), np.float64)
    scale = device.empty((len(heads),), np.float64)
    drawn = weight, count, chosen, probability, scale
    device.run(_weighted_cpu, _weighted_cuda, (len(heads),), problem.query_heads(heads), problem.seed, stage, *drawn)
    return chosen, probability, scale
