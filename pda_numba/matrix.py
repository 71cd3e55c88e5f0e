"""The softmax matrix as an operator: products with it and with its transpose, in a pass over the keys each.

    A X      exact attention with the values X                                    (`rows`)
    A^T Y    exact attention of the keys to the queries, whose softmax is undone:

             (A^T Y)_j = sum_i exp(s_ij - lse_i) y_i = exp(c_j) sum_i softmax_i(s_ij - lse_i) y_i

c_j being the log-sum-exp over the queries, which `rows` returns. A coordinate more carries lse_i: the keys [k_j, 1] are
the queries of [q_i, -lse_i / scale]. And from one more pass, with twice the scale,

    |A|_F^2 = sum_i exp(lse_i(2 scale) - 2 lse_i)

The matrix is never formed. Blocks X and Y are float64 arrays on the host, products are made in the arithmetic of q.
"""

import contextlib
import dataclasses
import math
from typing import Any

import numpy as np

from . import _validate
from ._place import follow
from .call import gpu_of, on_host
from .device import CPU, Cuda
from .gpu import estimated_seconds, on_gpu, open_stream, resolve_device
from .kernels.scalar import LOG2_E
from .mask import check as check_mask
from .problem import Problem
from .rows import rows
from .scan import find_ranges

_NO_MASK = False, None, None, None, None
_COORDINATES = 4  # the extended head dimension is a multiple of this many: 16 bytes of float32, one load of a GPU


class Softmax:
    """The softmax matrices (N, M) of some heads `q (heads, N, D)`, `k (heads, M, D)`, all with the same mask.

    `seen` is what every query sees and what every key is seen by (`queries_of_keys`), None for all.
    """

    def __init__(self, device, q, k, scale, seed, seen: Any = None):
        self.device, self.scale, self.seed = device, scale, seed
        self.shape = q.shape[1], k.shape[1]
        self.spans: Any = None if seen is None else seen[0]
        self.back: Any = None if seen is None else seen[1]
        self.host = q, k
        self.q, self.k = device.hold(q), device.hold(k)
        self.extended: Any = None
        self.lse: Any = None

    def _rows(self, q, k, x, scale, spans):
        """Exact attention of q to k with the values x, and its lse in units of log 2."""
        device, own = self.device, np.arange(q.shape[0])
        pattern = None if spans is None else np.zeros(len(own), np.int64)
        spans = None if spans is None else spans[None]
        element = np.dtype(q.dtype)
        with device.scope():
            values = device.hold(np.ascontiguousarray(x, element))
            problem = Problem(q, k, values, own, own, element, scale, self.seed, device, spans, pattern)
            out, lse, _ = rows(problem, own)
            return device.download(out).astype(float), device.download(lse).astype(float)

    def times(self, x):
        """A x for blocks x (heads, M, columns)."""
        out, self.lse = self._rows(self.q, self.k, x, self.scale, self.spans)
        return out

    def transposed_times(self, y):
        """A^T y for blocks y (heads, N, columns)."""
        if self.extended is None:
            self.extended = [self.device.hold(x) for x in self._extend()]
        queries, keys = self.extended
        out, lse = self._rows(keys, queries, y, self.scale, self.back)
        return out * np.exp2(lse)[:, :, None]

    def _extend(self):
        q, k = self.host
        if self.lse is None:
            self.times(np.zeros((*k.shape[:2], 1)))
        width = -(-(q.shape[2] + 1) // _COORDINATES) * _COORDINATES
        queries, keys = (np.zeros((*x.shape[:2], width), x.dtype) for x in (q, k))
        queries[:, :, : q.shape[2]], keys[:, :, : k.shape[2]] = q, k
        queries[:, :, q.shape[2]] = np.where(np.isfinite(self.lse), self.lse, 0) / (-LOG2_E * self.scale)
        keys[:, :, k.shape[2]] = 1
        return queries, keys

    def row_squares(self):
        """|a_i|^2 of every row: (heads, N)."""
        nothing = np.zeros((len(self.host[1]), self.shape[1], 1))
        if self.lse is None:
            self.times(nothing)
        _, lse = self._rows(self.q, self.k, nothing, 2 * self.scale, self.spans)
        some = np.isfinite(self.lse)
        return np.where(some, np.exp2(np.where(some, lse - 2 * np.where(some, self.lse, 0), 0)), 0)


def queries_of_keys(pattern, m):
    """(m, 2): the queries first .. last that see each key; under every mask of a call these are a range."""
    first, last, count = np.full(m, np.iinfo(np.int32).max), np.zeros(m, np.int64), np.zeros(m, np.int64)
    for segment in pattern.segments:
        keys = np.arange(segment.first, int(segment.end.max(initial=segment.first)))
        start = segment.query + np.searchsorted(segment.end, keys, side="right")
        first[keys] = np.minimum(first[keys], start)
        last[keys] = np.maximum(last[keys], segment.stop)
        count[keys] += segment.stop - start
    spans = np.stack([np.where(count > 0, first, 0), np.where(count > 0, last, 0)], axis=1)
    if (spans[:, 1] - spans[:, 0] != count).any():
        raise AssertionError("the queries that see a key must be a range")
    return spans.astype(np.int32)


# --- the heads of a call ---


@dataclasses.dataclass(frozen=True)
class Heads:
    """The inputs of a call, checked, on the host in the dtype of the arithmetic; where it is to be computed."""

    problem: Problem
    lead: tuple
    dtype: np.dtype  # of the arithmetic
    mask: Any
    device: Any
    reason: str

    def groups(self, bytes_of_column, columns):
        """(heads, `Softmax`) for groups of heads with the same mask that share the workspace of the device."""
        p, mask = self.problem, self.mask
        n, m, d = p.shape[:3]
        bytes_of_head = (n + m) * (columns * bytes_of_column + 2 * (d + _COORDINATES) * self.dtype.itemsize)
        size = max(1, int(self.device.group_bytes // max(bytes_of_head, 1)))
        pattern = np.zeros(len(p.query_head), np.int64) if mask is None else mask.pattern
        for which in np.unique(pattern):
            heads, seen, keys = np.flatnonzero(pattern == which), None, slice(None)
            if mask is not None:
                own = mask.patterns[which]
                keys = slice(None) if own.keys is None else own.keys
                count = m if own.keys is None else len(own.keys)
                seen = own.spans(n), queries_of_keys(own, count)
            for i in range(0, len(heads), size):
                group = heads[i : i + size]
                q, k = p.q[p.query_head[group]], np.ascontiguousarray(p.k[p.key_head[group]][:, keys])
                yield group, Softmax(self.device, q, k, p.scale, p.seed, seen)
                self.device.recycle()


@contextlib.contextmanager
def heads_of(q, k, scale, seed, device, check_finite, flops, masks=_NO_MASK):
    """The `Heads` of a call on q and k; `flops(n, m, d)` is what a head costs.

    `masks` are the caller's causal, query_lengths, key_lengths, key_mask and cu_seqlens.
    """
    _check_shapes(_validate.any_array("q", q).shape, _validate.any_array("k", k).shape)
    problem, lead, dtype = _validate.build_problem(q, k, k, scale, seed, accept=_validate.any_array)
    check_finite = _validate.flag("check_finite", check_finite)
    n, m, d = problem.shape[:3]
    mask = check_mask((*masks, None), lead, n, m)
    element = problem.element
    work = flops(n, m, d) * len(problem.query_head)
    seconds = estimated_seconds(work, "exact", element.itemsize, 2 * (n + m) * d * element.itemsize)
    seconds = None if 0 in (n, len(problem.query_head)) else seconds
    device, reason = resolve_device(device, on_gpu=not on_host(problem), seconds=seconds)
    given = q, k
    with on_gpu(gpu_of(problem)):
        home = CPU if device == "cpu" else _gpu(problem)
        q, k = (_widened(x, array, element, home) for x, array in zip(given, (problem.q, problem.k), strict=True))
        problem = dataclasses.replace(problem, q=q, k=k, v=k)
        seen = mask and mask.seen(problem)
        if math.prod(q.shape) and math.prod(k.shape):
            find_ranges(problem, dtype, check_finite=check_finite, seen=seen)
        if seen is not None:  # what nobody sees is not read
            k = np.where(seen[:, :, None] != 0, k, element.type(0))
            problem = dataclasses.replace(problem, k=k, v=k)
        yield Heads(problem, lead, element, mask, home, reason)


def _check_shapes(q, k):
    """What would otherwise be said of values too."""
    if len(q) != len(k):
        raise ValueError(f"q and k must have the same number of axes, got shapes {q} and {k}")
    if k[-2] == 0:
        raise ValueError(f"k must hold at least one key, got shape {k}: softmax over no keys is undefined")


def _gpu(problem):
    if on_host(problem):
        return Cuda(open_stream())
    device = Cuda(open_stream(problem.q.array.stream or 0))
    follow(device, problem.q.array, [problem.k.array])
    return device


def _widened(given, flat, element, device):
    """The heads (all, tokens, dim) as a contiguous NumPy array in the arithmetic's dtype."""
    if isinstance(given, np.ndarray):
        # What was flattened can be written to, as far as kernels know; they are compiled for such arrays alone.
        return np.ascontiguousarray(flat if given.dtype == element else given.astype(element).reshape(flat.shape))
    out = device.empty(flat.shape, element)
    for i in range(len(flat.pointers)):
        device.widen(flat.local(i), i * flat.size, out)
    return np.array(device.download(out))
