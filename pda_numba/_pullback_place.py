"""Where a backward pass runs: the arrays that it reads, the gradients that it adds up, and how these get to the caller.

`OnHost`     NumPy arrays, on the CPU.
`Moved`      NumPy arrays whose forward pass ran on a GPU: copied there as a whole, the gradients back.
`InPlace`    Arrays on a GPU.

What the forward pass kept is on the same device already (`Cuda.hold`).
"""

import dataclasses
from typing import Any

import numpy as np

from . import _arrays
from ._place import GpuOutput, follow
from ._streamed import USABLE
from .backward import Gradients
from .device import CPU, Cuda
from .gpu import open_stream
from .scan import scan_array


def pullback_place(call, on_gpu, given):
    """The place for `given`, the output's cotangent: (all heads, N, E) in the arithmetic's dtype, or a `GpuArray`."""
    if isinstance(call.problem.q, _arrays.Stacks):
        return InPlace(call, given)
    return (Moved if on_gpu else OnHost)(call, given)


class OnHost:
    """NumPy arrays, on the CPU."""

    device: Any = CPU

    def __init__(self, call, given):
        self.problem, self.dtype, self.given = call.problem, call.dtype, given
        self.cotangent, p = given, call.problem
        self.gradients = Gradients(*(np.zeros(x.shape, p.element) for x in (p.q, p.k, p.v)))

    def is_finite(self):
        """Is the cotangent?"""
        return np.isfinite(self.cotangent).all()

    def problem_of(self, _heads):
        """The problem with arrays that kernels can read, for heads that were computed together."""
        return self.problem

    def result(self, shapes):
        """dq, dk and dv for the caller."""
        return tuple(
            self.device.download(x).reshape(shape).astype(self.dtype, copy=False)
            for x, shape in zip(self.gradients, shapes, strict=True)
        )


class Moved(OnHost):
    """NumPy arrays, on a GPU."""

    def __init__(self, call, given):
        self.device, self.dtype = Cuda(open_stream()), call.dtype
        self.cotangent, p = given, call.problem
        arrays = [np.ascontiguousarray(x) for x in (p.q, p.k, p.v, given)]
        size = sum(x.nbytes for x in arrays) + sum(x.size for x in arrays[:3]) * p.element.itemsize
        usable = USABLE * self.device.free_bytes()
        if size > usable:
            raise MemoryError(
                f"the backward pass needs {size:,} bytes of device memory for its arrays, {int(usable):,} are free; "
                "use device='cpu' in the forward pass"
            )
        q, k, v, self.given = (self.device.hold(x) for x in arrays)
        self.problem = dataclasses.replace(p, q=q, k=k, v=v, device=self.device)
        self.gradients = Gradients(*(self.device.own_zeros(x.shape, p.element) for x in (q, k, v)))


class InPlace:
    """Arrays on a GPU, on the stream of the cotangent."""

    def __init__(self, call, given):
        p = call.problem
        self.device = Cuda(open_stream(given.stream or 0))
        follow(self.device, given, [p.q.array, p.k.array, p.v.array])
        self.problem = dataclasses.replace(p, device=self.device)
        self.source = _arrays.stacked(given)
        stream = self.device.stream if given.stream else 0
        outputs = (_arrays.new_like(x.array, x.array.shape, stream) for x in (p.q, p.k, p.v))
        self.outputs = [GpuOutput(self.device, out, call.dtype, p.element) for out in outputs]
        for out in self.outputs:
            self.device.clear(out.buffer)
        self.gradients = Gradients(*(out.buffer for out in self.outputs))
        self.given = self._widened(p.element)

    def _widened(self, element):
        """The cotangent in the arithmetic's dtype and contiguous, itself if it is."""
        source, device = self.source, self.device
        if source.is_whole(element):
            return source.local(0)
        out = device.cuda.device_array(source.shape, element, stream=device.stream)
        for i in range(source.shape[0] // source.size):
            device.widen(source.local(i), i * source.size, out)
        return out

    def is_finite(self):
        """Is the cotangent? Waits for the device."""
        report = self.device.zeros((self.given.shape[0], 3), np.float64)
        scan_array(self.device, self.problem.element, self.given, 0, report)
        finite = self.device.download(report)[:, 2].all()
        self.device.recycle()
        return finite

    def problem_of(self, heads):
        p, h = self.problem, heads[0]
        q, k = p.query_head[h] // p.q.size, p.key_head[h] // p.k.size
        return dataclasses.replace(p, q=p.q.placed(q), k=p.k.placed(k), v=p.v.placed(k))

    def result(self, _shapes):
        return tuple(out.result() for out in self.outputs)
