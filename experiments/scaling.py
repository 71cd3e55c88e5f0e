"""Section 7.4 of the PDA paper as an experiment: time, memory and error from a thousand to a million tokens.

    python experiments/scaling.py --out results

Theorems 4 and 5: time O(L d m + L m R + L R d_v) and memory O(L (d + m + R)), so that with m, R = O(log L) both are
close to linear; that such an R is enough rests on Lemma 2.1. Measured, D = E = 32, each size in a process of its own:
the seconds of a call, the peak of memory beyond inputs and output, and the error of 256 random rows against exact ones
in float64, the median and the worst of three seeds. For R = 64, for R = 6 log2 L, and for exact attention as far as it
goes; on a smooth head and a rough one; without a near field and without a projection.

Writes scaling.csv and scaling.png.
"""

import math
import time
import warnings

import click
import numpy as np
from common import command, exponent, in_fresh_process, off, peak_of, picture, show, softmax, verdict, write

import pda_numba
from pda_numba import theory
from pda_numba.data import smooth_heads

DIM, ROWS, CHUNK, SEEDS = 32, 256, 64, 3
SIZES = (1024, 4096, 16384, 65536, 262_144, 1_048_576)
METHODS = {"R = 64": lambda n: 64, "R = 6 log2 L": lambda n: round(6 * math.log2(n)), "exact": lambda n: 0}
HEADER = ["head", "method", "L", "R", "seconds", "MB", "error", "worst", "claimed", "95 % limit", "operations"]


def rough_heads(shape):
    """Like `smooth_heads`, with standard deviations 2 / sqrt(1 + d): many directions matter."""
    rng = np.random.default_rng(0)
    deviation = (2 / np.sqrt(1 + np.arange(shape[-1]))).astype(np.float32)
    q, k, v = (rng.standard_normal(shape, np.float32) for _ in range(3))
    return q * deviation, k * deviation, v


HEADS = {"smooth": smooth_heads, "rough": rough_heads}


def measure_one(head, method, n, which, true):
    """The columns from R on, `true` the exact output of the rows `which`; runs in a process of its own."""
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)  # the error is what is measured
    q, k, v = HEADS[head]((n, DIM))
    rank = METHODS[method](n)
    options = {"rank": rank, "method": "pda", "near": "none"} if rank else {"method": "exact"}
    out = np.ones_like(v)  # written to, so that it is resident
    first = min(n, 4096)  # loads the kernels, which is not this size's doing
    pda_numba.attention(q[:first], k[:first], v[:first], **options)

    def call(seed=0):
        return pda_numba.attention(q, k, v, out=out, seed=seed, return_info=True, **options)

    start = time.perf_counter()
    (_, info), peak = peak_of(call)
    seconds = time.perf_counter() - start
    for _ in range(2 if n <= 16384 else 0):  # the least of three, where it is too short to tell from noise
        start = time.perf_counter()
        call()
        seconds = min(seconds, time.perf_counter() - start)
    found = [(off(out[which], true), float(info.error), float(info.error_limit))]
    for seed in range(1, SEEDS if rank else 1):
        _, own = call(seed)
        found.append((off(out[which], true), float(own.error), float(own.error_limit)))
    error, claimed, limit = (float(x) for x in np.median(found, axis=0))
    return rank, seconds, peak / 1e6, error, max(found)[0], claimed, limit, float(info.flops)


def true_rows(q, k, v):
    """Which rows, drawn at random, and their exact output, by nothing of the package."""
    which = np.random.default_rng(5).choice(len(q), ROWS, replace=False)
    chunks = np.split(which, range(CHUNK, ROWS, CHUNK))
    true = np.concatenate([softmax(q[i], k, DIM**-0.5) @ v.astype(float) for i in chunks])
    return which, true


def measure(heads, sizes, longest_exact):
    """The rows of the table: all lengths of one method and head behind each other."""
    rows = []
    for head in heads:
        for n in sizes:
            rows_of_all = true_rows(*HEADS[head]((n, DIM)))
            for method in METHODS:
                if method != "exact" or n <= longest_exact:
                    rows.append((head, method, n, *in_fresh_process(measure_one, head, method, n, *rows_of_all)))
    return sorted(rows, key=lambda row: (heads.index(row[0]), list(METHODS).index(row[1])))


# --- results ---


def curve(rows, head, method, column):
    """L and one column."""
    kept = [(r[2], r[HEADER.index(column)]) for r in rows if r[:2] == (head, method)]
    return tuple(np.array(x, float) for x in zip(*kept, strict=True))


def fitted(rows, head, method, column):
    """The exponent over the upper half of the sizes: below, what a call costs at least is most of it."""
    sizes, values = curve(rows, head, method, column)
    from_here = len(sizes) // 2 if len(sizes) > 3 else 0
    return exponent(sizes[from_here:], values[from_here:])


def verdicts(rows):
    log = "R = 6 log2 L"
    heads = list(dict.fromkeys(r[0] for r in rows))
    times = {method: max(fitted(rows, head, method, "seconds") for head in heads) for method in METHODS}
    memory = max(fitted(rows, head, log, "MB") for head in heads)
    growth = {head: fitted(rows, head, log, "error") for head in heads}
    worst = {head: curve(rows, head, log, "worst")[1].max() for head in heads}
    last = max(r[2] for r in rows)
    at_last = {(r[0], r[1]): r for r in rows if r[2] == last}
    longest = at_last[heads[0], log]
    paper = theory.cost(last, last, DIM, DIM, math.ceil(math.log2(last)), longest[3])
    arrays = 2 * (paper.counted.factors + paper.counted.projected) / 1e6  # MB of float32; counted are two bytes each
    ends = {head: (curve(rows, head, log, "error")[1][[0, -1]]) for head in heads}
    return [
        verdict(
            "Theorem 4, time O(L log L) with R = O(log L)",
            "confirmed" if times[log] < 1.2 else "refuted",
            f"Seconds ~ L^{times['R = 64']:.2f} at R = 64, L^{times[log]:.2f} at {log}, exact L^{times['exact']:.2f}; "
            f"{last:,} tokens in {longest[4]:.1f} s with {longest[10]:.2g} operations, where the paper's algorithm "
            f"would take {paper.counted.flops:.2g}",
        ),
        verdict(
            "Theorem 5, memory O(L log L)",
            "confirmed" if memory < 1.2 else "refuted",
            f"Peak beyond inputs and output ~ L^{memory:.2f}; {longest[5]:.0f} MB at {last:,} tokens, where the "
            f"paper's factors and projected arrays would take {arrays:.0f} MB in float32",
        ),
        verdict(
            "R = O(log L) is enough at every length",
            "confirmed" if all(x[1] <= x[0] for x in ends.values()) else "refuted",
            "; ".join(
                f"{head}: error {ends[head][0]:.2g} to {ends[head][1]:.2g}, ~ L^{growth[head]:.2f} on the longer half, "
                f"the worst seed {worst[head]:.2g}"
                for head in heads
            ),
        ),
    ]


def draw(path, rows):
    styles = dict(zip(METHODS, ("o-", "s--", "^:"), strict=True))
    with picture(path, 3) as axes:
        for axis, column in zip(axes, ("seconds", "MB", "error"), strict=True):
            for head, colour in zip(dict.fromkeys(r[0] for r in rows), ("#1f6fb4", "#d9601a"), strict=False):
                for method, style in styles.items():
                    if column == "error" and method == "exact":
                        continue
                    axis.loglog(*curve(rows, head, method, column), style, color=colour, label=f"{head}, {method}")
            axis.set(title=column, xlabel="L")
        axes[0].legend(fontsize=7)


@command(__doc__)
@click.option("--head", "heads", default=list(HEADS), multiple=True, type=click.Choice(list(HEADS)), help="Of these.")
@click.option("--tokens", "sizes", default=SIZES, multiple=True, type=int, help="Once for each size; 1k to 1M.")
@click.option("--exact", default=65536, show_default=True, help="The longest sequence of exact attention.")
def main(out, heads, sizes, exact):
    rows = measure(heads, sizes, exact)
    write(out, "scaling.csv", HEADER, rows)
    draw(out / "scaling.png", rows)
    show(f"D = E = {DIM}, {min(sizes):,} to {max(sizes):,} tokens", [("Scaling", HEADER, rows)], verdicts(rows))


if __name__ == "__main__":
    main()
