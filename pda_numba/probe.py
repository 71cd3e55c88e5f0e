"""The best few of some centres for every row: what a query probes, and which centre a key is nearest to.

    score_ic = factor x_i . c + bias_c          over the centres of the nodes in the row's beam, a range for each node

Rows that look at the same centres should be neighbours in the order in which they are worked on (`by_neighbourhood`):
those of a panel, or of a block, are all compared with the centres of every node that one of them looks at, as one dense
product, and keep what is theirs.
"""

import numpy as np
from numba import prange

from . import draw
from ._jit import cpu_kernel, cuda, cuda_kernel, inlined
from .grouping import RUN, list_groups
from .kernels import tile
from .kernels.best import MOST, keep_best
from .kernels.panel import TILE, multiply_keys, pack_query
from .kernels.prefetch import AHEAD, prefetch
from .kernels.simd import lane_count
from .kernels.team import barrier, member, members

BEAM = 8  # nodes in a row's beam at most
_NO_NODE = np.iinfo(np.int32).max
_ONE, _MIX, _HIGH = np.uint64(1), np.uint64(0x9E3779B97F4A7C15), np.uint64(20)  # of a multiplicative hash
_SHADES = 256  # sets of nodes that are told apart among those with the same least node

# --- bodies ---


@inlined
def _neighbourhood(beam, row, shades):
    """A number that rows which look at the same nodes have in common: the least node, and a hash of all."""
    least, mixed = beam[row, 0], np.uint64(0)
    for s in range(beam.shape[1]):
        node = beam[row, s]
        if node >= 0:
            least = min(least, node) if least >= 0 else node
            mixed += (np.uint64(node) + _ONE) * _MIX >> _HIGH
    return np.int32(least * shades + np.int64(mixed % np.uint64(shades))) if least >= 0 else np.int32(-1)


@inlined
def _looks_at(beam, row, node):
    found = False
    for s in range(beam.shape[1]):
        found |= beam[row, s] == node
    return found


@inlined
def _collect(beam, row, lane, marks, nodes, count):
    """The nodes of a row's beam into the list, and its lane into their `marks`; returns how many there are now."""
    for s in range(beam.shape[1]):
        node = beam[row, s]
        if node >= 0:
            if marks[node] == 0:
                nodes[count] = node
                count += 1
            marks[node] |= np.uint32(1) << np.uint32(lane)
    return count


@inlined
def _sort_nodes(nodes, count):
    for i in range(1, count):
        node, p = nodes[i], i
        while p > 0 and nodes[p - 1] > node:
            nodes[p] = nodes[p - 1]
            p -= 1
        nodes[p] = node


@inlined
def _allow(marks, node, allowed):
    """0 for the lanes that a node's marks name, minus infinity for the others; the marks are cleared."""
    outside, inside = -allowed.dtype.type(np.inf), allowed.dtype.type(0)
    for lane in range(allowed.shape[0]):
        allowed[lane] = inside if marks[node] >> np.uint32(lane) & np.uint32(1) else outside
    marks[node] = 0


@inlined
def _begin(best, own, given):
    """Nothing found yet, but a centre that is `given`."""
    best[:], own[:] = -np.inf, -1
    if given >= 0:
        best[0], own[0] = np.inf, given


@inlined
def _look_through(begin, end, centres, bias, queries, products, allowed, best, found):
    """A panel of rows, in the lanes, against the centres begin .. end."""
    for j in range(begin, end, TILE):
        count = min(TILE, end - j)
        multiply_keys(products, centres[j:], queries, count)
        keep_best(products, count, bias, j, allowed, best, found)


@inlined
def _probe_panel(
    x,
    rows,
    count,
    beam,
    ranges,
    factor,
    centres,
    bias,
    given,
    found,
    queries,
    products,
    allowed,
    best,
    own,
    marks,
    nodes,
):
    width, most = lane_count(products), found.shape[1]
    for lane in range(width):
        ahead = rows[min(lane + AHEAD, rows.shape[0] - 1)]
        if ahead >= 0:
            prefetch(x, ahead)
            prefetch(beam, ahead)
            prefetch(found, ahead)
        pack_query(queries, lane, x, rows[min(lane, count - 1)], factor)
    _begin(best, own, given)
    total = 0
    for lane in range(count):
        total = _collect(beam, rows[lane], lane, marks, nodes, total)
    _sort_nodes(nodes, total)  # of equal scores the first stays first, in whatever order the rows come
    for i in range(total):
        _allow(marks, nodes[i], allowed)
        begin, end = ranges[nodes[i], 0], ranges[nodes[i], 1]
        _look_through(begin, end, centres, bias, queries, products, allowed, best, own)
    for lane in range(count):
        for p in range(most):
            found[rows[lane], p] = own[p, lane]


@inlined
def _rows_of(entries):
    """How many rows of a run there are: -1 is none."""
    count = entries.shape[0]
    while count > 0 and entries[count - 1] < 0:
        count -= 1
    return count


# --- CPU drivers ---


@cpu_kernel
def _neighbourhoods_cpu(beam, shades, out):
    heads, n = beam.shape[:2]
    for item in prange(heads * n):
        h, i = item // n, item % n
        out[h, i, 0] = _neighbourhood(beam[h], i, shades)


@cpu_kernel
def _probe_cpu(x, place, entries, beam, ranges, factor, centres, bias, given, found):
    heads, n = entries.shape
    width, most, runs = lane_count(centres), found.shape[2], (n + RUN - 1) // RUN
    for item in prange(heads * runs):
        h, r = item // runs, item % runs
        queries = np.zeros((x.shape[2], width), centres.dtype)
        products, allowed = np.empty((TILE, width), centres.dtype), np.empty(width, centres.dtype)
        best, own = np.empty((most, width), centres.dtype), np.empty((most, width), np.int32)
        marks, nodes = np.zeros(ranges.shape[1], np.uint32), np.empty(width * beam.shape[2], np.int32)
        used = _rows_of(entries[h, r * RUN : min((r + 1) * RUN, n)])
        for first in range(0, used, width):
            rows = entries[h, r * RUN + first : (r + 2) * RUN]  # and some of the next
            task = rows, min(width, used - first), beam[h], ranges[h], factor, centres[h], bias[h], given
            room = queries, products, allowed, best, own, marks, nodes
            _probe_panel(x[place[h]], *task, found[h], *room)


# --- CUDA drivers ---


@cuda_kernel(64)
def _neighbourhoods_cuda(beam, shades, out):
    i, h = cuda.blockIdx.x * members() + member(), cuda.blockIdx.y
    if i < beam.shape[1]:
        out[h, i, 0] = _neighbourhood(beam[h], i, shades)


def _probe_driver(element):
    """One block for RUN rows: a thread has the best of its own row."""
    a, keys, columns_at_once, block, depth, rows_of_buffers, piece_size = tile.geometry(element)
    threads, slots, nothing = tile.THREADS, BEAM * tile.THREADS, element.type(-np.inf)

    @cuda_kernel(tile.THREADS, tile.PRODUCT_BLOCKS)
    def probe_cuda(x, place, entries, beam, ranges, factor, centres, bias, given, vectors, found):
        t, h = cuda.threadIdx.x, cuda.blockIdx.y
        first = cuda.blockIdx.x * threads
        if entries[h, first] < 0:
            return
        products = cuda.shared.array((keys, threads), element, alignment=16)
        queries = cuda.shared.array((depth, threads), element, alignment=16)
        buffers = cuda.shared.array((rows_of_buffers, columns_at_once), element, alignment=16)
        best = cuda.shared.array((MOST, threads), element)
        centre = cuda.shared.array((MOST, threads), np.int32)
        nodes = cuda.shared.array(slots, np.int32)
        product = cuda.local.array(block, element)
        piece = cuda.local.array(piece_size, element)
        left = cuda.local.array(a, element)
        right = cuda.local.array(a, element)
        memory, registers = (products, queries, buffers), (product, left, right, piece)
        inside = first + t < entries.shape[1] and entries[h, min(first + t, entries.shape[1] - 1)] >= 0
        row, last = entries[h, first + t if inside else first], found.shape[2] - 1
        for p in range(last + 1):
            best[p, t], centre[p, t] = nothing, np.int32(-1)
        if given >= 0:
            best[0, t], centre[0, t] = -nothing, np.int32(given)
        for s in range(BEAM):
            node = beam[h, row, s] if s < beam.shape[2] else np.int32(-1)
            nodes[s * threads + t] = node if node >= 0 else np.int32(_NO_NODE)
        barrier()
        draw.sort(nodes)
        fresh = True
        for i in range(nodes.shape[0]):
            node = nodes[i]
            if node == _NO_NODE:
                break
            if i > 0 and nodes[i - 1] == node:
                continue
            mine = _looks_at(beam[h], row, node)
            begin, end = ranges[h, node, 0], ranges[h, node, 1]
            for j in range(begin, end, keys):
                where = x[place[h]], row, factor, products, t, False, centres[h], j, end, fresh, t, a, vectors
                tile.score_tile(memory, registers, *where)
                fresh = False
                for c in range(min(keys, end - j)):
                    score = tile.load(products, c, tile.score_place(c, t)) + bias[h, j + c]
                    if mine and score > best[last, t]:
                        p = last
                        while p > 0 and best[p - 1, t] < score:
                            best[p, t], centre[p, t] = best[p - 1, t], centre[p - 1, t]
                            p -= 1
                        best[p, t], centre[p, t] = score, np.int32(j + c)
        if inside:
            for p in range(last + 1):
                found[h, row, p] = centre[p, t]

    return probe_cuda


_PROBE_CUDA = {element: _probe_driver(np.dtype(element)) for element in (np.float32, np.float64)}

# --- stage ---


def by_neighbourhood(device, beam, nodes):
    """The rows of each head (heads, n) in an order in which those that look at the same of the `nodes` are neighbours.

    Among 131,072 queries with beams of 7, panels of 32 then look at 1.25 times the centres of a single row, instead of
    2.2 times in the order of the best node.
    """
    heads, n, _ = beam.shape
    if nodes == 1:
        return device.repeat(device.upload(np.arange(n)[None]), heads)
    shades, group = max(1, min(_SHADES, n // nodes)), device.empty((heads, n, 1), np.int32)
    device.run(_neighbourhoods_cpu, _neighbourhoods_cuda, (-(-n // 64), heads), beam, shades, group)
    return list_groups(device, group, 0, nodes * shades, unit=1).entries


def probe(device, x, place, factor, entries, beam, ranges, centres, bias, count, given=-1):
    """The best centres of the nodes in each row's `beam (heads, n, nodes)`: (heads, n, count) int32, best first.

    The rows of head h are x[place[h]], in the order of `entries (heads, n)`, -1 behind the last; `ranges (heads, nodes,
    2)` of the centres `(heads, C padded, D)` with `bias (heads, C)`. -1 is none; `given` is a centre that every row
    keeps, before the best.
    """
    heads, n, _ = beam.shape
    found = device.repeat(device.upload(np.full((1, count), -1, np.int32)), heads * n).reshape(heads, n, count)
    task = x, place, entries, beam, ranges, factor, centres, bias, given
    if device.name == "cpu":
        _probe_cpu(*task, found)
    else:
        grid, vectors = (-(-entries.shape[1] // RUN), len(place)), tile.vectors(x, centres)
        device.run(None, _PROBE_CUDA[centres.dtype.type], grid, *task, vectors, found)
    return found
