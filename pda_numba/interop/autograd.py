"""Attention for HIPS autograd (https://github.com/HIPS/autograd): gradients by `pda_numba`'s own backward pass.

Needs the package `autograd`.
"""

import numpy as np
from autograd.extend import defvjp_argnums, primitive
from autograd.tracer import isbox

import pda_numba
from pda_numba.gradient import attention_backward, attention_forward


def attention(q, k, v, **options):
    """Softmax attention that autograd can differentiate.

    Parameters
    ----------
    q, k, v : array, shape (..., Hq, N, D), (..., Hkv, M, D), (..., Hkv, M, E)
        As for `pda_numba.attention`; NumPy arrays, or what autograd makes of them while it differentiates.
    **options
        As for `pda_numba.attention_forward`.

    Returns
    -------
    out : array, shape (..., Hq, N, E)

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As for `pda_numba.attention`.
    NotImplementedError
        For second derivatives.

    Examples
    --------
    >>> import autograd, numpy as np
    >>> from pda_numba.interop.autograd import attention
    >>> q = np.random.default_rng(0).standard_normal((50, 8))
    >>> autograd.grad(lambda x: (attention(x, x, x) ** 2).sum())(q).shape
    (50, 8)
    """
    if not any(isbox(x) for x in (q, k, v)):
        return pda_numba.attention(q, k, v, **options)
    return _forward(q, k, v, [], options)


@primitive
def _forward(q, k, v, kept, options):
    out, residuals = attention_forward(q, k, v, **options)
    kept.append(residuals)  # lives as long as this call's node of the graph
    return out


defvjp_argnums(_forward, lambda argnums, _out, given, _: lambda dout: _pull_back(given[3][0], dout, argnums))


def _pull_back(residuals, dout, argnums):
    if isbox(dout):
        raise NotImplementedError("pda_numba has no second derivatives of attention")
    gradients = attention_backward(residuals, np.asarray(dout, residuals.call.dtype))
    return tuple(gradients[i] for i in argnums)
