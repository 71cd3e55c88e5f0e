"""Accuracy on the shipped heads: relative Frobenius error of the output, per head and as medians.

    python bench/accuracy.py                  # ranks 32, 64, 128 on both sets
    python bench/accuracy.py speech --rank 64
    python bench/accuracy.py --projections    # instead: the four projections of the head dimension, D to D/2

Beside it, at the same rank: the best rank-R approximation of the softmax matrix (its truncated SVD, far too expensive
to use), Performer (performer-pytorch) and Nystromformer (nystrom-attention) on the same queries, keys and values.
"""

import argparse
import statistics
import warnings

import numpy as np
import torch
from common import print_table, print_versions
from nystrom_attention import NystromAttention
from performer_pytorch import FastAttention
from scipy import linalg

import pda_numba
from pda_numba.data import SETS, real_heads

SEED = 0


def relative_error(out, exact):
    return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))


def softmax_matrix(q, k, scale):
    scores = q.astype(np.float64) @ k.astype(np.float64).T * scale
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores


def right_singular_vectors(a, count):
    """The `count` leading ones, the largest first."""
    n = a.shape[1]
    return linalg.eigh(a.T @ a, subset_by_index=(n - count, n - 1))[1][:, ::-1]


def performer(q, k, v, scale, rank):
    """FastAttention with `rank` orthogonal random features; it scales by 1/sqrt(D) itself."""
    torch.manual_seed(SEED)
    q, k, v = (torch.from_numpy(x)[None, None] for x in (q * scale * q.shape[-1] ** 0.5, k, v))
    return FastAttention(q.shape[-1], nb_features=rank)(q, k, v)[0, 0].numpy()


def nystromformer(q, k, v, scale, rank):
    """NystromAttention with `rank` landmarks, its learned projections replaced by the identity."""
    module = NystromAttention(q.shape[-1], dim_head=q.shape[-1], heads=1, num_landmarks=rank, residual=False)
    module.to_qkv = module.to_out = torch.nn.Identity()
    module.scale = scale
    tokens = torch.from_numpy(np.concatenate([q, k, v], axis=1))[None]
    with torch.no_grad():
        return module(tokens, mask=torch.ones(tokens.shape[:2], dtype=torch.bool))[0].numpy()


def compare(name, ranks):
    """One table per rank, and the medians of all of them."""
    q, k, v, scale = real_heads(name)
    rows = {rank: [] for rank in ranks}
    for head in range(len(q)):
        one = q[head], k[head], v[head]
        a = softmax_matrix(*one[:2], scale)
        exact = a @ one[2].astype(np.float64)
        vectors = right_singular_vectors(a, max(ranks))
        for rank in ranks:
            out, info = pda_numba.attention(*one, scale=scale, rank=rank, method="pda", return_info=True)
            best = (a @ vectors[:, :rank]) @ (vectors[:, :rank].T @ one[2])
            errors = [
                relative_error(x, exact)
                for x in (out, best, performer(*one, scale, rank), nystromformer(*one, scale, rank))
            ]
            rows[rank].append(
                (head, int(info.window), float(info.error), float(info.error_limit), *errors, errors[0] / errors[1])
            )
    header = [
        "head",
        "window",
        "claimed",
        "95 % limit",
        "PDA",
        "best rank R",
        "Performer",
        "Nystromformer",
        "PDA / best",
    ]
    for rank in ranks:
        print_table(f"{name}, R = {rank}", header, rows[rank])
    medians = [(rank, *(statistics.median(row[c] for row in rows[rank]) for c in range(4, 8))) for rank in ranks]
    print_table(f"{name}, medians over {len(q)} heads", ["R", *header[4:8]], medians)


def projections(name, ranks):
    """The projections of the head dimension at m = D/2, medians over the heads."""
    q, k, v, scale = real_heads(name)
    dim = q.shape[-1] // 2
    exact = np.stack([softmax_matrix(*x, scale) for x in zip(q, k, strict=True)]) @ v.astype(np.float64)
    rows = []
    for rank in ranks:
        medians = []
        for options in (
            {},
            *({"proj_dim": dim, "projection": kind} for kind in ("pca", "srht", "gaussian", "orthogonal")),
        ):
            out = pda_numba.attention(q, k, v, scale=scale, rank=rank, method="pda", seed=SEED, **options)
            medians.append(statistics.median(map(relative_error, out, exact)))
        rows.append((rank, *medians))
    print_table(
        f"{name}, m = D/2 = {dim}, medians", ["R", "no projection", "pca", "srht", "gaussian", "orthogonal"], rows
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", metavar="dataset", help=f"any of {', '.join(SETS)}; default: all")
    parser.add_argument("--rank", type=int, action="append", help="default: 32, 64 and 128")
    parser.add_argument("--projections", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.datasets) - set(SETS):
        parser.error(f"unknown dataset {', '.join(sorted(unknown))}; choose from {', '.join(SETS)}")
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)
    print_versions("performer-pytorch", "nystrom-attention")
    for dataset in options.datasets or SETS:
        (projections if options.projections else compare)(dataset, options.rank or [32, 64, 128])
