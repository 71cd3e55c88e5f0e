"""Every check of the caller's input and every message. Nothing here allocates more than a few numbers per head."""

import math
import operator
from dataclasses import dataclass

import numpy as np
from numba import prange

from ._jit import cpu_kernel
from .kernels.scalar import LOG2_E, widen
from .kernels.simd import dot
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


@dataclass(frozen=True)
class Options:
    """The caller's choices, checked. `window` None is "auto", 0 no near field; `proj_dim` None is no projection."""

    rank: int | None
    tol: float | None
    window: int | None
    proj_dim: int | None
    projection: str
    calibrate: bool
    method: str


def options(rank, tol, window, proj_dim, method, projection="pca", calibrate=True, *, n, m, d):
    """Check the choices that do not depend on the arrays' values, against N, M and D."""
    return Options(
        rank=None if rank is None else whole("rank", rank, 1),
        tol=None if tol is None else positive("tol", tol),
        window=None if isinstance(window, str) and window == "auto" else _window(window, max(n, m)),
        proj_dim=None if proj_dim is None else whole("proj_dim", proj_dim, 1, d, high_name=f"the head dimension {d}"),
        projection=choice("projection", projection, ("pca", "srht", "gaussian", "orthogonal")),
        calibrate=flag("calibrate", calibrate),
        method=choice("method", method, ("auto", "pda", "exact")),
    )


def _window(window, length):
    if isinstance(window, str):
        raise ValueError(f"window must be 'auto' or an integer, got {window!r}")
    return whole("window", window, 0, max(length - 1, 0), high_name=f"the sequence length less one, {length - 1}")


# --- arrays ---


def float_array(name, value):
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array of {_NAMES}, got {type(value).__name__}")
    if value.dtype.name not in ("float16", "float32", "float64", "bfloat16"):
        raise TypeError(f"{name} must be an array of {_NAMES}, got dtype {value.dtype}")
    if not value.dtype.isnative:
        raise TypeError(f"{name} must be in native byte order, got dtype {value.dtype.str}")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array; masked arrays are not supported")
    if value.ndim < 2:
        raise ValueError(f"{name} must have at least two axes (..., tokens, dim), got shape {value.shape}")
    return value.view(np.ndarray)


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
    return array.view({"float16": np.uint16, "bfloat16": np.int16}.get(array.dtype.name, array.dtype))


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


def build_problem(q, k, v, scale, seed):
    """Check q, k and v and flatten them; returns (problem, leading shape of the output, dtype of the output)."""
    q, k, v = float_array("q", q), float_array("k", k), float_array("v", v)
    same_dtype(q=q, k=k, v=v)
    lead = shapes(q.shape, k.shape, v.shape)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else positive("scale", scale)
    seed = whole("seed", seed, 0, 2**63 - 1, high_name="2**63 - 1")
    dtype = q.dtype
    element = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    if scale * LOG2_E > float(np.finfo(element).max):
        raise ValueError(f"scale must be representable in {element}, got {scale!r}")
    query_head, key_head = _head_maps(q.shape[:-2], k.shape[:-2], lead)
    q, k, v = (_writable_alias(bits(x).reshape(math.prod(x.shape[:-2]), *x.shape[-2:])) for x in (q, k, v))
    return Problem(q, k, v, query_head, key_head, element, scale, seed), lead, dtype


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
    """`out` must be a writable array of the right shape and dtype that shares no memory with an input."""
    plain_array("out", out)
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    if out.dtype != dtype:
        raise TypeError(f"out must have dtype {dtype}, like q, got {out.dtype}")
    if _overlaps_itself(out):
        raise ValueError("out must have room for every element, got an array whose elements share memory")
    if not out.flags.writeable:
        raise ValueError("out must be writable, got a read-only array")
    for name, array in inputs.items():
        if np.may_share_memory(out, array) and _shares_memory(out, array):
            raise ValueError(f"out must not overlap {name}: {name} is still read while out is written")


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


# --- values: one scan finds what is not finite, the range of every value column, and the longest rows ---


@cpu_kernel
def _scan_cpu(x, low, high, square, total, finite):
    heads, n, columns = x.shape
    pieces = finite.shape[1]
    for item in prange(heads * pieces):
        h, piece = item // pieces, item % pieces
        zero = low.dtype.type(0)
        longest, together = 0.0, 0.0
        row, spoiled = np.empty((1, columns)), np.zeros(columns, low.dtype)  # squares of float32 may overflow
        for d in range(columns):
            low[h, piece, d] = np.inf
            high[h, piece, d] = -np.inf
        for i in range(piece * _PIECE, min(n, (piece + 1) * _PIECE)):
            for d in range(columns):
                value = low.dtype.type(widen(x[h, i, d]))
                row[0, d] = value
                spoiled[d] += value * zero  # NaN as soon as one value is not finite
                low[h, piece, d] = value if value < low[h, piece, d] else low[h, piece, d]
                high[h, piece, d] = value if value > high[h, piece, d] else high[h, piece, d]
            length = dot(row, 0, row, 0, columns)
            longest = length if length > longest else longest
            together += length
        square[h, piece], total[h, piece] = longest, together
        finite[h, piece] = True
        for d in range(columns):
            finite[h, piece] &= spoiled[d] == 0


@dataclass(frozen=True)
class Ranges:
    """What one pass over the inputs found out."""

    low: np.ndarray  # (key heads, E): smallest value of each column of v
    high: np.ndarray
    slip: np.ndarray  # (heads,): root mean square error of an output row that rounding alone may cause
    half_unit: float  # relative error of rounding to the dtype of the output

    def rounding(self, head, n, size):
        """Relative error that rounding alone may cause in n rows of one head whose Frobenius norm is `size`."""
        return math.hypot(self.slip[head] * math.sqrt(n) / size, self.half_unit) if size > 0 else 0.0


def scan(problem, dtype, *, check_finite):
    """One pass over q, k and v; raises a ValueError if one is not finite, or so large that a sum would overflow."""
    longest, typical = {}, {}
    for name in ("q", "k", "v"):
        x = getattr(problem, name)
        shape = (x.shape[0], max(1, -(-x.shape[1] // _PIECE)))
        low, high = (np.empty((*shape, x.shape[2]), problem.element) for _ in range(2))
        square, total, finite = np.empty(shape), np.empty(shape), np.empty(shape, np.bool_)
        _scan_cpu(x, low, high, square, total, finite)
        if check_finite and not finite.all():
            place = _where(x, finite)
            raise ValueError(f"{name} must be finite, got NaN or infinity{place}; check_finite=False skips this test")
        longest[name] = np.sqrt(square.max(axis=1, initial=0))
        typical[name] = np.sqrt(total.sum(axis=1) / max(x.shape[1], 1))
    if check_finite:
        _check_range(problem, longest)
    # A logit of size s |q| |k|, summed in D steps, is off by sqrt(D) eps times its size, the output by twice that.
    logits = problem.scale * typical["q"][problem.query_head] * longest["k"][problem.key_head]
    epsilon = float(np.finfo(problem.element).eps)
    slip = epsilon * (2.0 + math.sqrt(problem.q.shape[2]) * logits) * typical["v"][problem.key_head]
    half_unit = {"float16": 2.0**-11, "bfloat16": 2.0**-9}.get(dtype.name, 0.0)
    return Ranges(low.min(axis=1), high.max(axis=1), slip, half_unit)


def _check_range(problem, longest):
    """Sums of M values and logits must stay finite in the arithmetic of the call."""
    limit = float(np.finfo(problem.element).max) / 8
    q, k, v = (float(longest[name].max(initial=0.0)) for name in ("q", "k", "v"))
    if v * problem.v.shape[1] > limit:
        raise ValueError(
            f"v must be small enough for sums over {problem.v.shape[1]:,} keys in {problem.element}, got {v:.3g}"
        )
    factor = problem.scale * LOG2_E
    if max(q * factor, k, q * factor * k) > limit:
        raise ValueError(
            f"scale * q . k must be small enough for {problem.element}, got scale {problem.scale:.3g}, rows of q up to "
            f"{q:.3g} and of k up to {k:.3g} long"
        )


def _where(x, finite):
    head, piece = np.argwhere(~finite)[0]
    rows = x[head, piece * _PIECE : (piece + 1) * _PIECE]
    rows = rows.view({"uint16": np.float16}.get(rows.dtype.name, rows.dtype))
    if rows.dtype == np.int16:
        bad = (rows & 0x7F80) == 0x7F80
    else:
        bad = ~np.isfinite(rows)
    row, column = np.argwhere(bad)[0]
    place = f"token {piece * _PIECE + row}, column {column}"
    return f" at {place}" if x.shape[0] == 1 else f" at head {head}, {place}"
