"""Attention of a whole prompt, and the cache that decoding goes on from."""

from . import _validate
from .api import attention
from .decode import AttentionCache


def prefill(
    q,
    k,
    v,
    *,
    causal=True,
    rank=None,
    tol=1e-2,
    recent=2048,
    method="auto",
    scale=None,
    seed=0,
    device="auto",
    check_finite=True,
):
    """Attention of a whole prompt, and the cache that goes on from there.

    Parameters
    ----------
    q : ndarray, shape (..., Hq, N, D)
        Queries, float16, float32, float64 or bfloat16.
    k : ndarray, shape (..., Hkv, M, D)
        Keys, M >= N. Leading axes broadcast with those of `q`; `Hq` is a multiple of `Hkv`.
    v : ndarray, shape (..., Hkv, M, E)
        Values.
    causal : bool, default True
        Each token of the prompt attends to those up to its own, the last query to all keys. False lets every token
        attend to the whole prompt.
    rank, tol, recent, method, scale, seed, device, check_finite
        As for `AttentionCache`.

    Returns
    -------
    out : ndarray, shape (..., Hq, N, E)
        In the dtype of `q`.
    cache : AttentionCache
        `cache.prefill_info` is the `AttentionInfo` of `out`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it must be and what it was.
    RuntimeError
        If `device="cuda"` is not available.

    Examples
    --------
    >>> import numpy as np, pda_numba
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((4, 300, 16), dtype=np.float32) for _ in range(3))
    >>> out, cache = pda_numba.prefill(q, k[:2], v[:2])
    >>> out.shape, cache.length
    ((4, 300, 16), 300)
    """
    _validate.flag("causal", causal)
    chosen = {"rank": rank, "tol": tol, "method": method, "scale": scale, "seed": seed, "device": device}
    chosen["check_finite"] = check_finite
    cache = AttentionCache(q, k, v, recent=recent, **chosen)
    out, cache.prefill_info = attention(q, k, v, causal=causal, return_info=True, **chosen)
    return out, cache
