"""Decoding: time of a step with a compressed past against exact steps, and what the answers are off by.

    python bench/decode.py --steps 192 > docs/measured/decoding.md

Steps are taken in turn by all methods in one process. "mean" includes audits, and refreshes that fell due.
"""

import argparse
import statistics
import time

import numpy as np
from common import print_table, print_versions

import pda_numba
from pda_numba.data import real_heads, smooth_heads


def torch_step(k, v):
    """Scaled dot-product attention of one token by torch, over the first tokens of a preallocated cache."""
    import torch

    k, v = torch.from_numpy(k), torch.from_numpy(v)
    group = {"enable_gqa": True}

    def step(q, length):
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(
                torch.from_numpy(q)[None], k[None, :, :length], v[None, :, :length], **group
            )

    return step


def timed(call, seconds):
    start = time.perf_counter()
    result = call()
    seconds.append(time.perf_counter() - start)
    return result


def race(heads, key_heads, length, dim, steps, tol):
    """One row of the table of times, and the error of the answers."""
    q, _, _ = smooth_heads((heads, 2048 + steps, dim))
    _, k, v = smooth_heads((key_heads, length + steps, dim), seed=1)
    past = (q[:, :2048], k[:, :length], v[:, :length])
    start = time.perf_counter()
    cache = pda_numba.AttentionCache(*past, tol=tol)
    built = time.perf_counter() - start
    exact, torch = pda_numba.AttentionCache(*past, method="exact"), torch_step(k, v)
    seconds, errors, sizes = {name: [] for name in ("ours", "exact", "torch")}, 0.0, 0.0
    for i in range(steps):
        one = slice(length + i, length + i + 1)
        token = np.ascontiguousarray(q[:, 2048 + i : 2049 + i])
        key, value = np.ascontiguousarray(k[:, one]), np.ascontiguousarray(v[:, one])

        def step(one, key=key, value=value, token=token):
            one.append(key, value)
            return one.attend(token)

        out = timed(lambda step=step: step(cache), seconds["ours"])
        truth = timed(lambda step=step: step(exact), seconds["exact"])
        timed(lambda token=token, i=i: torch(token, length + i + 1), seconds["torch"])
        errors += np.square(out - truth).sum(axis=(1, 2))
        sizes += np.square(truth).sum(axis=(1, 2))
    return cache, built, seconds, np.sqrt(errors / sizes)


def speed(arguments):
    rows = []
    for heads, key_heads, length in ((16, 16, 32768), (16, 16, 131072), (16, 4, 131072)):
        cache, built, seconds, errors = race(heads, key_heads, length, 64, arguments.steps, 0.05)
        ours, exact, torch = (1e3 * statistics.median(seconds[x]) for x in ("ours", "exact", "torch"))
        mean = 1e3 * statistics.mean(seconds["ours"])
        low_rank = int((cache.method == "pda").sum())
        row = f"{length:,}", f"{heads} / {key_heads}", low_rank, float(built), ours, mean, exact, torch
        ratio = f"{exact / ours:.1f}x", f"{exact / mean:.1f}x", f"{torch / mean:.1f}x"
        rows.append((*row, *ratio, float(errors.max()), float(cache.error_limit.max())))
    header = ["keys", "heads", "low rank", "first fit, s", "step, ms", "mean, ms", "exact, ms", "torch, ms"]
    ratios = ["exact / step", "exact / mean", "torch / mean", "worst error", "worst limit"]
    print_table(f"{arguments.steps} steps, D = E = 64, tol 0.05, one token at a time", header + ratios, rows)


def real(arguments):
    """Shipped heads that are long enough, continued: an encoder's, whose tokens here arrive one after the other."""
    rows = []
    for tol in (0.1, 0.03):
        rows += follow("text", *real_heads("text"), 3400, tol)
    header = ["head", "tol", "method at the end", "rank", "exact answers", "refreshes", "error", "estimate", "limit"]
    print_table("Real heads, 3,400 tokens and 696 more, recent=512, all answers", header, rows)


def follow(name, q, k, v, scale, start, tol):
    cache = pda_numba.AttentionCache(q[:, :start], k[:, :start], v[:, :start], scale=scale, tol=tol, recent=512)
    exact = pda_numba.AttentionCache(q[:, :start], k[:, :start], v[:, :start], scale=scale, method="exact")
    errors, sizes, counts = 0.0, 0.0, 0
    for i in range(start, q.shape[1]):
        for one in (cache, exact):
            one.append(k[:, i : i + 1], v[:, i : i + 1])
        out, info = cache.attend(q[:, i : i + 1], return_info=True)
        truth = exact.attend(q[:, i : i + 1])
        errors += np.square(out - truth).sum(axis=(1, 2))
        sizes += np.square(truth).sum(axis=(1, 2))
        counts = counts + info.exact
    true, steps = np.sqrt(errors / sizes), q.shape[1] - start
    return [
        (
            f"{name} {h}",
            tol,
            str(cache.method[h]),
            int(cache.rank[h]),
            f"{counts[h] / steps:.0%}",
            int(info.refreshes[h]),
            float(true[h]),
            float(cache.error[h]),
            float(cache.error_limit[h]),
        )
        for h in range(len(q))
    ]


SECTIONS = {"speed": speed, "real": real}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"any of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--steps", type=int, default=256)
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}")
    print_versions("numba", "torch")
    for section in options.sections or SECTIONS:
        SECTIONS[section](options)
