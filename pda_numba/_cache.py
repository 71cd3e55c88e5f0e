"""Storage that grows: keys and values of a sequence in one piece per head, and the last queries in a ring."""

import numpy as np

from ._jit import cuda, cuda_kernel
from .kernels.team import member, members

_ROOM, _GROWTH = 256, 1.5  # tokens of room at the start, and the factor when there is none left

# --- CUDA driver ---


@cuda_kernel(256)
def _put_cuda(source, first, out):
    """out[h, first + i] = source[h, i], a team per row."""
    for d in range(member(), source.shape[2], members()):
        out[cuda.blockIdx.y, first + cuda.blockIdx.x, d] = source[cuda.blockIdx.y, cuda.blockIdx.x, d]


class Storage:
    """Keys (heads, capacity, D) and values (heads, capacity, E) in the memory of a device; `length` tokens count.

    The capacity grows by a factor, so that a token is copied a bounded number of times however many follow it.
    """

    def __init__(self, device, k, v):
        self.device, self.length = device, 0
        capacity = k.shape[1] + max(_ROOM, k.shape[1] // 8)
        self.k, self.v = self._empty(k, capacity), self._empty(v, capacity)
        self.append(k, v)

    def append(self, k, v):
        """Copies of NumPy arrays (heads, T, D) and (heads, T, E) behind the last token."""
        needed = self.length + k.shape[1]
        if needed > self.k.shape[1]:
            capacity = max(needed, int(_GROWTH * self.k.shape[1]))
            old = self.k, self.v
            self.k, self.v = self._empty(k, capacity), self._empty(v, capacity)
            for source, target in zip(old, (self.k, self.v), strict=True):
                self._put(source[:, : self.length], 0, target)
        for source, target in ((k, self.k), (v, self.v)):
            self._put(source if self.device.name == "cpu" else self.device.hold(source), self.length, target)
        self.length = needed

    def of_head(self, head, stop):
        """Keys (1, stop, D) and values (1, stop, E) of one head, without a copy."""
        return self.k[head : head + 1, :stop], self.v[head : head + 1, :stop]

    @property
    def nbytes(self):
        return self.k.nbytes + self.v.nbytes

    def _empty(self, like, capacity):
        shape = like.shape[0], capacity, like.shape[2]
        if self.device.name == "cpu":
            return np.empty(shape, like.dtype)
        return self.device.cuda.device_array(shape, like.dtype, stream=self.device.stream)

    def _put(self, source, first, target):
        if self.device.name == "cpu":
            target[:, first : first + source.shape[1]] = source
        else:
            self.device.run(None, _put_cuda, (source.shape[1], source.shape[0]), source, first, target)


class Ring:
    """The last queries (heads, up to `size`, D), on the host."""

    def __init__(self, q, size):
        self.rows, self.seen = np.empty((q.shape[0], size, q.shape[2]), q.dtype), 0
        self.add(q)

    def add(self, q):
        """Queries (heads, T, D), the last of them last."""
        size = self.rows.shape[1]
        for i in range(max(0, q.shape[1] - size), q.shape[1], size):
            last = q[:, i : i + size]
            place = (self.seen + i + np.arange(last.shape[1])) % size
            self.rows[:, place] = last
        self.seen += q.shape[1]

    def last(self):
        """All of them in their order, in one piece."""
        size = self.rows.shape[1]
        if self.seen < size:
            return np.ascontiguousarray(self.rows[:, : self.seen])
        return np.roll(self.rows, -(self.seen % size), axis=1)

    @property
    def nbytes(self):
        return self.rows.nbytes
