"""`pda-numba check`: is the error that was claimed the error there is?"""

import math
from dataclasses import dataclass

import numpy as np

from . import reference

AFFORDABLE = 2**32  # scores computed without asking: about half a minute on two cores


@dataclass(frozen=True)
class Verdict:
    """One head: what was claimed and what is true (on the rows looked at)."""

    head: tuple
    method: str
    claimed: float
    limit: float
    true: float
    row_error: float
    row_share: float
    true_share: float
    within_limit: bool
    within_rows: bool

    @property
    def holds(self):
        return self.within_limit and self.within_rows


def rows_to_check(heads, n, m, wanted, seed):
    """The rows whose true output is computed: all that are `wanted`, or by default as many as are affordable."""
    if wanted is None:
        wanted = n if heads * n * m <= AFFORDABLE else max(256, AFFORDABLE // (heads * m))
    if wanted >= n:
        return np.arange(n)
    return np.sort(np.random.default_rng([seed, 1]).choice(n, wanted, replace=False))


def verdicts(out, q, k, v, claims, methods, rows, scale, tick):
    """A `Verdict` per head; `claims` has the arrays error, error_limit, row_error and row_share."""
    found = []
    for head, q_h, k_h, v_h in reference.heads(q, k, v):
        exact = reference.exact_rows(q_h, k_h, v_h, rows, scale, tick)
        given = out[head][rows].astype(np.float64)
        # Storing the output rounds it; no claim can be more exact than that.
        floor = 4 * float(np.finfo(out.dtype).eps)
        true = reference.relative_error(given, exact)
        row_error = float(claims.row_error[head])
        share = float(np.mean(reference.row_errors(given, exact) <= row_error + floor))
        promised = float(claims.row_share[head])
        # On a sample of the rows the share itself is uncertain: three standard deviations are allowed for.
        slack = 0.0 if len(rows) == len(q_h) else 3 * math.sqrt(promised * (1 - promised) / len(rows))
        found.append(
            Verdict(
                head=head,
                method=str(methods[head]),
                claimed=float(claims.error[head]),
                limit=float(claims.error_limit[head]),
                true=true,
                row_error=row_error,
                row_share=promised,
                true_share=share,
                within_limit=true <= float(claims.error_limit[head]) + floor,
                within_rows=share >= promised - slack,
            )
        )
    return found


def summary(found, all_rows):
    """The closing line."""
    failed = sum(not verdict.holds for verdict in found)
    where = "" if all_rows else " on the rows looked at"
    if not failed:
        return f"The claim holds for {_count(len(found), 'head')}{where}."
    return (
        f"The claim is violated{where} for {failed} of {_count(len(found), 'head')}. "
        "It is made at 95 % confidence: about one head in twenty may exceed it by chance."
    )


def _count(number, noun):
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
