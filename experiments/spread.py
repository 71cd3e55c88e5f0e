"""Section 8 of the PDA paper as an experiment: how far do results of several seeds lie apart, and do runs help?

    python experiments/spread.py --out results

"In practice several runs may be needed." Measured, for every shipped head and a smooth one, over 50 seeds: the error of
the output (relative, Frobenius) of

    fixed     R = 64
    paper     R = 64 on the projected problem: one random orthogonal projection to m = D/2, nothing else exact
    tol       the rank at which the certificate keeps `tol`; low rank only, so that nothing hides behind exact attention

and the error of the mean of all outputs, which is what is left of it if the runs of all seeds are averaged: what seeds
do not move, more runs do not mend. Beside them the share of runs whose claimed 95 % limit was above the true error, and
of those that claimed to keep tol. The others say that they do not; without `method="pda"` they end in exact attention.

Writes spread.csv and spread.png.
"""

import warnings

import click
import numpy as np
from common import command, off, picture, show, verdict, write

import pda_numba
from pda_numba.data import SETS, real_heads, smooth_heads

nan = float("nan")
QUANTITIES = ("least", "median", "largest", "largest / least", "of the mean", "limit holds", "claim tol", "largest R")
HEADER = ["head", "method", *QUANTITIES]


def problems(tokens):
    """Name -> q, k, v (heads, tokens, dim), scale."""
    yield "smooth", (*(x[None] for x in smooth_heads((tokens, 32))), 32**-0.5)
    for name in SETS:
        q, k, v, scale = real_heads(name)
        yield name, (q[:, :tokens], k[:, :tokens], v[:, :tokens], scale)


def methods(rank, tol, dim):
    projected = {"proj_dim": dim // 2, "projection": "orthogonal", "calibrate": False, "near": "none"}
    fixed = {"rank": rank, "method": "pda"}
    return {"fixed": fixed, "paper": fixed | projected, "tol": {"tol": tol, "method": "pda"}}


def runs(q, k, v, scale, exact, seeds, options):
    """(seeds, heads) errors, limits and ranks; and the error of the mean output."""
    found, total = [], np.zeros(exact.shape)
    for seed in range(seeds):
        out, info = pda_numba.attention(q, k, v, scale=scale, seed=seed, return_info=True, **options)
        found.append(([off(*pair) for pair in zip(out, exact, strict=True)], info.error_limit, info.rank))
        total += out
    mean = [off(*pair) for pair in zip(total / seeds, exact, strict=True)]
    return *(np.array(x) for x in zip(*found, strict=True)), mean


def measure(tokens, seeds, rank, tol):
    """The rows of the table; and for the verdict and the picture (head, method) -> errors and limits of all seeds."""
    rows, single = [], {}
    for name, (q, k, v, scale) in problems(tokens):
        exact = pda_numba.attention(*(x.astype(float) for x in (q, k, v)), scale=scale, method="exact")
        for method, options in methods(rank, tol, q.shape[2]).items():
            errors, limits, ranks, mean = runs(q, k, v, scale, exact, seeds, options)
            for h in range(len(q)):
                own, limit = errors[:, h], limits[:, h]
                # the paper's algorithm has no certificate, and that of its projected problem is about something else
                told = (nan, nan) if method == "paper" else (float(np.mean(own <= limit)), float(np.mean(limit <= tol)))
                ends = float(own.min()), float(np.median(own)), float(own.max())
                label = f"{name} {h}"
                rows.append((label, method, *ends, ends[2] / ends[0], mean[h], *told, int(ranks[:, h].max())))
                single[label, method] = own, limit
    return rows, single


# --- results ---


def verdicts(rows, single, seeds, tol):
    by = {m: [dict(zip(HEADER, r, strict=True)) for r in rows if r[1] == m] for m in ("fixed", "paper", "tol")}
    spread = {method: [r["largest / least"] for r in found] for method, found in by.items()}
    left = {method: np.median([r["of the mean"] / r["median"] for r in found]) for method, found in by.items()}
    errors, limits = (np.concatenate([x[i] for (_, method), x in single.items() if method == "tol"]) for i in (0, 1))
    claimed = limits <= tol
    broken, fixed = (errors[claimed] > tol).sum(), [r["largest"] for r in by["fixed"]]
    held = {method: np.mean([r["limit holds"] for r in by[method]]) for method in ("fixed", "tol")}
    return [
        verdict(
            "Results of one run are uncertain",
            "confirmed" if max(spread["fixed"]) > 1.1 else "refuted",  # a tenth is not worth another run
            f"Over {seeds} seeds the largest error of a head is {np.median(spread['fixed']):.2f} times the least in "
            f"the median of the heads and {max(spread['fixed']):.2f} times at most at a fixed rank; as in the paper "
            f"{np.median(spread['paper']):.2f} and {max(spread['paper']):.2f}",
        ),
        verdict(
            "Several runs make them sure",
            "confirmed" if left["paper"] < 2 * seeds**-0.5 else "corrected",  # errors without a bias fall like n^-0.5
            f"The mean of all runs still has {left['fixed']:.2f} of one run's error at a fixed rank (median), as in "
            f"the paper {left['paper']:.2f}; of errors that have nothing in common it would be {seeds**-0.5:.2f}",
        ),
        verdict(
            f"One run that claims tol = {tol:g} keeps it",
            "confirmed" if broken <= 0.05 * max(claimed.sum(), 1) else "refuted",
            f"{claimed.sum()} of {len(errors)} runs claimed it, {broken} of these were above (5 % are allowed for); "
            f"at the fixed rank {sum(x > tol for x in fixed)} of {len(fixed)} heads had a run above it. The 95 % limit "
            f"held in {held['fixed']:.1%} of the runs at the fixed rank and in {held['tol']:.1%} with tol",
        ),
    ]


def draw(path, single, tol):
    heads = list(dict.fromkeys(head for head, _ in single))
    with picture(path, 3) as axes:
        for axis, method in zip(axes, ("fixed", "paper", "tol"), strict=True):
            for i, head in enumerate(heads):
                axis.semilogy(np.full(len(single[head, method][0]), i), single[head, method][0], "_", color="#1f6fb4")
            axis.set_xticks(range(len(heads)), heads, rotation=90, fontsize=7)
            axis.set(title=method, ylabel="error of each seed")
        axes[2].axhline(tol, color="k", lw=1, ls=":")


@command(__doc__)
@click.option("--tokens", default=4096, show_default=True, help="At most.")
@click.option("--seeds", default=50, show_default=True)
@click.option("--rank", default=64, show_default=True)
@click.option("--tol", default=0.1, show_default=True)
def main(out, tokens, seeds, rank, tol):
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)  # the errors are what is measured
    rows, single = measure(tokens, seeds, rank, tol)
    write(out, "spread.csv", HEADER, rows)
    draw(out / "spread.png", single, tol)
    tables = [(f"Error of the output over {seeds} seeds", HEADER, rows)]
    show(f"{seeds} seeds, R = {rank}, tol = {tol:g}", tables, verdicts(rows, single, seeds, tol))


if __name__ == "__main__":
    main()
