"""One panel of queries in the adjoint of the apply pass: p_ij, g, D, ds_ij, dq_i; `apply_adjoint` has the equations.

Its rows are the keys of the band, padded to whole register blocks, then the landmarks; its lanes are the queries.
"""

import numpy as np

from ._jit import shared
from .apply import mask_covered
from .kernels.panel import clipped, in_band, is_kept, larger, log_sum, multiply_keys, slope, weight
from .kernels.simd import lane_count, padded


@shared
def score_panel(
    scores, key_tile, landmarks, queries, projected, row, low, keys, window, rank, bucket, heavy, names, used
):
    """Scores of the band, then of the landmarks; minus infinity for what is neither. Returns where the second begin."""
    nothing, first = -scores.dtype.type(np.inf), padded(keys)
    multiply_keys(scores, key_tile, queries, keys)
    for j in range(first):
        for x in range(lane_count(scores)):
            near = j < keys and in_band(row + x, low + j, window)
            scores[j, x] = scores[j, x] if near else nothing
    if used:
        mask_covered(scores, low, keys, bucket, heavy, names, used)
    multiply_keys(scores[first:], landmarks, projected, rank)
    return first


@shared
def normalise(scores, first, rank, den, alive, beside, top, total, own):
    """Scores to p_ij, in place; 0 in the lanes that are not alive or have no positive normaliser; `own` is its log.

    `beside` is the lse of the content near field, which becomes its share.
    """
    top[:] = np.finfo(scores.dtype).min / 2
    for x in range(lane_count(scores)):
        top[x] = larger(beside[x], top[x])
        total[x] = 0
    for j in range(first + rank):
        for x in range(lane_count(scores)):
            top[x] = larger(scores[j, x], top[x])
    for j in range(first + rank):
        share = den[j - first] if j >= first else scores.dtype.type(1)
        for x in range(lane_count(scores)):
            scores[j, x] = weight(scores[j, x], top[x])
            total[x] += scores[j, x] * share
    for x in range(lane_count(scores)):
        beside[x] = weight(beside[x], top[x])
        total[x] += beside[x]
        own[x] = log_sum(top[x], total[x]) if total[x] > 0 else scores.dtype.type(0)
        share = scores.dtype.type(1) / total[x] if total[x] > 0 and alive[x] else scores.dtype.type(0)
        total[x] = share if share < np.inf else scores.dtype.type(0)
        beside[x] *= total[x]
    for j in range(first + rank):
        for x in range(lane_count(scores)):
            scores[j, x] *= total[x]
    scores[first + rank : first + padded(rank)] = 0


@shared
def drop_clipped(cotangent, outputs, low, high, delta):
    """g = 0 where the output was clipped; D = g . out."""
    delta[:] = 0
    for e in range(low.shape[0]):
        for x in range(lane_count(outputs)):
            kept = is_kept(outputs[e, x], low[e], high[e])
            cotangent[e, x] = cotangent[e, x] if kept else cotangent.dtype.type(0)
            delta[x] += cotangent[e, x] * outputs[e, x]


@shared
def take_part(cotangent, outputs, low, high, own, whole, along, row, count, scores, rows, delta):
    """The same for a part of the output: p_ij to its share of the whole."""
    for x in range(lane_count(outputs)):
        delta[x] = along[row + x] if x < count else delta.dtype.type(0)
        own[x] = weight(own[x], whole[row + x]) if x < count else delta.dtype.type(0)
    for e in range(low.shape[0]):
        for x in range(lane_count(outputs)):
            kept = is_kept(outputs[e, x], low[e], high[e])
            delta[x] -= delta.dtype.type(0) if kept else cotangent[e, x] * clipped(outputs[e, x], low[e], high[e])
            cotangent[e, x] = cotangent[e, x] if kept else cotangent.dtype.type(0)
    for j in range(rows):
        for x in range(lane_count(scores)):
            scores[j, x] *= own[x]


@shared
def slopes(products, scores, first, rank, den, delta):
    """g . v_j and g . Z_j,:E to ds_ij, in place."""
    for j in range(first + rank):
        share = den[j - first] if j >= first else scores.dtype.type(1)
        for x in range(lane_count(scores)):
            products[j, x] = slope(scores[j, x], products[j, x], -delta[x] * share)


@shared
def write_queries(dq, sums, slot, row, count, first_held, scale, guess):
    """dq of a panel's rows; of those that were held out into `guess`. Returns the sum of |dq_i|^2 of the others."""
    square = 0.0
    for x in range(count):
        held = slot[row + x] - 1 - first_held
        if slot[row + x] == 0:
            for d in range(dq.shape[1]):
                value = sums[d, x] * scale
                dq[row + x, d] += value
                square += np.float64(value) * np.float64(value)
        elif held >= 0:
            for d in range(dq.shape[1]):
                guess[held, d] = sums[d, x] * scale
    return square


@shared
def keep_own(scores, products, rows, slot, row, count):
    """Nothing of the rows that are exact goes further than this."""
    for x in range(count):
        if slot[row + x] != 0:
            for j in range(rows):
                scores[j, x] = 0
                products[j, x] = 0
