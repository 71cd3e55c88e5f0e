"""Attention of a whole prompt, and the cache that decoding goes on from."""

import numpy as np

from . import _validate
from .api import attention
from .decode import AttentionCache
from .steps import Queries, over_keys


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
    return _prefill_attention(q, k, v, causal, chosen), cache


def _prefill_attention(q, k, v, causal, options):
    """The prompt's own attention."""
    if not causal:
        return attention(q, k, v, **options)
    problem, lead, dtype = _validate.build_problem(q, k, v, options["scale"], options["seed"])
    n, m, _, e = problem.shape
    heads = len(problem.query_head)
    out = np.empty((heads, n, e), problem.element)
    for first in range(0, n, 256):
        count = min(256, n - first)
        head, time = np.repeat(np.arange(heads), count), np.tile(np.arange(first, first + count), heads)
        stop = m - n + time + 1
        part, _ = over_keys(problem, Queries(head, time), np.zeros_like(stop), stop, m - n + first + count)
        out[:, first : first + count] = part.reshape(heads, count, e)
    return out.astype(dtype).reshape(*lead, n, e)
