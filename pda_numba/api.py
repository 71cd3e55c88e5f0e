"""The public calls: validation in its order, and dispatch to the stages."""

import dataclasses
import math
import warnings

import numpy as np

from . import _validate, certify, draw, plan, project
from ._jit import announce_slow_compilation
from .adaptive import low_rank
from .device import resolve_device
from .info import AccuracyWarning, AttentionInfo, Clock, ErrorEstimate
from .results import HeadResult
from .rows import rows


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
    q : ndarray, shape (..., Hq, N, D)
        Queries, float16, float32, float64 or bfloat16. Two axes are one head. Any strides.
    k : ndarray, shape (..., Hkv, M, D)
        Keys. Leading axes broadcast with those of `q`; `Hq` is a multiple of `Hkv` (query heads share key heads).
    v : ndarray, shape (..., Hkv, M, E)
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
        by the error on rows left out of the fit (if N equals M).
    scale : float, optional
        Factor on the logits, by default 1/sqrt(D).
    method : {"auto", "pda", "exact"}
        "auto" computes exactly where that is cheaper or, without `rank`, where low rank does not keep `tol`. "pda"
        does so only where low rank would compute every row exactly anyway.
    device : {"auto", "cpu", "cuda"}
        Where to run. "auto" says in the info what it chose.
    seed : int
        Seed of all random draws: the same seed gives the same bits for any number of threads.
    check_finite : bool, default True
        Raise if an input holds NaN or infinity.
    out : ndarray, optional
        Where to write the result: shape (..., Hq, N, E), the dtype of `q`, no memory shared with an input.
    progress : bool, default False
        Show a progress bar over groups of heads on the standard error, if that is a terminal.
    return_info : bool, default False
        Also return an `AttentionInfo`.

    Returns
    -------
    out : ndarray, shape (..., Hq, N, E)
        In the dtype of `q`.
    info : AttentionInfo
        Only if `return_info`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it must be and what it was; nothing has been computed then.
    RuntimeError
        If `device="cuda"` is not available.

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
    problem, lead, dtype = _validate.build_problem(q, k, v, scale, seed)
    n, m, d, e = problem.shape
    options = _validate.options(rank, tol, window, proj_dim, method, projection, calibrate, n=n, m=m, d=d)
    for name, value in (("check_finite", check_finite), ("progress", progress), ("return_info", return_info)):
        _validate.flag(name, value)
    device, device_reason = resolve_device(device)
    shape, returned = (*lead, n, e), None
    if out is not None:
        _validate.check_out(out, shape, dtype, q=q, k=k, v=v)
        returned, out = out, out.view(np.ndarray)
    announce_slow_compilation()

    clock, heads = Clock(), math.prod(lead)
    buffer, direct = _output_buffer(out, shape, heads, dtype, problem.element)
    with clock.stage("scan"):
        ranges = _validate.scan(problem, dtype, check_finite=check_finite)
    choice, ranks, reason = plan.decide(n, m, d, e, options) if n and e and heads else ("exact", (), "nothing to do")
    results = [HeadResult(method="exact", reason=reason) for _ in range(heads)]
    if choice == "pda":
        results = _low_rank_in_groups(problem, options, ranks, ranges, buffer, clock, progress)
    _exact_heads(problem, results, ranges, buffer, clock)
    if not direct:
        out = np.empty(shape, dtype) if out is None else out
        np.copyto(out, buffer.reshape(shape), casting="same_kind")
    elif out is None:
        out = buffer.reshape(shape)

    memory = plan.workspace(n, m, d, e, ranks, problem.element.itemsize, heads)
    info = _info(results, lead, options, problem, device, device_reason, dtype, memory, clock)
    insisted = options.rank is not None or options.method == "pda"
    if insisted and options.tol is not None and np.any(info.error_limit > options.tol):
        worst = float(np.max(info.error_limit))
        warnings.warn(
            f"the error may be as large as {worst:.2g}, above tol={options.tol:.2g}, with rank={options.rank} and "
            f"method={options.method!r}; rank=None with method='auto' keeps tol, tol=None silences this",
            AccuracyWarning,
            stacklevel=2,
        )
    out = out if returned is None else returned
    return (out, info) if return_info else out


def estimate_error(out, q, k, v, *, n_rows=128, scale=None, seed=0, device="auto", check_finite=True):
    """Measure how far `out` is from exact attention, whoever computed it.

    Exact attention is computed for a random sample of the queries: `n_rows` uniform ones, and a quarter as many drawn
    towards queries that lie far from the bulk.

    Parameters
    ----------
    out : ndarray, shape (..., Hq, N, E)
        The output to judge, in the dtype of `q`.
    q, k, v : ndarray
        As for `attention`.
    n_rows : int, default 128
        Uniform rows per head.
    scale : float, optional
        Factor on the logits, by default 1/sqrt(D).
    seed : int
        Seed of the draws.
    device : {"auto", "cpu", "cuda"}
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
    problem, lead, dtype = _validate.build_problem(q, k, v, scale, seed)
    n_rows = min(_validate.whole("n_rows", n_rows, 1), max(problem.shape[0], 1))
    _validate.flag("check_finite", check_finite)
    resolve_device(device)
    shape = (*lead, problem.shape[0], problem.shape[3])
    out = _validate.plain_array("out", out)
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    _validate.same_dtype(out=out, q=q)
    if check_finite and not np.isfinite(out).all():
        raise ValueError("out must be finite, got NaN or infinity; check_finite=False skips this test")
    announce_slow_compilation()
    ranges = _validate.scan(problem, dtype, check_finite=check_finite)
    flat = out.reshape(math.prod(lead), *shape[-2:])
    judged = [_judge_head(problem, h, flat[h], n_rows, ranges) for h in range(math.prod(lead))]
    columns = (np.array(c).reshape(lead) for c in zip(*judged, strict=True))
    return ErrorEstimate(*columns)


def _judge_head(problem, head, out, n_rows, ranges):
    n = problem.shape[0]
    if n == 0 or out.shape[1] == 0:
        return 0.0, 0.0, 0.0, 1.0, 0
    heads = np.array([head])
    reach = certify.reach(problem, heads)
    nothing = np.zeros((1, n), bool)
    sizes = (min(n_rows, n), 0, n_rows // 4)
    (audit,) = certify.draw_audit(problem, heads, 0, nothing, reach, reach, np.zeros(1, int), sizes, draw.JUDGE)
    truth = rows(problem, heads, audit.rows[None])[0][0].astype(np.float64)
    guess = out[audit.rows].astype(np.float64)
    rest = np.ones(n, bool)
    rest[audit.rows] = False
    rest_norm = np.square(out[rest], dtype=np.float64).sum()
    none = np.zeros(0)
    error, limit, worst, share = certify.judge(
        audit,
        np.square(guess - truth).sum(axis=1),
        np.square(truth).sum(axis=1),
        np.square(guess).sum(axis=1),
        rest_norm,
        0.0,
        n,
        (none, none, none),
        replaced=False,
    )
    size = math.sqrt(np.square(truth).sum() * n / len(truth))
    return error, math.hypot(limit, ranges.rounding(head, n, size)), worst, share, len(audit.rows)


# --- the parts of `attention` ---


def _output_buffer(out, shape, heads, dtype, element):
    """Where the kernels write, (heads, N, E), and whether that is the result itself."""
    flat = (heads, *shape[-2:])
    if dtype != element:
        return np.empty(flat, element), False
    if out is None:
        return np.empty(flat, element), True
    if out.flags.c_contiguous:
        return out.reshape(flat), True
    return np.empty(flat, element), False


def _low_rank_in_groups(problem, options, ranks, ranges, buffer, clock, progress):
    """Heads in groups that fit the workspace: their serial stages run side by side."""
    n, m, d, e = problem.shape
    heads = np.arange(len(problem.query_head))
    size = plan.together(n, m, d, e, ranks[-1], problem.element.itemsize, len(heads))
    groups = [heads[i : i + size] for i in range(0, len(heads), size)]
    run = _paper_variant if options.proj_dim is not None and not options.calibrate else low_rank
    results = []
    for group in _with_progress(groups, progress):
        results += run(problem, group, options, ranks, ranges, buffer, clock)
    return results


def _with_progress(groups, progress):
    if not progress:
        return groups
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(groups, "attention", console=console, disable=not console.is_terminal)


def _paper_variant(problem, heads, options, ranks, ranges, buffer, clock):
    """calibrate=False: the low-rank method on the projected problem; the certificate still looks at the original."""
    with clock.stage("project"):
        projected = project.projected_problem(problem, heads, options.proj_dim, options.projection)
    inner = dataclasses.replace(options, proj_dim=None, method="pda", tol=None)
    local = np.empty((len(heads), *buffer.shape[1:]), buffer.dtype)
    own = problem.key_head[heads]
    spread = dataclasses.replace(ranges, low=ranges.low[own], high=ranges.high[own], slip=ranges.slip[heads])
    results = low_rank(projected, np.arange(len(heads)), inner, ranks[:1], spread, local, clock)
    with clock.stage("certify"):
        for h, (head, result) in enumerate(zip(heads, results, strict=True)):
            buffer[head] = local[h]
            judged = _judge_head(problem, head, local[h], certify.UNIFORM, ranges)
            result.error, result.error_limit, result.row_error, result.row_share, result.rows = judged
            if options.rank is None and options.method == "auto" and options.tol and result.error_limit > options.tol:
                result.method, result.reason = "exact", "the projected problem does not keep tol"
    return results


def _exact_heads(problem, results, ranges, buffer, clock):
    """Every head that is left to the exact method."""
    heads = np.array([h for h, r in enumerate(results) if r.method == "exact"], np.int64)
    n, m, d, e = problem.shape
    if not len(heads) or not n or not e:
        return
    with clock.stage("exact"):
        if len(heads) == len(results):
            rows(problem, heads, np.tile(np.arange(n), (len(heads), 1)), out=buffer)
        else:
            for h in heads:
                rows(problem, heads[heads == h], np.arange(n)[None], out=buffer[h : h + 1])
    for h in heads:
        result = results[h]
        result.rank = result.effective_rank = result.window = result.flagged_rows = result.fallback_rows = 0
        result.rows, result.row_share = n, 1.0
        size = math.sqrt(np.square(buffer[h], dtype=np.float64).sum())
        result.error = result.error_limit = result.row_error = ranges.rounding(h, n, size)
        result.flops += plan.exact_flops(n, m, d, e)


def _info(results, lead, options, problem, device, device_reason, dtype, memory, clock):
    names = [f.name for f in dataclasses.fields(HeadResult) if f.name != "flops"]
    per_head = {name: np.array([getattr(r, name) for r in results]).reshape(lead) for name in names}
    return AttentionInfo(
        **per_head,
        tol=options.tol,
        seed=problem.seed,
        device=device,
        device_reason=device_reason,
        dtype=str(dtype),
        flops=sum(r.flops for r in results),
        workspace_bytes=int(memory),
        seconds=dict(clock.seconds),
    )
