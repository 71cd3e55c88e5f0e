"""Kinds of approximate attention on the shipped heads, as they are, untrained: the error of the output at inference.

    python bench/comparison.py

Every method gets queries, keys and values of a trained exact model. "per query" is how many keys, features or landmarks
each output is a sum over. The sparse methods are given by dense masks, so that nothing but the choice of keys counts:
"64 heaviest keys" picks them with all scores known, which a method that has to find them cannot do better.
"""

import functools
import statistics
import warnings

import numpy as np
from accuracy import nystromformer, performer, relative_error, right_singular_vectors, softmax_matrix
from common import print_table, print_versions

import pda_numba
from pda_numba.data import SETS, real_heads

RANK, WINDOW, SINKS = 64, 128, 16


def low_rank(q, k, v, scale, rank, **choices):
    return pda_numba.attention(q, k, v, scale=scale, rank=rank, tol=None, method="pda", **choices)


def masked(a, seen, v):
    """The softmax over the keys that are seen, from the softmax over all."""
    kept = np.where(seen, a, 0)
    return kept @ v / kept.sum(axis=1, keepdims=True)


def window_and_sinks(a, v):
    """The nearest keys and the first ones of the sequence."""
    apart = np.abs(np.arange(a.shape[0])[:, None] - np.arange(a.shape[1]))
    return masked(a, (apart <= WINDOW) | (np.arange(a.shape[1]) < SINKS), v)


def heaviest(a, v, count):
    return masked(a, a >= np.partition(a, -count, axis=1)[:, -count, None], v)


def best(a, v, rank):
    vectors = right_singular_vectors(a, rank)
    return (a @ vectors) @ (vectors.T @ v)


def methods(q, k, v, scale, a):
    """name: (numbers per query, the output as a function)."""
    one = q, k, v, scale
    return {
        f"pda_numba, rank {RANK}": (f"{RANK} and near field", functools.partial(low_rank, *one, RANK)),
        f"pda_numba, rank {RANK}, near='none'": (RANK, functools.partial(low_rank, *one, RANK, near="none")),
        "pda_numba, rank 128": ("128 and near field", functools.partial(low_rank, *one, 128)),
        f"Nystromformer, {RANK} landmarks": (RANK, functools.partial(nystromformer, *one, RANK)),
        "Nystromformer, 256 landmarks": (256, functools.partial(nystromformer, *one, 256)),
        f"Performer, {RANK} features": (RANK, functools.partial(performer, *one, RANK)),
        "Performer, 256 features": (256, functools.partial(performer, *one, 256)),
        f"window {WINDOW} and {SINKS} first keys": (2 * WINDOW + 1 + SINKS, functools.partial(window_and_sinks, a, v)),
        f"{RANK} heaviest keys": (RANK, functools.partial(heaviest, a, v, RANK)),
        "256 heaviest keys": (256, functools.partial(heaviest, a, v, 256)),
        f"best of rank {RANK} (SVD)": (RANK, functools.partial(best, a, v, RANK)),
    }


def compare(name):
    """The errors of every method on all heads of a set."""
    q, k, v, scale = real_heads(name)
    errors, numbers = {}, {}
    for one in zip(q, k, v, strict=True):
        a = softmax_matrix(*one[:2], scale)
        exact = a @ one[2].astype(np.float64)
        for method, (count, output) in methods(*one, scale, a).items():
            errors.setdefault(method, []).append(relative_error(output(), exact))
            numbers[method] = count
    rows = [(m, numbers[m], min(x), statistics.median(x), max(x)) for m, x in errors.items()]
    header = ["method", "per query", "best head", "median", "worst head"]
    print_table(f"{name}: relative error over {len(q)} heads, N = {q.shape[1]:,}, D = {q.shape[2]}", header, rows)


if __name__ == "__main__":
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)
    print_versions("performer-pytorch", "nystrom-attention")
    for dataset in SETS:
        compare(dataset)
