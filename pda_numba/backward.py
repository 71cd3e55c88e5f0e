"""From the gradient of the output to those of queries, keys and values: the adjoint of every stage, last stage first.

    exact heads      rows
    low-rank heads   apply -> fit and features -> near field's targets -> exact rows -> landmarks

Sampled rows, landmarks, weights, ridge, windows, projections and the set of clipped outputs are held fixed; everything
else is differentiated. The formulas stand in the stages' own files.
"""

import math

import numpy as np
from numba import prange

from . import content, landmarks
from ._jit import cpu_kernel, cuda, cuda_kernel, serial_kernel, shared
from .apply_adjoint import apply_adjoint
from .content import gather_rows
from .content_adjoint import add_held, content_adjoint, owed_by_targets, own_rows, settle_queries
from .dense import multiply
from .finish import landmarks_alone
from .fit_adjoint import fit_adjoint, scatter_rows
from .kernels.scalar import exp2
from .kernels.team import member, members, team_sum
from .landmarks_adjoint import landmarks_adjoint
from .near import targets
from .near_adjoint import near_adjoint
from .residuals import Exact
from .rows import rows
from .rows_adjoint import Gradients as Gradients
from .rows_adjoint import rows_adjoint

# --- body ---


@shared
def _exact_row(i, row, lse, given, out, whole, along, shift, d_target, d_lse, cotangent, offset):
    """do_i = g_i + dt_i,:E and c_i = dlse_i + dt_i,E - do_i . o_i of one exact row, by a team; 0 if it does not count.

    The target's last column is 1 less the near field: that 1 is the row's own sum of weights, a constant. Where the
    row is a part of another's (`merge`), with lse_i - shift, whose lse and g . out are `whole` and `along`, the part's
    share a = exp(lse_i + shift - lse): do_i = a g_i + dt_i,:E and c_i = dlse_i + dt_i,E - dt_i . o_i - a along_i.
    """
    counts, total, share = lse[i] < np.inf, 0.0, cotangent.dtype.type(1)
    fitted = counts and i < d_target.shape[0]
    if whole.shape[0] and counts:
        share = exp2(lse[i] + cotangent.dtype.type(shift) - whole[row])
    for e in range(member(), cotangent.shape[1], members()):
        value = given[row, e] * share if counts else cotangent.dtype.type(0)
        cotangent[i, e] = value + d_target[i, e] if fitted else value
        own = cotangent[i, e]
        if whole.shape[0]:
            own = d_target[i, e] if fitted else cotangent.dtype.type(0)
        total += np.float64(own) * np.float64(out[i, e]) if counts else 0.0
    total = team_sum(total)
    if whole.shape[0] and counts:
        total += np.float64(share) * np.float64(along[row])
    if member() == 0:
        offset[i] = (d_lse[i] if fitted else 0.0) - total


@shared
def _judge(guess, exact, pi, lse, fitted, squares, report):
    """|dq - exact dq|^2 and |exact dq|^2 of one head, by a team.

    Of the held-out rows by (1 - pi)/pi (Horvitz and Thompson 1952), of the fit's rows by `fitted`, their difference.
    """
    wrong = size = 0.0
    first = exact.shape[0] - guess.shape[0]
    for i in range(member(), squares.shape[0], members()):
        size += squares[i]
    for i in range(member(), exact.shape[0], members()):
        if lse[i] < np.inf:
            for d in range(exact.shape[1]):
                y = np.float64(exact[i, d])
                size += y * y
                if i < fitted.shape[0]:
                    wrong += np.float64(fitted[i, d]) * np.float64(fitted[i, d])
                if i >= first:
                    x, expand = np.float64(guess[i - first, d]), (1.0 - pi[i - first]) / pi[i - first]
                    wrong += expand * (x - y) * (x - y)
                    size += expand * (y * y - x * x)
    wrong, size = team_sum(wrong), team_sum(size)
    if member() == 0:
        report[0], report[1] = wrong, size


@shared
def _blank(count, lse):
    """Entries behind the list count for nothing; by a team."""
    for i in range(count + member(), lse.shape[0], members()):
        lse[i] = np.inf


# --- drivers ---


@serial_kernel
def _blank_cpu(count, lse):
    for h in range(len(count)):
        _blank(count[h], lse[h])


@cuda_kernel(256)
def _blank_cuda(count, lse):
    h = cuda.blockIdx.x
    _blank(count[h], lse[h])


@cpu_kernel
def _exact_rows_cpu(place, which, lse, given, out, whole, along, shift, d_target, d_lse, cotangent, offset):
    heads, n = offset.shape
    for item in prange(heads * n):
        h, i = item // n, item % n
        row = which[h, i] if which.shape[1] else np.int64(i)
        merged = whole[h], along[h], shift
        _exact_row(i, row, lse[h], given[place[h]], out[h], *merged, d_target[h], d_lse[h], cotangent[h], offset[h])


@cuda_kernel(64)
def _exact_rows_cuda(place, which, lse, given, out, whole, along, shift, d_target, d_lse, cotangent, offset):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    row = which[h, i] if which.shape[1] else np.int64(i)
    merged = whole[h], along[h], shift
    _exact_row(i, row, lse[h], given[place[h]], out[h], *merged, d_target[h], d_lse[h], cotangent[h], offset[h])


@cpu_kernel
def _judge_cpu(guess, exact, pi, lse, fitted, squares, report):
    for h in prange(len(report)):
        _judge(guess[h], exact[h], pi[h], lse[h], fitted[h], squares[h], report[h])


@cuda_kernel(256)
def _judge_cuda(guess, exact, pi, lse, fitted, squares, report):
    h = cuda.blockIdx.x
    _judge(guess[h], exact[h], pi[h], lse[h], fitted[h], squares[h], report[h])


# --- stages ---


def apart(problem, heads):
    """The heads' places in runs no two heads of which share queries or keys."""
    left = list(range(len(heads)))
    while left:
        taken: set = set()
        run: list = []
        for i in left:
            own = {("q", problem.query_head[heads[i]]), ("k", problem.key_head[heads[i]])}
            if not own & taken:
                run.append(i)
                taken |= own
        yield np.array(run)
        left = sorted(set(left) - set(run))


def backward(problem, part, bounds, given, gradients, *, measure=False, whole=None):
    """Add the gradients of some heads (`residuals.Exact` or `residuals.LowRank`) for `given (all heads, N, E)`.

    `bounds` are the ranges of the values that outputs were clipped to. No two of the heads may share queries or keys.
    `whole`, if the output is a part of another (`merge`), is that one's lse and g . out, both (heads, N).
    With `measure` returns (heads, 2): estimates of |dq - exact dq|^2, which take the exact rows' pass twice, and of
    |exact dq|^2.
    """
    if isinstance(part, Exact):
        return _exact(problem, part, given, gradients, measure)
    return _low_rank(problem, part, bounds, given, gradients, measure, whole)


def _exact(problem, part, given, gradients, measure):
    every = problem.device.empty((len(part.heads), 0), np.int64)
    offset, cotangent = cotangents(problem, part.heads, every, part.lse, given, part.out)
    rows_adjoint(problem, part.heads, part.lse, offset, cotangent, gradients)
    return problem.device.zeros((len(part.heads), 2), np.float64) if measure else None


def _low_rank(problem, part, bounds, given, gradients, measure, whole):
    device, heads, fitted = problem.device, part.heads, part.weight.shape[1]
    buckets, near = content.again(problem, heads, part)
    model = part.landmarks, part.table, part.found, part.window, part.basis
    apart = gradients
    if buckets is not None and measure:  # the queries' gradients in an account of their own
        apart = gradients._replace(q=device.zeros(gradients.q.shape, problem.element))
    task = bounds, given, part.slot, part.held, apart, whole, near
    d_landmarks, d_table, *seen, about = apply_adjoint(problem, heads, model, *task)
    sums = buckets and _near_keys(problem, part, buckets, near, about, apart, seen if measure else None)
    if apart is not gradients:
        seen[1] = settle_queries(device, apart.q, problem.query_heads(heads), gradients.q)
    which, out, lse = (device.columns(x, fitted) for x in (part.rows, part.out, part.lse))
    sampled = content.of_rows(device, near, which)
    target = targets(problem, heads, which, out, lse, part.window.reshape(-1, 1), sampled)
    target = target.reshape(*which.shape, target.shape[3])
    fit = which, lse, target, part.weight, part.ridge, (part.landmarks, part.found, part.basis)
    d_target, d_lse, d_queries = fit_adjoint(problem, heads, *fit, d_landmarks, d_table)
    near_adjoint(problem, heads, which, lse, part.window, d_target, d_lse, d_queries, gradients, sampled)
    if sums:
        x, own = gather_rows(problem, problem.q, problem.query_heads(heads), which), _every(device, heads)
        offset, cotangent = owed_by_targets(problem, sampled, lse, d_target, d_lse)
        d_near = device.zeros(x.shape, problem.element)
        content_adjoint(problem, heads, x, own, buckets, sampled, lse, offset, cotangent, own, d_near, sums)
        each = device.repeat(device.upload(np.arange(which.shape[1])[None]), len(heads))
        scatter_rows(device, own, each, d_near, d_queries, distinct=True)
        for total, out in zip(sums, gradients[1:], strict=True):
            scatter_rows(device, problem.key_heads(heads), part.order, total, out, distinct=True)
    scatter_rows(device, problem.query_heads(heads), which, d_queries, gradients.q)
    report = _exact_rows(problem, part, given, d_target, d_lse, d_queries, gradients, seen if measure else None, whole)
    if part.lost.shape[1]:
        _lost_rows(problem, part, given, gradients, whole)
    if part.projection.shape[1]:
        d_landmarks = multiply(device, d_landmarks, part.projection)
    sample = landmarks.assign(problem, heads, part.keys, part.found, landmarks.REFINE_FACTOR * part.keys.shape[1])[1:]
    landmarks_adjoint(problem, heads, d_landmarks, part.keys, part.found, sample, part.temperature, gradients)
    return report


def _every(device, heads):
    return device.upload(np.arange(len(heads)))


def _near_keys(problem, part, buckets, near, about, gradients, seen):
    """What the queries owe to the keys that are near by content; returns the sums of these, in sorted order.

    With `seen` also what the held-out rows would owe, had they the fit's output.
    """
    device, heads, (lse, offset, cotangent) = problem.device, part.heads, about
    x, place = content.plain(problem, problem.q, problem.query_heads(heads))
    shape = len(heads), part.order.shape[1]
    sums = tuple(device.zeros((*shape, columns), problem.element) for columns in problem.shape[2:])
    own = own_rows(device, lse, part.slot), offset, cotangent
    content_adjoint(problem, heads, x, place, buckets, near, *own, problem.query_heads(heads), gradients.q, sums)
    if seen is not None:
        listed, each = part.rows, _every(device, heads)
        of_all = [x.reshape(*x.shape[:2], -1) for x in (lse, offset, cotangent)]
        lse, offset, cotangent = (gather_rows(problem, x, each, listed) for x in of_all)
        lse, offset = (x.reshape(x.shape[:2]) for x in (lse, offset))
        nowhere = tuple(device.zeros(x.shape, problem.element) for x in sums)
        x = gather_rows(problem, problem.q, problem.query_heads(heads), listed)
        dq = device.zeros(x.shape, problem.element)
        task = x, each, buckets, content.of_rows(device, near, listed), lse, offset, cotangent
        content_adjoint(problem, heads, *task, each, dq, nowhere)
        add_held(device, dq, part.held[0], seen[0])
    return sums


def _exact_rows(problem, part, given, d_target, d_lse, d_queries, gradients, seen, whole):
    """What the exact rows owe for the output and for the fit: together, or apart to measure the gradient's error."""
    device, heads = problem.device, part.heads
    if seen is None:
        fitted = {"d_target": d_target, "d_lse": d_lse}
        offset, cotangent = cotangents(problem, heads, part.rows, part.lse, given, part.out, whole, **fitted)
        rows_adjoint(problem, heads, part.lse, offset, cotangent, gradients, part.rows)
        return None
    nothing = device.zeros(given.shape, problem.element)
    offset, cotangent = cotangents(
        problem, heads, part.rows, part.lse, nothing, part.out, d_target=d_target, d_lse=d_lse
    )
    by_fit = rows_adjoint(problem, heads, part.lse, offset, cotangent, gradients, part.rows, keep=True)
    offset, cotangent = cotangents(problem, heads, part.rows, part.lse, given, part.out)
    exact = rows_adjoint(problem, heads, part.lse, offset, cotangent, gradients, part.rows, keep=True)
    own = device.repeat(device.upload(np.arange(d_lse.shape[1])[None]), len(heads))
    scatter_rows(device, device.upload(np.arange(len(heads))), own, by_fit, d_queries, distinct=True)
    report, (guess, squares) = device.empty((len(heads), 2), np.float64), seen
    device.run(_judge_cpu, _judge_cuda, (len(heads),), guess, exact, part.pi, part.lse, d_queries, squares, report)
    return report


def cotangents(problem, heads, which, lse, given, out, whole=None, shift=0.0, d_target=None, d_lse=None):
    """What `rows_adjoint` needs to know of exact rows; `d_target` and `d_lse` are of the first rows alone."""
    device = problem.device
    cotangent, offset = device.empty(out.shape, problem.element), device.empty(lse.shape, problem.element)
    if d_target is None:
        d_target = device.empty((len(heads), 0, 0), problem.element)
        d_lse = device.empty((len(heads), 0), np.float64)
    if whole is None:
        whole = (device.empty((len(heads), 0), problem.element),) * 2
    lists = device.upload(np.asarray(heads)), which, lse, given, out, *whole, shift, d_target, d_lse, cotangent, offset
    device.run(_exact_rows_cpu, _exact_rows_cuda, lse.shape[::-1], *lists)
    return offset, cotangent


def _lost_rows(problem, part, given, gradients, whole):
    """Rows that are the softmax over the landmarks' own keys and values."""
    device, heads = problem.device, part.heads
    alone, keys = landmarks_alone(problem, heads, part.keys, part.found)
    out, lse, _ = rows(alone, heads, part.lost, used=part.losses)
    device.run(_blank_cpu, _blank_cuda, (len(heads),), part.losses, lse)
    shift = math.log2(problem.shape[1] / keys.shape[1])
    offset, cotangent = cotangents(problem, heads, part.lost, lse, given, out, whole, shift)
    own = Gradients(gradients.q, *(device.zeros(x.shape, problem.element) for x in (alone.k, alone.v)))
    rows_adjoint(alone, heads, lse, offset, cotangent, own, part.lost)
    place = problem.key_heads(heads)
    scatter_rows(device, place, keys, own.k, gradients.k)
    scatter_rows(device, place, keys, own.v, gradients.v)
