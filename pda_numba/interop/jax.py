"""Attention for JAX (https://docs.jax.dev): a function with a gradient of its own that works under jit, grad and vmap.

Needs the package `jax`. The computation is a callback to the host: JAX's arrays on a GPU are copied there and back.
"""

import functools

import jax
import numpy as np

import pda_numba
from pda_numba.gradient import attention_backward, attention_forward


def attention(q, k, v, **options):
    """Softmax attention that JAX can compile, differentiate (once, in reverse) and map over leading axes.

    Parameters
    ----------
    q, k, v : jax.Array, shape (..., Hq, N, D), (..., Hkv, M, D), (..., Hkv, M, E)
        As for `pda_numba.attention`.
    **options
        As for `pda_numba.attention_forward`; plain Python values, not traced ones.

    Returns
    -------
    out : jax.Array, shape (..., Hq, N, E)

    Raises
    ------
    TypeError, ValueError
        As for `pda_numba.attention`, when the function runs; then as an error of JAX that quotes the message.

    Notes
    -----
    JAX may run a backward pass never, or more than once, and cannot hold the residuals, which have no fixed shape. So
    the backward pass repeats the forward pass, which draws the same rows from the same seed. With `vmap` the mapped
    axis becomes a leading axis of one call.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from pda_numba.interop.jax import attention
    >>> q = jax.random.normal(jax.random.key(0), (50, 8))
    >>> jax.jit(jax.grad(lambda x: (attention(x, x, x) ** 2).sum()))(q).shape
    (50, 8)
    """
    return _attention(tuple(sorted(options.items())), q, k, v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v):
    # q has all axes of the output: checked by the call itself, when it runs
    heads = np.broadcast_shapes(q.shape[:-3], k.shape[:-3]) + q.shape[-3:-2]
    shape = jax.ShapeDtypeStruct((*heads, q.shape[-2], v.shape[-1]), q.dtype)
    return _on_host(functools.partial(_run, options), shape, q, k, v)


def _forward(options, q, k, v):
    return _attention(options, q, k, v), (q, k, v)


def _backward(options, arrays, dout):
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    return _on_host(functools.partial(_run_backward, options), shapes, *arrays, dout)


_attention.defvjp(_forward, _backward)


def _on_host(function, shapes, *arrays):
    return jax.pure_callback(function, shapes, *arrays, vmap_method="broadcast_all")


def _run(options, *arrays):
    return pda_numba.attention(*(np.asarray(x) for x in arrays), **dict(options))


def _run_backward(options, q, k, v, dout):
    q, k, v, dout = (np.asarray(x) for x in (q, k, v, dout))
    _, residuals = attention_forward(q, k, v, **dict(options))
    return attention_backward(residuals, dout)
