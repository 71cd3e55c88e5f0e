"""Theorem 1: projected logits."""

import math

from .. import _validate


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
