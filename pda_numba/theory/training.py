"""Theorems 6 and 7: the variance of gradients, and what training comes to."""

import math

from .. import _validate
from ._checks import nonnegative


def gradient_variance_hypothesis(eps, rank, proj_dim, *, constant=1.0):
    """Theorem 6, which is not proved: the variance of a gradient is at most ``C (eps^2 + 1/R + 1/m)``.

    Here as a hypothesis to compare measurements with. No C serves all data: twice the values have twice the gradient
    and four times its variance, and the right-hand side stays. The theorem adds up errors of three stages as if they
    were independent, and says nothing of the bias, which was measured to be as large. What holds for the first stage is
    `projection_gradient_variance`.

    Parameters
    ----------
    eps : float
        Largest error of a projected logit.
    rank, proj_dim : int
        R and m.
    constant : float
        C.

    Returns
    -------
    float
    """
    eps, constant = float(nonnegative("eps", eps)), _validate.positive("constant", constant)
    rank, m = _validate.whole("rank", rank, 1), _validate.whole("proj_dim", proj_dim, 1)
    return constant * (eps**2 + 1 / rank + 1 / m)


def projection_gradient_variance(head_dim, proj_dim, *, kind="gaussian"):
    """The variance of the gradient of one projected logit, as a multiple of the squared gradient: exact.

    The gradient of ``q P P^T k`` with respect to q is ``P P^T k``. Its mean is k, the true gradient, and

        E |P P^T k - k|^2 / |k|^2  =  (D + 1) / m    for normal entries of variance 1/m
                                      D / m - 1      for sqrt(D / m) times m orthonormal columns

    So the term 1/m of Theorem 6 is right, with a constant of about D: with half of the coordinates or fewer the
    variance is at least as large as the squared gradient itself.

    Parameters
    ----------
    head_dim, proj_dim : int
        D and m.
    kind : {"gaussian", "orthogonal"}
        The random matrix P, shared by queries and keys.

    Returns
    -------
    float

    Examples
    --------
    >>> projection_gradient_variance(64, 32), projection_gradient_variance(64, 32, kind="orthogonal")
    (2.03125, 1.0)
    """
    d = _validate.whole("head_dim", head_dim, 1)
    m = _validate.whole("proj_dim", proj_dim, 1, d, high_name=f"head_dim {d}")
    return (d + 1) / m if _validate.choice("kind", kind, ("gaussian", "orthogonal")) == "gaussian" else d / m - 1


def training_hypothesis(steps, eps, rank, proj_dim, *, constants=(1.0, 1.0)):
    """Theorem 7, which is not proved: the mean squared gradient is at most ``C1/T + C2 (eps + 1/sqrt(R) + 1/sqrt(m))``.

    Here as a hypothesis to compare measurements with. The theorem has no condition on the loss or on the step: with a
    step above ``2 / L`` gradient descent on ``L x^2 / 2`` diverges, whatever the approximation. What holds is
    `training_bound`.

    Parameters
    ----------
    steps : int
        T.
    eps : float
        Largest error of a projected logit.
    rank, proj_dim : int
        R and m.
    constants : pair of float
        C1 and C2.

    Returns
    -------
    float
    """
    steps, eps = _validate.whole("steps", steps, 1), float(nonnegative("eps", eps))
    rank, m = _validate.whole("rank", rank, 1), _validate.whole("proj_dim", proj_dim, 1)
    first, second = (_validate.positive("constants", c) for c in constants)
    return first / steps + second * (eps + 1 / math.sqrt(rank) + 1 / math.sqrt(m))


def training_bound(steps, gap, step_size, smoothness, *, bias=0.0, variance=0.0):
    """What holds in place of Theorem 7: the mean over T steps of the expected squared gradient.

    For steps ``x - step_size g`` with ``g`` the true gradient, plus a bias of norm at most `bias`, plus noise of mean
    zero and at most this `variance`, on a loss whose gradient is Lipschitz [1]_,

        mean |gradient|^2  <=  2 gap / (step_size T) + bias^2 + step_size smoothness variance

    The floor is the *square* of the bias, which no number of steps and no step size lowers (a quadratic loss with a
    constant bias attains it), and a share of the variance, which a small step does. `GradientInfo.gradient_error` is
    an estimate of bias and noise together, relative to the gradient.

    Parameters
    ----------
    steps : int
        T.
    gap : float
        The loss at the start, less its infimum.
    step_size : float
        At most ``1 / smoothness``.
    smoothness : float
        The gradient's Lipschitz constant.
    bias, variance : float
        Of the gradients that are used.

    Returns
    -------
    float

    References
    ----------
    .. [1] A. Ajalloeian, S. U. Stich, "On the convergence of SGD with biased gradients", 2020.

    Examples
    --------
    >>> training_bound(1000, 1.0, 0.1, 2.0, bias=0.3)
    0.11
    """
    steps, gap = _validate.whole("steps", steps, 1), float(nonnegative("gap", gap))
    step_size, smoothness = (_validate.positive(*x) for x in (("step_size", step_size), ("smoothness", smoothness)))
    bias, variance = float(nonnegative("bias", bias)), float(nonnegative("variance", variance))
    if step_size * smoothness > 1:
        raise ValueError(f"step_size must be at most 1 / smoothness, {1 / smoothness:.4g}, got {step_size}")
    return 2 * gap / (step_size * steps) + bias**2 + step_size * smoothness * variance
