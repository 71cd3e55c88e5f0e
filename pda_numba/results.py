"""What is noted down for one head while it is computed."""

import math
from dataclasses import dataclass

from . import plan

# Columns of the report that each rank step brings to the host: what the fit found, then what `finish` did.
(
    LEAVE_ONE_OUT,
    SLOPE,
    RANK,
    WINDOW,
    FLAGGED_ROWS,
    FALLBACK_ROWS,
    ERROR,
    LIMIT,
    ROW_ERROR,
    ROW_SHARE,
    SIZE,  # |out|, to which rounding is relative
    EXACT_ROWS,  # before the held-out rows were replaced
    HELD_OUT_ROWS,
    PROBES,
) = range(14)
COLUMNS = 14


@dataclass
class HeadResult:
    """The fields of `AttentionInfo` that have one entry per head."""

    method: str = "pda"
    reason: str = ""
    rank: int = 0
    effective_rank: int = 0
    rows: int = 0
    window: int = 0
    probes: int = 0
    error: float = 0.0
    error_limit: float = 0.0
    row_error: float = 0.0
    row_share: float = 1.0
    leave_one_out: float = math.nan
    flagged_rows: int = 0
    fallback_rows: int = 0
    empty_rows: int = 0
    rectangles: int = 0
    flops: float = 0.0


def count_rows(problem, heads, results, count):
    """Add the operations of `count` exact rows to each head's account."""
    _, m, d, e = problem.shape
    for head in heads:
        results[head].flops += plan.row_flops(count, m, d, e)


def note(problem, result, row, rank, rounding):
    """One head's row of the report into its result; `rounding` is the relative error that rounding alone may cause."""
    n, m, d, e = problem.shape
    result.rank, result.effective_rank, result.window = rank, int(row[RANK]), max(int(row[WINDOW]), 0)
    result.probes = int(row[PROBES])
    result.error, result.row_error, result.row_share = (float(row[c]) for c in (ERROR, ROW_ERROR, ROW_SHARE))
    result.error_limit = math.hypot(row[LIMIT], rounding)
    flagged, fallback, held_out = (int(row[c]) for c in (FLAGGED_ROWS, FALLBACK_ROWS, HELD_OUT_ROWS))
    result.flagged_rows, result.fallback_rows = flagged, fallback
    result.rows = int(row[EXACT_ROWS]) + held_out
    result.flops += plan.apply_flops(n, d, e, rank, result.window)
    result.flops += plan.row_flops(flagged - fallback + held_out, m, d, e)
