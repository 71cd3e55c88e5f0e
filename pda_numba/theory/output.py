"""Theorem 3: the error of the output."""

import math

from .. import _validate
from ._checks import nonnegative
from .decomposition import decomposition_bound


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
    return (math.expm1(2 * _validate.positive("eps", eps)) * nonnegative("mass", mass))[()]


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
    return (2 * math.tanh(_validate.positive("eps", eps) / 2) * nonnegative("radius", radius))[()]


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
    nuclear, eta = float(nonnegative("nuclear_norm", nuclear_norm)), float(nonnegative("eta", eta))
    decomposition = decomposition_bound(nuclear, rank, bound=bound)
    if bound == "paper":
        return length * eps + decomposition + eta
    return math.sqrt(2 * length) * math.tanh(eps / 2) + decomposition
