"""How often the error statement holds, over random problems of seven kinds and over the shipped heads.

    python bench/certificate.py             # under three minutes on two cores
    python bench/certificate.py --seeds 40  # closer counts

The truth is attention in float64 by plain NumPy. Every result is one head. The kinds of problems are those of the
tests (`tests/problems.py`). Ratios leave out results with a true error below 1e-4, which is rounding for the most part.
"""

import argparse
import itertools
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import print_table, print_versions

import pda_numba
from pda_numba.cli import reference
from pda_numba.data import SETS, real_heads

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from problems import KINDS, make

LENGTHS = (1024, 1500, 2100, 3000)
RANKS = (32, 64, 128)
TOLERANCES = (0.1, 0.03, 0.01)
SMALL = 1e-4  # no ratios of true errors below this


@dataclass
class Result:
    """One head at a fixed rank; `judged` is the limit that `estimate_error` gives for the same output."""

    true: float
    error: float
    limit: float
    judged: float
    rows_hold: bool


def fixed_rank(arrays, truth, rank, scale, seed):
    out, info = pda_numba.attention(
        *arrays, rank=rank, tol=None, method="pda", scale=scale, seed=seed, return_info=True
    )
    judged = pda_numba.estimate_error(out, *arrays, scale=scale, seed=seed + 1)
    within = np.mean(reference.row_errors(out, truth) <= info.row_error * (1 + 1e-6))
    return Result(
        true=reference.relative_error(out, truth),
        error=float(info.error),
        limit=float(info.error_limit),
        judged=float(judged.error_limit),
        rows_hold=bool(within >= info.row_share),
    )


def with_tolerance(arrays, truth, tol, scale, seed):
    """(does the certificate accept low rank at this tol, the true error)."""
    out, info = pda_numba.attention(*arrays, tol=tol, method="pda", scale=scale, seed=seed, return_info=True)
    return bool(info.error_limit <= tol), reference.relative_error(out, truth)


def random_problems(seeds):
    """(kind, turn, seed, scale, arrays) of one head each; the turn picks its rank and its tol."""
    for kind, (place, n), seed in itertools.product(KINDS, enumerate(LENGTHS), range(seeds)):
        yield kind, place + seed, seed, None, make(kind, n, d=16, e=8, seed=seed)


def shipped_heads(seeds):
    for name, seed in itertools.product(SETS, range(seeds)):
        q, k, v, scale = real_heads(name)
        for head, arrays in enumerate(zip(q, k, v, strict=True)):
            yield f"{name} (shipped)", head + seed, seed, scale, arrays


def measure(problems):
    """{kind: results at a fixed rank}, {tol: [(accepted, true error)]}."""
    fixed, chosen = {}, {tol: [] for tol in TOLERANCES}
    for kind, turn, seed, scale, arrays in problems:
        q, k, v = arrays
        truth = reference.exact_rows(q, k, v, np.arange(len(q)), scale or reference.default_scale(q))
        rank, tol = RANKS[turn % len(RANKS)], TOLERANCES[turn % len(TOLERANCES)]
        fixed.setdefault(kind, []).append(fixed_rank(arrays, truth, rank, scale, seed))
        chosen[tol].append(with_tolerance(arrays, truth, tol, scale, seed))
    return fixed, chosen


def share(hits, count):
    return f"{100 * hits / count:.1f} % of {count}" if count else "none"


def row_of(kind, results):
    ratios = np.array([(r.error / r.true, r.limit / r.true) for r in results if r.true > SMALL])
    numbers = [f"{x:.2f}" for x in (*np.median(ratios, axis=0), np.quantile(ratios[:, 1], 0.9))] if len(ratios) else []
    count = len(results)
    return (
        kind,
        share(sum(r.true <= r.limit for r in results), count),
        *(numbers or ["-"] * 3),
        share(sum(r.rows_hold for r in results), count),
        share(sum(r.true <= r.judged for r in results), count),
    )


def print_results(fixed, chosen):
    header = ["kind", "within limit", "error / true", "limit / true", "its 90 %", "rows hold", "estimate_error's limit"]
    everything = [r for results in fixed.values() for r in results]
    rows = [row_of(kind, results) for kind, results in fixed.items()]
    print_table(f"A fixed rank, {', '.join(map(str, RANKS))} in turn", header, [*rows, row_of("all", everything)])
    rows = []
    for tol, runs in chosen.items():
        accepted = [true for holds, true in runs if holds]
        rows.append((f"{tol:g}", len(runs), len(accepted), share(sum(t <= tol for t in accepted), len(accepted))))
    print_table("With tol", ["tol", "results", "accepted by their limit", "of these, true error within tol"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, help="seeds of every kind and length")
    parser.add_argument("--head-seeds", type=int, default=3, help="seeds of every shipped head")
    options = parser.parse_args()
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)
    print_versions("numba")
    print_results(*measure(itertools.chain(random_problems(options.seeds), shipped_heads(options.head_seeds))))
