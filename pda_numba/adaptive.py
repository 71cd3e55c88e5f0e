"""Low-rank attention of some heads: the stages in their order at one rank, and the loop over ranks that keeps `tol`.

    rank R:  uniform rows -> landmarks -> trial fits: temperature and window -> leverage rows -> fit   (`solve`)
             -> apply -> rows the fit cannot be trusted on -> certificate                              (`finish`)

The loop doubles R, keeping the rows it has, until the certificate's upper limit is at most `tol`. Where the
leave-one-out error says that no affordable rank will get there, it gives up early and leaves the head to the exact
method.
"""

import numpy as np

from .finish import Beside, finish
from .residuals import keep_low_rank
from .results import LEAVE_ONE_OUT, SIZE, SLOPE, HeadResult, note
from .solve import dear, solve, uniform_part

# A rank whose leave-one-out error exceeds this multiple of tol is not worth a certificate.
_HOPE = 2.0
# The error is taken to fall by at least this factor (log2) per doubling of the rank when the next rank is judged.
_LEAST_SLOPE, _SLACK = 0.3, 1.0


def low_rank(problem, heads, options, ranks, ranges, out, clock, keep=None, beside=None, judged=True):
    """Fill `out (all heads, N, E)` for `heads`; returns a HeadResult each ("exact" where that is left to do).

    `keep`, if given, is told what the gradients of the heads that are done at a rank need; `beside`, a `finish.Beside`
    of all heads, is filled. A fixed rank needs no certificate if it is not to be `judged`.
    """
    results = {h: HeadResult() for h in heads}
    fixed = options.tol is None or options.rank is not None
    judged = judged or not fixed
    active, sample, previous = np.asarray(heads), None, None
    for rank in ranks:
        last = rank == ranks[-1]
        sample = uniform_part(problem, active, sample, rank, results, clock)
        left = ~dear(problem, active, sample, options, rank, clock)
        for head in active[~left]:
            results[head].method, results[head].reason = "exact", "exact is cheaper than the near field that it needs"
        if not left.any():
            break
        active, sample = active[left], sample.keep(left)
        previous = previous if previous is None else previous[left]
        task = problem, active, sample, options, rank, results, clock
        solved = solve(*task, slope=not last, room=_own_part(out, active))
        certain = fixed or (last and options.method == "pda")
        hope = np.inf if certain else _HOPE * options.tol
        # The only wait for the device: what the step found out about every head.
        own = None
        if beside is not None:
            own = Beside(*(problem.device.empty((len(active), problem.shape[0]), problem.element) for _ in range(2)))
        report, finished = finish(problem, active, solved, rank, hope, ranges, out, clock, own, judged)
        report = problem.device.download(report)
        loo = report[:, LEAVE_ONE_OUT]
        worth = certain | (loo <= hope)
        for row, head, certified in zip(report, active, worth, strict=True):
            results[head].leave_one_out = float(row[LEAVE_ONE_OUT])
            if certified:
                note(problem, results[head], row, rank, ranges.rounding(head, problem.shape[0], row[SIZE]))
        limits = np.array([results[h].error_limit for h in active])
        done = worth & (fixed | (limits <= (options.tol or np.inf)))
        if problem.merged and not fixed:  # the certificate knows nothing of the normalisers
            done &= loo <= options.tol
        for head in active[done]:
            results[head].reason = "fixed rank" if fixed else "tol is met"
        slope = report[:, SLOPE] if previous is None else np.log2(previous / np.maximum(loo, 1e-300))
        over = np.full(len(active), last) | ~_may_reach(loo, slope, options.tol, ranks[-1] / rank)
        if options.method == "pda":
            over = np.full(len(active), last)
        for head in active[over & ~done]:
            _give_up(results[head], options, last)
        kept = done | (over & worth & (options.method == "pda"))
        if own is not None and beside is not None and kept.any():
            for source, target in zip(own, beside, strict=True):
                problem.device.put(source, np.flatnonzero(kept), active[kept], target)
        if keep is not None and kept.any():
            keep(keep_low_rank(problem, active, kept, solved, finished, report))
        left = ~done & ~over
        active, previous = active[left], loo[left]
        if not len(active):
            break
        sample = solved.sample.keep(left)
    return [results[h] for h in heads]


def _own_part(out, heads):
    """The output of heads that lie side by side; None if others lie between them."""
    first, stop = int(heads[0]), int(heads[-1]) + 1
    return out[first:stop] if stop - first == len(heads) else None


def _give_up(result, options, last):
    result.reason = "no affordable rank meets tol" if last else "low rank would not meet tol"
    if options.method != "pda":
        result.method = "exact"


def _may_reach(loo, slope, tol, growth):
    """Could the error fall to tol by the last rank, going on as it did (with some slack)?"""
    if tol is None:
        return np.ones(len(loo), bool)
    return np.log2(np.maximum(loo, 1e-300) / tol) <= np.log2(growth) * np.maximum(1.5 * slope, _LEAST_SLOPE) + _SLACK
