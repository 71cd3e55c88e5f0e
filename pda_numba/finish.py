"""From the fit to the output: apply it to all queries, mend the rows it cannot be trusted on, certify the rest.

    doubt_i = max( leverage_i / max(4 max_s leverage_s, 10),  reach_i / max(2 max_s reach_s, 4) )

over the fitted rows s, each when left out. Above 1 the fit says nothing about a row: the R most doubtful ones are
computed exactly, and those past this budget whose normaliser is not positive become the softmax over the landmarks.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from . import certify, holdout, landmarks, plan
from ._jit import cpu_kernel, cuda, cuda_kernel, serial_kernel, shared
from .apply import apply
from .core import LEFT_ALONE
from .holdout import EXACT, FLAGGED, LOST, list_rows
from .kernels.simd import padded
from .kernels.team import member, members, part, sum_before, team_max, team_sum
from .merge import keep_leverage, place_lse
from .problem import Problem
from .reach import reach
from .results import COLUMNS, FALLBACK_ROWS, FLAGGED_ROWS, LEAVE_ONE_OUT, PROBES, RANK, SLOPE, WINDOW
from .rows import rows

# A row is flagged if its leverage exceeds this multiple of any fitted row's when left out, and this value; or if its
# query lies further out than this multiple of any fitted row's, and than this multiple of the queries' mean square.
_FAR_LEVERAGE, _LEAST_LEVERAGE = 4.0, 10.0
_FAR_REACH, _LEAST_REACH = 2.0, 4.0
_INFINITE = 0x7FF0000000000000  # the bits of infinity in float64

# --- bodies ---


@shared
def _gate(h, loo, slope, found, window, probes, hope, rank, edges, report):
    """Whether a head is worth finishing: its rank then, else 0. What the fit found goes to the report."""
    worth = loo[h] <= hope or hope == np.inf
    rank[h] = found[h] if worth else 0
    edges[h] = holdout.EDGE if window[h] >= 0 else 0
    report[h, LEAVE_ONE_OUT], report[h, SLOPE], report[h, RANK], report[h, WINDOW] = (
        loo[h],
        slope[h],
        found[h],
        window[h],
    )
    report[h, PROBES] = probes[h]


@shared
def _place_row(values, row, out, norm, state):
    """An exact row into its place; by a team."""
    for e in range(member(), values.shape[0], members()):
        out[row, e] = values[e]
    certify.measure_row(out, norm, row)
    if member() == 0:
        state[row] = EXACT


@shared
def _doubt(leverage, reach, state, fitted, row_leverage, drawn_pi, order):
    """The bits of doubt_i, which rise with it, or 0 where a row is trusted or exact; by a team.

    Slots of `fitted` with probability 0 are empty.
    """
    own = furthest = 0.0
    uniform_rows = fitted.shape[0] - drawn_pi.shape[0]
    for s in range(member(), fitted.shape[0], members()):
        if s < uniform_rows or drawn_pi[s - uniform_rows] > 0:
            furthest = max(furthest, np.float64(reach[fitted[s]]))
            own = max(own, row_leverage[s]) if row_leverage[s] < LEFT_ALONE else own
    far_leverage = max(_FAR_LEVERAGE * team_max(own), _LEAST_LEVERAGE)
    far_reach = max(_FAR_REACH * team_max(furthest), _LEAST_REACH)
    for i in range(member(), state.shape[0], members()):
        doubt = max(np.float64(leverage[i]) / far_leverage, np.float64(reach[i]) / far_reach)
        order[i] = np.float64(doubt).view(np.int64) if doubt > 1.0 and not state[i] & EXACT else 0


@shared
def _doubtful(order, least):
    """How many rows have doubt of at least the bits `least`; by a team."""
    count = 0
    for i in range(member(), order.shape[0], members()):
        count += 1 if order[i] >= least else 0
    return team_sum(count)


@shared
def _budget_bits(order, budget):
    """Bits of the least doubt that the budget reaches to, by bisection; 1 where it is enough for all. By a team."""
    low, high = np.int64(1), np.int64(_INFINITE + 1)
    if _doubtful(order, low) <= budget:
        return low
    while high - low > 1:
        middle = low + (high - low) // 2
        count = _doubtful(order, middle)
        if count == budget:
            return middle
        if count > budget:
            low = middle
        else:
            high = middle
    return low


@shared
def _flag(order, leverage, budget, state, flagged):
    """Flag the most doubtful rows, the first ones among equals; past the budget those without normaliser are lost.

    Lists the flagged rows, and in `order` the lost ones; returns how many they are. By a team.
    """
    least = _budget_bits(order, budget)
    left = budget - _doubtful(order, least + 1)  # for the rows whose doubt is just the least
    start, stop = part(state.shape[0])
    ties = 0
    for i in range(start, stop):
        ties += 1 if order[i] == least else 0
    left -= sum_before(ties)
    for i in range(start, stop):
        if order[i] > least or (order[i] == least and left > 0):
            state[i] |= FLAGGED
        elif order[i] > 0 and not leverage[i] < np.inf:
            state[i] |= LOST
        left -= 1 if order[i] == least else 0
    return list_rows(state, FLAGGED, flagged), list_rows(state, LOST, order)


@shared
def _repeat_keys(h, keys, found, repeated):
    """The landmarks' keys again and again, up to whole tiles."""
    for j in range(member(), repeated.shape[1], members()):
        repeated[h, j] = keys[h, j % max(found[h], 1)]


# --- CPU drivers ---


@serial_kernel
def _gate_cpu(loo, slope, found, window, probes, hope, rank, edges, report):
    for h in range(rank.shape[0]):
        _gate(h, loo, slope, found, window, probes, hope, rank, edges, report)


@serial_kernel
def _place_cpu(place, which, count, live, values, out, norm, state):
    for h in range(which.shape[0]):
        if live[h]:
            for i in range(count[h]):
                _place_row(values[h, i], which[h, i], out[place[h]], norm[h], state[h])


@cpu_kernel
def _flag_cpu(rank, leverage, reach, state, fitted, row_leverage, drawn_pi, order, flagged, flags, losses, report):
    for h in prange(rank.shape[0]):
        flags[h] = losses[h] = 0
        if rank[h]:
            _doubt(leverage[h], reach[h], state[h], fitted[h], row_leverage[h], drawn_pi[h], order[h])
            flags[h], losses[h] = _flag(order[h], leverage[h], flagged.shape[1], state[h], flagged[h])
        report[h, FLAGGED_ROWS], report[h, FALLBACK_ROWS] = flags[h] + losses[h], losses[h]


@serial_kernel
def _repeat_keys_cpu(keys, found, repeated):
    for h in range(keys.shape[0]):
        _repeat_keys(h, keys, found, repeated)


# --- CUDA drivers ---


@cuda_kernel(128)
def _gate_cuda(loo, slope, found, window, probes, hope, rank, edges, report):
    h = cuda.grid(1)
    if h < rank.shape[0]:
        _gate(h, loo, slope, found, window, probes, hope, rank, edges, report)


@cuda_kernel(64)
def _place_cuda(place, which, count, live, values, out, norm, state):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    if live[h] and i < count[h]:
        _place_row(values[h, i], which[h, i], out[place[h]], norm[h], state[h])


@cuda_kernel(512)
def _flag_cuda(rank, leverage, reach, state, fitted, row_leverage, drawn_pi, order, flagged, flags, losses, report):
    h = cuda.blockIdx.x
    found = without = 0
    if rank[h]:
        _doubt(leverage[h], reach[h], state[h], fitted[h], row_leverage[h], drawn_pi[h], order[h])
        found, without = _flag(order[h], leverage[h], flagged.shape[1], state[h], flagged[h])
    if member() == 0:
        flags[h], losses[h] = found, without
        report[h, FLAGGED_ROWS], report[h, FALLBACK_ROWS] = found + without, without


@cuda_kernel(128)
def _repeat_keys_cuda(keys, found, repeated):
    _repeat_keys(cuda.blockIdx.x, keys, found, repeated)


# --- stages ---


class ExactRows(NamedTuple):
    """Rows of the output that are exact: the first `count` of each head's list."""

    rows: Any  # (heads, most) int64
    count: Any  # (heads,) int64
    out: Any  # (heads, most, E)
    lse: Any  # (heads, most)


class Beside(NamedTuple):
    """What is wanted beside an output that is to be merged with others."""

    lse: Any  # (heads, N): log2 of every row's normaliser
    leverage: Any  # (heads, N): of every row, 0 where it is exact


class Finished(NamedTuple):
    """What a pass did to the rows, beside the fit's own."""

    flagged: ExactRows
    held_out: ExactRows
    pi: Any  # (heads, most): the probabilities of the held-out rows
    lost: tuple  # rows that became the softmax over the landmarks (heads, most), and how many (heads,)


@dataclasses.dataclass
class _Pass:
    """One pass from the fit to the output, for the heads whose `rank` is not 0."""

    problem: Problem
    heads: np.ndarray
    rank: Any  # (heads,) int64: landmarks, 0 where a head is not worth finishing
    out: Any  # (all heads, N, E)
    norm: Any  # (heads, at least N): |out_i|^2
    state: Any  # (heads, N): see `holdout`
    report: Any  # (heads, COLUMNS)
    beside: Any = None  # `Beside`, if it is wanted

    def place(self, which, count, values, lse):
        """Exact rows into `out`: the first `count` of each head's list."""
        device = self.problem.device
        lists = device.upload(np.asarray(self.heads)), which, count, self.rank, values
        device.run(_place_cpu, _place_cuda, which.shape[::-1], *lists, self.out, self.norm, self.state)
        self.place_lse(which, count, lse)

    def place_lse(self, which, count, values, shift=0.0):
        if self.beside is not None:
            place_lse(self.problem.device, which, count, self.rank, values, shift, self.beside.lse)

    def none(self):
        """An empty list."""
        device, count, element = self.problem.device, len(self.heads), self.problem.element
        listed = device.empty((count, 0), np.int64), device.zeros(count, np.int64)
        return ExactRows(
            *listed, device.empty((count, 0, self.problem.shape[3]), element), device.empty((count, 0), element)
        )


def finish(problem, heads, solved, rank, hope, ranges, out, clock, beside=None, judged=True):
    """Apply, mend what cannot be trusted, certify: for the heads whose leave-one-out error is at most `hope`.

    `beside`, if given, is filled. Without `judged` there is no certificate.
    Returns the report of the step, (heads, COLUMNS) in float64, and what became of the rows (None if no head is worth
    it).
    """
    device, n = problem.device, problem.shape[0]
    report = device.zeros((len(heads), COLUMNS), np.float64)
    worth, edges = device.empty(len(heads), np.int64), device.empty(len(heads), np.int64)
    facts = solved.loo, solved.slope, solved.found, solved.window, solved.near.count, float(hope)
    device.run(_gate_cpu, _gate_cuda, (-(-len(heads) // 128),), *facts, worth, edges, report)
    if _surely_none(problem, worth):
        return report, None
    with clock.stage("apply"):
        starts = device.repeat(device.upload(np.arange(0, n, plan.PANEL)[None]), len(heads))
        model = solved.tiles, solved.table, worth, solved.window, solved.basis
        lse = None if beside is None else beside.lse
        leverage, norm = apply(problem, heads, starts, *model, (ranges.low, ranges.high), out, lse, solved.near)
    step = _Pass(problem, heads, worth, out, norm, device.zeros((len(heads), n), np.int32), report, beside)
    sample = solved.sample
    fitted = certify.Fitted(sample.rows, solved.row_error, solved.row_leverage)
    with clock.stage("mend"):
        step.place(fitted.rows, device.upload(np.full(len(heads), fitted.rows.shape[1])), sample.out, sample.lse)
        far = reach(problem, heads)
        flagged, lost = _mend(step, solved, fitted, leverage, far, rank)
    held_out, pi = step.none(), device.empty((len(heads), 0), np.float64)
    if judged:
        with clock.stage("certify"):
            held_out, pi = _certify(step, fitted, sample.uniform.shape[1], leverage, far, edges)
    if beside is not None:
        keep_leverage(device, step.state, leverage, beside.leverage)
    return report, Finished(flagged, held_out, pi, lost)


def _surely_none(problem, counts):
    """Are all counts 0? Only the CPU can say so without waiting."""
    return problem.device.name == "cpu" and not counts.any()


def _listed(problem, which, counts):
    """Lists without the columns that no head uses, where that is known without waiting."""
    return which[:, : counts.max()].copy() if problem.device.name == "cpu" else which


def _mend(step, solved, fitted, leverage, reach, budget):
    """Doubtful rows: exact while the budget lasts; past it, if without normaliser, landmark softmax."""
    problem, heads, device = step.problem, step.heads, step.problem.device
    flagged, order = device.empty((len(heads), budget), np.int64), device.empty(step.state.shape, np.int64)
    flags, losses = device.empty(len(heads), np.int64), device.empty(len(heads), np.int64)
    doubt = leverage, reach, step.state, fitted.rows, fitted.leverage, solved.sample.drawn_pi, order
    device.run(_flag_cpu, _flag_cuda, (len(heads),), step.rank, *doubt, flagged, flags, losses, step.report)
    mended = step.none()
    if not _surely_none(problem, flags):
        flagged = _listed(problem, flagged, flags)
        values, lse, _ = rows(problem, heads, flagged, used=flags)
        step.place(flagged, flags, values, lse)
        mended = ExactRows(flagged, flags, values, lse)
    if _surely_none(problem, losses):
        return mended, (order[:, :0], losses)
    lost = _listed(problem, order, losses)
    alone, keys = landmarks_alone(problem, heads, solved.keys, solved.found)
    _, lse, _ = rows(alone, heads, lost, used=losses, place=step.out)
    step.place_lse(lost, losses, lse, math.log2(problem.shape[1] / keys.shape[1]))  # as if all keys were like these
    certify.measure(problem, heads, lost, losses, step.out, step.norm)
    return mended, (lost, losses)


def landmarks_alone(problem, heads, own, found):
    """The problem whose keys and values are each head's landmarks: its output is a convex combination of values.

    Where some of the landmarks `own (heads, R)` were redundant the others are repeated, up to whole tiles. Also returns
    which keys these are.
    """
    device = problem.device
    size = padded(own.shape[1])
    keys, count = device.empty((len(heads), size), np.int64), device.upload(np.full(len(heads), size))
    device.run(_repeat_keys_cpu, _repeat_keys_cuda, (len(heads),), own, found, keys)
    key_head = np.zeros_like(problem.key_head)
    key_head[heads] = np.arange(len(heads))
    alone = dataclasses.replace(
        problem,
        k=landmarks.gather(problem, heads, keys, count),
        v=landmarks.gather(problem, heads, keys, count, source=problem.v),
        key_head=key_head,
    )
    return alone, keys


def _certify(step, fitted, first, leverage, reach, edges):
    problem, heads = step.problem, step.heads
    work = problem.device.empty(step.state.shape, np.float64)
    drawn = holdout.hold_out(problem, heads, first, step.state, leverage, reach, edges, step.rank, work)
    truth, lse, _ = rows(problem, heads, drawn.rows, used=drawn.count)
    certify.judge(problem, heads, drawn, truth, step.out, step.norm, step.state, fitted, reach, step.rank, step.report)
    step.place(drawn.rows, drawn.count, truth, lse)
    return ExactRows(drawn.rows, drawn.count, truth, lse), drawn.pi
