"""How far apart two keys are for the queries: keys that all queries see alike belong into one bucket.

    |k - c|_M^2 = (k - c)^T M (k - c)      M = mean_g ( C_g / s_g^2 + min(1, s_g / |m_g|) m_g m_g^T / s_g^2 ) + r I

with the mean m_g and the covariance C_g of sampled queries of the heads g that share the keys, and s_g^2 = tr C_g / D.
With the factor 1 instead of s / |m| this would be the mean of (q . (k - c))^2. Queries often lie far from the origin,
all in one direction: buckets would then be cut along this direction alone, which tells the queries as little from each
other as the keys. Heads count alike, however large their logits are.
"""

import math

import numpy as np
from numba import prange

from . import draw
from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .kernels.scalar import widen
from .kernels.team import member, members, team_sum

_ROWS = 512  # queries that are sampled
_RIDGE = 0.2  # r

# --- bodies ---


@shared
def _centre(q, which, groups, g, sample, mean):
    """The sampled queries of head g less their mean, over s; the mean over s. Returns min(1, s / |m|); by a team."""
    n, dim = sample.shape
    count, own, length = 0, 0.0, 0.0
    for i in range(n):
        count += which[i] * groups // q.shape[0] == g
    for d in range(member(), dim, members()):
        total = sample.dtype.type(0)
        for i in range(n):
            if which[i] * groups // q.shape[0] == g:
                sample[i, d] = widen(q[which[i], d])
                total += sample[i, d]
        mean[d] = total / max(count, 1)
        for i in range(n):
            if which[i] * groups // q.shape[0] == g:
                sample[i, d] -= mean[d]
                own += np.float64(sample[i, d]) ** 2
    square = team_sum(own) / (max(count, 1) * dim)
    share = 1.0 / math.sqrt(square) if square > 0 else 0.0  # of queries that are all alike nothing is left
    for d in range(member(), dim, members()):
        mean[d] *= share
        length += np.float64(mean[d]) ** 2
        for i in range(n):
            if which[i] * groups // q.shape[0] == g:
                sample[i, d] *= share
    length = team_sum(length)
    return 1.0 / math.sqrt(length) if length > 1 else 1.0


@shared
def _metric_row(sample, means, factors, d, metric):
    """Row d of M; by a team."""
    n, dim = sample.shape
    one = sample.dtype.type(1)
    share, part = one / sample.dtype.type(n), one / sample.dtype.type(len(means))
    for e in range(member(), dim, members()):
        metric[d, e] = 0
    for i in range(n):
        own = sample[i, d]
        for e in range(member(), dim, members()):
            metric[d, e] += own * sample[i, e]
    for e in range(member(), dim, members()):
        metric[d, e] *= share
        for g in range(len(means)):
            metric[d, e] += factors[g] * part * means[g, d] * means[g, e]
    if d % members() == member():
        metric[d, d] += sample.dtype.type(_RIDGE)


@shared
def _see(metric, centre, seen):
    """seen = M c; returns -c^T M c / 2: with it the largest k . seen + bias is the nearest centre's. By a team."""
    zero = seen.dtype.type(0)
    for d in range(member(), seen.shape[0], members()):
        seen[d] = zero
    for e in range(centre.shape[0]):
        own = centre[e]
        for d in range(member(), seen.shape[0], members()):
            seen[d] += metric[e, d] * own
    own = 0.0
    for d in range(member(), seen.shape[0], members()):
        own += np.float64(seen[d] * centre[d])
    return seen.dtype.type(-0.5 * team_sum(own))


# --- CPU drivers ---


@cpu_kernel
def _centre_cpu(q, place, which, sample, means, factors):
    heads, groups = factors.shape
    for item in prange(heads * groups):
        h, g = item // groups, item % groups
        factors[h, g] = _centre(q[place[h]], which[h], groups, g, sample[h], means[h, g])


@cpu_kernel
def _metric_cpu(sample, means, factors, metric):
    heads, dim = metric.shape[:2]
    for item in prange(heads * dim):
        h = item // dim
        _metric_row(sample[h], means[h], factors[h], item % dim, metric[h])


@cpu_kernel
def _see_cpu(metric, centres, seen, bias):
    heads, count = bias.shape
    for item in prange(heads * count):
        h, c = item // count, item % count
        bias[h, c] = _see(metric[h], centres[h, c], seen[h, c])


# --- CUDA drivers ---


@cuda_kernel(256)
def _centre_cuda(q, place, which, sample, means, factors):
    g, h = cuda.blockIdx.x, cuda.blockIdx.y
    factor = _centre(q[place[h]], which[h], factors.shape[1], g, sample[h], means[h, g])
    if member() == 0:
        factors[h, g] = factor


@cuda_kernel(64)
def _metric_cuda(sample, means, factors, metric):
    d, h = cuda.blockIdx.x, cuda.blockIdx.y
    _metric_row(sample[h], means[h], factors[h], d, metric[h])


@cuda_kernel(64)
def _see_cuda(metric, centres, seen, bias):
    c, h = cuda.blockIdx.x, cuda.blockIdx.y
    value = _see(metric[h], centres[h, c], seen[h, c])
    if member() == 0:
        bias[h, c] = value


# --- stages ---


def metric_of(problem, heads):
    """M of every head, (heads, D, D)."""
    device, (n, _, dim, _), element, count = problem.device, problem.shape, problem.element, len(heads)
    which = draw.uniform_rows(problem, heads, min(_ROWS, n), stage=draw.METRIC)
    shapes = (*which.shape, dim), (count, problem.group, dim), (count, problem.group), (count, dim, dim)
    sample, means, factors, metric = (device.empty(shape, element) for shape in shapes)
    task = problem.q, problem.query_heads(heads), which, sample, means, factors
    device.run(_centre_cpu, _centre_cuda, (problem.group, count), *task)
    device.run(_metric_cpu, _metric_cuda, (dim, count), sample, means, factors, metric)
    return metric


def see(device, metric, centres, seen, bias):
    """What keys are multiplied by, and the bias, to find the centre that is nearest to them: `seen` and `bias`."""
    device.run(_see_cpu, _see_cuda, bias.shape[::-1], metric, centres, seen, bias)
