"""The bounds of the paper on Projection-Decomposition Attention, and what is left of them, as functions.

    Theorem 1    projected logits             `projection_tail`, `projection_dim`, `projection_factor`
    Theorem 2    a factorisation of rank R    `decomposition_bound`, `rank_bound`, `decomposition_error`
    Lemma 2.1    decay of singular values     `decay_hypothesis`, refuted by `permutation_attention`
    Theorem 3    error of the output          `output_error_bound`, `logit_error_bound`, `logit_spread_bound`
    3.3          operations and memory        `cost`

With ``bound="paper"`` a function returns what the paper states, otherwise what holds. The documentation's page on
theory says which statement is confirmed, refuted or corrected, and which test shows it.
"""

import math
from dataclasses import dataclass

import numpy as np

from . import _validate
from .plan import exact_flops, pda_flops

_BOUNDS = ("paper", "sharp")

# --- Theorem 1: projections ---


def projection_tail(eps, proj_dim, *, bound="sharp"):
    """How likely a projection to `proj_dim` coordinates is to move one inner product by `eps` or more.

    A bound on ``P(|q P P^T k - q k| >= eps |q| |k|)`` for one random matrix P that q and k share, scaled so that the
    mean of ``q P P^T k`` is ``q k``.

    Parameters
    ----------
    eps : float
        Error relative to ``|q| |k|``.
    proj_dim : int
        Columns of P.
    bound : {"sharp", "standard", "paper"}
        "sharp": ``2 exp(-m (eps - log(1 + eps)) / 2)``, for normal entries: the best exponent for q = k.
        "standard": ``4 exp(-m (eps^2/4 - eps^3/6))``, the Johnson-Lindenstrauss bound of ``|q + k|`` and ``|q - k|``
        [1]_; for normal entries, random signs and orthogonal columns.
        "paper": ``2 exp(-m eps^2 / 8)``. True for eps <= 1 [2]_, false for large eps.

    Returns
    -------
    float
        At most 1.

    References
    ----------
    .. [1] S. Dasgupta, A. Gupta, "An elementary proof of a theorem of Johnson and Lindenstrauss", Random Structures
       and Algorithms 22, 2003.
    .. [2] A. Kaban, "Improved bounds on the dot product under random projection and random sign projection", KDD 2015.

    Examples
    --------
    >>> for bound in ("paper", "standard", "sharp"):
    ...     print(bound, round(projection_tail(0.5, 256, bound=bound), 6))
    paper 0.000671
    standard 9.3e-05
    sharp 1.1e-05
    """
    eps, m = _validate.positive("eps", eps), _validate.whole("proj_dim", proj_dim, 1)
    front, rate = _tail(eps, bound)
    return min(1.0, front * math.exp(-m * rate)) if rate > 0 else 1.0


def _tail(eps, bound):
    """(front, rate) of a tail front exp(-m rate)."""
    _validate.choice("bound", bound, ("sharp", "standard", "paper"))
    if bound == "paper":
        return 2.0, eps**2 / 8
    if bound == "standard":
        return 4.0, eps**2 / 4 - eps**3 / 6
    return 2.0, (eps - math.log1p(eps)) / 2


def projection_dim(eps, length, delta=0.05, *, norm=1.0, bound="sharp"):
    """How many coordinates keep all ``length^2`` logits within `eps`, with probability ``1 - delta``.

    The union bound over all pairs of `projection_tail`. There is no use for it where it exceeds the head dimension.

    Parameters
    ----------
    eps : float
        Largest error of a logit.
    length : int
        Number of queries, and of keys.
    delta : float
        Probability that some logit is off by more.
    norm : float
        The largest ``scale |q_i| |k_j|`` of the data. The paper takes 1 (and ``|logit| <= 1/sqrt(D)`` with it: an
        attention that is nearly uniform).
    bound : {"sharp", "standard", "paper"}
        As in `projection_tail`.

    Returns
    -------
    int

    Examples
    --------
    >>> projection_dim(0.5, 1_000_000, bound="paper"), projection_dim(0.5, 1_000_000)
    (1003, 663)
    """
    eps, delta, norm = (_validate.positive(*x) for x in (("eps", eps), ("delta", delta), ("norm", norm)))
    length = _validate.whole("length", length, 1)
    if delta >= 1:
        raise ValueError(f"delta must be below 1, got {delta}")
    front, rate = _tail(eps / norm, bound)
    if rate <= 0:
        raise ValueError(f"eps must be below 1.5 times norm for bound='standard', got {eps} and {norm}")
    return max(1, math.ceil((math.log(front / delta) + 2 * math.log(length)) / rate))


def projection_factor(head_dim, proj_dim, *, shared=True, scaled=True):
    """The mean of a projected logit, as a multiple of the logit.

    With P of `proj_dim` orthonormal columns, drawn uniformly, the mean of ``P P^T`` is ``(m / D) I``. The paper divides
    the projected logits by ``sqrt(m)`` instead of ``sqrt(D)``, which leaves a factor of ``sqrt(m / D)``; with one
    matrix for the queries and an independent one for the keys, as its algorithm says, the mean is 0.

    Parameters
    ----------
    head_dim, proj_dim : int
        D and m.
    shared : bool
        Do queries and keys have the same matrix?
    scaled : bool
        Is it scaled by ``sqrt(D / m)``, and are logits divided by ``sqrt(D)``? False is the paper's normaliser.

    Returns
    -------
    float

    Examples
    --------
    >>> projection_factor(64, 16), projection_factor(64, 16, scaled=False), projection_factor(64, 16, shared=False)
    (1.0, 0.5, 0.0)
    """
    d = _validate.whole("head_dim", head_dim, 1)
    m = _validate.whole("proj_dim", proj_dim, 1, d, high_name=f"head_dim {d}")
    if not _validate.flag("shared", shared):
        return 0.0
    return 1.0 if _validate.flag("scaled", scaled) else math.sqrt(m / d)


# --- Theorem 2 and section 6.2: rank ---


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
    values = np.sort(_nonnegative("singular_values", singular_values))[::-1]
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
    nuclear = float(np.sum(_nonnegative("singular_values", singular_values)))
    rank = _validate.whole("rank", rank, 1)
    share = 1.0 if _validate.choice("bound", bound, _BOUNDS) == "paper" else 0.5
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
    share = 1.0 if _validate.choice("bound", bound, _BOUNDS) == "paper" else 0.25
    return max(1, math.ceil(share * ratio**2))


# --- Lemma 2.1: decay ---


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


# --- Theorem 3: the output ---


def logit_error_bound(eps, mass=1.0):
    """If every logit of row i is off by at most `eps`: how far its output is off, ``(e^(2 eps) - 1) mass``.

    Parameters
    ----------
    eps : float
    mass : float or array
        ``sum_j a_ij |v_j|`` of the exact weights.

    Returns
    -------
    float or ndarray
        A bound on ``|o'_i - o_i|``. No length enters.
    """
    return (math.expm1(2 * _validate.positive("eps", eps)) * _nonnegative("mass", mass))[()]


def logit_spread_bound(eps, radius=1.0):
    """If every logit of a row is off by at most `eps`: how far its output is off, ``2 tanh(eps / 2) radius``.

    Sharper than `logit_error_bound` where the values lie close together, and never more than the diameter: the weights
    of a row change by at most ``2 tanh(eps / 2)`` in all, which two keys of equal weight attain to first order.

    Parameters
    ----------
    eps : float
    radius : float or array
        The values that the row sees lie within this distance of some point.

    Returns
    -------
    float or ndarray
        A bound on ``|o'_i - o_i|``.
    """
    return (2 * math.tanh(_validate.positive("eps", eps) / 2) * _nonnegative("radius", radius))[()]


def output_error_bound(eps, length, nuclear_norm, rank, *, eta=0.0, bound="sharp"):
    """Theorem 3: the Frobenius error of the output of projection and factorisation, as a multiple of the values' norm.

    Parameters
    ----------
    eps : float
        Largest error of a projected logit.
    length : int
        Queries, and keys.
    nuclear_norm : float
        Of the projected softmax matrix.
    rank : int
    eta : float
        What the paper adds for the softmax once more; it has no value there, and is not needed.
    bound : {"sharp", "paper"}
        "paper": ``L eps + nuclear_norm / sqrt(R) + eta``, times ``|V|_F``. It says less than nothing as soon as
        ``eps >= sqrt(2 / L)``: two matrices of L rows that sum to 1 never differ by more than ``sqrt(2 L)``.
        "sharp": ``sqrt(2 L) tanh(eps / 2) + nuclear_norm / (2 sqrt(R))``, times the *spectral* norm of V. For a
        statement that does not grow with the length take the bounds of single rows, `logit_error_bound`.

    Returns
    -------
    float

    Examples
    --------
    >>> length = 1_000_000
    >>> output_error_bound(0.1, length, 0.0, 32, bound="paper") > math.sqrt(2 * length)
    True
    """
    eps, length = _validate.positive("eps", eps), _validate.whole("length", length, 1)
    nuclear, eta = float(_nonnegative("nuclear_norm", nuclear_norm)), float(_nonnegative("eta", eta))
    decomposition = decomposition_bound(nuclear, rank, bound=bound)
    if bound == "paper":
        return length * eps + decomposition + eta
    return math.sqrt(2 * length) * math.tanh(eps / 2) + decomposition


# --- 3.3: cost ---


@dataclass(frozen=True)
class Count:
    """Operations and bytes of the paper's algorithm, by its stages.

    Attributes
    ----------
    projection, decomposition, application : float
        Operations of the three stages.
    inputs, projected, factors, output : float
        Bytes.
    flops, bytes : float
        The sums.
    """

    projection: float
    decomposition: float
    application: float
    inputs: float
    projected: float
    factors: float
    output: float

    @property
    def flops(self):
        return self.projection + self.decomposition + self.application

    @property
    def bytes(self):
        return self.inputs + self.projected + self.factors + self.output


@dataclass(frozen=True)
class Cost:
    """What projection, decomposition and application cost, as published and as counted.

    Attributes
    ----------
    published, counted : Count
    low_rank_flops : float
        What `attention` takes at this rank, which samples rows of the softmax instead: see `plan`.
    exact_flops : float
        Exact attention.
    """

    published: Count
    counted: Count
    low_rank_flops: float
    exact_flops: float

    def __str__(self):
        names = "projection", "decomposition", "application", "flops", "inputs", "projected", "factors", "output"
        lines = [f"{'':13}  {'published':>10}  {'counted':>10}"]
        for name in (*names, "bytes"):
            lines.append(f"{name:<13}  {getattr(self.published, name):10.3g}  {getattr(self.counted, name):10.3g}")
        lines += [f"low rank as built: {self.low_rank_flops:.3g} flops, exact attention: {self.exact_flops:.3g}"]
        return "\n".join(lines)


def cost(n_queries, n_keys, head_dim, value_dim, proj_dim, rank, *, itemsize=2):
    """What the paper's algorithm costs for one head: its own count beside the right one.

    The published count of section 3.3 has one projection of the two, one of the two products of the application and of
    the decomposition, no QR, one side of the factors, no output, and takes a multiplication and an addition for one
    operation. (What is counted here is the paper's algorithm: a factorisation of the projected logits, which is not
    one of the softmax.)

    Parameters
    ----------
    n_queries, n_keys, head_dim, value_dim, proj_dim, rank : int
        N, M, D, E, m and R. The published count is that of the longer sequence.
    itemsize : int
        Bytes of a number.

    Returns
    -------
    Cost

    Examples
    --------
    >>> c = cost(10**6, 10**6, 1024, 1024, 64, 32)
    >>> print(f"{c.published.flops:.3g} published, {c.counted.flops:.3g} counted")
    1e+11 published, 4.06e+11 counted
    """
    names = "n_queries", "n_keys", "head_dim", "value_dim", "proj_dim", "rank", "itemsize"
    given = n_queries, n_keys, head_dim, value_dim, proj_dim, rank, itemsize
    n, m, d, e, p, r, size = (_validate.whole(*pair, 1) for pair in zip(names, given, strict=True))
    length = float(max(n, m))
    published = Count(
        projection=length * d * p,
        decomposition=length * p * r,
        application=r * length * e,
        inputs=size * length * (2 * d + e),
        projected=size * 2 * length * p,
        factors=size * r * (length + p),
        output=0.0,
    )
    counted = Count(
        projection=2.0 * (n + m) * d * p,
        decomposition=2.0 * (n + m) * p * r + 4.0 * n * r**2,  # the sketch, K^T Q, and Q by Householder's QR
        application=2.0 * r * (n + m) * e,
        inputs=float(size * (n * d + m * (d + e))),
        projected=float(size * (n + m) * p),
        factors=float(size * r * (n + m)),
        output=float(size * n * e),
    )
    return Cost(published, counted, pda_flops(n, m, d, e, r), exact_flops(n, m, d, e))


def _nonnegative(name, value):
    array = np.asarray(value, float)
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
    return array
