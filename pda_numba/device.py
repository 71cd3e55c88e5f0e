"""Where a call runs: arrays, copies and launches on the CPU or on an NVIDIA GPU.

Stages say what they need of an array (`empty`, `take`, `concatenate`, ...) and name both drivers of a kernel; the
device of the problem does the rest. On the GPU nothing here waits for the device but `download` and `synchronize`.
"""

import contextlib
import math

import numpy as np

from ._arrays import contiguous_strides
from ._jit import SIMULATED, cuda, cuda_kernel, import_cuda, shared
from .kernels.scalar import widen
from .kernels.team import member, members

# --- movement of data on the GPU: rows of 4-byte words ---

_LARGEST_GRID = 65535  # blocks along any axis but the first


@cuda_kernel(256)
def _move_cuda(source, index, repeats, out, column):
    """out[i, column:] = source[index[i // repeats]], where `index` is empty source[i // repeats], as far as it goes."""
    count = min(source.shape[1], out.shape[1] - column)
    for row in range(cuda.blockIdx.y, out.shape[0], cuda.gridDim.y):
        taken = row // repeats
        if index.shape[0]:
            taken = index[taken]
        for c in range(cuda.blockIdx.x * members() + member(), count, cuda.gridDim.x * members()):
            out[row, column + c] = source[taken, c]


@cuda_kernel(256)
def _put_cuda(source, index, place, out):
    """out[place[i]] = source[index[i]]."""
    for i in range(cuda.blockIdx.y, index.shape[0], cuda.gridDim.y):
        for c in range(cuda.blockIdx.x * members() + member(), source.shape[1], cuda.gridDim.x * members()):
            out[place[i], c] = source[index[i], c]


@cuda_kernel(256)
def _add_rows_cuda(block, head, first, out):
    """out[head, first:] += block."""
    n, columns = block.shape
    for item in range(cuda.blockIdx.x * members() + member(), n * columns, cuda.gridDim.x * members()):
        out[head, first + item // columns, item % columns] += block[item // columns, item % columns]


@cuda_kernel(256)
def _cut_cuda(source, head, first, out):
    """out[i] = rows first[i], first[i] + 1, ... of source[head[i]]."""
    blocks, n, columns = out.shape
    for item in range(cuda.blockIdx.x * members() + member(), blocks * n * columns, cuda.gridDim.x * members()):
        row, c = item // columns, item % columns
        i = row // n
        out[i, row % n, c] = source[head[i], first[i] + row % n, c]


@cuda_kernel(256)
def _fill_cuda(out, word):
    for i in range(cuda.blockIdx.x * members() + member(), out.shape[0], cuda.gridDim.x * members()):
        out[i] = word


# --- results, rounded to the caller's dtype and written in the caller's layout ---


@shared
def _bfloat16_bits(x):
    """A float32 rounded to the nearest bfloat16, ties to even."""
    bits = x.view(np.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.int16(rounded) if x == x else np.int16(0x7FC0)


@cuda_kernel(256)
def _store_cuda(source, first, out):
    """out[h] = source[first + h]; `out` may have any strides."""
    heads, n, columns = out.shape
    for i in range(cuda.blockIdx.x * members() + member(), heads * n * columns, cuda.gridDim.x * members()):
        row, c = i // columns, i % columns
        out[row // n, row % n, c] = source[first + row // n, row % n, c]


@cuda_kernel(256)
def _store_bfloat16_cuda(source, first, out):
    heads, n, columns = out.shape
    for i in range(cuda.blockIdx.x * members() + member(), heads * n * columns, cuda.gridDim.x * members()):
        row, c = i // columns, i % columns
        out[row // n, row % n, c] = _bfloat16_bits(source[first + row // n, row % n, c])


@cuda_kernel(256)
def _widen_cuda(source, first, out):
    """out[first + h] = source[h], which may have any strides."""
    heads, n, columns = source.shape
    for i in range(cuda.blockIdx.x * members() + member(), heads * n * columns, cuda.gridDim.x * members()):
        row, c = i // columns, i % columns
        out[first + row // n, row % n, c] = widen(source[row // n, row % n, c])


# --- devices ---


class Cpu:
    """NumPy arrays and the CPU drivers."""

    name = label = "cpu"
    pieces = 32  # pieces of work that keep every core busy
    group_bytes = 48 * 2**20  # heads that are computed together share this much workspace

    empty = staticmethod(np.empty)
    zeros = staticmethod(np.zeros)

    @staticmethod
    def upload(array):
        return array

    @staticmethod
    def download(array):
        return array

    @staticmethod
    def hold(array):
        """An array that outlives what is recycled."""
        return array

    @staticmethod
    def concatenate(arrays):
        """Joined along the second axis."""
        return np.concatenate(arrays, axis=1)

    @staticmethod
    def columns(array, count):
        """The first `count` entries of the second axis."""
        return np.ascontiguousarray(array[:, :count])

    @staticmethod
    def take(array, index):
        """array[index] along the first axis."""
        return array[index]

    @staticmethod
    def is_contiguous(array):
        return array.flags.c_contiguous

    @staticmethod
    def gather_rows(source, head, index):
        """Rows index[i] of source[head[i]]: (len(head), rows, columns)."""
        return source[head[:, None], index]

    @staticmethod
    def scope():
        """A context at whose end what was made inside may be forgotten."""
        return contextlib.nullcontext()

    @staticmethod
    def cut(source, head, first, size):
        """Blocks of `size` rows, block i from source[head[i], first[i]] on: (blocks, size, columns)."""
        return np.stack([source[h, i : i + size] for h, i in zip(head, first, strict=True)])

    @staticmethod
    def add_rows(block, head, first, out):
        """out[head, first:] += block, as far as it goes."""
        out[head, first : first + len(block)] += block

    @staticmethod
    def put(source, index, place, out):
        """out[place] = source[index] along the first axis."""
        out[place] = source[index]

    @staticmethod
    def repeat(array, count):
        """Every entry of the first axis `count` times in a row."""
        return np.repeat(array, count, axis=0)

    @staticmethod
    def run(cpu, cuda, grid, *args):
        """Run a kernel by its driver for this device; `grid` is the CUDA driver's."""
        cpu(*args)

    @staticmethod
    def recycle():
        """Forget every array made so far (but those handed out by other means); their memory is given out again."""

    @staticmethod
    def synchronize():
        """Wait for all that was launched."""


CPU = Cpu()


class Cuda:
    """Numba device arrays from one arena, and the CUDA drivers, on one stream."""

    name = "cuda"
    pieces = 1024
    _FIRST, _CHUNK = 4 * 2**20, 64 * 2**20  # blocks of the arena: each twice as large as the one before, to a limit
    _ALIGNMENT = 256

    def __init__(self, stream=0, group_bytes=2**30):
        self.cuda, self.stream, self.group_bytes = import_cuda(), stream, group_bytes
        self.label = "cuda (simulator)" if SIMULATED else "cuda"
        self.chunks, self.used = [], []  # the arena: blocks of device memory, and how far each is taken
        self.uploads = {}

    # Device memory is taken from blocks that live as long as this object: an allocation of its own for every array
    # would cost a call of the driver, and freeing one would wait for the device.
    def empty(self, shape, dtype):
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(int(n) for n in shape)
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return self.cuda.device_array(shape, dtype, stream=self.stream)
        needed = -(-size // self._ALIGNMENT) * self._ALIGNMENT
        for i, chunk in enumerate(self.chunks):
            if self.used[i] + needed <= chunk.size:
                break
        else:
            i = len(self.chunks)
            block = max(needed, min(self._CHUNK, self._FIRST << len(self.chunks)))
            self.chunks.append(self.cuda.device_array(block, np.uint8, stream=self.stream))
            self.used.append(0)
        start = self.used[i]
        self.used[i] += needed
        return self.chunks[i][start : start + size].view(dtype).reshape(shape)

    def recycle(self):
        """Forget every array made so far; their memory is given out again."""
        self.used = [0] * len(self.chunks)
        self.uploads = {}

    def zeros(self, shape, dtype):
        out = self.empty(shape, dtype)
        self.clear(out)
        return out

    def clear(self, array):
        """Set a contiguous array to zero."""
        if array.size:
            words = self._words(array).reshape(-1)
            _fill_cuda.launch(min(1024, -(-words.size // 256)), self.stream, words, np.uint32(0))

    def hold(self, array):
        """A copy, of an array here or on the host, in memory of its own, which outlives what is recycled."""
        out = self.cuda.device_array(array.shape, array.dtype, stream=self.stream)
        if math.prod(out.shape):
            out.copy_to_device(array, stream=self.stream)
        return out

    def own_zeros(self, shape, dtype):
        """The same of zeros."""
        out = self.cuda.device_array(shape, dtype, stream=self.stream)
        self.clear(out)
        return out

    def upload(self, array):
        """A small array of the host, copied once: equal arrays are the same one here, which nobody may write to."""
        array = np.ascontiguousarray(array)
        key = array.dtype.str, array.shape, array.tobytes()
        if key not in self.uploads:
            self.uploads[key] = self.empty(array.shape, array.dtype)
            if array.size:
                self.uploads[key].copy_to_device(array, stream=self.stream)
        return self.uploads[key]

    def download(self, array):
        """A copy on the host; waits for all that was launched before."""
        out = array.copy_to_host(stream=self.stream)
        self.synchronize()
        return out

    def synchronize(self):
        if self.stream:
            self.stream.synchronize()
        else:
            self.cuda.synchronize()

    def mark(self, stream=None):
        """An event: all that has been put on the stream so far."""
        event = self.cuda.event() if SIMULATED else self.cuda.event(timing=False)
        event.record(self.stream if stream is None else stream)
        return event

    def free_bytes(self):
        """Device memory that nobody holds."""
        return self.cuda.current_context().get_memory_info().free

    def store(self, source, first, out):
        """out (heads, N, E) = source[first:], rounded to the dtype of `out` (int16: bfloat16)."""
        count = math.prod(out.shape)
        if count:
            kernel = _store_bfloat16_cuda if out.dtype == np.int16 else _store_cuda
            kernel.launch(min(4096, -(-count // 256)), self.stream, source, first, out)

    def widen(self, source, first, out):
        """out[first:] = source (heads, N, E), in the arithmetic's dtype."""
        count = math.prod(source.shape)
        if count:
            _widen_cuda.launch(min(4096, -(-count // 256)), self.stream, source, first, out)

    def concatenate(self, arrays):
        first = arrays[0]
        length = sum(a.shape[1] for a in arrays)
        out = self.empty((first.shape[0], length, *first.shape[2:]), first.dtype)
        column = 0
        for array in arrays:
            if array.size:
                words = self._words(array)
                self._move(words, self.upload(np.empty(0, np.int64)), 1, self._words(out), column)
                column += words.shape[1]
        return out

    def columns(self, array, count):
        out = self.empty((array.shape[0], count, *array.shape[2:]), array.dtype)
        if out.size:
            self._move(self._words(array), self.upload(np.empty(0, np.int64)), 1, self._words(out), 0)
        return out

    def take(self, array, index):
        index = self.upload(index) if isinstance(index, np.ndarray) else index
        return self._gathered(array, index, len(index), 1)

    @staticmethod
    def is_contiguous(array):
        steps = contiguous_strides(array.shape, array.dtype.itemsize)
        return all(n <= 1 or a == b for a, b, n in zip(array.strides, steps, array.shape, strict=True))

    def gather_rows(self, source, head, index):
        rows = self.cut(source, np.repeat(head, index.shape[1]), index.reshape(-1), 1)
        return rows.reshape(*index.shape, source.shape[2])

    @contextlib.contextmanager
    def scope(self):
        used, uploads = list(self.used), dict(self.uploads)
        yield
        self.used, self.uploads = used + [0] * (len(self.chunks) - len(used)), uploads

    def cut(self, source, head, first, size):
        out = self.empty((len(head), size, source.shape[2]), source.dtype)
        grid = max(1, min(4096, -(-math.prod(out.shape) // 256)))
        _cut_cuda.launch(grid, self.stream, source, self.upload(head), self.upload(first), out)
        return out

    def add_rows(self, block, head, first, out):
        if block.size:
            grid = min(4096, -(-block.size // 256))
            _add_rows_cuda.launch(grid, self.stream, block, head, first, out)

    def put(self, source, index, place, out):
        source, out = self._words(source), self._words(out)
        grid = min(256, -(-source.shape[1] // 256)), min(len(index), _LARGEST_GRID)
        if math.prod(grid):
            _put_cuda.launch(grid, self.stream, source, self.upload(index), self.upload(place), out)

    def repeat(self, array, count):
        return self._gathered(array, self.upload(np.empty(0, np.int64)), array.shape[0] * count, count)

    def _gathered(self, array, index, rows, repeats):
        out = self.empty((rows, *array.shape[1:]), array.dtype)
        if out.size:
            self._move(self._words(array), index, repeats, self._words(out), 0)
        return out

    def _move(self, source, index, repeats, out, column):
        blocks = min(256, -(-source.shape[1] // 256))
        grid = blocks, min(out.shape[0], _LARGEST_GRID)
        _move_cuda.launch(grid, self.stream, source, index, repeats, out, column)

    @staticmethod
    def _words(array):
        return array.reshape(-1).view(np.uint32).reshape(array.shape[0], -1)

    def run(self, cpu, cuda, grid, *args):
        if math.prod(grid):
            cuda.launch(grid, self.stream, *args)
