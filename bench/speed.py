"""Speed beside torch's scaled_dot_product_attention, in one run, on all cores, in float32.

    python bench/speed.py            # torch is measured up to 32,768 tokens, its quadratic law gives the rest
    python bench/speed.py --full     # measured at 131,072 tokens too (half a minute per call on two cores)
    python bench/speed.py long short # only some of the sections: budget, long, slope, exact, short

Calls are alternated and medians compared. Every PDA call includes its certificate.
"""

import argparse
import warnings

import numpy as np
import torch
from common import alternate, print_table, print_versions

import pda_numba
from pda_numba.data import smooth_heads
from pda_numba.plan import apply_flops, exact_flops, pda_flops, row_flops

LONG = (16_384, 131_072, 1_048_576)
MEASURED = (16_384, 32_768)
SLOPE = tuple(2**p for p in range(16, 21))


def torch_attention(q, k, v):
    q, k, v = (torch.from_numpy(x)[None] for x in (q, k, v))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)


def pda(q, k, v):
    return lambda: pda_numba.attention(q, k, v, rank=128, method="pda")


def budget(arguments):
    """Where the floating-point operations of the main table go, by the plan's account."""
    rows = []
    for n in LONG:
        exact, total = exact_flops(n, n, 64, 64), pda_flops(n, n, 64, 64, 128)
        count = pda_numba.plan((n, 64), (n, 64), (n, 64), rank=128, method="pda").rows
        apply, sampled = apply_flops(n, 64, 64, 128, 0), row_flops(count, n, 64, 64)
        rest = total - apply - sampled
        rows.append(
            (f"{n:,}", count, *(x / 1e9 for x in (sampled, apply, rest, total, exact)), f"{exact / total:.0f}x")
        )
    header = ["N", "rows", "exact rows", "apply", "leverage and fit", "all", "exact attention", "ratio"]
    print_table("Operations, 10^9, one head, D = E = 64, rank 128", header, rows)


def long(arguments):
    """One head, D = E = 64, rank 128: the main table."""
    measured = {*MEASURED, *((131_072,) if arguments.full else ())}
    law, rows = [], []
    for n in sorted({*LONG, *measured}):
        heads = smooth_heads((1, n, 64))
        calls = {"pda": pda(*heads)}
        if n in measured:
            calls["torch"] = torch_attention(*heads)
        repeats = arguments.repeats if n < 131_072 else min(arguments.repeats, 3)
        seconds = alternate(calls, repeats)
        if n in MEASURED:
            law.append(seconds["torch"] / n**2)
        by_law = float(np.exp(np.mean(np.log(law)))) * n**2
        reference = seconds.get("torch", by_law)
        source = "measured" if "torch" in seconds else "quadratic law"
        rows.append((f"{n:,}", seconds["pda"], reference, source, f"{reference / seconds['pda']:.1f}x"))
    print_table(
        "One head, D = E = 64, rank 128, certificate on", ["N", "PDA, s", "torch, s", "torch's time is", "ratio"], rows
    )


def slope(arguments):
    """How the time grows between 65k and 1M tokens."""
    seconds = []
    for n in SLOPE:
        seconds.append(alternate({"pda": pda(*smooth_heads((1, n, 64)))}, min(arguments.repeats, 3))["pda"])
    exponent = np.polyfit(np.log(SLOPE), np.log(seconds), 1)[0]
    print_table("Growth, rank 128", ["N", "seconds"], [(f"{n:,}", s) for n, s in zip(SLOPE, seconds, strict=True)])
    print(f"\nLog-log slope: {exponent:.3f}")


def exact(arguments):
    """Streaming exact attention against torch."""
    rows = []
    for dim in (64, 128):
        q, k, v = smooth_heads((1, 8192, dim))
        calls = {
            "exact": lambda q=q, k=k, v=v: pda_numba.attention(q, k, v, method="exact"),
            "torch": torch_attention(q, k, v),
        }
        seconds = alternate(calls, arguments.repeats)
        rows.append((dim, seconds["exact"], seconds["torch"], f"{seconds['torch'] / seconds['exact']:.2f}x"))
    print_table('method="exact", N = 8,192', ["D", "exact, s", "torch, s", "ratio"], rows)


def short(arguments):
    """Many short heads, where nothing can be gained and nothing may be lost."""
    q, k, v = smooth_heads((16, 2048, 64))
    calls = {"auto": lambda: pda_numba.attention(q, k, v), "torch": torch_attention(q, k, v)}
    seconds = alternate(calls, arguments.repeats)
    row = (seconds["auto"], seconds["torch"], f"{seconds['auto'] / seconds['torch']:.2f}x")
    print_table('16 heads, N = 2,048, D = 64, method="auto"', ["auto, s", "torch, s", "time relative to torch"], [row])


SECTIONS = {f.__name__: f for f in (budget, long, slope, exact, short)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"any of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--full", action="store_true", help="measure torch at 131,072 tokens too")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}")
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)  # accuracy has its own script
    print_versions("numba", "torch")
    for section in options.sections or SECTIONS:
        SECTIONS[section](options)
