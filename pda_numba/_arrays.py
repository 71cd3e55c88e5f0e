"""Arrays of other libraries on the GPU: read where they lie, with results that are arrays of the same library.

An array is on the GPU if its `__dlpack_device__` is a CUDA device, or if it has `__cuda_array_interface__`. Address,
shape and strides come from the latter, or from a DLPack capsule where there is none (bfloat16 of JAX). No library is
imported here: an array of one is proof that it is there.

Kernels read three-axis arrays (heads, tokens, dim) of any strides. Leading axes that do not lie at one stride, such as
those of `x.transpose(1, 2)` of (batch, tokens, heads, dim), are read as several of these, a `Stack` each (`stacked`).
"""

import ctypes
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ._jit import SIMULATED, import_cuda

_LIBRARIES = {"cupy": "cupy", "torch": "torch", "jax": "jax", "jaxlib": "jax", "numba": "numba"}
_CUDA, _CUDA_MANAGED = 2, 13  # device types of DLPack


class _BFloat16:
    """Stands for the dtype of the package ml_dtypes, which need not be installed."""

    name, itemsize, isnative = "bfloat16", 2, True

    def __repr__(self):
        return self.name


BFLOAT16 = _BFloat16()


@dataclass(frozen=True, eq=False)
class GpuArray:
    """An array in device memory, as its library describes it. Strides are in bytes."""

    kind: str  # the library: "cupy", "torch", "jax", "numba" or "other"
    given: Any  # the caller's object
    owner: Any  # what keeps the memory alive
    pointer: int
    shape: tuple
    strides: tuple
    dtype: Any  # NumPy's, or BFLOAT16
    stream: int | None = None  # a handle; None where the library says nothing
    ordinal: int | None = None  # which GPU; None is the current one
    writable: bool = True

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def stored(self):
        """The dtype that kernels see: 16-bit floats as integers (`kernels.scalar.widen`)."""
        return stored_dtype(self.dtype)

    def shadow(self):
        """A NumPy array with the same addresses, to ask where its elements lie; they cannot be read."""
        return np.asarray(_HostMemory(_interface_of(self.pointer, self.shape, self.strides, self.stored), None))


def stored_dtype(dtype):
    """16-bit floats as integers of the same width; anything else as it is."""
    return np.dtype({"float16": np.uint16, "bfloat16": np.int16}.get(dtype.name, dtype))


# --- reading what an array says of itself ---


def describe(name, value):
    """The `GpuArray` that `value` is, or None if it is not on a GPU; raises a TypeError if it cannot be read."""
    if isinstance(value, np.ndarray) or not _on_gpu(value):
        return None
    kind = _kind(value)
    if kind == "jax":
        value.block_until_ready()  # JAX has streams of its own and hands none out
    interface, problem = _interface(value)
    if interface is None:
        interface, problem = _from_dlpack(value, kind)
    if interface is None:
        raise TypeError(f"{name} must be readable in place, got {type(value).__name__}: {problem}")
    if interface.get("mask") is not None:
        raise TypeError(f"{name} must be a plain array; masked arrays are not supported")
    dtype = _dtype(interface["typestr"], value)
    if dtype is None:
        shown = getattr(value, "dtype", interface["typestr"])
        raise TypeError(f"{name} must be an array of float16, float32, float64 or bfloat16, got dtype {shown}")
    shape = tuple(map(int, interface["shape"]))
    pointer, read_only = interface["data"]
    ordinal = _dlpack_device(value)[1]
    return GpuArray(
        kind=kind,
        given=value,
        owner=(value, interface.get("owner")),
        pointer=int(pointer),
        shape=shape,
        strides=tuple(interface.get("strides") or contiguous_strides(shape, dtype.itemsize)),
        dtype=dtype,
        stream=_stream(kind, interface, ordinal),
        ordinal=ordinal,
        writable=not read_only and kind != "jax",
    )


def _on_gpu(value):
    device_type = _dlpack_device(value)[0]
    if device_type is not None:
        return device_type in (_CUDA, _CUDA_MANAGED)
    return _is_numba(value) or hasattr(value, "__cuda_array_interface__")


def _is_numba(value):
    return getattr(value, "__cuda_ndarray__", False)


def _dlpack_device(value):
    if _is_numba(value):
        return None, None
    try:
        return tuple(map(int, value.__dlpack_device__()))
    except Exception:  # no such method, or an array that has no one device
        return None, None


def _kind(value):
    roots = (c.__module__.split(".")[0] for c in type(value).__mro__)
    return next((_LIBRARIES[root] for root in roots if root in _LIBRARIES), "other")


def _interface(value):
    """(the CUDA array interface or None, why there is none)."""
    if SIMULATED and _is_numba(value):  # the simulator's arrays have none
        host = value._ary.__array_interface__
        return {**host, "strides": value._ary.strides}, None
    try:
        return value.__cuda_array_interface__, None
    except Exception as error:  # PyTorch: a tensor that requires grad; JAX: bfloat16
        return None, error


def _dtype(typestr, value):
    if typestr in ("<f2", "<f4", "<f8"):
        return np.dtype(typestr)
    return BFLOAT16 if typestr[1:] == "V2" and str(getattr(value, "dtype", "")).endswith("bfloat16") else None


def contiguous_strides(shape, itemsize):
    return tuple(itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _stream(kind, interface, ordinal):
    if kind == "torch":
        return int(sys.modules["torch"].cuda.current_stream(ordinal).cuda_stream)
    if kind == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return interface.get("stream")


# --- DLPack ---


class _Tensor(ctypes.Structure):
    """DLTensor of DLPack's C header."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """DLManagedTensor."""


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]
_FLOAT, _BFLOAT = 2, 4  # type codes
_CAPSULE = b"dltensor"

_address_of = ctypes.pythonapi.PyCapsule_GetPointer
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _from_dlpack(value, kind):
    """(a description like the CUDA array interface, None), or (None, why there is none)."""
    try:
        # -1: no synchronisation; all work is put on the stream that the library works on anyway.
        capsule = value.__dlpack__() if kind == "jax" else value.__dlpack__(stream=-1)
    except Exception as error:
        return None, error
    tensor = _Managed.from_address(_address_of(capsule, _CAPSULE)).tensor
    itemsize = tensor.bits * tensor.lanes // 8
    letter = {_FLOAT: "f", _BFLOAT: "V"}.get(tensor.code, "?")
    strides = [tensor.strides[i] * itemsize for i in range(tensor.ndim)] if tensor.strides else None
    return {
        "shape": tuple(tensor.shape[: tensor.ndim]),
        "strides": strides,
        "typestr": f"<{letter}{itemsize}",
        "data": ((tensor.data or 0) + tensor.byte_offset, False),
        "owner": capsule,  # not marked as used: it lets go of the memory when it dies
    }, None


_EXPORTED: dict[int, tuple] = {}  # what must stay alive until the consumer is done with it


@_Deleter
def _let_go(managed):
    _EXPORTED.pop(ctypes.addressof(managed.contents), None)


class _Exported:
    """A contiguous array in device memory for `from_dlpack` of another library."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return (1, 0) if SIMULATED else (_CUDA, self.array.ordinal or 0)

    def __dlpack__(self, **_wishes):
        array = self.array
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        code = _BFLOAT if array.dtype is BFLOAT16 else _FLOAT
        managed = _Managed(deleter=_let_go)
        managed.tensor = _Tensor(
            array.pointer, *self.__dlpack_device__(), array.ndim, code, 8 * array.dtype.itemsize, 1, shape, None, 0
        )
        address = ctypes.addressof(managed)
        _EXPORTED[address] = managed, shape, array.owner
        return _new_capsule(address, _CAPSULE, None)


# --- results ---


def new_like(array, shape, stream):
    """A new contiguous array of the same library, dtype and GPU (a JAX array only becomes one in `finished`)."""
    if array.kind == "torch":
        return describe("out", array.given.new_empty(shape))
    if array.kind == "cupy":
        return describe("out", sys.modules["cupy"].empty(shape, array.given.dtype))
    dtype = array.dtype if isinstance(array.dtype, np.dtype) else getattr(array.given, "dtype", None)
    memory = import_cuda().device_array(shape, array.stored, stream=stream)
    given = memory.view(dtype) if isinstance(dtype, np.dtype) else memory
    strides = contiguous_strides(shape, array.dtype.itemsize)
    return GpuArray(array.kind, given, memory, address(memory), shape, strides, array.dtype, ordinal=array.ordinal)


def finished(array, device):
    """The caller's object. A JAX array is one only after the work is done: JAX knows no streams but its own."""
    if array.kind != "jax":
        return array.given
    device.synchronize()
    return sys.modules["jax"].dlpack.from_dlpack(_Exported(array))


# --- views that kernels read ---


def address(array):
    """Where a Numba device array begins."""
    return array._ary.ctypes.data if SIMULATED else array.device_ctypes_pointer.value


class _HostMemory:
    """Memory as NumPy's, for the simulator and for questions of place."""

    def __init__(self, interface, owner):
        self.__array_interface__, self.owner = interface, owner


def view(pointer, shape, strides, dtype, owner):
    """A Numba device array over memory that `owner` keeps alive."""
    described = _interface_of(int(pointer) % 2**64, shape, strides, dtype)
    if SIMULATED:
        from numba.cuda.cudadrv.devicearray import FakeCUDAArray

        return FakeCUDAArray(np.asarray(_HostMemory(described, owner)))
    return import_cuda().from_cuda_array_interface(described, owner=owner, sync=False)


def _interface_of(pointer, shape, strides, dtype):
    return {
        "data": (int(pointer), False),
        "shape": tuple(map(int, shape)),
        "strides": tuple(map(int, strides)),
        "typestr": np.dtype(dtype).str,
        "version": 3,
    }


@dataclass(frozen=True)
class Stacks:
    """An array (..., tokens, dim) as stacks of `size` heads each: head h of all is head h % size of stack h // size."""

    array: GpuArray
    shape: tuple  # all heads, tokens, dim
    size: int
    pointers: tuple
    strides: tuple  # of the three axes of a stack
    dtype: Any

    def local(self, stack):
        """One stack (size, tokens, dim)."""
        return self._view(self.pointers[stack], self.size)

    def placed(self, stack):
        """One stack, under the numbers that its heads have among all: only these may be read.

        The address of head 0 may lie outside of the array, as in `pointer - first * stride` of C.
        """
        return self._view(self.pointers[stack] - stack * self.size * self.strides[0], self.shape[0])

    def is_whole(self, element):
        """Are all heads one contiguous array of this dtype?"""
        whole = contiguous_strides(self.shape, element.itemsize)
        return self.dtype == element and self.size == self.shape[0] and self.strides == whole

    def _view(self, pointer, heads):
        return view(pointer, (heads, *self.shape[1:]), self.strides, self.dtype, self.array.owner)

    def cut(self, size):
        """The same in stacks of `size`, a divisor of this one's."""
        steps = range(0, self.size, size)
        pointers = tuple(pointer + i * self.strides[0] for pointer in self.pointers for i in steps)
        strides = _plain_strides((size, *self.shape[1:]), self.strides, self.array.dtype.itemsize)
        return replace(self, size=size, pointers=pointers, strides=strides)


def stacked(array, dtype=None):
    """A `GpuArray` as as few stacks as its strides allow, without a copy; seen as `stored` or as `dtype`."""
    *lead, n, d = array.shape
    size, stride, axis = 1, 0, len(lead) if math.prod(lead) else 0
    while axis and (lead[axis - 1] == 1 or size == 1 or array.strides[axis - 1] == size * stride):
        axis -= 1
        if lead[axis] != 1:
            stride = array.strides[axis] if size == 1 else stride
            size *= lead[axis]
    outer, steps = tuple(lead[:axis]), array.strides[:axis]
    pointers = tuple(
        array.pointer + sum(i * s for i, s in zip(index, steps, strict=True)) for index in np.ndindex(outer)
    )
    strides = _plain_strides((size, n, d), (stride, *array.strides[-2:]), array.dtype.itemsize)
    return Stacks(array, (math.prod(lead), n, d), size, pointers, strides, dtype or array.stored)


def _plain_strides(shape, strides, itemsize):
    """Strides of axes of length one are free: as in a contiguous array, so that it is seen to be one."""
    plain, step = [], itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        plain.append(step if length <= 1 else stride)
        step = plain[-1] * max(length, 1)
    return tuple(reversed(plain))


def numbered(array, first, total):
    """A contiguous Numba array of heads `first`, `first + 1`, ... of `total`, under these numbers (see `placed`)."""
    strides = contiguous_strides(array.shape, array.dtype.itemsize)
    return view(address(array) - first * strides[0], (total, *array.shape[1:]), strides, array.dtype, array)
