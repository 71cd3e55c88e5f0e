"""One pass over the inputs before anything else: is every value finite, what range has every column of the values, how
long are the rows? From it follow the bounds of the output, and the error that rounding alone may cause.

Per head and piece of rows, then per head:

    low_d = min_i x_id      high_d = max_i x_id      longest = max_i |x_i|^2      total = sum_i |x_i|^2
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, serial_kernel, shared
from .kernels.panel import add_square, larger
from .kernels.scalar import LOG2_E, widen
from .kernels.simd import dot
from .kernels.team import member, members, team_max, team_sum

_PIECE, _CUDA_PIECE = 4096, 256  # rows per piece

# --- bodies ---


@shared
def smaller(a, b):
    return a if a < b else b


@shared
def _spoil(spoiled, value):
    """NaN as soon as one value is not finite."""
    return spoiled + value * (value - value)


@shared
def _fold(low, high, square, total, finite, h, row, lowest, highest, report):
    """All pieces of one head, by a team: the columns' ranges, and a line of the report (longest, total, is finite)."""
    for d in range(member(), low.shape[2], members()):
        a, b = low[h, 0, d], high[h, 0, d]
        for piece in range(1, low.shape[1]):
            a, b = smaller(low[h, piece, d], a), larger(high[h, piece, d], b)
        lowest[h, d], highest[h, d] = a, b
    if member() == 0:
        longest, together, good = 0.0, 0.0, 1
        for piece in range(low.shape[1]):
            longest, together = larger(square[h, piece], longest), together + total[h, piece]
            good = good if finite[h, piece] else 0
        report[row + h, 0], report[row + h, 1], report[row + h, 2] = longest, together, good


@shared
def _read(seen, h, i):
    """Is row i looked at? `seen` is empty where all are."""
    return seen.shape[1] == 0 or seen[h, i] != 0


@shared
def _first_bad(x, seen, piece, finite, place):
    """Head, row and column of the first value that is not finite."""
    for h in range(x.shape[0]):
        for p in range(finite.shape[1]):
            if not finite[h, p]:
                for i in range(p * piece, min(x.shape[1], (p + 1) * piece)):
                    for d in range(x.shape[2] if _read(seen, h, i) else 0):
                        value = widen(x[h, i, d])
                        if value - value != value - value:
                            place[0], place[1], place[2] = h, i, d
                            return


# --- CPU drivers ---


@cpu_kernel
def _scan_cpu(x, seen, low, high, square, total, finite):
    heads, n, columns = x.shape
    pieces = finite.shape[1]
    for item in prange(heads * pieces):
        h, piece = item // pieces, item % pieces
        longest, together = 0.0, 0.0
        row, spoiled = np.empty((1, columns)), np.zeros(columns, low.dtype)  # squares of float32 may overflow
        for d in range(columns):
            low[h, piece, d] = np.inf
            high[h, piece, d] = -np.inf
        for i in range(piece * _PIECE, min(n, (piece + 1) * _PIECE)):
            if not _read(seen, h, i):
                continue
            for d in range(columns):
                value = low.dtype.type(widen(x[h, i, d]))
                row[0, d] = value
                spoiled[d] = _spoil(spoiled[d], value)
                low[h, piece, d] = smaller(value, low[h, piece, d])
                high[h, piece, d] = larger(value, high[h, piece, d])
            length = dot(row, 0, row, 0, columns)
            longest, together = larger(length, longest), together + length
        square[h, piece], total[h, piece] = longest, together
        finite[h, piece] = 1
        for d in range(columns):
            finite[h, piece] &= spoiled[d] == 0


@serial_kernel
def _fold_cpu(low, high, square, total, finite, row, lowest, highest, report):
    for h in range(low.shape[0]):
        _fold(low, high, square, total, finite, h, row, lowest, highest, report)


@serial_kernel
def _first_bad_cpu(x, seen, piece, finite, place):
    _first_bad(x, seen, piece, finite, place)


# --- CUDA drivers ---


@cuda_kernel(64)
def _scan_cuda(x, seen, low, high, square, total, finite):
    """One block per piece: columns over the threads, then rows over the threads."""
    piece, h = cuda.blockIdx.x, cuda.blockIdx.y
    start, stop = piece * _CUDA_PIECE, min(x.shape[1], (piece + 1) * _CUDA_PIECE)
    bad = 0
    for d in range(member(), x.shape[2], members()):
        least, most, spoiled = low.dtype.type(np.inf), low.dtype.type(-np.inf), low.dtype.type(0)
        for i in range(start, stop):
            if _read(seen, h, i):
                value = low.dtype.type(widen(x[h, i, d]))
                spoiled = _spoil(spoiled, value)
                least, most = smaller(value, least), larger(value, most)
        low[h, piece, d], high[h, piece, d] = least, most
        if spoiled != spoiled:
            bad = 1
    longest, together = 0.0, 0.0
    for i in range(start + member(), stop, members()):
        length = 0.0
        for d in range(x.shape[2] if _read(seen, h, i) else 0):
            length = add_square(length, np.float64(widen(x[h, i, d])))
        longest, together = larger(length, longest), together + length
    longest, together, bad = team_max(longest), team_sum(together), team_sum(bad)
    if member() == 0:
        square[h, piece], total[h, piece], finite[h, piece] = longest, together, bad == 0


@cuda_kernel(256)
def _fold_cuda(low, high, square, total, finite, row, lowest, highest, report):
    _fold(low, high, square, total, finite, cuda.blockIdx.x, row, lowest, highest, report)


@cuda_kernel(1)
def _first_bad_cuda(x, seen, piece, finite, place):
    _first_bad(x, seen, piece, finite, place)


# --- stage ---


@dataclass(frozen=True)
class Ranges:
    """What one pass over the inputs found out."""

    low: Any  # (key heads, E): smallest value of each column of v, on the problem's device
    high: Any
    slip: np.ndarray  # (heads,): root mean square error of an output row that rounding alone may cause
    half_unit: float  # relative error of rounding to the dtype of the output

    def rounding(self, head, n, size):
        """Relative error that rounding alone may cause in n rows of one head whose Frobenius norm is `size`."""
        return math.hypot(self.slip[head] * math.sqrt(n) / size, self.half_unit) if size > 0 else 0.0


def find_ranges(problem, dtype, *, check_finite, seen=None):
    """The `Ranges`; raises a ValueError if an input is not finite, or so large that a sum would overflow.

    `seen (key heads, M)`, if given, is 0 for keys that are not read. Waits for the device once.
    """
    device = problem.device
    arrays = {name: getattr(problem, name) for name in ("q", "k", "v")}
    report = device.zeros((sum(x.shape[0] for x in arrays.values()), 3), np.float64)
    row, found = 0, {}
    read = {"q": None, "k": seen, "v": seen}
    for name, x in arrays.items():
        found[name] = scan_array(device, problem.element, x, row, report, read[name])
        row += x.shape[0]
    told = np.split(device.download(report), np.cumsum([x.shape[0] for x in arrays.values()])[:2])
    longest, typical = {}, {}
    for (name, x), lines in zip(arrays.items(), told, strict=True):
        if check_finite and not lines[:, 2].all():
            place = _where(device, x, found[name][2], read[name])
            raise ValueError(f"{name} must be finite, got NaN or infinity{place}; check_finite=False skips this test")
        count = max(x.shape[1], 1) if read[name] is None else np.maximum(seen.sum(axis=1), 1)
        longest[name], typical[name] = np.sqrt(lines[:, 0]), np.sqrt(lines[:, 1] / count)
    if check_finite:
        _check_range(problem, longest)
    # A logit of size s |q| |k|, summed in D steps, is off by sqrt(D) eps times its size, the output by twice that.
    logits = problem.scale * typical["q"][problem.query_head] * longest["k"][problem.key_head]
    epsilon = float(np.finfo(problem.element).eps)
    slip = epsilon * (2.0 + math.sqrt(problem.q.shape[2]) * logits) * typical["v"][problem.key_head]
    half_unit = {"float16": 2.0**-11, "bfloat16": 2.0**-9}.get(dtype.name, 0.0)
    low, high, _ = found["v"]
    return Ranges(low, high, slip, half_unit)


def scan_array(device, element, x, row, report, seen=None):
    """Ranges of the columns, and which pieces are finite; fills the report's lines from `row` on.

    `seen (heads, rows)`, if given, is 0 for rows that are not looked at.
    """
    pieces = max(1, -(-x.shape[1] // (_PIECE if device.name == "cpu" else _CUDA_PIECE)))
    low, high = (device.empty((x.shape[0], pieces, x.shape[2]), element) for _ in range(2))
    square, total = (device.empty((x.shape[0], pieces), np.float64) for _ in range(2))
    finite = device.empty((x.shape[0], pieces), np.int32)
    read = _on_device(device, seen)
    device.run(_scan_cpu, _scan_cuda, (pieces, x.shape[0]), x, read, low, high, square, total, finite)
    lowest, highest = (device.empty((x.shape[0], x.shape[2]), element) for _ in range(2))
    task = low, high, square, total, finite, row, lowest, highest, report
    device.run(_fold_cpu, _fold_cuda, (x.shape[0],), *task)
    return lowest, highest, finite


def _check_range(problem, longest):
    """Sums of M values and logits must stay finite in the arithmetic of the call."""
    limit = float(np.finfo(problem.element).max) / 8
    q, k, v = (float(longest[name].max(initial=0.0)) for name in ("q", "k", "v"))
    if v * problem.v.shape[1] > limit:
        raise ValueError(
            f"v must be small enough for sums over {problem.v.shape[1]:,} keys in {problem.element}, got {v:.3g}"
        )
    factor = problem.scale * LOG2_E
    if max(q * factor, k, q * factor * k) > limit:
        raise ValueError(
            f"scale * q . k must be small enough for {problem.element}, got scale {problem.scale:.3g}, rows of q up to "
            f"{q:.3g} and of k up to {k:.3g} long"
        )


def _on_device(device, seen):
    return device.upload(np.empty((1, 0), np.uint8) if seen is None else seen)


def _where(device, x, finite, seen):
    place = device.zeros((3,), np.int64)
    piece = _PIECE if device.name == "cpu" else _CUDA_PIECE
    device.run(_first_bad_cpu, _first_bad_cuda, (1,), x, _on_device(device, seen), piece, finite, place)
    head, row, column = device.download(place)
    place = f"token {row}, column {column}"
    return f" at {place}" if x.shape[0] == 1 else f" at head {head}, {place}"
