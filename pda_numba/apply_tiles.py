"""The apply pass on the GPU's tiles (`apply` has its equation).

A block has THREADS queries. It takes the keys of their band, then the landmarks, in tiles: the online softmax goes from
one to the other, the leverage's columns and the normaliser's are summed up beside the values.
"""

import numpy as np

from ._jit import cuda, cuda_kernel
from .core_places import LEVERAGE_COLUMNS
from .kernels import tile
from .kernels.panel import add_square, covered, in_band, larger, log_sum, weight
from .kernels.team import barrier
from .plan import PANEL
from .products import project_queries

# --- drivers ---


def _apply_driver(element):
    """One block for the queries of a panel and a a value columns of one head."""
    a, keys, columns_at_once, block, depth, rows_of_buffers, piece_size = tile.geometry(element)
    threads = tile.THREADS
    lowest = element.type(np.finfo(element).min / 2)
    infinity, marks = element.type(np.inf), tile.MARKS

    @cuda_kernel(tile.THREADS, tile.BLOCKS)
    def apply_cuda(
        q,
        k,
        v,
        query_head,
        key_head,
        place,
        starts,
        factor,
        columns,
        landmarks,
        table,
        rank,
        window,
        near_out,
        near_lse,
        probes,
        used,
        bucket,
        heavy,
        values,
        low,
        high,
        vectors,
        out,
        leverage,
        lse,
    ):
        t, h, column = cuda.threadIdx.x, cuda.blockIdx.z, cuda.blockIdx.y * columns_at_once
        panel = cuda.blockIdx.x
        start = starts[h, panel]
        if rank[h] == 0 or start >= q.shape[1]:
            return
        scores = cuda.shared.array((keys, threads), element, alignment=16)
        queries = cuda.shared.array((depth, threads), element, alignment=16)
        buffers = cuda.shared.array((rows_of_buffers, columns_at_once), element, alignment=16)
        sums = cuda.shared.array((marks, threads), element)  # of the normaliser's column and of the leverage's
        factors = cuda.shared.array(threads, element)
        rows = cuda.shared.array(threads, np.int32)
        acc = cuda.local.array(columns_at_once, element)
        product = cuda.local.array(block, element)
        piece = cuda.local.array(piece_size, element)
        left = cuda.local.array(a, element)
        right = cuda.local.array(a, element)
        memory, registers = (scores, queries, buffers), (product, left, right, piece)
        part = cuda.local.array(4, element)
        q_h, k_h, v_h = q[query_head[h]], k[key_head[h]], v[key_head[h]]
        row = min(start + t, q.shape[1] - 1)
        stop = min(start + threads + window[h], k.shape[1]) if window[h] >= 0 else np.int64(0)
        first_near = max(start - window[h], 0)
        zero, one = acc.dtype.type(0), acc.dtype.type(1)
        top, total = lowest, zero
        projected = columns.shape[1] > 0
        tile.fill(acc, zero)
        for c in range(marks):
            sums[c, t] = zero
        some = used[h]
        if some:
            rows[t], factors[t] = row, near_lse[h, row]
            top = larger(factors[t], top)
            total = one if factors[t] == top else zero
            barrier()
            if values:
                tile.load_rows(acc, near_out[h], rows, factors, lowest, column, t, a)
            barrier()
        for j in range(first_near, stop, keys):
            fresh = j == first_near
            tile.score_tile(
                memory, registers, q_h, row, factor, columns[h], t, False, k_h, j, stop, fresh, t, a, vectors
            )
            tile.hide_scores(scores, min(keys, stop - j), -infinity, t)
            for c in range(min(keys, stop - j)):
                near = in_band(start + t, j + c, window[h])
                if near and some:
                    near = not covered(bucket[h, j + c, 0], heavy, probes[h, row], some)
                if not near:
                    tile.store(scores, c, tile.score_place(c, t), -infinity)
            peak = tile.peak_of(scores, top, t)
            shrink = weight(top, peak)
            top = peak
            factors[t] = shrink
            total = total * shrink + tile.weigh(scores, top, t)
            if values:
                tile.begin_values(memory, registers, v_h, j, stop, column, t, a, vectors & 4)
                barrier()
                tile.scale_queries(acc, factors, t, a)
                tile.add_values(acc, memory, registers, v_h, j, stop, column, t, a, vectors & 4)
        sums[0, t] = total
        landmarks_h, table_h, columns_h = landmarks[h], table[h], columns[h]
        for j in range(0, rank[h], keys):
            fresh = j == 0 and (projected or stop <= first_near)
            tile.score_tile(
                memory,
                registers,
                q_h,
                row,
                factor,
                columns_h,
                panel * threads + t,
                projected,
                landmarks_h,
                j,
                rank[h],
                fresh,
                t,
                a,
                vectors >> 3,
            )
            tile.put_marks(buffers, keys, table_h, j, rank[h], values, t)
            tile.hide_scores(scores, min(keys, rank[h] - j), lowest, t)
            peak = tile.peak_of(scores, top, t)
            shrink = weight(top, peak)
            top = peak
            factors[t] = shrink
            tile.weigh(scores, top, t)
            barrier()
            tile.add_marks(sums, part, scores, buffers, shrink, t)
            barrier()
            if values:
                tile.begin_values(memory, registers, table_h, j, rank[h], column, t, a, vectors & 32)
                barrier()
                tile.scale_queries(acc, factors, t, a)
                tile.add_values(acc, memory, registers, table_h, j, rank[h], column, t, a, vectors & 32)
        share = one / sums[0, t]
        factors[t] = share
        if column == 0 and start + t < q.shape[1]:
            square = zero
            for c in range(1, 1 + LEVERAGE_COLUMNS):
                square = add_square(square, sums[c, t] * share)
            leverage[h, panel * threads + t] = square if sums[0, t] > zero else infinity
            if lse.shape[1]:
                lse[h, start + t] = log_sum(top, sums[0, t]) if sums[0, t] > zero else infinity
        if values:
            barrier()
            tile.scale_queries(acc, factors, t, a)
            tile.clip_columns(acc, low[key_head[h]], high[key_head[h]], column, t, a)
            tile.put_block(queries, acc, t, a)
            barrier()
            if start + t < q.shape[1]:
                tile.write_row(out[place[h]], row, queries, column, t, a, vectors & 64)

    return apply_cuda


_APPLY_CUDA = {element: _apply_driver(np.dtype(element)) for element in (np.float32, np.float64)}


@cuda_kernel(PANEL)
def _panel_rows_cuda(starts, n, which):
    h, i = cuda.blockIdx.y, cuda.grid(1)
    if i < which.shape[1]:
        which[h, i] = min(starts[h, i // PANEL] + i % PANEL, n - 1)


# --- on the host ---


def _panel_rows(problem, starts):
    """The queries of all panels, (heads, panels * PANEL); those beyond the last are the last."""
    which = problem.device.empty((len(starts), starts.shape[1] * PANEL), np.int64)
    grid = which.shape[1] // PANEL, len(starts)
    problem.device.run(None, _panel_rows_cuda, grid, starts, problem.shape[0], which)
    return which


def apply_on_gpu(problem, heads, place, starts, model, bounds, values, out, leverage, lse):
    """The driver's launch; `lse` is (heads, N) or (heads, 0).

    Returns the projected queries (heads, coordinates, panels * PANEL), times the logits' factor.
    """
    device, element = problem.device, problem.element
    landmarks, table, rank, window, basis, near = model
    which = _panel_rows(problem, starts) if basis.shape[1] else starts
    columns = project_queries(problem, heads, which, basis, landmarks.shape[2])
    vectors = tile.vectors(problem.q, problem.k, problem.v) | tile.vectors(problem.q, landmarks, table, out) << 3
    grid = starts.shape[1], max(1, -(-values // tile.geometry(element).columns)), len(heads)
    task = *problem.arrays(heads), place, starts, problem.factor, columns, landmarks, table, rank, window, *near
    device.run(None, _APPLY_CUDA[element.type], grid, *task, values, *bounds, vectors, out, leverage, lse)
    return columns
