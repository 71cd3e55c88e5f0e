"""Attention that can be differentiated: the forward pass with its residuals, the backward pass, both as a pullback."""

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

from . import _arrays, _validate, project
from ._pullback_place import pullback_place
from .backward import Gradients, apart, backward
from .call import Call, check_call, projected, run_call, warn_of_error
from .dense import scatter_rows
from .gpu import on_gpu
from .info import AttentionInfo, Clock, GradientInfo
from .masked_adjoint import Masked, masked_backward
from .residuals import Exact


@dataclass(frozen=True)
class Residuals:
    """What `attention_forward` keeps for `attention_backward`.

    Attributes
    ----------
    info : AttentionInfo
        What the forward pass reports.
    nbytes : int
        Memory that is kept beside the inputs, which are kept by reference: they must not change before the backward
        pass.
    """

    info: AttentionInfo
    call: Call = dataclasses.field(repr=False)
    check_finite: bool = dataclasses.field(repr=False)
    parts: list = dataclasses.field(repr=False)
    bounds: tuple = dataclasses.field(repr=False)
    shapes: tuple = dataclasses.field(repr=False)

    @property
    def nbytes(self):
        return sum(part.nbytes for part in self.parts) + sum(x.nbytes for x in self.bounds)


def attention_forward(
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
):
    """Attention, and what its backward pass needs.

    Parameters
    ----------
    q, k, v, rank, tol, proj_dim, projection, calibrate, window, near, scale, method, device, seed, check_finite
        As for `attention`.
    causal, query_lengths, key_lengths, key_mask, cu_seqlens, exact_rows
        As for `attention`.

    Returns
    -------
    out : array, shape (..., Hq, N, E)
        The same bits as from `attention`.
    residuals : Residuals
        For `attention_backward`. The inputs are kept by reference: do not change them in between.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MemoryError
        As for `attention`.

    Warns
    -----
    AccuracyWarning
        As for `attention`.

    Examples
    --------
    >>> import numpy as np, pda_numba
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((300, 8)) for _ in range(3))
    >>> out, residuals = pda_numba.attention_forward(q, k, v)
    >>> dq, dk, dv = pda_numba.attention_backward(residuals, np.ones_like(out))
    >>> bool(abs(dv.sum() - out.size) < 1e-9)  # the weights of every output sum to one
    True
    """
    given = rank, tol, window, near, proj_dim, method, projection, calibrate
    masks = causal, query_lengths, key_lengths, key_mask, cu_seqlens, exact_rows
    call = check_call(q, k, v, given, masks, scale, seed, device, None, check_finite)
    parts: list = []
    out, info, ranges = run_call(call, check_finite, False, True, parts.append)
    warn_of_error(info, call.options)
    bounds = () if ranges is None else (ranges.low, ranges.high)
    return out, Residuals(info, call, check_finite, parts, bounds, (q.shape, k.shape, v.shape))


def attention_backward(residuals, dout, *, return_info=False):
    """Gradients of queries, keys and values, from the gradient of the output.

    Differentiates what the forward pass computed, with its choices held fixed: sampled rows, landmarks, weights, ridge,
    windows, projections, and which outputs were clipped. For exact heads this is attention's own gradient. Nothing of
    size N x M or N x R is stored.

    Parameters
    ----------
    residuals : Residuals
        From `attention_forward`; may be used more than once.
    dout : array, shape (..., Hq, N, E)
        dL/d out, of the kind and dtype of the output.
    return_info : bool, default False
        Also return a `GradientInfo`. Its error estimate takes the pass over the exact rows twice: low-rank heads need
        about half as much time again.

    Returns
    -------
    dq, dk, dv : array
        In shape, dtype and kind of `q`, `k` and `v`; where heads or batches share an input, summed over them. float16
        inputs are summed in float32.
    info : GradientInfo
        Only if `return_info`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it must be and what it was; nothing has been computed then.

    Notes
    -----
    The formulas are derived by hand; the documentation's page on gradients has them, stage by stage.
    """
    if not isinstance(residuals, Residuals):
        raise TypeError(f"residuals must be what attention_forward returned, got {type(residuals).__name__}")
    _validate.flag("return_info", return_info)
    call, clock = residuals.call, Clock()
    problem, lead = call.problem, call.lead
    given = _cotangent(residuals, dout)
    on_device = residuals.info.device.startswith("cuda")
    report = np.zeros((len(problem.query_head), 2))
    with on_gpu(None if isinstance(given, np.ndarray) else given.ordinal):
        home = pullback_place(call, on_device, given)
        if residuals.check_finite and not home.is_finite():
            raise ValueError("dout must be finite, got NaN or infinity; check_finite=False skips this test")
        for part in residuals.parts:
            report[part.heads] = _one_part(home, call, part, residuals.bounds, return_info, clock)
            home.device.recycle()
        arrays = home.result(residuals.shapes)
    if not return_info:
        return arrays
    wrong, size = report.T
    error = np.sqrt(wrong / np.where(size > 0, size, 1.0))
    return *arrays, GradientInfo(error.reshape(lead), dict(clock.seconds))


def attention_vjp(q, k, v, **options):
    """Attention, and the function that maps dL/d out to the gradients.

    Parameters
    ----------
    q, k, v, **options
        As for `attention_forward`.

    Returns
    -------
    out : array, shape (..., Hq, N, E)
    pullback : callable
        ``pullback(dout, return_info=False)``, as `attention_backward`; may be called more than once.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MemoryError
        As for `attention`.

    Examples
    --------
    >>> import numpy as np, pda_numba
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((300, 8)) for _ in range(3))
    >>> out, pullback = pda_numba.attention_vjp(q, k, v)
    >>> [x.shape for x in pullback(2 * out)]
    [(300, 8), (300, 8), (300, 8)]
    """
    out, residuals = attention_forward(q, k, v, **options)
    return out, functools.partial(attention_backward, residuals)


def _cotangent(residuals, dout):
    """`dout`, checked: (all heads, N, E) in the arithmetic's dtype, or the description of an array on a GPU."""
    call = residuals.call
    there = not isinstance(call.problem.q, np.ndarray)
    array = _arrays.describe("dout", dout) if there else _validate.plain_array("dout", dout)
    if array is None:
        raise TypeError(f"dout must be on a GPU, like q, got {type(dout).__name__}")
    if array.shape != call.shape:
        raise ValueError(f"dout must have the shape of the output, {call.shape}, got {array.shape}")
    if array.dtype != call.dtype:
        raise TypeError(f"dout must have the dtype of the output, {call.dtype}, got {array.dtype}")
    if there:
        return array
    flat = _validate.bits(array).reshape(len(call.problem.query_head), *call.shape[-2:])
    return np.ascontiguousarray(project.as_element(flat, call.problem.element))


def _one_part(home, call, part, bounds, measure, clock):
    """Heads that were computed together: adds to the gradients; what `backward` measures of each, on the host."""
    problem, device = home.problem_of(part.heads), home.device
    if isinstance(part, Masked):
        with clock.stage("masked"):
            masked_backward(problem, part, call.mask, call.options, home.given, home.gradients)
        return np.where(part.exact, 0.0, np.nan)[:, None]  # nobody has measured it
    report, bounds = np.zeros((len(part.heads), 2)), [device.upload(x) for x in bounds]
    for which in apart(problem, part.heads):
        own = part.of(device, which), call.options, bounds, home.given, home.gradients
        measured = _one_run(problem, *own, measure, clock)
        if measure:
            report[which] = device.download(measured)
    return report


def _one_run(problem, part, options, bounds, given, gradients, measure, clock):
    """Heads that share nothing."""
    if isinstance(part, Exact):
        with clock.stage("exact"):
            return backward(problem, part, bounds, given, gradients, measure=measure)
    with clock.stage("low rank"):
        if options.proj_dim is None or options.calibrate:
            return backward(problem, part, bounds, given, gradients, measure=measure)
        return _through_projection(problem, part, options, bounds, given, gradients, measure)


def _through_projection(problem, part, options, bounds, given, gradients, measure):
    """The paper's variant: the projected problem's gradients, and from them those of the original."""
    device, heads = problem.device, part.heads
    own = projected(problem, heads, options)
    bounds = [device.take(x, problem.key_head[heads]) for x in bounds]
    inner = Gradients(*(device.zeros(x.shape, problem.element) for x in (own.q, own.k, own.v)))
    report = backward(own, part, bounds, given, inner, measure=measure)
    project.projected_adjoint(problem, heads, options.proj_dim, options.projection, inner.q, inner.k, gradients)
    every = device.repeat(device.upload(np.arange(own.v.shape[1])[None]), len(heads))
    scatter_rows(device, problem.key_heads(heads), every, inner.v, gradients.v, distinct=True)
    return report
