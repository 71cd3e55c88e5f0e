"""`spectrum` and `factorize` beside the dense SVD of the softmax matrix, on the shipped heads.

    python bench/spectrum.py
    python bench/spectrum.py --sets speech --rank 32
    python bench/spectrum.py --tokens 16384          # a smooth head of that length; its dense SVD takes long

For each head: the singular values' largest relative deviation from the dense ones, the error that the best
approximation of that rank has, what `spectrum` says of it, and the true and the claimed error of `factorize`.
"""

import argparse
import time

import numpy as np
from common import print_table, print_versions
from scipy.linalg import svdvals

import pda_numba
from pda_numba.data import SETS, real_heads, smooth_heads


def softmax(q, k, scale):
    """The matrix, in float64."""
    logits = scale * (q.astype(float) @ k.astype(float).T)
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=1, keepdims=True)
    return logits


def timed(call, *arguments, **options):
    start = time.perf_counter()
    result = call(*arguments, **options)
    return result, time.perf_counter() - start


def compare(name, q, k, scale, rank):
    """One row of the table for one head."""
    a = softmax(q, k, scale)
    norm = np.linalg.norm(a)
    dense, dense_seconds = timed(svdvals, a, check_finite=False)
    found, seconds = timed(pda_numba.spectrum, q, k, rank=rank, scale=scale)
    factors, factor_seconds = timed(pda_numba.factorize, q, k, rank=rank, scale=scale)
    a -= (factors.left * factors.singular_values) @ factors.right.T
    return (
        name,
        f"{np.max(np.abs(found.singular_values / dense[:rank] - 1)):.0e}",
        f"{np.linalg.norm(dense[rank:]) / norm:.3f}",
        f"{float(found.error):.3f}",
        f"{np.linalg.norm(a) / norm:.3f}",
        f"{float(factors.error):.3f}",
        f"{float(factors.error_limit):.3f}",
        f"{dense_seconds:.1f}",
        f"{seconds:.2f}",
        f"{factor_seconds:.2f}",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    parser.add_argument("--tokens", type=int, nargs="*", default=[])
    parser.add_argument("--rank", type=int, default=64)
    options = parser.parse_args()
    pda_numba.factorize(*smooth_heads((3000, 16))[:2], rank=options.rank)  # compiles
    pda_numba.spectrum(*smooth_heads((3000, 16))[:2], rank=options.rank)
    rows = []
    for name in options.sets:
        q, k, _, scale = real_heads(name)
        rows += [compare(f"{name} {h}", q[h], k[h], scale, options.rank) for h in range(len(q))]
    for n in options.tokens:
        q, k, _ = smooth_heads((n, 64))
        rows.append(compare(f"smooth, {n:,}", q, k, 0.125, options.rank))
    header = ["head", "values off", "best", "spectrum says", "factors", "they say", "limit", "SVD, s", "spectrum, s"]
    print_versions("numpy", "scipy", "numba")
    print_table(f"Rank {options.rank}, relative Frobenius errors", [*header, "factorize, s"], rows)
