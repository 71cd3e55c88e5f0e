"""The exact leave-one-out error of ridge fits, per head, in float64: a panel of rows in the lanes at a time.

    [dnum, dden] = (x_i Z - t_i) / (1 - h_i)      h_i = w_i^2 |x_i G|^2
    loo = sum_i w_i^2 (|dnum_i - o_i dden_i|^2 + b dden_i^2) / (1 + dden_i)^2

where b is 0, or `joint` times the mean of |o_i|^2 where the output is to be merged with others by its normaliser.

Every body is a team's (`core` has the driver).
"""

import numpy as np

from ._jit import shared
from .kernels.simd import lane_count, multiply_rows
from .kernels.team import barrier, member, members, team_sum
from .kernels.view import view

_ALONE = 1e-7  # 1 - h below this: the row is fitted by itself alone, and without it nothing is known (x_i Z = 0)
LEFT_ALONE = 1e12  # the leverage of such a row when it is left out
# The output is clipped to the range of the values, so no row's error counts for more than this, in rms |o|: twice the
# largest difference of two outputs of that size. A row whose normaliser is not positive counts as much.
_LARGEST_ERROR = 2.0


@shared
def _largest_square(exact, weight):
    """What one row's squared error counts for at most."""
    total, counted = 0.0, 0.0
    for i in range(member(), exact.shape[0], members()):
        if weight[i] > 0:
            counted += 1.0
            for j in range(exact.shape[1]):
                value = np.float64(exact[i, j])
                total += value * value
    total, counted = team_sum(total), team_sum(counted)
    return _LARGEST_ERROR * _LARGEST_ERROR * total / max(counted, 1.0)


@shared
def _left_out_square(fitted, base, lane, targets, exact, row, window, grow, alone, largest, spread):
    """Squared error of one row's output when the row is left out; that of its normaliser counts `spread` times."""
    columns = targets.shape[2]
    dden = (fitted[base + columns - 1, lane] - targets[row, window, columns - 1]) * grow
    dden = -np.float64(targets[row, window, columns - 1]) if alone else dden
    square = spread * dden * dden if spread > 0 else 0.0
    for j in range(columns - 1):
        dnum = (fitted[base + j, lane] - targets[row, window, j]) * grow
        dnum = -np.float64(targets[row, window, j]) if alone else dnum
        error = dnum - exact[row, j] * dden
        square += error * error
    normaliser = 1.0 + dden
    return min(square / (normaliser * normaliser), largest) if normaliser > 0.0 else largest


@shared
def _judge(
    leverage,
    fitted,
    targets,
    window,
    windows,
    exact,
    weight,
    start,
    first,
    largest,
    spread,
    sums,
    row_error,
    row_leverage,
):
    """Add the rows start .. start + lanes to the sums (candidates * windows, lanes) of squared errors."""
    width, columns = lane_count(fitted), targets.shape[2]
    used = min(width, weight.shape[0] - start)
    candidates = sums.shape[0] // windows
    for item in range(member(), candidates * width, members()):
        g, i = item // width, item % width
        row = start + i
        if i < used and weight[row] > 0:
            w_square = weight[row] * weight[row]
            rest = 1.0 - leverage[g, i] * w_square
            alone = rest < _ALONE
            grow = 0.0 if alone else 1.0 / rest
            for w in range(windows):
                place = g * windows + w
                square = _left_out_square(
                    fitted, place * columns, i, targets, exact, row, window + w, grow, alone, largest, spread
                )
                if row >= first:
                    sums[place, i] += w_square * square
                if row_error.shape[0]:
                    row_error[row] = square
                    row_leverage[row] = LEFT_ALONE if alone else leverage[g, i] * grow
        elif i < used and row_error.shape[0]:
            row_error[row] = 0.0
            row_leverage[row] = 0.0


@shared
def leave_one_out(
    features,
    vt,
    gains,
    coefficients,
    targets,
    window,
    windows,
    exact,
    weight,
    first,
    joint,
    width,
    loo,
    row_error,
    row_leverage,
    work,
):
    """loo (candidates * windows,) for ridge candidates g and the windows from `window` on.

    `gains (candidates padded, R)` are 1 / (sigma^2 + lambda); `coefficients (rows, R)` are the transposed coefficients
    in the basis V, row (g * windows + w) * columns + j; `targets (n, windows, columns)`, `exact (n, columns - 1)`.
    The rows before `first` do not count in `loo`. `row_error` and `row_leverage` (n,), if not empty, get every row's
    squared error and leverage |x_i G|^2 / (1 - h_i), for one candidate and one window.
    """
    n, rank = weight.shape[0], vt.shape[1]
    rows = view(work, 0, (work.shape[0] // width, width))
    at_leverage = 2 * rank + vt.shape[0]
    at_fitted = at_leverage + gains.shape[0]
    at_sums = at_fitted + coefficients.shape[0]
    x, squared, coordinates = rows[:rank], rows[rank : 2 * rank], rows[2 * rank : at_leverage]
    leverage, fitted = rows[at_leverage:at_fitted], rows[at_fitted:at_sums]
    sums = rows[at_sums : at_sums + loo.shape[0]]
    lanes = lane_count(x)
    for w in range(sums.shape[0]):
        for i in range(member(), lanes, members()):
            sums[w, i] = 0.0
    largest = _largest_square(exact, weight)
    for start in range(0 if row_error.shape[0] else first, n, width):
        for c in range(rank):
            for i in range(member(), lanes, members()):
                x[c, i] = features[c, start + i] if start + i < n else 0.0
        barrier()
        multiply_rows(coordinates, 0, vt.shape[0], vt, 0, rank, 1, x, rank, False)
        barrier()
        for c in range(rank):
            for i in range(member(), lanes, members()):
                squared[c, i] = coordinates[c, i] * coordinates[c, i]
        barrier()
        multiply_rows(leverage, 0, gains.shape[0], gains, 0, rank, 1, squared, rank, False)
        multiply_rows(fitted, 0, coefficients.shape[0], coefficients, 0, rank, 1, coordinates, rank, False)
        barrier()
        _judge(
            leverage,
            fitted,
            targets,
            window,
            windows,
            exact,
            weight,
            start,
            first,
            largest,
            joint * largest / (_LARGEST_ERROR * _LARGEST_ERROR),
            sums,
            row_error,
            row_leverage,
        )
    barrier()
    for w in range(member(), loo.shape[0], members()):
        loo[w] = 0.0
        for i in range(lanes):
            loo[w] += sums[w, i]
