"""NumPy arrays computed on a GPU: heads travel there and back in chunks, while others are computed.

A chunk is a run of heads whose arrays fit into the device memory that is free, twice if there is more than one: the
next chunk is copied in, and the last one out, by a thread of its own on a stream of its own. What crosses the bus goes
through two pieces of pinned memory, one of which the thread fills or empties while the other travels.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from . import _arrays, _validate
from .device import Cuda
from .gpu import current_gpu, on_gpu, open_stream
from .scan import find_ranges

_STAGE_BYTES = 32 * 2**20  # of each of the two pieces of pinned memory
USABLE = 7 / 8  # of the free device memory; the rest is for compiled kernels and small arrays


class Streamed:
    """NumPy arrays, computed on the GPU chunk by chunk (see `_place`).

    With `judge` the output is there already, and is copied in like the inputs.
    """

    blank = False

    def __init__(self, problem, shape, dtype, out, *, judge=False):
        self.device, self.copies = Cuda(open_stream()), open_stream()
        self.problem, self.given, self.dtype, self.judge = problem, out, dtype, judge
        self.out = np.empty(shape, dtype) if out is None else out.view(np.ndarray)
        flat = (len(problem.query_head), *shape[-2:])
        self.direct = judge or self.out.flags.c_contiguous
        self.host = self.out.reshape(flat) if self.direct else np.empty(flat, dtype)
        self.host = _validate.bits(self.host) if judge else self.host

    def scan(self, check_finite, seen=None):
        """The ranges of all heads, found on the CPU: an error is raised before anything is copied or written."""
        return find_ranges(self.problem, self.dtype, check_finite=check_finite, seen=seen)

    def is_finite(self):
        """Of an output to judge."""
        return np.isfinite(self.given).all()

    def fits(self, size, workspace):
        """Is there device memory for at least one head at a time?"""
        with contextlib.suppress(MemoryError):
            return bool(self._fit(size, workspace))
        return False

    def groups(self, size, workspace=0):
        """Heads, problem and buffer of each chunk of at most `size` heads, which need `workspace` bytes each beside."""
        chunks, count = self._fit(size, workspace)
        slots = [
            _Slot(self, [max(sizes) for sizes in zip(*(c.sizes for c in chunks), strict=True)]) for _ in range(count)
        ]
        staging = _Staging(self.device, self.copies, max(max(c.sizes) for c in chunks))
        with ThreadPoolExecutor(1, "pda_numba copies") as thread:
            inward = [thread.submit(staging.fill, *pair) for pair in zip(slots, chunks, strict=False)]
            outward = []
            for i, chunk in enumerate(chunks):
                slot = slots[i % count]
                inward[i].result().wait(self.device.stream)
                yield chunk.heads, slot.problem(chunk), slot.buffer(chunk)
                if not self.judge:
                    slot.finish(chunk)
                    outward.append(thread.submit(staging.empty, slot, chunk, self.device.mark()))
                if i + count < len(chunks):
                    inward.append(thread.submit(staging.fill, slot, chunks[i + count]))
                self.device.recycle()
            for copy in outward:
                copy.result()

    def _fit(self, size, workspace):
        """The chunks, and how many are on the device at a time."""
        usable, heads = USABLE * self.device.free_bytes(), np.arange(len(self.problem.query_head))
        size = min(size, len(heads))
        while True:
            chunks = [_Chunk(self, heads[i : i + size]) for i in range(0, len(heads), size)]
            largest = max(sum(chunk.sizes) for chunk in chunks)
            for count in range(min(2, len(chunks)), 0, -1):
                if count * largest + size * workspace <= usable and (count == 2 or len(chunks) == 1 or size == 1):
                    return chunks, count
            if size == 1:
                raise MemoryError(
                    f"device='cuda' needs {largest + workspace:,} bytes of device memory for one head (its arrays and "
                    f"{workspace:,} bytes of workspace), {int(usable):,} are free; use device='cpu'"
                )
            size = -(-size // 2)

    def result(self):
        """The caller's array, or a new one."""
        if not self.direct:
            np.copyto(self.out, self.host.reshape(self.out.shape))
        return self.out if self.given is None else self.given


class _Chunk:
    """Some consecutive heads: which heads of q, and of k and v, they read, and how many bytes their arrays take."""

    def __init__(self, call, heads):
        p = call.problem
        self.heads = heads
        self.q = slice(p.query_head[heads].min(), p.query_head[heads].max() + 1)
        self.k = slice(p.key_head[heads].min(), p.key_head[heads].max() + 1)
        element = call.host.itemsize if call.judge else p.element.itemsize
        rounded = 0 if call.judge or call.dtype == p.element else call.host[0].nbytes
        self.sizes = (
            p.q[self.q].nbytes,
            p.k[self.k].nbytes,
            p.v[self.k].nbytes,
            len(heads) * call.host[0].size * element,
            len(heads) * rounded,
        )


class _Slot:
    """Device memory for one chunk at a time."""

    def __init__(self, call, sizes):
        self.call = call
        self.memory = [call.device.cuda.device_array(max(n, 1), np.uint8, stream=call.device.stream) for n in sizes]

    def inputs(self, chunk):
        """[(array on the host, its place here)] of q, k, v and an output to judge."""
        p = self.call.problem
        hosts = [p.q[chunk.q], p.k[chunk.k], p.v[chunk.k]]
        if self.call.judge:
            hosts.append(self.call.host[chunk.heads[0] : chunk.heads[-1] + 1])
        return [(host, self._array(i, host.shape, host.dtype)) for i, host in enumerate(hosts)]

    def problem(self, chunk):
        """The problem of the call with the chunk's arrays, under the numbers that its heads have in the call."""
        p = self.call.problem
        firsts = (chunk.q.start, p.q), (chunk.k.start, p.k), (chunk.k.start, p.v)
        arrays = [
            _arrays.numbered(here, first, len(whole))
            for (_, here), (first, whole) in zip(self.inputs(chunk), firsts, strict=False)
        ]
        return replace(p, **dict(zip("qkv", arrays, strict=True)), device=self.call.device)

    def buffer(self, chunk):
        return _arrays.numbered(self._output(chunk), chunk.heads[0], len(self.call.host))

    def finish(self, chunk):
        """Round the output to the caller's dtype."""
        if chunk.sizes[4]:
            shape = (len(chunk.heads), *self.call.host.shape[1:])
            rounded = np.int16 if self.call.dtype.name == "bfloat16" else self.call.dtype
            self.call.device.store(self._output(chunk), 0, self._array(4, shape, rounded))

    def output(self, chunk):
        """(bytes here, bytes on the host) of the output."""
        host = self.call.host[chunk.heads[0] : chunk.heads[-1] + 1].reshape(-1).view(np.uint8)
        return self.memory[4 if chunk.sizes[4] else 3][: len(host)], host

    def _output(self, chunk):
        dtype = self.call.host.dtype if self.call.judge else self.call.problem.element
        return self._array(3, (len(chunk.heads), *self.call.host.shape[1:]), dtype)

    def _array(self, i, shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.memory[i][:size].view(dtype).reshape(shape)


class _Staging:
    """Copies between pageable memory and the device, in the thread that calls."""

    def __init__(self, device, stream, largest):
        size = min(_STAGE_BYTES, max(largest, 1))
        self.device, self.stream, self.gpu = device, stream, current_gpu()
        self.pinned = [device.cuda.pinned_array(size, np.uint8) for _ in range(2)]
        self.travelling = [None, None]  # the event after the last copy of each
        self.turn = 0

    def fill(self, slot, chunk):
        """Copy a chunk in; returns the event after the last copy."""
        with on_gpu(self.gpu):
            for host, here in slot.inputs(chunk):
                here, at = here.reshape(-1).view(np.uint8), 0
                for piece in _pieces(host, len(self.pinned[0])):
                    staged = self._free()[: piece.nbytes]
                    np.copyto(staged.view(piece.dtype).reshape(piece.shape), piece)
                    here[at : at + piece.nbytes].copy_to_device(staged, stream=self.stream)
                    self._sent()
                    at += piece.nbytes
            return self.device.mark(self.stream)

    def empty(self, slot, chunk, computed):
        """Copy the output of a chunk out, as soon as it is `computed`."""
        with on_gpu(self.gpu):
            computed.wait(self.stream)
            here, host = slot.output(chunk)
            size, waiting = len(self.pinned[0]), []
            for at in range(0, len(host), size):
                staged = self._free()[: min(size, len(host) - at)]
                here[at : at + len(staged)].copy_to_host(staged, stream=self.stream)
                waiting.append((host[at : at + len(staged)], staged, self._sent()))
                if len(waiting) == 2:
                    _receive(*waiting.pop(0))
            for one in waiting:
                _receive(*one)

    def _free(self):
        """The piece of pinned memory whose turn it is, once its last copy is done."""
        if self.travelling[self.turn]:
            self.travelling[self.turn].synchronize()
        return self.pinned[self.turn]

    def _sent(self):
        event = self.travelling[self.turn] = self.device.mark(self.stream)
        self.turn = 1 - self.turn
        return event


def _receive(host, staged, event):
    event.synchronize()
    np.copyto(host, staged)


def _pieces(array, size):
    """The array in pieces of at most `size` bytes, in the order of its elements."""
    if array.nbytes <= size:
        yield array
    elif array[0].nbytes <= size:
        step = size // array[0].nbytes
        yield from (array[i : i + step] for i in range(0, len(array), step))
    else:
        for part in array:
            yield from _pieces(part, size)
