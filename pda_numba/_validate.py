"""Every check of the caller's input and every message. Nothing here allocates more than a few numbers per head."""

import math
import operator

import numpy as np

from . import _arrays
from .kernels.scalar import LOG2_E
from .problem import Problem

_NAMES = "float16, float32, float64 or bfloat16"
_PIECE = 4096  # rows per piece of the scan below

# --- numbers and words ---


def choice(name, value, options):
    if not isinstance(value, str) or value not in options:
        listed = ", ".join(repr(o) for o in options)
        raise ValueError(f"{name} must be one of {listed}, got {value!r}")
    return value


def whole(name, value, low, high=None, *, high_name=None):
    """`value` as an int in low .. high."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}") from None
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if number < low or (high is not None and number > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high_name or high}"
        raise ValueError(f"{name} must be {limit}, got {number}")
    return number


def positive(name, value):
    """`value` as a finite float above zero."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return number


def flag(name, value):
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")
    return bool(value)


# --- arrays ---


def _type(value):
    """What the type of a value is called, with its library."""
    kind = type(value)
    root = kind.__module__.split(".")[0]
    return kind.__name__ if root in ("builtins", "numpy") else f"{root}.{kind.__name__}"


def float_array(name, value, *, wanted="a NumPy array"):
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name} must be {wanted} of {_NAMES}, got {_type(value)}")
    if value.dtype.name not in ("float16", "float32", "float64", "bfloat16"):
        raise TypeError(f"{name} must be an array of {_NAMES}, got dtype {value.dtype}")
    if not value.dtype.isnative:
        raise TypeError(f"{name} must be in native byte order, got dtype {value.dtype.str}")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array; masked arrays are not supported")
    if value.ndim < 2:
        raise ValueError(f"{name} must have at least two axes (..., tokens, dim), got shape {value.shape}")
    return value.view(np.ndarray)


def any_array(name, value):
    """A NumPy array, or the description of an array on a GPU."""
    array = _arrays.describe(name, value)
    if array is None:
        return float_array(name, value, wanted="a NumPy array or an array on a GPU,")
    if array.ndim < 2:
        raise ValueError(f"{name} must have at least two axes (..., tokens, dim), got shape {array.shape}")
    return array


def same_place(**arrays):
    """All on the host, or all on one GPU."""
    (first, a), *others = arrays.items()
    for name, b in others:
        if isinstance(a, np.ndarray) != isinstance(b, np.ndarray):
            raise TypeError(
                f"{first} and {name} must both be NumPy arrays or both on a GPU, got {_where_is(a)} and {_where_is(b)}"
            )
        if not isinstance(a, np.ndarray) and a.ordinal != b.ordinal and None not in (a.ordinal, b.ordinal):
            raise TypeError(f"{first} and {name} must be on the same GPU, got GPU {a.ordinal} and GPU {b.ordinal}")


def _where_is(array):
    return "a NumPy array" if isinstance(array, np.ndarray) else f"{_type(array.given)} on a GPU"


def same_dtype(**arrays):
    (first, a), *others = arrays.items()
    for name, b in others:
        if a.dtype != b.dtype:
            raise TypeError(f"{first} and {name} must have the same dtype, got {a.dtype} and {b.dtype}")


def shapes(q, k, v):
    """The output's leading shape from shapes `q (..., Hq, N, D)`, `k (..., Hkv, M, D)`, `v (..., Hkv, M, E)`."""
    if not len(q) == len(k) == len(v):
        raise ValueError(f"q, k and v must have the same number of axes, got shapes {q}, {k} and {v}")
    if q[-1] != k[-1]:
        raise ValueError(f"q and k must have the same last axis, got shapes {q} and {k}")
    if q[-1] == 0:
        raise ValueError(f"q and k must have at least one column, got shapes {q} and {k}")
    if k[-2] != v[-2]:
        raise ValueError(f"k and v must have the same number of keys (axis -2), got shapes {k} and {v}")
    if k[:-2] != v[:-2]:
        raise ValueError(f"k and v must have the same leading axes, got shapes {k} and {v}")
    if k[-2] == 0:
        raise ValueError(
            f"k and v must hold at least one key, got shapes {k} and {v}: softmax over no keys is undefined"
        )
    if len(q) == 2:
        return ()
    if q[-3] % k[-3] if k[-3] else q[-3]:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key heads (axis -3), got {q[-3]} and "
            f"{k[-3]} from shapes {q} and {k}"
        )
    try:
        batch = np.broadcast_shapes(q[:-3], k[:-3])
    except ValueError:
        raise ValueError(f"the leading axes of q and k must broadcast, got shapes {q} and {k}") from None
    return (*batch, q[-3])


def bits(array):
    """16-bit floats as integers of the same width (see kernels.scalar.widen); anything else as it is."""
    return array.view(_arrays.stored_dtype(array.dtype))


class _Alias:
    """The memory of an array, said to be writable."""

    def __init__(self, array):
        self.array = array  # keeps the memory alive
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _writable_alias(array):
    """A view of a read-only array (a memory map, say) that compiled code takes for an ordinary one.

    Kernels only read their inputs, but Numba would compile every one of them a second time for a read-only type.
    """
    return array if array.flags.writeable or not array.size else np.asarray(_Alias(array))


def build_problem(q, k, v, scale, seed, *, accept=float_array):
    """Check q, k and v and flatten them; returns (problem, leading shape of the output, dtype of the output).

    With `accept=any_array` they may be on a GPU: the problem then holds them as `_arrays.Stacks`.
    """
    q, k, v = accept("q", q), accept("k", k), accept("v", v)
    same_place(q=q, k=k, v=v)
    same_dtype(q=q, k=k, v=v)
    lead = shapes(q.shape, k.shape, v.shape)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else positive("scale", scale)
    seed = whole("seed", seed, 0, 2**63 - 1, high_name="2**63 - 1")
    dtype = q.dtype
    element = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    if scale * LOG2_E > float(np.finfo(element).max):
        raise ValueError(f"scale must be representable in {element}, got {scale!r}")
    query_head, key_head = _head_maps(q.shape[:-2], k.shape[:-2], lead)
    flatten = _flat if isinstance(q, np.ndarray) else _arrays.stacked
    q, k, v = flatten(q), flatten(k), flatten(v)
    if flatten is not _flat:  # keys and values are found under one number
        k, v = k.cut(min(k.size, v.size)), v.cut(min(k.size, v.size))
    return Problem(q, k, v, query_head, key_head, element, scale, seed), lead, dtype


def _flat(array):
    return _writable_alias(bits(array).reshape(math.prod(array.shape[:-2]), *array.shape[-2:]))


def _head_maps(q_lead, k_lead, lead):
    """For every output head, its place among the flattened heads of q and of k (broadcasting and grouped queries)."""
    if not lead:
        return np.zeros(1, np.int64), np.zeros(1, np.int64)
    group = lead[-1] // max(k_lead[-1], 1)
    q_index = np.arange(math.prod(q_lead)).reshape(q_lead)
    k_index = np.repeat(np.arange(math.prod(k_lead)).reshape(k_lead), group, axis=-1)
    return (np.ascontiguousarray(np.broadcast_to(x, lead)).reshape(-1) for x in (q_index, k_index))


def plain_array(name, value):
    """`value` as an ordinary ndarray."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, got {type(value).__name__}")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array; masked arrays are not supported")
    return value.view(np.ndarray)


def check_out(out, shape, dtype, **inputs):
    """`out` must be a writable array of the right shape and dtype that shares no memory with an input.

    Returns it, or its description where the inputs (NumPy arrays or `GpuArray`s) are on a GPU.
    """
    on_gpu = not all(isinstance(array, np.ndarray) for array in inputs.values())
    array = _arrays.describe("out", out) if on_gpu else plain_array("out", out)
    if array is None:
        raise TypeError(f"out must be on a GPU, like q, got {_type(out)}")
    if array.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {array.shape}")
    if array.dtype != dtype:
        raise TypeError(f"out must have dtype {dtype}, like q, got {array.dtype}")
    memory, *read = (x.shadow() if on_gpu else x for x in (array, *inputs.values()))
    if _overlaps_itself(memory):
        raise ValueError("out must have room for every element, got an array whose elements share memory")
    if not (array.writable if on_gpu else array.flags.writeable):
        raise ValueError("out must be writable, got a read-only array")
    for name, other in zip(inputs, read, strict=True):
        if np.may_share_memory(memory, other) and _shares_memory(memory, other):
            raise ValueError(f"out must not overlap {name}: {name} is still read while out is written")
    return array if on_gpu else out


def output_to_judge(out, shape, q, **_others):
    """`out` must be an array of the right shape and dtype, beside `q`; returns it, or its description on a GPU."""
    on_gpu = not isinstance(q, np.ndarray)
    array = _arrays.describe("out", out) if on_gpu else plain_array("out", out)
    if array is None:
        raise TypeError(f"out must be on a GPU, like q, got {_type(out)}")
    if array.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {array.shape}")
    same_dtype(out=array, q=q)
    return array


def _overlaps_itself(array):
    """Do two elements of one array lie over each other?"""
    extent = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < extent:
            return True
        extent += stride * (length - 1)
    return False


def _shares_memory(a, b):
    try:
        return np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True  # too tangled to tell: treated as overlapping
