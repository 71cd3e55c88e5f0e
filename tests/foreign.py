"""Arrays of a library that nobody knows: `__cuda_array_interface__` around memory of NumPy or of the simulator."""

import numpy as np


class Foreign:
    """What CuPy or PyTorch would be, for code that only asks where an array lies; the simulator can also read it."""

    def __init__(self, array, *, stream=None, typestr=None, read_only=False, device=None):
        self.array, self.dtype, self.shape = array, array.dtype, array.shape
        self.changes = {"stream": stream, "typestr": typestr or array.dtype.str, "version": 3}
        self.read_only = read_only
        if device is not None:
            self.__dlpack_device__ = lambda: (2, device)

    @property
    def __cuda_array_interface__(self):
        memory = self.array.view({2: np.uint16}.get(self.array.itemsize, self.array.dtype))
        data = memory.ctypes.data, self.read_only
        return {"shape": self.shape, "strides": memory.strides, "data": data, **self.changes}
