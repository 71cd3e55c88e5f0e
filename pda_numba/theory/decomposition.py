"""Theorem 2, section 6.2 and Lemma 2.1: the rank, and the decay of singular values."""

import math

import numpy as np

from .. import _validate
from ._checks import BOUNDS, nonnegative


def decomposition_error(singular_values, rank):
    """The Frobenius error of the best approximation of this rank: the norm of the other singular values.

    Parameters
    ----------
    singular_values : array
        All of them, in any order.
    rank : int

    Returns
    -------
    float
    """
    values = np.sort(nonnegative("singular_values", singular_values))[::-1]
    return float(np.linalg.norm(values[_validate.whole("rank", rank, 0) :]))


def decomposition_bound(singular_values, rank, *, bound="sharp"):
    """A bound on the error of the best approximation of this rank, from the nuclear norm alone.

    Parameters
    ----------
    singular_values : array
        All of them; or one number, their sum, the nuclear norm.
    rank : int
    bound : {"sharp", "paper"}
        "sharp": nuclear norm / (2 sqrt(rank)), which 2 rank equal singular values attain.
        "paper": nuclear norm / sqrt(rank). True, by an argument that is not: the square sum of the others is not
        bounded by the square of *their* sum over the rank.

    Returns
    -------
    float

    Examples
    --------
    >>> decomposition_error([1, 1, 1, 1], 2), decomposition_bound([1, 1, 1, 1], 2)
    (1.4142135623730951, 1.414213562373095)
    """
    nuclear = float(np.sum(nonnegative("singular_values", singular_values)))
    rank = _validate.whole("rank", rank, 1)
    share = 1.0 if _validate.choice("bound", bound, BOUNDS) == "paper" else 0.5
    return share * nuclear / math.sqrt(rank)


def rank_bound(nuclear_norm, eps, *, bound="sharp"):
    """A rank whose best approximation is off by at most `eps` (Frobenius), from the nuclear norm alone.

    A valid bound, far too large in practice: `spectrum` shows what a head needs.

    Parameters
    ----------
    nuclear_norm, eps : float
    bound : {"sharp", "paper"}
        ``ceil(nuclear_norm^2 / (4 eps^2))``, or ``ceil(nuclear_norm^2 / eps^2)``.

    Returns
    -------
    int
    """
    ratio = _validate.positive("nuclear_norm", nuclear_norm) / _validate.positive("eps", eps)
    share = 1.0 if _validate.choice("bound", bound, BOUNDS) == "paper" else 0.25
    return max(1, math.ceil(share * ratio**2))


def decay_hypothesis(index, proj_dim, norm):
    """The paper's Lemma 2.1, which is false: singular value i (from 1) is at most ``exp(-sqrt(m) i / B^2)``.

    It fails at i = 1 for every attention matrix with at least as many queries as keys: rows sum to 1, so the largest
    singular value is at least ``sqrt(N / M)``. It fails everywhere for attention close to a permutation
    (`permutation_attention`). Here as a hypothesis to compare a measured `spectrum` with.

    Parameters
    ----------
    index : int or array of int
        i, from 1 on.
    proj_dim : int
        m, the columns of queries and keys.
    norm : float
        B, the largest norm of a query or key.

    Returns
    -------
    float or ndarray
    """
    m, norm = _validate.whole("proj_dim", proj_dim, 1), _validate.positive("norm", norm)
    return np.exp(-math.sqrt(m) / norm**2 * np.asarray(index, float))[()]


def permutation_attention(length, *, mass=0.9, seed=0):
    """Queries and keys of two columns whose attention is close to a permutation: a flat spectrum.

    The keys are equally spaced on a circle, the queries the same in another order; each query gives its own key the
    share `mass` (with the default scale ``1/sqrt(2)``). All singular values are at least ``2 mass - 1``, although the
    logits have rank 2: neither a small head dimension nor a low rank of the logits makes the softmax one of low rank.

    Parameters
    ----------
    length : int
    mass : float
        Between 0.5 and 1. The nearer to 1 and the longer, the longer the vectors.
    seed : int
        Of the permutation.

    Returns
    -------
    q, k : ndarray of float64, shape (length, 2)

    Examples
    --------
    >>> q, k = permutation_attention(50, mass=0.95)
    >>> logits = q @ k.T / np.sqrt(2)
    >>> weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    >>> weights /= weights.sum(axis=1, keepdims=True)
    >>> bool(np.linalg.svd(weights, compute_uv=False).min() > 0.9)
    True
    """
    length = _validate.whole("length", length, 2)
    mass = _validate.positive("mass", mass)
    if not 0.5 <= mass < 1:
        raise ValueError(f"mass must be at least 0.5 and below 1, got {mass}")
    angle = 2 * np.pi * np.arange(length) / length
    gap = math.log((length - 1) * mass / (1 - mass))  # of the logits of the nearest other key, at the least
    radius = math.sqrt(gap * math.sqrt(2) / (1 - math.cos(2 * math.pi / length)))
    points = radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return points, points[np.random.default_rng(seed).permutation(length)]
