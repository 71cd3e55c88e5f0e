"""Held-out rows: rows that no fit has seen, drawn by three independent designs.

    uniform          the next entries of the row permutation
    leverage         inclusion ~ |x_i G|^2, the final fit's own leverage
    reach            inclusion ~ |q_i C^-1/2|^2 (`certify.reach`): queries far from the bulk

A row is held out if any design draws it, with probability

    pi_i = 1 - (1 - pi_uniform) (1 - min(1, t_leverage w_i)) (1 - min(1, t_reach w_i))

With a near field, the first and last rows have a band of another shape: they are always held out, pi_i = 1.

What became of each row is kept in the bits of one integer, `state (heads, N)`.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from . import draw
from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .kernels.scalar import permuted
from .kernels.team import barrier, member, members, part, sum_before, team_sum

UNIFORM, LEVERAGE, REACH = 128, 48, 16  # rows of the three designs
EDGE = 4  # rows at either end that are always held out beside a near field
_LEAST_WEIGHT, _LARGEST_WEIGHT = 1e-12, 1e12

# The bits of a row's state; without any, the fit's output stands.
EXACT, BY_CHANCE, BY_WEIGHT, FLAGGED, LOST = 1, 2, 4, 8, 16
HELD_OUT = BY_CHANCE | BY_WEIGHT

# --- bodies, for a team ---


@shared
def list_rows(state, bits, listed):
    """The rows with any of these bits, in their order; returns how many. Every member lists its part of the rows."""
    start, stop = part(state.shape[0])
    own = 0
    for i in range(start, stop):
        own += 1 if state[i] & bits else 0
    slot = sum_before(own)
    for i in range(start, stop):
        if state[i] & bits:
            listed[slot] = i
            slot += 1
    return team_sum(own)


@shared
def rows_with(state, bits):
    """How many rows have any of these bits."""
    own = 0
    for i in range(member(), state.shape[0], members()):
        own += 1 if state[i] & bits else 0
    return team_sum(own)


@shared
def _design_weight(x):
    weight = np.float64(x)
    weight = weight if weight > _LEAST_WEIGHT else _LEAST_WEIGHT  # also for NaN
    return weight if weight < _LARGEST_WEIGHT else _LARGEST_WEIGHT


@shared
def inclusion(uniform_pi, scales, leverage, reach):
    """pi of the union of the three designs, for a row of this leverage and reach."""
    by_leverage = min(1.0, scales[0] * _design_weight(leverage))
    by_reach = min(1.0, scales[1] * _design_weight(reach))
    return 1.0 - (1.0 - uniform_pi) * (1.0 - by_leverage) * (1.0 - by_reach)


@shared
def _draw_uniform(state, first, wanted, seed, head, stage):
    """Mark the next `wanted` rows of the permutation that are not exact; returns how many there were."""
    n, found = state.shape[0], 0
    for base in range(first, n, members()):
        entry = base + member()
        row, fresh = 0, 0
        if entry < n:
            row = permuted(entry, n, seed, head, stage)
            fresh = 0 if state[row] & EXACT else 1
        place = found + sum_before(fresh)
        if fresh and place < wanted:
            state[row] |= BY_CHANCE
        found += team_sum(fresh)
        if found >= wanted:
            return wanted
    return found


@shared
def _draw_weighted(state, source, size, seed, head, stage, weight, chosen, probability):
    """Mark `size` rows that are not exact with probability ~ `source`; returns t. The last three are workspace."""
    for i in range(member(), weight.shape[0], members()):
        weight[i] = 0.0 if state[i] & EXACT else _design_weight(source[i])
    for i in range(member(), size, members()):
        probability[i] = 0.0
    # No barrier: the draw begins with sums over the team.
    scale = draw._weighted(weight, size, seed, head, stage, chosen, probability)
    barrier()
    for i in range(member(), size, members()):
        if probability[i] > 0:
            state[chosen[i]] |= BY_WEIGHT
    return scale


@shared
def _hold_end(state, row):
    if not state[row] & EXACT:
        state[row] |= BY_WEIGHT


@shared
def _hold_out(
    leverage, reach, first, sizes, edge, seed, head, stage, state, weight, chosen, probability, rows, chance, pi, scales
):
    """One head's rows, in their order, whether the uniform design drew them, and their pi.

    Returns how many there are, and the probability of the uniform design.
    """
    n = state.shape[0]
    exact = rows_with(state, EXACT)
    uniform_pi = _draw_uniform(state, first, sizes[0], seed, head, stage) / max(n - exact, 1)
    for design in range(2):  # one call to compile
        source, stream = (leverage, draw.AUDIT) if design == 0 else (reach, draw.REACH)
        scale = _draw_weighted(state, source, sizes[1 + design], seed, head, stream, weight, chosen, probability)
        if member() == 0:
            scales[design] = scale
    for i in range(member(), min(edge, n), members()):
        _hold_end(state, i)
        _hold_end(state, n - 1 - i)
    barrier()
    count = list_rows(state, HELD_OUT, rows)
    for i in range(member(), count, members()):
        row = rows[i]
        chance[i] = 1 if state[row] & BY_CHANCE else 0
        always = row < edge or row >= n - edge
        pi[i] = 1.0 if always else inclusion(uniform_pi, scales, leverage[row], reach[row])
    return count, uniform_pi


@shared
def _hold_out_head(
    h,
    live,
    query_head,
    leverage,
    reach,
    first,
    sizes,
    edges,
    seed,
    stage,
    state,
    weight,
    chosen,
    probability,
    rows,
    chance,
    pi,
    scales,
    count,
    uniform_pi,
):
    """Head h, if it is live."""
    found, by_chance = 0, 0.0
    if live[h]:
        drawn = leverage[h], reach[h], first, sizes, edges[h], seed, query_head[h], stage, state[h]
        work = weight[h], chosen[h], probability[h]
        found, by_chance = _hold_out(*drawn, *work, rows[h], chance[h], pi[h], scales[h])
    if member() == 0:
        count[h], uniform_pi[h] = found, by_chance


# --- CPU driver ---


@cpu_kernel
def _hold_out_cpu(
    live,
    query_head,
    leverage,
    reach,
    first,
    sizes,
    edges,
    seed,
    stage,
    state,
    weight,
    chosen,
    probability,
    rows,
    chance,
    pi,
    scales,
    count,
    uniform_pi,
):
    drawn = live, query_head, leverage, reach, first, sizes, edges, seed, stage, state
    for h in prange(state.shape[0]):
        _hold_out_head(h, *drawn, weight, chosen, probability, rows, chance, pi, scales, count, uniform_pi)


# --- CUDA driver ---


@cuda_kernel(512)
def _hold_out_cuda(
    live,
    query_head,
    leverage,
    reach,
    first,
    sizes,
    edges,
    seed,
    stage,
    state,
    weight,
    chosen,
    probability,
    rows,
    chance,
    pi,
    scales,
    count,
    uniform_pi,
):
    drawn = live, query_head, leverage, reach, first, sizes, edges, seed, stage, state
    lists = rows, chance, pi, scales, count, uniform_pi
    _hold_out_head(cuda.blockIdx.x, *drawn, weight, chosen, probability, *lists)


# --- stage ---


class HeldOut(NamedTuple):
    """The held-out rows of some heads: the first `count` of each head's lists."""

    rows: Any  # (heads, most) int64: indices, rising
    chance: Any  # (heads, most) int32: drawn by the uniform design
    pi: Any  # (heads, most): probability of being drawn by any design
    scales: Any  # (heads, 2): t of the leverage and of the reach design
    count: Any  # (heads,) int64
    uniform_pi: Any  # (heads,): probability of the uniform design


def hold_out(
    problem, heads, first, state, leverage, reach, edges, live, work, sizes=(UNIFORM, LEVERAGE, REACH), stage=draw.ROWS
):
    """Held-out rows of the heads that are `live` (not 0): uniform ones from entry `first` of permutation `stage` on.

    `state (heads, N)` tells which rows are exact, and gets the bits of the drawn ones; `leverage` and `reach`
    (heads, at least N) are the weights; of either end `edges (heads,)` rows are always drawn. `work (heads, N)` is
    float64 workspace.
    """
    device = problem.device
    count, n = state.shape
    most = min(n, sum(sizes) + 2 * EDGE)
    held = HeldOut(
        device.empty((count, most), np.int64),
        device.empty((count, most), np.int32),
        device.empty((count, most), np.float64),
        device.empty((count, 2), np.float64),
        device.empty(count, np.int64),
        device.empty(count, np.float64),
    )
    slots = count, max(sizes[1:])
    chosen, probability = device.empty(slots, np.int64), device.empty(slots, np.float64)
    query_head = problem.query_heads(heads)
    sizes = device.upload(np.array(sizes))
    draws = leverage, reach, first, sizes, edges, problem.seed, stage, state, work, chosen, probability
    device.run(_hold_out_cpu, _hold_out_cuda, (count,), live, query_head, *draws, *held)
    return held
