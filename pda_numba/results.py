"""What is noted down for one head while it is computed."""

import math
from dataclasses import dataclass

from . import plan


@dataclass
class HeadResult:
    """The fields of `AttentionInfo` that have one entry per head."""

    method: str = "pda"
    reason: str = ""
    rank: int = 0
    effective_rank: int = 0
    rows: int = 0
    window: int = 0
    error: float = 0.0
    error_limit: float = 0.0
    row_error: float = 0.0
    row_share: float = 1.0
    leave_one_out: float = math.nan
    flagged_rows: int = 0
    fallback_rows: int = 0
    flops: float = 0.0


def count_rows(problem, heads, results, count):
    """Add the operations of `count` exact rows to each head's account."""
    _, m, d, e = problem.shape
    for head in heads:
        results[head].flops += plan.row_flops(count, m, d, e)
