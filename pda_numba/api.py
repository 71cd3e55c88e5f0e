"""The public calls: `attention`, and the measured error of any output."""

import contextlib
import math

import numpy as np

from . import _validate
from ._jit import announce_slow_compilation
from ._place import place_of_output
from .call import TOGETHER, as_given, check_call, gpu_of, judge_heads, on_host, run_call, warn_of_error
from .gpu import on_gpu, resolve_device
from .info import ErrorEstimate
from .mask import check as check_mask
from .masked import seen_problem


def attention(
    q,
    k,
    v,
    *,
    rank=None,
    tol=1e-2,
    proj_dim=None,
    projection="pca",
    calibrate=True,
    window="auto",
    near="auto",
    causal=False,
    query_lengths=None,
    key_lengths=None,
    key_mask=None,
    cu_seqlens=None,
    exact_rows=None,
    scale=None,
    method="auto",
    device="auto",
    seed=0,
    check_finite=True,
    out=None,
    progress=False,
    return_info=False,
):
    """Softmax attention in time linear in the sequence length, with a measured error.

    Computes ``softmax(scale * q @ k.T) @ v`` for every head. Attention rows that are computed exactly for a sample of
    the queries are extended to all queries by a low-rank fit and an exact near field; further exact rows, never used in
    the fit, measure the error. Where low rank cannot keep `tol`, the head is computed exactly.

    Parameters
    ----------
    q : array, shape (..., Hq, N, D)
        Queries, float16, float32, float64 or bfloat16. Two axes are one head. Any strides. NumPy's, or an array on a
        GPU (CuPy, PyTorch, JAX, Numba, ...), which is read where it lies.
    k : array, shape (..., Hkv, M, D)
        Keys. Leading axes broadcast with those of `q`; `Hq` is a multiple of `Hkv` (query heads share key heads).
    v : array, shape (..., Hkv, M, E)
        Values.
    rank : int, optional
        Number of landmarks. By default the smallest of 64, 128, 256 and 512 that keeps `tol`, or 128 if `tol` is None.
    tol : float or None, default 1e-2
        Largest relative Frobenius error of each head's output, kept with 95 % confidence when `rank` is None and
        `method` is not "pda". Otherwise a certificate above `tol` issues an `AccuracyWarning`.
    proj_dim : int, optional
        Project the head dimension to this many coordinates for the low-rank part.
    projection : {"pca", "srht", "gaussian", "orthogonal"}
        How, if `proj_dim` is given: a pair of matrices from the data, or one random matrix for both sides.
    calibrate : bool, default True
        Fit against exact rows of the original problem. False fits the projected problem itself, as in the paper.
    window : int or "auto"
        Keys with |i - j| <= window are attended to exactly; 0 is none. "auto" chooses among 0, 32 and 128 for each head
        by the error on rows left out of the fit (if N equals M). Under a mask it must be 0 or "auto": the near field is
        what each query sees last, 256 keys on average or more. The short form of `near=NearField(window=...)`.
    near : {"auto", "none", "window", "content", "both"} or NearField
        What is attended to exactly beside the low-rank far field: a window, or the keys of those buckets of similar
        keys that a query matches best and the few keys that hold most attention ("content"). "auto" chooses none,
        either or both for each head, by the error on rows left out of the fit times the cost.
    causal : bool, default False
        Query i sees the keys j <= i + M - N alone: the last query sees all keys.
    query_lengths, key_lengths : array of int, optional
        Of each batch entry (the leading axes without the heads') only so many queries, or keys, are there. The others'
        outputs are 0; other keys are never read. With `key_lengths` alone the padding's queries are computed too.
    key_mask : array of bool, shape (..., M), optional
        True where a key may be seen; leading axes broadcast with the batch. Keys that nobody may see are never read.
    cu_seqlens : array of int, shape (B + 1,), or a pair of these, optional
        Several sequences packed one behind the other along N and M, as in FlashAttention's varlen call: sequence b is
        made of the queries, and keys, cu_seqlens[b] .. cu_seqlens[b + 1]. A pair is for queries and keys. Causal
        sequences are aligned at their ends, each by itself.
    exact_rows : slice or array of int, optional
        Queries whose rows are exact whatever the rest is. By default, under a causal mask, the last 64 of every
        sequence (not counting padding): the next token depends on them.
    scale : float, optional
        Factor on the logits, by default 1/sqrt(D).
    method : {"auto", "pda", "exact"}
        "auto" computes exactly where that is cheaper or, without `rank`, where low rank does not keep `tol`. "pda"
        does so only where low rank would compute every row exactly anyway.
    device : {"auto", "cpu", "cuda"}
        Where to run. Arrays on a GPU are computed there; for NumPy arrays "auto" takes a GPU if there is one and it is
        faster with the transfer, and says in the info what it chose. "cuda" also means Numba's CUDA simulator.
    seed : int
        Seed of all random draws: the same seed gives the same bits for any number of threads.
    check_finite : bool, default True
        Raise if an input holds NaN or infinity.
    out : array, optional
        Where to write the result: shape (..., Hq, N, E), the dtype of `q`, beside `q` on host or GPU, no memory shared
        with an input.
    progress : bool, default False
        Show a progress bar over groups of heads on the standard error, if that is a terminal.
    return_info : bool, default False
        Also return an `AttentionInfo`.

    Returns
    -------
    out : array, shape (..., Hq, N, E)
        In the dtype of `q`, of the same library. On a GPU it is ready in the order of the caller's stream. 0 for
        queries that see no key.
    info : AttentionInfo
        Only if `return_info`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it must be and what it was; nothing has been computed then.
    RuntimeError
        If `device="cuda"` is not available.
    MemoryError
        If the arrays of one head do not fit into the free memory of the GPU.

    Warns
    -----
    AccuracyWarning
        If `rank` is given or `method` is "pda", and the certificate's limit exceeds `tol`.

    Notes
    -----
    The method is a row-sampled variant of Projection-Decomposition Attention; the documentation's page on mathematics
    derives it and names its sources.

    Examples
    --------
    >>> import numpy as np, pda_numba
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((2048, 32), dtype=np.float32) for _ in range(3))
    >>> out, info = pda_numba.attention(q, k, v, return_info=True)
    >>> out.shape
    (2048, 32)
    """
    given = rank, tol, window, near, proj_dim, method, projection, calibrate
    masks = causal, query_lengths, key_lengths, key_mask, cu_seqlens, exact_rows
    call = check_call(q, k, v, given, masks, scale, seed, device, out, check_finite, progress, return_info)
    out, info, _ = run_call(call, check_finite, progress, return_info)
    warn_of_error(info, call.options)
    return (out, info) if return_info else out


def estimate_error(
    out,
    q,
    k,
    v,
    *,
    n_rows=128,
    causal=False,
    query_lengths=None,
    key_lengths=None,
    key_mask=None,
    cu_seqlens=None,
    scale=None,
    seed=0,
    device="auto",
    check_finite=True,
):
    """Measure how far `out` is from exact attention, whoever computed it.

    Exact attention is computed for a random sample of the queries: `n_rows` uniform ones, and a quarter as many drawn
    towards queries that lie far from the bulk.

    Parameters
    ----------
    out : array, shape (..., Hq, N, E)
        The output to judge, in the dtype of `q` and beside it on host or GPU.
    q, k, v : array
        As for `attention`.
    n_rows : int, default 128
        Uniform rows per head.
    causal, query_lengths, key_lengths, key_mask, cu_seqlens
        As for `attention`.
    scale : float, optional
        Factor on the logits, by default 1/sqrt(D).
    seed : int
        Seed of the draws.
    device : {"auto", "cpu", "cuda"}
        Where to run. For NumPy arrays "auto" is the CPU.
    check_finite : bool, default True
        Raise if an input holds NaN or infinity.

    Returns
    -------
    ErrorEstimate

    Raises
    ------
    TypeError, ValueError
        As for `attention`.

    Notes
    -----
    Estimate and limit are those of `attention`'s own certificate (see `pda_numba.certify`), without what only the fit
    knows: where errors sit in very few rows, the limit can be too low.
    """
    problem, lead, dtype = _validate.build_problem(q, k, v, scale, seed, accept=_validate.any_array)
    mask = check_mask((causal, query_lengths, key_lengths, key_mask, cu_seqlens, None), lead, *problem.shape[:2])
    n_rows = min(_validate.whole("n_rows", n_rows, 1), max(problem.shape[0], 1))
    _validate.flag("check_finite", check_finite)
    device, _ = resolve_device(device, on_gpu=not on_host(problem))
    shape = (*lead, problem.shape[0], problem.shape[3])
    out = _validate.output_to_judge(out, shape, **as_given(problem, q, k, v))
    announce_slow_compilation()
    with on_gpu(gpu_of(problem)):
        home = place_of_output(device, problem, out, dtype)
        if check_finite and not home.is_finite():
            raise ValueError("out must be finite, got NaN or infinity; check_finite=False skips this test")
        seen = mask and mask.seen(problem)
        ranges = home.scan(check_finite, seen) if math.prod(shape) or on_host(problem) else None
        judged = np.zeros((5, len(problem.query_head)))
        judged[3] = 1.0  # nothing to judge: no error, for all rows
        if math.prod(shape):
            with contextlib.closing(home.groups(max(1, TOGETHER // shape[-2]))) as groups:
                for heads, part, flat in groups:
                    own = seen_problem(part, heads, mask) if mask else part
                    judged[:, heads] = judge_heads(own, heads, flat, n_rows, ranges)
    error, limit, worst, share, count = (column.reshape(lead) for column in judged)
    return ErrorEstimate(error, limit, worst, share, count.astype(int))
