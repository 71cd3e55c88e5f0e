"""Where the heads of a call lie while they are computed, and how the output gets to the caller.

A place hands out the heads in groups, each with a problem that the kernels can read and a buffer (all heads, N, E) that
they write. Heads keep their numbers, on which the random draws depend: only the arrays differ from group to group.

`OnHost`     NumPy arrays, computed on the CPU.
`InPlace`    Arrays on a GPU, computed there without a copy.
`Streamed`   NumPy arrays, computed on a GPU (`_streamed`).

A place that is `blank` has a buffer that is zero where nothing has been written: memory that no one touches is free.
"""

import dataclasses

import numpy as np

from . import _arrays, _validate
from ._jit import SIMULATED
from ._streamed import Streamed
from .device import CPU, Cuda
from .gpu import open_stream
from .scan import find_ranges, scan_array


def place(device, problem, shape, dtype, out, blank):
    """The place for a call: `device` is "cpu" or "cuda", `shape` and `dtype` are those of its output.

    On the CPU it is `blank`, if that is wished for and can be.
    """
    if device == "cpu":
        return OnHost(problem, shape, dtype, out, blank)
    kind = InPlace if isinstance(problem.q, _arrays.Stacks) else Streamed
    return kind(problem, shape, dtype, out)


def place_of_output(device, problem, out, dtype):
    """The place for a look at `out`, an array or a `GpuArray`: each group's buffer is a part of it."""
    if isinstance(problem.q, _arrays.Stacks):
        return Judged(problem, out, dtype)
    return (
        JudgedOnHost(problem, out, dtype) if device == "cpu" else Streamed(problem, out.shape, dtype, out, judge=True)
    )


def _slices(heads, size):
    return [heads[i : i + size] for i in range(0, len(heads), size)]


class OnHost:
    """NumPy arrays, computed on the CPU."""

    device = CPU

    def __init__(self, problem, shape, dtype, out, blank):
        self.problem, self.shape, self.dtype, self.given = problem, shape, dtype, out
        flat = (len(problem.query_head), *shape[-2:])
        direct = dtype == problem.element and (out is None or out.flags.c_contiguous)
        self.out = (np.zeros if blank else np.empty)(shape, dtype) if out is None else out.view(np.ndarray)
        self.buffer = self.out.reshape(flat) if direct else np.empty(flat, problem.element)
        self.direct, self.blank = direct, blank and direct and out is None

    def scan(self, check_finite, seen=None):
        return find_ranges(self.problem, self.dtype, check_finite=check_finite, seen=seen)

    def groups(self, size, _workspace=0):
        """Heads, problem and buffer of each group of at most `size` heads."""
        for heads in _slices(np.arange(len(self.problem.query_head)), size):
            yield heads, self.problem, self.buffer

    def result(self):
        if not self.direct:
            np.copyto(self.out, self.buffer.reshape(self.shape), casting="same_kind")
        return self.out if self.given is None else self.given


class JudgedOnHost(OnHost):
    """An output that is there already."""

    def __init__(self, problem, out, dtype):
        self.problem, self.dtype, self.given = problem, dtype, out
        flat = len(problem.query_head), *out.shape[-2:]
        self.buffer = np.ascontiguousarray(_validate.bits(out).reshape(flat))

    def is_finite(self):
        return np.isfinite(self.given).all()


class GpuOutput:
    """An array of the caller's library and the buffer that kernels write: the same memory if it can be."""

    def __init__(self, device, array, dtype, element):
        self.device, self.array = device, array
        self.target = _arrays.stacked(array, None if dtype is _arrays.BFLOAT16 else dtype)
        self.direct = self.target.is_whole(element)
        if self.direct:
            self.buffer = self.target.local(0)
        else:
            self.buffer = device.cuda.device_array(self.target.shape, element, stream=device.stream)

    def result(self):
        """The caller's object, all that was launched before written to it."""
        if not self.direct:
            for i in range(self.target.shape[0] // self.target.size):
                self.device.store(self.buffer, i * self.target.size, self.target.local(i))
        return _arrays.finished(self.array, self.device)


class InPlace:
    """Arrays on the GPU, computed there on the caller's stream."""

    blank = False

    def __init__(self, problem, shape, dtype, out):
        given = problem.q.array
        self.device = Cuda(open_stream(given.stream or 0))
        follow(self.device, given, [problem.k.array, problem.v.array, *([out] if out else [])])
        self.problem, self.dtype = dataclasses.replace(problem, device=self.device), dtype
        # A Numba array says which stream it is bound to, but the default stream must not be named.
        out = out or _arrays.new_like(given, shape, self.device.stream if given.stream else 0)
        self.out = GpuOutput(self.device, out, dtype, problem.element)

    def _parts(self):
        """Groups of heads that one stack each of q, k and v holds: (heads, stack of q, stack of k and v)."""
        return self._shared_stacks(self.problem.query_head // self.problem.q.size)

    def _shared_stacks(self, *of_heads):
        stacks = np.stack([*of_heads, self.problem.key_head // self.problem.k.size])
        pairs, part = np.unique(stacks, axis=1, return_inverse=True)
        return [(np.flatnonzero(part.reshape(-1) == i), *map(int, pair)) for i, pair in enumerate(pairs.T)]

    def scan(self, check_finite, seen=None):
        """The ranges of all heads, stack by stack. Waits for the device."""
        p, found = self.problem, []
        for heads, q, k in self._parts():
            part = dataclasses.replace(
                p,
                q=p.q.local(q),
                k=p.k.local(k),
                v=p.v.local(k),
                query_head=p.query_head[heads] - q * p.q.size,
                key_head=p.key_head[heads] - k * p.k.size,
            )
            try:
                own = None if seen is None else seen[k * p.k.size : (k + 1) * p.k.size]
                ranges = find_ranges(part, self.dtype, check_finite=check_finite, seen=own)
            except ValueError as error:
                first = q * p.q.size if str(error).startswith("q") else k * p.k.size
                raise ValueError(f"{error} (heads counted from {first} on)" if first else str(error)) from None
            low, high = (x if isinstance(x, np.ndarray) else self.device.download(x) for x in (ranges.low, ranges.high))
            found.append((heads, part.key_head, dataclasses.replace(ranges, low=low, high=high)))
            self.device.recycle()
        return found[0][2] if len(found) == 1 else self._together(found)

    def _together(self, found):
        p = self.problem
        low, high = (np.empty((p.k.shape[0], p.v.shape[2]), p.element) for _ in range(2))
        slip = np.empty(len(p.query_head))
        for heads, keys, ranges in found:
            low[p.key_head[heads]], high[p.key_head[heads]] = ranges.low[keys], ranges.high[keys]
            slip[heads] = ranges.slip
        return dataclasses.replace(found[0][2], low=low, high=high, slip=slip)

    def groups(self, size, _workspace=0):
        p = self.problem
        for heads, q, k in self._parts():
            part = dataclasses.replace(p, q=p.q.placed(q), k=p.k.placed(k), v=p.v.placed(k))
            for group in _slices(heads, size):
                yield group, part, self.out.buffer
                self.device.recycle()

    def result(self):
        """The caller's array, or a new one of the same library."""
        return self.out.result()


class Judged(InPlace):
    """An output on the GPU, beside the arrays that it was computed from."""

    def __init__(self, problem, out, dtype):
        given = problem.q.array
        self.device = Cuda(open_stream(given.stream or 0))
        follow(self.device, given, [problem.k.array, problem.v.array, out])
        self.problem, self.dtype = dataclasses.replace(problem, device=self.device), dtype
        self.target = _arrays.stacked(out)

    def is_finite(self):
        """Waits for the device."""
        report = self.device.zeros((self.target.shape[0], 3), np.float64)
        for i in range(len(self.target.pointers)):
            scan_array(self.device, self.problem.element, self.target.local(i), i * self.target.size, report)
        finite = self.device.download(report)[:, 2].all()
        self.device.recycle()
        return finite

    def groups(self, size, _workspace=0):
        p = self.problem
        own = np.arange(len(p.query_head)) // self.target.size
        for heads, out, q, k in self._shared_stacks(own, p.query_head // p.q.size):
            part = dataclasses.replace(p, q=p.q.placed(q), k=p.k.placed(k), v=p.v.placed(k))
            for group in _slices(heads, size):
                yield group, part, self.target.placed(out)
                self.device.recycle()


def follow(device, leader, others):
    """Let the stream of `leader` wait for what is on the streams of the others."""
    if not SIMULATED:
        for handle in {array.stream or 0 for array in others} - {leader.stream or 0}:
            device.mark(open_stream(handle)).wait(device.stream)
