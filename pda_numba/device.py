"""Where a call runs: arrays, copies and launches on the CPU or on an NVIDIA GPU.

Stages say what they need of an array (`empty`, `take`, `concatenate`, ...) and name both drivers of a kernel; the device
of the problem does the rest. On the GPU nothing here waits for the device but `download`.
"""

import math

import numpy as np

from ._jit import cuda, cuda_kernel, import_cuda
from .kernels.team import member, members

# --- movement of data on the GPU: rows of 4-byte words ---


@cuda_kernel(256)
def _move_cuda(source, index, repeats, out, column):
    """out[i, column:] = source[index[i // repeats]], or source[i // repeats] where `index` is empty."""
    row = cuda.blockIdx.y
    taken = row // repeats
    if index.shape[0]:
        taken = index[taken]
    for c in range(cuda.blockIdx.x * members() + member(), source.shape[1], cuda.gridDim.x * members()):
        out[row, column + c] = source[taken, c]


@cuda_kernel(256)
def _fill_cuda(out, word):
    for i in range(cuda.blockIdx.x * members() + member(), out.shape[0], cuda.gridDim.x * members()):
        out[i] = word


# --- devices ---


class Cpu:
    """NumPy arrays and the CPU drivers."""

    name = "cpu"
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
    def concatenate(arrays):
        """Joined along the second axis."""
        return np.concatenate(arrays, axis=1)

    @staticmethod
    def take(array, index):
        """array[index] along the first axis."""
        return array[index]

    @staticmethod
    def repeat(array, count):
        """Every entry of the first axis `count` times in a row."""
        return np.repeat(array, count, axis=0)

    @staticmethod
    def run(cpu, cuda, grid, *args):
        """Run a kernel by its driver for this device; `grid` is the CUDA driver's."""
        cpu(*args)


CPU = Cpu()


class Cuda:
    """Numba device arrays from one arena, and the CUDA drivers, on one stream."""

    name = "cuda"
    pieces = 1024
    _CHUNK = 64 * 2**20
    _ALIGNMENT = 256

    def __init__(self, stream=0, group_bytes=2**30):
        self.cuda, self.stream, self.group_bytes = import_cuda(), stream, group_bytes
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
            self.chunks.append(self.cuda.device_array(max(needed, self._CHUNK), np.uint8, stream=self.stream))
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
        if out.size:
            words = self._words(out).reshape(-1)
            _fill_cuda.launch(min(1024, -(-words.size // 256)), self.stream, words, np.uint32(0))
        return out

    def upload(self, array):
        """A small array of the host, copied once."""
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
        if self.stream:
            self.stream.synchronize()
        return out

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

    def take(self, array, index):
        index = self.upload(index) if isinstance(index, np.ndarray) else index
        return self._gathered(array, index, len(index), 1)

    def repeat(self, array, count):
        return self._gathered(array, self.upload(np.empty(0, np.int64)), array.shape[0] * count, count)

    def _gathered(self, array, index, rows, repeats):
        out = self.empty((rows, *array.shape[1:]), array.dtype)
        if out.size:
            self._move(self._words(array), index, repeats, self._words(out), 0)
        return out

    def _move(self, source, index, repeats, out, column):
        blocks = min(256, -(-source.shape[1] // 256))
        _move_cuda.launch((blocks, out.shape[0]), self.stream, source, index, repeats, out, column)

    @staticmethod
    def _words(array):
        return array.reshape(-1).view(np.uint32).reshape(array.shape[0], -1)

    def run(self, cpu, cuda, grid, *args):
        if math.prod(grid):
            cuda.launch(grid, self.stream, *args)


def resolve_device(device):
    """(device, reason) for the caller's wish: "auto", "cpu" or "cuda".

    This release has CPU drivers only, so "cuda" is an error that says so, and "auto" names its reason.
    """
    if not isinstance(device, str):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    if device == "cpu":
        return "cpu", "asked for"
    if device == "auto":
        return "cpu", "auto: this release runs on the CPU"
    if device == "cuda":
        raise RuntimeError("device='cuda': this release of pda_numba has no GPU kernels; use device='cpu' or 'auto'")
    raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
