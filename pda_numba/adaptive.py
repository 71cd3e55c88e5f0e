"""Low-rank attention of some heads: the stages in their order at one rank, and the loop over ranks that keeps `tol`.

    rank R:  uniform rows -> landmarks -> trial fits: temperature and window -> leverage rows -> fit   (`solve`)
             -> apply -> rows the fit cannot be trusted on -> certificate                              (`finish`)

The loop doubles R, keeping the rows it has, until the certificate's upper limit is at most `tol`. Where the
leave-one-out error says that no affordable rank will get there, it gives up early and leaves the head to the exact
method.
"""

import numpy as np

from .finish import finish
from .results import HeadResult
from .solve import solve, uniform_part

# A rank whose leave-one-out error exceeds this multiple of tol is not worth a certificate.
_HOPE = 2.0
# The error is taken to fall by at least this factor (log2) per doubling of the rank when the next rank is judged.
_LEAST_SLOPE, _SLACK = 0.3, 1.0


def low_rank(problem, heads, options, ranks, ranges, out, clock):
    """Fill `out (all heads, N, E)` for `heads`; returns a HeadResult each ("exact" where that is left to do)."""
    results = {h: HeadResult() for h in heads}
    fixed = options.tol is None or options.rank is not None
    active, sample, previous = np.asarray(heads), None, None
    for rank in ranks:
        last = rank == ranks[-1]
        sample = uniform_part(problem, active, sample, rank, results, clock)
        solved = solve(problem, active, sample, options, rank, results, clock, slope=not last)
        for h, head in enumerate(active):
            results[head].leave_one_out = float(solved.loo[h])
        worth = np.ones(len(active), bool)
        if not fixed and not (last and options.method == "pda"):
            worth = solved.loo <= _HOPE * options.tol
        if worth.any():
            finish(problem, active, worth, solved, rank, ranges, out, results, clock)
        limits = np.array([results[h].error_limit for h in active])
        done = worth & (fixed | (limits <= (options.tol or np.inf)))
        for head in active[done]:
            results[head].reason = "fixed rank" if fixed else "tol is met"
        slope = solved.slope if previous is None else np.log2(previous / np.maximum(solved.loo, 1e-300))
        over = np.full(len(active), last) | ~_may_reach(solved.loo, slope, options.tol, ranks[-1] / rank)
        if options.method == "pda":
            over = np.full(len(active), last)
        for head in active[over & ~done]:
            _give_up(results[head], options, last)
        left = ~done & ~over
        active, sample, previous = active[left], solved.sample.keep(left), solved.loo[left]
        if not len(active):
            break
    return [results[h] for h in heads]


def _give_up(result, options, last):
    result.reason = "no affordable rank meets tol" if last else "low rank would not meet tol"
    if options.method != "pda":
        result.method = "exact"


def _may_reach(loo, slope, tol, growth):
    """Could the error fall to tol by the last rank, going on as it did (with some slack)?"""
    if tol is None:
        return np.ones(len(loo), bool)
    return np.log2(np.maximum(loo, 1e-300) / tol) <= np.log2(growth) * np.maximum(1.5 * slope, _LEAST_SLOPE) + _SLACK
