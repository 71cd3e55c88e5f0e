"""One call of `attention` from its checks to its results: where it runs, in which groups of heads, by which method."""

import contextlib
import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _validate, certify, holdout, plan, project, residuals
from ._jit import announce_slow_compilation
from ._place import place
from ._streamed import Streamed
from .adaptive import low_rank
from .gpu import estimated_seconds, gpu_name, on_gpu, resolve_device
from .info import AccuracyWarning, AttentionInfo, Clock
from .mask import check as check_mask
from .masked import masked_attention
from .masked_adjoint import masked_residuals
from .options import Options
from .options import options as check_options
from .problem import Problem
from .rectangles import LEAF
from .results import COLUMNS, ERROR, HELD_OUT_ROWS, LIMIT, ROW_ERROR, ROW_SHARE, SIZE, HeadResult
from .rows import rows

_EXACT_ROWS = 2**18  # rows of exact attention that keep any GPU busy: heads are computed together up to this many
TOGETHER = 2**20  # rows of all heads that are judged together


@dataclass(frozen=True)
class Call:
    """A call that has been checked; nothing has been computed."""

    problem: Problem
    lead: tuple  # leading axes of the output
    dtype: Any
    options: Options
    chosen: tuple  # method, ranks, reason
    device: str  # the caller's wish
    where: tuple  # device, reason
    out: Any
    mask: Any = None  # `mask.Mask`, if not every query sees every key

    @property
    def shape(self):
        """Of the output."""
        return (*self.lead, self.problem.shape[0], self.problem.shape[3])


def check_call(q, k, v, given, masks, scale, seed, device, out, check_finite, progress=False, return_info=False):
    """Every check of `attention`, in its order; `given` are the options that go to the plan, `masks` those of masks."""
    problem, lead, dtype = _validate.build_problem(q, k, v, scale, seed, accept=_validate.any_array)
    n, m, d, e = problem.shape
    options = check_options(*given, n=n, m=m, d=d)
    for name, value in (("check_finite", check_finite), ("progress", progress), ("return_info", return_info)):
        _validate.flag(name, value)
    shape = (*lead, n, e)
    mask = check_mask(masks, lead, n, m)
    if mask:
        _check_with_mask(options)
    chosen = plan.decide(n, m, d, e, options) if math.prod(shape) else ("exact", (), "nothing to do")
    where = _where_to_run(device, problem, chosen)
    if out is not None:
        out = _validate.check_out(out, shape, dtype, **as_given(problem, q, k, v))
    return Call(problem, lead, dtype, options, chosen, device, where, out, mask)


def _check_with_mask(options):
    if not options.calibrate:
        raise ValueError("calibrate must be True under a mask or with exact_rows, got False")
    if 0 not in options.near.windows:
        raise ValueError(
            f"window must be 'auto' or 0, and near not ask for one, under a mask or with exact_rows, got a window of "
            f"{options.near.windows[0]}: there the last keys that a query sees are exact, up to {LEAF} or more"
        )


def run_call(call, check_finite, progress, measure, keep=None):
    """Compute it: output, info and the values' ranges. With `keep` it is told what the gradients need."""
    clock, problem = Clock(), call.problem
    announce_slow_compilation()
    with on_gpu(gpu_of(problem)):
        home, device_reason = _home(call)
        kept = keep and (lambda part: keep(part.over(home.device.hold)))
        measure = measure or _insisted(call.options)
        results, ranges = _compute(home, call, clock, check_finite, measure, progress, kept)
        with clock.stage("output"):
            out = home.result()
        device_reason += f" ({gpu_name()})" if home.device.name == "cuda" and measure else ""
    memory = _memory(home.device, problem, call.chosen, call.mask)
    return out, _info(results, call, home.device.label, device_reason, memory, clock), ranges


def on_host(problem):
    return isinstance(problem.q, np.ndarray)


def gpu_of(problem):
    return None if on_host(problem) else problem.q.array.ordinal


def as_given(problem, q, k, v):
    """The arrays as the caller gave them."""
    if not on_host(problem):
        q, k, v = problem.q.array, problem.k.array, problem.v.array
    return {"q": q, "k": k, "v": v}


def _where_to_run(wish, problem, chosen):
    """(device, reason); for NumPy arrays and "auto" by what the call would take on either."""
    n, m, d, e = problem.shape
    method, ranks, _ = chosen
    heads, seconds = len(problem.query_head), None
    if on_host(problem) and heads and n and e:
        flops = heads * (plan.pda_flops(n, m, d, e, ranks[0]) if ranks else plan.exact_flops(n, m, d, e))
        moved = sum(x.nbytes for x in (problem.q, problem.k, problem.v)) + heads * n * e * problem.q.itemsize
        seconds = estimated_seconds(flops, method, problem.element.itemsize, moved)
    return resolve_device(wish, on_gpu=not on_host(problem), seconds=seconds)


def _home(call):
    """(place, reason): where the call runs in the end."""
    device, reason = call.where
    target = call.problem, call.shape, call.dtype, call.out, bool(call.mask)
    home = place(device, *target)
    if call.device != "auto" or not isinstance(home, Streamed):
        return home, reason
    if home.fits(*_group(home.device, call.problem, call.chosen, call.mask)):
        return home, reason
    return place("cpu", *target), "auto: the arrays of one head do not fit into the GPU"


def _group(device, problem, chosen, mask):
    """How many heads are computed together, and the bytes of workspace that each takes."""
    n, m, d, e = problem.shape
    heads, itemsize, ranks = max(1, len(problem.query_head)), problem.element.itemsize, chosen[1]
    if mask:  # half of the queries are in the largest rectangle
        memory = itemsize * n * (e + 3) // 2 + itemsize * m * (d + e) * mask.compacts
        memory += plan.head_workspace(n // 2, m // 2, d, e, ranks[-1], itemsize) if ranks else 0
        shared = max(1, heads // max(1, len(np.unique(problem.key_head))))  # heads of a group stay together
        return max(1, min(heads, shared * max(1, int(device.group_bytes // (shared * memory))))), memory
    if ranks:
        memory = plan.head_workspace(n, m, d, e, ranks[-1], itemsize)
        return max(1, min(heads, int(device.group_bytes // memory))), memory
    return (heads if device.name == "cpu" else max(1, min(heads, _EXACT_ROWS // max(n, 1)))), 2 * n * itemsize


def _memory(device, problem, chosen, mask):
    """Bytes beyond inputs and output."""
    _, _, d, e = problem.shape
    return math.prod(_group(device, problem, chosen, mask)) if chosen[1] or mask else plan.exact_workspace(d, e)


def _compute(home, call, clock, check_finite, measure, progress, keep):
    """Every head: a HeadResult each, and the values' ranges. With `measure` exact heads are told what rounding may
    cost; `keep` gets what the gradients need.
    """
    method, ranks, reason = call.chosen
    problem = home.problem
    nothing, ranges = 0 in (*problem.shape[::3], len(problem.query_head)), None
    if (check_finite or measure or ranks or keep or call.mask) and (not nothing or on_host(problem)):
        with clock.stage("scan"):
            ranges = home.scan(check_finite, call.mask and call.mask.seen(problem))
    results = [HeadResult(method="exact", reason=reason) for _ in problem.query_head]
    if not nothing:
        size, memory = _group(home.device, problem, call.chosen, call.mask)
        total = progress and method == "pda" and -(-len(results) // size)
        known = ranges if ranks or measure or call.mask else None
        groups = home.groups(size, memory)
        if call.mask:
            _masked_groups(groups, results, call, known, clock, total, keep, home.blank)
        else:
            _in_groups(groups, results, call.options, ranks, known, clock, total, keep)
    return results, ranges


def _masked_groups(groups, results, call, ranges, clock, total, keep, blank):
    """All heads under the call's mask, in groups. Fills `results`."""
    with contextlib.closing(groups):
        for heads, problem, buffer in _with_progress(groups, total):
            kept = keep and (lambda *task: keep(masked_residuals(*task)))
            task = problem, heads, call.mask, call.options, ranges, buffer, clock, judge_heads, kept, blank
            for head, result in zip(heads, masked_attention(*task), strict=True):
                results[head] = result


def _in_groups(groups, results, options, ranks, ranges, clock, total, keep):
    """All heads, in groups that fit the workspace: their serial stages run side by side. Fills `results`.

    A progress bar counts to `total` groups, unless that is 0.
    """
    run = _paper_variant if options.proj_dim is not None and not options.calibrate else low_rank
    with contextlib.closing(groups):
        for heads, problem, buffer in _with_progress(groups, total):
            if ranks:
                upload = problem.device.upload
                near = dataclasses.replace(ranges, low=upload(ranges.low), high=upload(ranges.high))
                done = run(problem, heads, options, ranks, near, buffer, clock, keep)
                for head, result in zip(heads, done, strict=True):
                    results[head] = result
            exact = heads[[results[h].method == "exact" for h in heads]]
            _exact_heads(problem, exact, results, ranges, buffer, clock, keep)


def _with_progress(groups, total):
    if not total:
        return groups
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(groups, "attention", total=total, console=console, disable=not console.is_terminal)


def projected(problem, heads, options):
    """The problem of calibrate=False for these heads, who keep their numbers."""
    place = np.zeros_like(problem.query_head)
    place[heads] = np.arange(len(heads))
    projected = project.projected_problem(problem, heads, options.proj_dim, options.projection)
    return dataclasses.replace(projected, query_head=place, key_head=place)


def _paper_variant(problem, heads, options, ranks, ranges, buffer, clock, keep):
    """calibrate=False: the low-rank method on the projected problem; the certificate still looks at the original."""
    with clock.stage("project"):
        own_problem = projected(problem, heads, options)
    inner = dataclasses.replace(options, proj_dim=None, method="pda", tol=None)
    low, high = (problem.device.take(bound, problem.key_head[heads]) for bound in (ranges.low, ranges.high))
    own = dataclasses.replace(ranges, low=low, high=high)
    parts: list = []
    results = low_rank(own_problem, heads, inner, ranks[:1], own, buffer, clock, keep and parts.append)
    with clock.stage("certify"):
        judged = judge_heads(problem, heads, buffer, holdout.UNIFORM, ranges)
    for result, *row in zip(results, *judged, strict=True):
        result.error, result.error_limit, result.row_error, result.row_share, result.rows = row
        if options.rank is None and options.method == "auto" and options.tol and result.error_limit > options.tol:
            result.method, result.reason = "exact", "the projected problem does not keep tol"
    for part in parts:
        left = np.flatnonzero([result.method == "pda" for result in results])
        keep(part.of(problem.device, left))
    return results


def _exact_heads(problem, heads, results, ranges, buffer, clock, keep):
    """Exact attention for `heads`; what it is off by follows from `ranges`, if these are known."""
    if not len(heads):
        return
    n, m, d, e = problem.shape
    with clock.stage("exact"):
        for run in np.split(heads, np.flatnonzero(np.diff(heads) != 1) + 1):
            out, lse, _ = rows(problem, run, out=buffer[int(run[0]) : int(run[-1]) + 1])
            if keep:
                keep(residuals.Exact(run, problem.device.take(out, np.arange(len(run))), lse))
        sizes = np.sqrt(certify.sum_squares(problem, heads, buffer)) if ranges else np.zeros(len(heads))
    for head, size in zip(heads, sizes, strict=True):
        result = results[head]
        result.rank = result.effective_rank = result.window = result.probes = 0
        result.flagged_rows = result.fallback_rows = 0
        result.rows, result.row_share = n, 1.0
        if ranges:
            result.error = result.error_limit = result.row_error = ranges.rounding(head, n, size)
        result.flops += plan.exact_flops(n, m, d, e)


def _insisted(options):
    return options.tol is not None and (options.rank is not None or options.method == "pda")


def warn_of_error(info, options):
    """A caller who insisted on low rank hears where the certificate exceeds tol."""
    if _insisted(options) and np.any(info.error_limit > options.tol):
        worst = float(np.max(info.error_limit))
        warnings.warn(
            f"the error may be as large as {worst:.2g}, above tol={options.tol:.2g}, with rank={options.rank} and "
            f"method={options.method!r}; rank=None with method='auto' keeps tol, tol=None silences this",
            AccuracyWarning,
            stacklevel=3,
        )


def _info(results, call, device, device_reason, memory, clock):
    names = [f.name for f in dataclasses.fields(HeadResult) if f.name != "flops"]
    per_head = {name: np.array([getattr(r, name) for r in results]).reshape(call.lead) for name in names}
    return AttentionInfo(
        **per_head,
        tol=call.options.tol,
        seed=call.problem.seed,
        device=device,
        device_reason=device_reason,
        dtype=str(call.dtype),
        flops=sum(r.flops for r in results),
        workspace_bytes=int(memory),
        seconds=dict(clock.seconds),
    )


# --- judging an output ---


def judge_heads(problem, heads, out, n_rows, ranges, leverage=None):
    """Error, its limit, worst row, share of rows and held-out rows of some heads of `out (all heads, N, E)`."""
    n = problem.shape[0]
    report = np.zeros((len(heads), COLUMNS))
    report[:, ROW_SHARE] = 1.0
    if n and out.shape[2]:
        step = max(1, TOGETHER // n)
        for i in range(0, len(heads), step):
            some = np.arange(i, min(i + step, len(heads)))
            own = None if leverage is None else problem.device.take(leverage, some)
            judged = certify.judge_output(problem, heads[some], out, n_rows, own)
            report[i : i + step] = problem.device.download(judged)
    rounding = [ranges.rounding(head, n, size) for head, size in zip(heads, report[:, SIZE], strict=True)]
    limit = np.hypot(report[:, LIMIT], rounding)
    return report[:, ERROR], limit, report[:, ROW_ERROR], report[:, ROW_SHARE], report[:, HELD_OUT_ROWS].astype(int)
