"""Scalar bodies used by every kernel, on both devices: 2^x, the random hash, a random permutation, 16-bit floats."""

import math

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from .._jit import shared

LOG2_E = 1.4426950408889634

# (2^f - 1)/f on [-1/2, 1/2], minimax polynomials, lowest order first: relative error of 2^f below 1e-8 with
# six terms (float32 rounds at 6e-8) and below 1e-17 with eleven (float64 rounds at 1e-16).
_F32 = tuple(
    np.float32(c)
    for c in (
        0.69314718802622878106,
        0.24022650760568126945,
        0.055503571142190778186,
        0.0096180825572778514913,
        0.0013390863364671234381,
        0.00015453162945120690177,
    )
)
_F64 = (
    0.69314718055994530942,
    0.2402265069591009822,
    0.055504108664821594339,
    0.0096181291076068885273,
    0.001333355814641693531,
    0.00015403530441736050155,
    0.000015252733829836118394,
    1.3215442587921689653e-6,
    1.0178062445845773521e-7,
    7.0725859492692236999e-9,
    4.4549605981865183938e-10,
)
_F32_LOW, _F32_HIGH = np.float32(-126.0), np.float32(127.0)
_F64_LOW, _F64_HIGH = -1022.0, 1023.0
# Added to a small number these leave the nearest integer in the last bits, which a conversion would take longer for.
_F32_SHIFT, _F64_SHIFT = np.float32(1.5 * 2**23), np.float64(1.5 * 2**52)


def fma(a, b, c):
    """a b + c, rounded once in compiled code."""
    return a * b + c


@intrinsic
def _fused(typingctx, a, b, c):
    return a(a, b, c), lambda context, builder, signature, arguments: builder.fma(*arguments)


@overload(fma)
def _fma_compiled(a, b, c):
    return lambda a, b, c: _fused(a, b, c)


def exp2(x):
    """2^x within 2 units in the last place; 0 below the normal range (so also at minus infinity), capped above it."""
    return _exp2_float32(x) if isinstance(x, np.float32) else _exp2_float64(x)


@overload(exp2)
def _exp2_by_type(x):
    return _exp2_float32 if x == types.float32 else _exp2_float64


@shared
def _exp2_float32(x):
    # x = n + f with |f| <= 1/2: 2^x = 2^f * 2^n, and n goes straight from the last bits of a sum into the exponent's.
    y = _F32_LOW if x < _F32_LOW else x
    y = _F32_HIGH if y > _F32_HIGH else y
    shifted = y + _F32_SHIFT
    f = y - (shifted - _F32_SHIFT)
    p = fma(f, _F32[5], _F32[4])
    p = fma(f, p, _F32[3])
    p = fma(f, p, _F32[2])
    p = fma(f, p, _F32[1])
    p = fma(f, p, _F32[0])
    p = fma(f, p, np.float32(1.0))
    power = np.int32((np.float32(shifted).view(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0.0) if x < _F32_LOW else p * power


@shared
def _exp2_float64(x):
    y = _F64_LOW if x < _F64_LOW else x
    y = _F64_HIGH if y > _F64_HIGH else y
    shifted = y + _F64_SHIFT
    f = y - (shifted - _F64_SHIFT)
    p = fma(f, _F64[10], _F64[9])
    p = fma(f, p, _F64[8])
    p = fma(f, p, _F64[7])
    p = fma(f, p, _F64[6])
    p = fma(f, p, _F64[5])
    p = fma(f, p, _F64[4])
    p = fma(f, p, _F64[3])
    p = fma(f, p, _F64[2])
    p = fma(f, p, _F64[1])
    p = fma(f, p, _F64[0])
    p = fma(f, p, 1.0)
    power = np.int64((np.float64(shifted).view(np.int64) + np.int64(1023)) << np.int64(52)).view(np.float64)
    return 0.0 if x < _F64_LOW else p * power


# --- counter-based random numbers: a draw is a pure function of (seed, head, stage, index) ---

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@shared
def _mix(z):
    # The finaliser of SplitMix64 (Steele, Lea and Flood 2014).
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


@shared
def hash64(seed, head, stage, index):
    """64 random bits for one draw."""
    z = _mix(np.uint64(seed) + _GOLDEN)
    z = _mix(z ^ (np.uint64(head) * _GOLDEN + np.uint64(stage)))
    return _mix(z + np.uint64(index) * _GOLDEN)


@shared
def uniform(seed, head, stage, index):
    """A float64 in [0, 1)."""
    return float(hash64(seed, head, stage, index) >> _S11) * (1.0 / 9007199254740992.0)


def cos_turns(u):
    """cos(2 pi u) for 0 <= u < 1."""
    return math.cos(2.0 * math.pi * u)


overload(cos_turns)(lambda u: cos_turns)


@overload(cos_turns, target="cuda")
def _cos_turns_cuda(u):
    from numba.cuda import libdevice

    return lambda u: libdevice.cospi(2.0 * u)  # `cos` keeps local memory for arguments far from zero


@shared
def normal(seed, head, stage, index):
    """A float64 of the standard normal distribution (Box and Muller 1958)."""
    u = 1.0 - uniform(seed, head, stage, 2 * index)  # in (0, 1]
    return math.sqrt(-2.0 * math.log(u)) * cos_turns(uniform(seed, head, stage, 2 * index + 1))


@shared
def permuted(index, size, seed, head, stage):
    """Where a random permutation of range(size) sends `index`: distinct draws that need no memory.

    A Feistel network on the next even number of bits, walked until it lands inside the range again
    (Black and Rogaway 2002); on average less than four rounds of the walk.
    """
    half = np.uint64(1)
    while (np.uint64(1) << (half + half)) < np.uint64(size):
        half += np.uint64(1)
    mask = (np.uint64(1) << half) - np.uint64(1)
    x = np.uint64(index)
    while True:
        left, right = x >> half, x & mask
        for turn in range(4):
            left, right = right, (left ^ hash64(seed, head, stage + turn, right)) & mask
        x = (left << half) | right
        if x < np.uint64(size):
            return np.int64(x)


# --- 16-bit inputs are widened as they are loaded: float16 travels as uint16, bfloat16 as int16 ---


def widen(x):
    """A stored element as the arithmetic type of its kernel."""
    if isinstance(x, np.uint16):
        return _widen_float16(x)
    return _widen_bfloat16(x) if isinstance(x, np.int16) else x


@overload(widen)
def _widen_by_type(x):
    if x == types.uint16:
        return _widen_float16
    if x == types.int16:
        return _widen_bfloat16
    return lambda x: x


_HALF_SCALE = np.float32(2.0**112)


@shared
def _widen_float16(x):
    # Shift exponent and fraction into place, let one multiplication rebias the exponent (denormals included).
    bits = np.int32(x)
    magnitude = np.int32((bits & np.int32(0x7FFF)) << np.int32(13)).view(np.float32) * _HALF_SCALE
    special = np.int32(((bits & np.int32(0x7FFF)) << np.int32(13)) | np.int32(0x7F800000)).view(np.float32)
    value = special if (bits & np.int32(0x7C00)) == np.int32(0x7C00) else magnitude
    return -value if bits & np.int32(0x8000) else value


@shared
def _widen_bfloat16(x):
    return np.int32(np.int32(x) << np.int32(16)).view(np.float32)
