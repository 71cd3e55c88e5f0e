"""The adjoint of exact rows (`rows`): attention's own backward pass, for chosen queries or for all of them.

    s_ij = scale q_i . k_j      a_ij = exp(s_ij - lse_i)      o_i = sum_j a_ij v_j

    ds_ij = a_ij (do_i . v_j + c_i)      c_i = dlse_i - do_i . o_i
    dq_i += scale sum_j ds_ij k_j        dk_j += scale sum_i ds_ij q_i        dv_j += sum_i a_ij do_i

The weights are computed again, tile by tile, from the saved lse (FlashAttention, Dao et al. 2022). The keys are cut
into `splits` of fixed size, on the CPU each the work of one thread, who alone writes its keys' gradients; what the
splits say of the queries is added up in their order, so that the number of threads does not change a bit. Where the
problem has spans (`kernels.span`) nothing that a query does not see enters any sum, whatever it holds.
`lse` is in units of log 2, everything else in natural ones.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .adjoint_tiles import Pairs, add_adjoint, seers, to_keys, to_queries, to_values
from .kernels import tile
from .kernels.panel import (
    TILE,
    add_outer,
    add_values,
    load_tile,
    multiply_keys,
    pack_query,
    pack_rows,
    slope,
    weight,
)
from .kernels.scalar import LOG2_E
from .kernels.simd import lane_count, padded
from .kernels.span import add_seen, hide_unseen, inside, is_finite, outside, place_spans, spread
from .kernels.team import member, members
from .rows import _chosen, _splits

_CHUNK = 4096  # queries that are worked on together: what they add up to is kept once for every split of the keys

# --- bodies ---


@shared
def _hide(scores, products, lows, highs, start, keys):
    """No weight and no slope for the keys of a tile that a lane does not see."""
    nothing = scores.dtype.type(0)
    hide_unseen(scores, lows, highs, start, keys, nothing)
    hide_unseen(products, lows, highs, start, keys, nothing)


@shared
def _weights_and_slopes(scores, products, lse, offset, count):
    """Scores to weights and g . v_j to ds_j, in place, for the `count` keys of a tile."""
    for j in range(count):
        for x in range(lane_count(scores)):
            scores[j, x] = weight(scores[j, x], lse[x])
            products[j, x] = slope(scores[j, x], products[j, x], offset[x])


@shared
def _add_tile(sums, factor, count, start, out):
    """Rows of a tile's sums (panels, keys, lanes) times `factor` onto the rows of `out` from `start` on."""
    width = lane_count(sums)
    for j in range(count):
        for d in range(out.shape[1]):
            out[start + j, d] += sums[d // width, j, d % width] * factor


@shared
def _blocks(columns, width):
    return (columns + width - 1) // width


@shared
def _adjoint_range(q, k, v, which, h, first, count, start, stop, factor, spans, lse, offset, cotangent, dq, dk, dv):
    """The queries first .. first + count of head h's list against the keys start .. stop.

    `lse`, `offset` and `cotangent` have a row for each entry of the list, `dq (count, D)` one for each of these.
    """
    element, width = dq.dtype, lane_count(dq)
    dim, values, used = q.shape[1], v.shape[1], _blocks(count, width)
    scale = element.type(factor / LOG2_E)
    queries = np.zeros((used, dim, width), element)
    query_rows = np.zeros((used, _blocks(dim, width), width, width), element)
    outputs = np.zeros((used, values, width), element)
    output_rows = np.zeros((used, _blocks(values, width), width, width), element)
    sums = np.zeros((used, padded(dim), width), element)
    panel_lse = np.full((used, width), np.inf, element)  # an empty lane has no weights
    panel_offset = np.zeros((used, width), element)
    scores, products = np.empty((TILE, width), element), np.empty((TILE, width), element)
    key_tile, value_tile = np.empty((TILE, padded(dim)), element), np.empty((TILE, padded(values)), element)
    key_sums = np.empty((query_rows.shape[1], TILE, width), element)
    value_sums = np.empty((output_rows.shape[1], TILE, width), element)
    lows, highs = np.empty((used, width), np.int64), np.empty((used, width), np.int64)
    for i in range(count):
        p, x = i // width, i % width
        row = _chosen(which, h, first + i)
        pack_query(queries[p], x, q, row, factor)
        if spans.shape[0]:
            place_spans(spans, row, start, stop, lows[p], highs[p], x)
            if lse[first + i] == np.inf:  # counts for nothing
                lows[p, x], highs[p, x] = start, start
            spread(lows[p], highs[p], x, width)
        pack_query(outputs[p], x, cotangent, first + i, element.type(1))
        panel_lse[p, x], panel_offset[p, x] = lse[first + i], offset[first + i]
    for p in range(used):
        pack_rows(query_rows[p], queries[p], dim)
        pack_rows(output_rows[p], outputs[p], values)
    for j in range(start, stop, TILE):
        keys = min(TILE, stop - j)
        load_tile(key_tile, k, j, keys)
        load_tile(value_tile, v, j, keys)
        key_sums[:], value_sums[:] = 0, 0
        for p in range(used):
            seen = not spans.shape[0] or inside(lows[p], highs[p], j, keys)
            if not seen and outside(lows[p], highs[p], j, keys):
                continue
            multiply_keys(scores, key_tile, queries[p], keys)
            multiply_keys(products, value_tile, outputs[p], keys)
            _weights_and_slopes(scores, products, panel_lse[p], panel_offset[p], keys)
            if not seen:
                _hide(scores, products, lows[p], highs[p], j, keys)
            if seen or is_finite(key_tile, keys):
                add_values(sums[p], key_tile, products, keys)
            else:
                add_seen(sums[p], key_tile, products, lows[p], highs[p], j, keys)
            add_outer(key_sums, products, 0, keys, query_rows[p])
            add_outer(value_sums, scores, 0, keys, output_rows[p])
        _add_tile(key_sums, element.type(1 / LOG2_E), keys, j, dk)
        _add_tile(value_sums, element.type(1), keys, j, dv)
    for i in range(count):
        for d in range(dim):
            dq[i, d] = sums[i // width, d, i % width] * scale


@shared
def _gather_splits(h, i, row, partial, dq):
    """partial[0, h, i] = the sum over the splits, in their order; that onto `row` of `dq`. By a team."""
    for d in range(member(), dq.shape[1], members()):
        for s in range(1, partial.shape[0]):
            partial[0, h, i, d] += partial[s, h, i, d]
        dq[row, d] += partial[0, h, i, d]


@shared
def _copy_row(source, out):
    for d in range(member(), out.shape[0], members()):
        out[d] = source[d]


# --- CPU drivers ---


@cpu_kernel
def _adjoint_cpu(
    q,
    k,
    v,
    query_head,
    key_head,
    spans,
    pattern,
    which,
    first,
    start,
    stop,
    keys,
    split,
    factor,
    lse,
    offset,
    cotangent,
    partial,
    dk,
    dv,
):
    splits, heads, count = partial.shape[:3]
    for item in prange(heads * splits):
        h, s = item // splits, item % splits
        _adjoint_range(
            q[query_head[h]],
            k[key_head[h]],
            v[key_head[h]],
            which,
            h,
            first,
            count,
            start + s * split,
            min(stop, keys[h], start + (s + 1) * split),
            factor,
            spans[pattern[h]],
            lse[h],
            offset[h],
            cotangent[h],
            partial[s, h],
            dk[key_head[h]],
            dv[key_head[h]],
        )


@cpu_kernel
def _gather_splits_cpu(query_head, which, first, lse, partial, dq):
    heads, count = partial.shape[1:3]
    for item in prange(heads * count):
        h, i = item // count, item % count
        if lse[h, first + i] < np.inf:
            _gather_splits(h, i, _chosen(which, h, first + i), partial, dq[query_head[h]])


# --- CUDA drivers: a team per row (the sums themselves are made by `adjoint_tiles`) ---


@cuda_kernel(64)
def _gather_splits_cuda(query_head, which, first, lse, partial, dq):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    if lse[h, first + i] < np.inf:
        _gather_splits(h, i, _chosen(which, h, first + i), partial, dq[query_head[h]])


@cuda_kernel(64)
def _copy_rows_cuda(q, query_head, which, out):
    i, h = cuda.blockIdx.x, cuda.blockIdx.y
    _copy_row(q[query_head[h], which[h, i]], out[h, i])


@cuda_kernel(64)
def _copy_spans_cuda(spans, pattern, which, out):
    i, h = cuda.blockIdx.x * members() + member(), cuda.blockIdx.y
    if i < which.shape[1]:
        out[h, i, 0], out[h, i, 1] = spans[pattern[h], which[h, i], 0], spans[pattern[h], which[h, i], 1]


# --- stage ---


class Gradients(NamedTuple):
    """What is added up, in the arithmetic's dtype: (all heads of q, N, D), (all heads of k, M, D), (..., M, E)."""

    q: Any
    k: Any
    v: Any


def rows_adjoint(problem, heads, lse, offset, cotangent, gradients, which=None, *, keep=False, keys=None):
    """Add to `gradients` what the exact rows `which (heads, n)`, or all rows, owe to queries, keys and values.

    `lse`, `offset` = c_i (heads, n) and `cotangent` = do_i (heads, n, E) describe the rows; an lse of infinity marks a
    row that counts for nothing. Of the keys the first `keys (heads,)` count, all by default. No two of the heads may
    share queries or keys, and no row may count twice. Returns dq of the rows (heads, n, D) if asked to `keep` it.
    """
    device = problem.device
    which = device.empty((len(heads), 0), np.int64) if which is None else which
    keys = device.upload(np.full(len(heads), problem.shape[1])) if keys is None else keys
    run = _on_cpu if device.name == "cpu" else _on_cuda
    return run(problem, heads, which, keys, (lse, offset, cotangent), gradients, keep)


def _on_cpu(problem, heads, which, keys, about, gradients, keep):
    device, element, lse = problem.device, problem.element, about[0]
    d, kept = problem.shape[2], []
    for first in range(0, lse.shape[1], _CHUNK):
        count = min(_CHUNK, lse.shape[1] - first)
        start, stop = _seen_by(problem, heads, which, first, count)
        splits, split = _splits(problem, len(heads), max(stop - start, 1))
        partial = device.empty((splits, len(heads), count, d), element)
        listed = *problem.seen(heads), which, first, start, stop, keys, split, problem.factor, *about
        _adjoint_cpu(*problem.arrays(heads), *listed, partial, gradients.k, gradients.v)
        _gather_splits_cpu(problem.query_heads(heads), which, first, lse, partial, gradients.q)
        if keep:
            kept.append(partial[0])
    if keep:
        return device.concatenate(kept) if kept else device.empty((len(heads), 0, d), element)
    return None


def _seen_by(problem, heads, which, first, count):
    """The range of keys that some of these queries see."""
    if problem.spans is None:
        return 0, problem.shape[1]
    pattern = problem.seen(heads)[1]
    if which.shape[1]:
        own = problem.spans[pattern[:, None], which[:, first : first + count]]
    else:
        own = problem.spans[np.unique(pattern), first : first + count]
    own = own[own[..., 0] < own[..., 1]]
    return (int(own[:, 0].min()), int(own[:, 1].max())) if len(own) else (0, 0)


def _seen_pairs(problem, heads, which):
    """The spans of the rows for `adjoint_tiles`."""
    device, (spans, pattern) = problem.device, problem.seen(heads)
    if not which.shape[1]:
        return spans, pattern, device.upload(seers(problem.spans, problem.shape[1]))
    own = device.empty((*which.shape, 2), np.int32)
    device.run(None, _copy_spans_cuda, (-(-which.shape[1] // 64), len(heads)), spans, pattern, which, own)
    return own, device.upload(np.arange(len(heads))), device.empty((1, 0, 2), np.int32)


def _on_cuda(problem, heads, which, keys, about, gradients, keep):
    device, element, (lse, offset, cotangent) = problem.device, problem.element, about
    q, k, v, query_place, key_place = problem.arrays(heads)
    _, m, d, _ = problem.shape
    n, own = lse.shape[1], device.upload(np.arange(len(heads)))
    place = query_place
    if which.shape[1]:
        q, place = device.empty((len(heads), n, d), problem.q.dtype), own
        device.run(None, _copy_rows_cuda, (n, len(heads)), problem.q, query_place, which, q)
    everything = keys, lse, offset, device.empty((len(heads), 0), element)
    seen = None if problem.spans is None else _seen_pairs(problem, heads, which)
    pairs = Pairs(q, cotangent, k, v, place, key_place, *everything, device.empty(0, np.int64), seen=seen)
    factor, scale = problem.factor, problem.scale
    add_adjoint(problem, to_keys, pairs, factor, scale, key_place, gradients.k[None])
    add_adjoint(problem, to_values, pairs, factor, 1, key_place, gradients.v[None])
    splits, split = _splits(problem, len(heads) * -(-n // tile.THREADS), m)
    if splits == 1 and not which.shape[1] and not keep:
        add_adjoint(problem, to_queries, pairs, factor, scale, query_place, gradients.q[None])
        return None
    partial = device.zeros((splits, len(heads), n, d), element)
    add_adjoint(problem, to_queries, pairs, factor, scale, own, partial, split=split)
    task = query_place, which, 0, lse, partial, gradients.q
    device.run(None, _gather_splits_cuda, (n, len(heads)), *task)
    return device.take(partial.reshape(splits * len(heads), n, d), np.arange(len(heads))) if keep else None
