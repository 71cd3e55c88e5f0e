"""The certificate: rows that no fit has seen are computed exactly, and say how wrong the output is.

Errors sit in few rows, so these rows are drawn by three designs (`holdout`). With pi_i the probability that row i is
held out, y_i = |out_i - o_i|^2 and sums over the held-out rows, the error that is left once these rows have been
replaced by their exact values is estimated by

    S = sum (1 - pi_i)/pi_i y_i                                              (Horvitz and Thompson 1952)
    T = sum_known |o_i|^2 + sum_rest |out_i|^2 + sum (1 - pi_i)/pi_i (|o_i|^2 - |out_i|^2)
    error = sqrt(S / T)

T being the difference estimator of |o|^2. The upper limit treats S as gamma distributed with the variance of the ratio

    V = sum (1 - pi_i)/pi_i^2 (y_i - S/T (|o_i|^2 - |out_i|^2))^2

after adding one pseudo-row of the largest expanded error seen, held out or left out (the gamma limit of Fay and Feuer
1997; its quantile by Wilson and Hilferty 1931). It is twice as large where no rows are left out of a fit: held-out rows
alone tell less of the rare ones.

From the uniform rows alone: with 95 % confidence at least a share 0.05^(1/n) of all rows is off by no more than the
worst of n rows (the one-sided distribution-free tolerance limit of Wilks 1941).
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from . import draw
from ._jit import cpu_kernel, cuda, cuda_kernel, serial_kernel, shared
from .holdout import EXACT, HELD_OUT, hold_out, inclusion, rows_with
from .kernels.scalar import widen
from .kernels.team import member, members, team_max, team_sum
from .reach import reach
from .results import COLUMNS, ERROR, EXACT_ROWS, HELD_OUT_ROWS, LIMIT, ROW_ERROR, ROW_SHARE, SIZE
from .rows import rows

Z95 = 1.6448536269514722
_PIECES = 64  # of each head, whose squares are summed apart
_UNFITTED = 2.0  # times the largest error seen, where no rows left out of a fit have been seen as well

# --- bodies: squares of rows ---


@shared
def measure_row(out, norm, row):
    """norm[row] = |out[row]|^2, summed in float64; by a team."""
    total = 0.0
    for e in range(member(), out.shape[1], members()):
        x = np.float64(widen(out[row, e]))
        total += x * x
    total = team_sum(total)
    if member() == 0:
        norm[row] = total


@shared
def _compare(truth, guess, squares):
    """|guess - truth|^2, |truth|^2 and |guess|^2 of one row, by a team."""
    error = exact = given = 0.0
    for e in range(member(), truth.shape[0], members()):
        t, g = np.float64(truth[e]), np.float64(widen(guess[e]))
        error += (g - t) * (g - t)
        exact += t * t
        given += g * g
    error, exact, given = team_sum(error), team_sum(exact), team_sum(given)
    if member() == 0:
        squares[0], squares[1], squares[2] = error, exact, given


@shared
def _piece_square(x, piece, pieces):
    """Sum of the squares of one piece of a matrix's rows, by a team."""
    size = (x.shape[0] + pieces - 1) // pieces
    total = 0.0
    for i in range(piece * size, min(x.shape[0], (piece + 1) * size)):
        for e in range(member(), x.shape[1], members()):
            value = np.float64(x[i, e])
            total += value * value
    return team_sum(total)


# --- bodies: the statement about one head ---


@shared
def share_of_rows(count):
    """With 95 % confidence at least this share of all rows is off by no more than the worst of `count` uniform ones."""
    return 0.05 ** (1.0 / count) if count else 0.0


@shared
def _gamma_limit(mean, variance):
    """95 % quantile of the gamma distribution with this mean and variance."""
    if variance <= 0:
        return mean
    shape = mean * mean / variance
    return mean * max(1.0 - 1.0 / (9.0 * shape) + Z95 / (3.0 * math.sqrt(shape)), 0.0) ** 3


@shared
def _largest_left_out(uniform_pi, scales, fitted, row_error, row_leverage, reach):
    """The largest (1 - pi)/pi y of the fitted rows, each when left out of the fit; by a team."""
    largest = 0.0
    for i in range(member(), fitted.shape[0], members()):
        pi = max(inclusion(uniform_pi, scales, row_leverage[i], reach[fitted[i]]), 1e-12)
        largest = max(largest, (1.0 - pi) / pi * row_error[i])
    return team_max(largest)


@shared
def _sum_norms(norm, state):
    """Sum of |out_i|^2 over the exact rows, and over those that are neither exact nor held out; by a team."""
    known = rest = 0.0
    for i in range(member(), state.shape[0], members()):
        if state[i] & EXACT:
            known += np.float64(norm[i])
        elif not state[i] & HELD_OUT:
            rest += np.float64(norm[i])
    return team_sum(known), team_sum(rest)


@shared
def _sum_held_out(pi, squares, replaced):
    """S, sum y, sum |o|^2, sum |out|^2, sum (1 - pi)/pi (|o|^2 - |out|^2), the largest (1 - pi)/pi y; by a team."""
    left = wrong = truth = given = difference = largest = 0.0
    for i in range(member(), pi.shape[0], members()):
        expand = (1.0 - pi[i]) / pi[i]
        error = squares[i, 0]
        left += expand * error + (0.0 if replaced else error)
        wrong += error
        truth += squares[i, 1]
        given += squares[i, 2]
        difference += expand * (squares[i, 1] - squares[i, 2])
        largest = max(largest, expand * error)
    left, wrong, difference = team_sum(left), team_sum(wrong), team_sum(difference)
    return left, wrong, team_sum(truth), team_sum(given), difference, team_max(largest)


@shared
def _variance(pi, squares, ratio):
    """V of the module's docstring, S/T being `ratio`; by a team."""
    total = 0.0
    for i in range(member(), pi.shape[0], members()):
        deviation = squares[i, 0] - ratio * (squares[i, 1] - squares[i, 2])
        total += (1.0 - pi[i]) / (pi[i] * pi[i]) * deviation * deviation
    return team_sum(total)


@shared
def _worst_uniform(chance, squares):
    """Largest y of the uniform rows, and how many they are; by a team."""
    worst, count = 0.0, 0
    for i in range(member(), chance.shape[0], members()):
        if chance[i]:
            worst = max(worst, squares[i, 0])
            count += 1
    return team_max(worst), team_sum(count)


@shared
def _judge(chance, pi, scales, uniform_pi, squares, norm, state, fitted, row_error, row_leverage, reach, replaced, row):
    """The certificate of one head into its row of the report; by a team.

    `replaced` says whether the held-out rows are exact in the end, so that their own error does not count.
    """
    n, count = state.shape[0], pi.shape[0]
    known, rest = _sum_norms(norm, state)
    left, wrong, truth, given, difference, largest = _sum_held_out(pi, squares, replaced)
    total = max(known + truth + rest + difference, 0.2 * (known + truth + rest))
    worst, drawn = _worst_uniform(chance, squares)
    pseudo = max(largest, _largest_left_out(uniform_pi, scales, fitted, row_error, row_leverage, reach))
    pseudo *= 1.0 if fitted.shape[0] else _UNFITTED
    variance = _variance(pi, squares, left / total if total > 0 else 0.0)
    exact_rows = rows_with(state, EXACT)
    if member() == 0:
        if total > 0:
            row[ERROR] = math.sqrt(left / total)
            row[LIMIT] = math.sqrt(_gamma_limit(left + pseudo, variance + pseudo * pseudo) / total)
            row[ROW_ERROR] = math.sqrt(worst * n / total)
        else:  # nothing to be right about: any error is infinitely large
            row[ERROR] = row[LIMIT] = row[ROW_ERROR] = np.inf if wrong > 0 else 0.0
        row[ROW_SHARE] = share_of_rows(drawn)
        row[SIZE] = math.sqrt(known + rest + given if replaced else truth * n / max(count, 1))
        row[EXACT_ROWS], row[HELD_OUT_ROWS] = exact_rows, count


@shared
def _judge_head(
    h,
    live,
    count,
    chance,
    pi,
    scales,
    uniform_pi,
    squares,
    norm,
    state,
    fitted,
    row_error,
    row_leverage,
    reach,
    replaced,
    report,
):
    """Head h, if it is live."""
    if live[h]:
        n = count[h]
        held = chance[h, :n], pi[h, :n], scales[h], uniform_pi[h], squares[h]
        left_out = fitted[h], row_error[h], row_leverage[h]
        _judge(*held, norm[h], state[h], *left_out, reach[h], replaced, report[h])


# --- CPU drivers ---


@serial_kernel
def _compare_cpu(place, rows, count, truth, out, squares):
    for h in range(rows.shape[0]):
        for i in range(count[h]):
            _compare(truth[h, i], out[place[h], rows[h, i]], squares[h, i])


@serial_kernel
def _measure_cpu(place, rows, count, out, norm):
    for h in range(rows.shape[0]):
        for i in range(count[h]):
            measure_row(out[place[h]], norm[h], rows[h, i] if rows.shape[1] else np.int64(i))


@cpu_kernel
def _sum_squares_cpu(place, out, sums):
    heads, pieces = sums.shape
    for item in prange(heads * pieces):
        h, piece = item // pieces, item % pieces
        sums[h, piece] = _piece_square(out[place[h]], piece, pieces)


@serial_kernel
def _judge_cpu(
    live,
    count,
    chance,
    pi,
    scales,
    uniform_pi,
    squares,
    norm,
    state,
    fitted,
    row_error,
    row_leverage,
    reach,
    replaced,
    report,
):
    held = live, count, chance, pi, scales, uniform_pi, squares
    for h in range(state.shape[0]):
        _judge_head(h, *held, norm, state, fitted, row_error, row_leverage, reach, replaced, report)


# --- CUDA drivers ---


@cuda_kernel(64)
def _compare_cuda(place, rows, count, truth, out, squares):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    if i < count[h]:
        _compare(truth[h, i], out[place[h], rows[h, i]], squares[h, i])


@cuda_kernel(64)
def _measure_cuda(place, rows, count, out, norm):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    if i < count[h]:
        measure_row(out[place[h]], norm[h], rows[h, i] if rows.shape[1] else np.int64(i))


@cuda_kernel(256)
def _sum_squares_cuda(place, out, sums):
    piece, h = cuda.blockIdx.x, cuda.blockIdx.y
    total = _piece_square(out[place[h]], piece, sums.shape[1])
    if member() == 0:
        sums[h, piece] = total


@cuda_kernel(512)
def _judge_cuda(
    live,
    count,
    chance,
    pi,
    scales,
    uniform_pi,
    squares,
    norm,
    state,
    fitted,
    row_error,
    row_leverage,
    reach,
    replaced,
    report,
):
    held = live, count, chance, pi, scales, uniform_pi, squares
    _judge_head(cuda.blockIdx.x, *held, norm, state, fitted, row_error, row_leverage, reach, replaced, report)


# --- stages ---


def measure(problem, heads, rows, count, out, norm):
    """norm (heads, at least N) = |out_i|^2 for the first `count` of the listed rows; an empty list is all of them."""
    longest = rows.shape[1] or problem.shape[0]
    place = problem.device.upload(np.asarray(heads))
    problem.device.run(_measure_cpu, _measure_cuda, (longest, len(heads)), place, rows, count, out, norm)


def sum_squares(problem, heads, out):
    """|out_h|^2 of the given heads on the host, in float64."""
    device = problem.device
    sums = device.empty((len(heads), _PIECES), np.float64)
    device.run(_sum_squares_cpu, _sum_squares_cuda, (_PIECES, len(heads)), device.upload(np.asarray(heads)), out, sums)
    return device.download(sums).sum(axis=1)


class Fitted(NamedTuple):
    """What the fit knows of its rows: their squared error and leverage when each is left out."""

    rows: Any  # (heads, n) int64
    error: Any  # (heads, n)
    leverage: Any  # (heads, n)


def judge(problem, heads, held, truth, out, norm, state, fitted, reach, live, report, *, replaced=True):
    """The certificate of the heads that are `live`, into the columns of `report` from ERROR on.

    `truth (heads, most, E)` are the exact rows of those that are held out; `norm (heads, at least N)` is |out_i|^2.
    """
    device = problem.device
    squares = device.empty((*held.rows.shape, 3), np.float64)
    lists = device.upload(np.asarray(heads)), held.rows, held.count
    device.run(_compare_cpu, _compare_cuda, held.rows.shape[::-1], *lists, truth, out, squares)
    judge_squares(device, held, squares, norm, state, fitted, reach, live, report, replaced=replaced)


def judge_squares(device, held, squares, norm, state, fitted, reach, live, report, *, replaced):
    """The same from `squares (heads, most, 3)`: |out_i - o_i|^2, |o_i|^2 and |out_i|^2 of the rows held out."""
    parts = held.count, held.chance, held.pi, held.scales, held.uniform_pi, squares, norm, state
    device.run(_judge_cpu, _judge_cuda, (squares.shape[0],), live, *parts, *fitted, reach, replaced, report)


def judge_output(problem, heads, out, n_rows, leverage=None):
    """The report on heads of an output (all heads, N, E) that nothing else is known about, whoever computed it.

    There are `n_rows` uniform rows, and a quarter as many drawn by reach; if the leverage (heads, N) is known, half as
    many by that and an eighth by reach.
    """
    device, n, count = problem.device, problem.shape[0], len(heads)
    live, nowhere = device.upload(np.ones(count, np.int64)), device.zeros(count, np.int64)
    state, work = device.zeros((count, n), np.int32), device.empty((count, n), np.float64)
    far, sizes = reach(problem, heads), (min(n_rows, n), 0, n_rows // 4)
    if leverage is not None:
        sizes = (min(n_rows, n), n_rows // 2, n_rows // 8)
    weight = far if leverage is None else leverage
    held = hold_out(problem, heads, 0, state, weight, far, nowhere, live, work, sizes, draw.JUDGE)
    truth, _, _ = rows(problem, heads, held.rows, used=held.count)
    norm, every = device.empty((count, n), problem.element), device.empty((count, 0), np.int64)
    measure(problem, heads, every, device.upload(np.full(count, n)), out, norm)
    report = device.zeros((count, COLUMNS), np.float64)
    fitted = Fitted(every, device.empty((count, 0), np.float64), device.empty((count, 0), np.float64))
    judge(problem, heads, held, truth, out, norm, state, fitted, far, live, report, replaced=False)
    return report
