"""The near field by content: accuracy on real heads, needles, time and growth; each with and without it, in one run.

    python bench/near.py                       # all sections: heads, needles, tol, time, slope
    python bench/near.py heads --file F.npz    # other heads as well: arrays q, k, v (..., heads, N, D), scale, causal

Calls are alternated and medians compared.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from common import alternate, print_table, print_versions

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from problems import make
from test_content import needles

from pda_numba import NearField, attention
from pda_numba.data import real_heads, smooth_heads

FIXED = {"rank": 64, "tol": None, "return_info": True}


def relative(out, true):
    return float(np.linalg.norm(out - true) / np.linalg.norm(true))


def _heads(arguments):
    for name in ("text", "speech"):
        yield name, False, *real_heads(name)
    for path in arguments.file or ():
        with np.load(path) as z:
            q, k, v = (z[name].astype(np.float32) for name in "qkv")
            if k.shape[-3] != q.shape[-3]:
                k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
            arrays = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
            yield Path(path).stem, bool(z["causal"]), *arrays, float(z["scale"])


def heads(arguments):
    """Relative errors of every head, with windows alone and with everything to choose from."""
    for name, causal, q, k, v, scale in _heads(arguments):
        wide = (x.astype(np.float64) for x in (q, k, v))
        true = attention(*wide, scale=scale, causal=causal, method="exact")
        rows = []
        for rank in (64, 128):
            for near in ("none",) if causal else ("none", "window"):
                rows.append(_row(rank, near, q, k, v, scale, causal, true))
            rows.append(_row(rank, "auto", q, k, v, scale, causal, true))
        header = ["R", "near", "errors", "median", "worst", "limit held", "probes", "s"]
        print_table(f"{name}, N = {q.shape[-2]:,}" + (", causal" if causal else ""), header, rows)


def _row(rank, near, q, k, v, scale, causal, true):
    options = {"rank": rank, "tol": None, "method": "pda", "scale": scale, "causal": causal, "near": near}
    seconds = alternate({"call": lambda: attention(q, k, v, return_info=True, **options)}, repeats=3)["call"]
    out, info = attention(q, k, v, return_info=True, **options)
    errors = np.array([relative(a, b) for a, b in zip(out, true, strict=True)])
    held = f"{(errors <= info.error_limit).sum()} of {len(errors)}"
    listed, probes = (" ".join(map(str, x)) for x in ([f"{e:.4f}" for e in errors], info.probes))
    return rank, near, listed, float(np.median(errors)), float(errors.max()), held, probes, f"{seconds:.2f}"


def find_needles(arguments):
    """The share of queries with a key of their own that are within 5 % of exact attention."""
    rows = []
    for tokens in (16_384, 65_536, 262_144):
        for gap in (4, 6, 8, 10, 12):
            q, k, v, which = needles(tokens, gap)
            exact = attention(q[which], k, v, method="exact")
            row = [f"{tokens:,}", gap]
            for near in ("none", "auto"):
                out, info = attention(q, k, v, near=near, **FIXED)
                errors = np.linalg.norm(out[which] - exact, axis=1) / np.linalg.norm(exact, axis=1)
                row += [f"{np.mean(errors <= 0.05):.1%}", float(info.error_limit)]
            rows.append((*row, int(info.probes)))
    header = ["N", "gap", "without: within 5 %", "limit", "with: within 5 %", "limit", "probes"]
    print_table("Needles: 1 % of the queries have one key of their own; rank 64", header, rows)


def tol(arguments):
    """How often a tolerance is kept, and how often by exact attention."""
    rows = []
    for kind in ("clustered", "decaying", "peaked", "duplicated", "outliers", "needles"):
        for bound in (0.1, 0.03):
            kept, exact = {"window": 0, "auto": 0}, {"window": 0, "auto": 0}
            for seed in range(6):
                arrays = needles(16_384, 8, seed=seed)[:3] if kind == "needles" else make(kind, 16_384, d=32, seed=seed)
                some = np.random.default_rng(seed).choice(16_384, 2_000, replace=False)
                true = attention(*(x.astype(np.float64) for x in (arrays[0][some], *arrays[1:])), method="exact")
                for near in kept:
                    out, info = attention(*arrays, tol=bound, near=near, return_info=True)
                    kept[near] += relative(out[some], true) <= bound
                    exact[near] += str(info.method) == "exact"
            rows.append((kind, bound, *(f"{x[near]} of 6" for x in (kept, exact) for near in ("window", "auto"))))
    header = ["problem", "tol", "kept, windows", "kept, all", "exact, windows", "exact, all"]
    print_table("tol at N = 16,384, with windows alone and with everything to choose from", header, rows)


BOTH = NearField(window=32, n_probes=4, bucket_size=64)


def time(arguments):
    q, k, v = smooth_heads((1, 131_072, 64))
    ways = {"none": "none", "4 probes of 64 and a window of 32": BOTH, "8 probes of 32": NearField(), "auto": "auto"}
    calls = {name: (lambda near=near: attention(q, k, v, near=near, **FIXED)) for name, near in ways.items()}
    times = alternate(calls, repeats=5)
    rows = [(name, f"{seconds:.3f}", seconds / times["none"]) for name, seconds in times.items()]
    print_table("N = 131,072, one head, D = E = 64, rank 64", ["near field", "s", "ratio"], rows)


def slope(arguments):
    tokens, seconds = [2**p for p in range(16, 21)], []
    for n in tokens:
        q, k, v = smooth_heads((1, n, 64))
        times = alternate({"call": lambda: attention(q, k, v, near=BOTH, **FIXED)}, repeats=3)  # noqa: B023
        seconds.append(times["call"])
    own = np.polyfit(np.log(tokens), np.log(seconds), 1)[0]
    rows = [(f"{n:,}", f"{s:.2f}") for n, s in zip(tokens, seconds, strict=True)]
    print_table(f"Growth with 4 probes of 64 and a window of 32, log-log slope {own:.3f}", ["N", "s"], rows)


SECTIONS = {"heads": heads, "needles": find_needles, "tol": tol, "time": time, "slope": slope}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), metavar="section")
    parser.add_argument("--file", action="append")
    given = parser.parse_args()
    print_versions()
    for section in given.sections:
        SECTIONS[section](given)
