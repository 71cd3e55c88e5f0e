"""Kinds of approximate attention, as they are, untrained: error of the output and time at inference.

    python bench/comparison.py                                # the shipped heads, and a smooth head of two lengths
    python bench/comparison.py text --tokens 16384            # one set and one length
    python bench/comparison.py text --tokens 16384 --repeats 9

Every method gets queries, keys and values of a trained exact model. "per query" is how many keys, features or landmarks
each output is a sum over. "time" is relative to exact attention by torch in the same run: calls are alternated, one
head after the other, and medians compared; PDA's include its certificate. The sparse methods are given by dense masks,
so that nothing but the choice of keys counts: "64 heaviest keys" picks them with all scores known, which a method that
has to find them cannot do better. They, and the SVD, have no time of their own.
"""

import argparse
import functools
import statistics
import warnings

import numpy as np
import torch
from accuracy import nystromformer, performer, relative_error, right_singular_vectors, softmax_matrix
from common import alternate, print_table, print_versions

import pda_numba
from pda_numba.data import SETS, real_heads, smooth_heads

RANK, WINDOW, SINKS = 64, 128, 16
EXACT, ROWS = "exact attention (torch)", 1024


def low_rank(q, k, v, scale, rank, **choices):
    return pda_numba.attention(q, k, v, scale=scale, rank=rank, tol=None, method="pda", **choices)


def exact(q, k, v, scale):
    q, k, v = (torch.from_numpy(x)[None, None] for x in (q, k, v))  # with fewer axes torch makes the whole matrix
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)[0, 0].numpy()


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


# name: (numbers per query, output of q, k, v, scale)
METHODS = {
    EXACT: ("all", exact),
    f"pda_numba, rank {RANK}": (f"{RANK} and near field", functools.partial(low_rank, rank=RANK)),
    f"pda_numba, rank {RANK}, near='none'": (RANK, functools.partial(low_rank, rank=RANK, near="none")),
    "pda_numba, rank 128": ("128 and near field", functools.partial(low_rank, rank=128)),
    f"Nystromformer, {RANK} landmarks": (RANK, functools.partial(nystromformer, rank=RANK)),
    "Nystromformer, 256 landmarks": (256, functools.partial(nystromformer, rank=256)),
    f"Performer, {RANK} features": (RANK, functools.partial(performer, rank=RANK)),
    "Performer, 256 features": (256, functools.partial(performer, rank=256)),
}
# the same of the softmax matrix and v: what is not made to be fast
FROM_MATRIX = {
    f"window {WINDOW} and {SINKS} first keys": (2 * WINDOW + 1 + SINKS, window_and_sinks),
    f"{RANK} heaviest keys": (RANK, functools.partial(heaviest, count=RANK)),
    "256 heaviest keys": (256, functools.partial(heaviest, count=256)),
    f"best of rank {RANK} (SVD)": (RANK, functools.partial(best, rank=RANK)),
}


def times(heads, scale, repeats):
    """Seconds of every method for these heads, over those of exact attention, as text."""
    calls = {name: lambda f=f: [f(*one, scale) for one in heads] for name, (_, f) in METHODS.items()}
    seconds = alternate(calls, repeats)
    return {name: f"{s / seconds[EXACT]:.2f}" for name, s in seconds.items()}


def compare(name, repeats):
    """The errors and the time of every method on all heads of a set."""
    q, k, v, scale = real_heads(name)
    heads = list(zip(q, k, v, strict=True))
    errors = {method: [] for method in (*METHODS, *FROM_MATRIX)}
    for one in heads:
        a = softmax_matrix(*one[:2], scale)
        true = a @ one[2].astype(np.float64)
        for method, (_, output) in METHODS.items():
            errors[method].append(relative_error(output(*one, scale), true))
        for method, (_, output) in FROM_MATRIX.items():
            errors[method].append(relative_error(output(a, one[2]), true))
    took = times(heads, scale, repeats)
    rows = []
    for method, (count, _) in (METHODS | FROM_MATRIX).items():
        own = errors[method]
        rows.append((method, count, min(own), statistics.median(own), max(own), took.get(method, "-")))
    header = ["method", "per query", "best head", "median", "worst head", "time"]
    print_table(f"{name}: relative error over {len(q)} heads, N = {q.shape[1]:,}, D = {q.shape[2]}", header, rows)


def long(tokens, repeats):
    """The same for one smooth head of a length at which time matters; errors on random rows."""
    q, k, v = smooth_heads((tokens, 64))
    scale = 64**-0.5
    which = np.random.default_rng(0).choice(tokens, min(ROWS, tokens), replace=False)
    true = softmax_matrix(q[which], k, scale) @ v.astype(np.float64)
    errors = {name: relative_error(output(q, k, v, scale)[which], true) for name, (_, output) in METHODS.items()}
    took = times([(q, k, v)], scale, repeats)
    rows = [(name, count, errors[name], took[name]) for name, (count, _) in METHODS.items()]
    header = ["method", "per query", "error", "time"]
    print_table(f"A smooth head, N = {tokens:,}, D = 64: error of {len(which):,} random rows", header, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", metavar="dataset", help=f"any of {', '.join(SETS)}; default: all")
    parser.add_argument("--tokens", type=int, nargs="*", default=[16_384, 65_536], help="lengths of the smooth head")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if unknown := set(options.datasets) - set(SETS):
        parser.error(f"unknown dataset {', '.join(sorted(unknown))}; choose from {', '.join(SETS)}")
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)
    print_versions("torch", "performer-pytorch", "nystrom-attention")
    for dataset in options.datasets or SETS:
        compare(dataset, options.repeats)
    for length in options.tokens:
        long(length, options.repeats)
