"""2^x, the widening of 16-bit floats, the hash, the random permutation and the normal draws."""

import math

import numba
import numpy as np
import pytest
from scipy import stats

from pda_numba.kernels import scalar


@numba.njit(error_model="numpy")
def _exp2_all(x, out):
    for i in range(x.shape[0]):
        out[i] = scalar.exp2(x[i])


@numba.njit
def _widen_all(x, out):
    for i in range(x.shape[0]):
        out[i] = scalar.widen(x[i])


@numba.njit
def _hash_all(seed, head, stage, count, out):
    for i in range(count):
        out[i] = scalar.hash64(seed, head, stage, i)


@numba.njit
def _uniform_all(seed, head, stage, out):
    for i in range(out.shape[0]):
        out[i] = scalar.uniform(seed, head, stage, i)


@numba.njit
def _normal_all(seed, head, stage, out):
    for i in range(out.shape[0]):
        out[i] = scalar.normal(seed, head, stage, i)


@numba.njit
def _permute_all(size, seed, head, stage, out):
    for i in range(size):
        out[i] = scalar.permuted(i, size, seed, head, stage)


def exp2(x):
    out = np.empty_like(x)
    _exp2_all(x, out)
    return out


def _true_exp2(x):
    """2^x correctly rounded enough to judge 2 ulp: in a longer float than x has."""
    return np.exp2(x.astype(np.longdouble if x.dtype == np.float64 else np.float64))


# The normal range of 2^x ends at the smallest normal exponent; above the largest whole exponent the result is capped.
RANGES = {np.float32: (-126.0, 127.0), np.float64: (-1022.0, 1023.0)}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2_is_within_two_ulp(dtype, rng):
    low, high = RANGES[dtype]
    whole = np.arange(low, high + 0.5)
    near_halves = np.nextafter(whole[:-1] + 0.5, whole[:-1])
    parts = [np.linspace(low, high, 400_001), whole, near_halves, rng.uniform(-1, 1, 200_000), [0.0, -0.0]]
    x = np.concatenate(parts).astype(dtype)
    true = _true_exp2(x)
    ulp = np.spacing(true.astype(dtype)).astype(true.dtype)
    assert np.max(np.abs(exp2(x).astype(true.dtype) - true) / ulp) <= 2.0  # the claim of the docstring


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2_outside_the_normal_range(dtype):
    low, high = RANGES[dtype]
    below = np.array([-np.inf, -1e30, 2 * low, low - 20, low - 0.5, np.nextafter(dtype(low), dtype(-np.inf))], dtype)
    assert (exp2(below) == 0).all()  # results that would be denormal are flushed, so nothing slows down
    assert exp2(np.array([low], dtype))[0] == np.finfo(dtype).tiny
    above = exp2(np.array([high, high + 0.25, 1e30, np.inf], dtype))
    assert np.isfinite(above).all()
    assert (above >= 2.0**high * (1 - 4 * np.finfo(dtype).eps)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2_of_nan_is_nan(dtype):
    assert np.isnan(exp2(np.array([np.nan, -np.nan], dtype))).all()


def test_exp2_agrees_outside_compiled_code():
    x = np.linspace(-30, 30, 301)
    assert [scalar.exp2(a) for a in x] == pytest.approx(list(2.0**x), rel=4 * np.finfo(np.float64).eps)  # 2 ulp
    singles = x.astype(np.float32)
    interpreted = np.array([scalar.exp2(a) for a in singles])
    assert interpreted.dtype == np.float32
    np.testing.assert_allclose(interpreted, 2.0 ** singles.astype(float), rtol=2.4e-7)  # 2 ulp of float32


@numba.njit
def _fma_all(a, b, c, out):
    for i in range(a.shape[0]):
        out[i] = scalar.fma(a[i], b[i], c[i])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fma_rounds_once(dtype, rng):
    """(1 + e)(1 - e) - 1 = -e^2: with two roundings it would be zero."""
    digits = np.finfo(dtype).nmant
    e = (0.5 ** rng.integers(digits // 2 + 1, digits, 100)).astype(dtype)
    one, out = np.ones(100, dtype), np.empty(100, dtype)
    _fma_all(one + e, one - e, -one, out)
    assert (out == -e * e).all()
    assert scalar.fma(2.0, 3.0, 4.0) == 10.0


def test_widen_float16_for_every_pattern():
    bits = np.arange(65536).astype(np.uint16)
    out = np.empty(65536, np.float32)
    _widen_all(bits, out)
    true = bits.view(np.float16).astype(np.float32)
    finite = ~np.isnan(true)
    assert np.isnan(out[~finite]).all()
    assert (out[finite].view(np.uint32) == true[finite].view(np.uint32)).all()  # the sign of zero too


def test_widen_bfloat16_for_every_pattern():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.arange(65536).astype(np.uint16)
    out = np.empty(65536, np.float32)
    _widen_all(bits.view(np.int16), out)
    true = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    finite = ~np.isnan(true)
    assert np.isnan(out[~finite]).all()
    assert (out[finite].view(np.uint32) == true[finite].view(np.uint32)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_widen_leaves_wide_floats_alone(dtype):
    x = np.array([0.0, -0.0, 1.5, np.inf, np.finfo(dtype).smallest_subnormal], dtype)
    out = np.empty_like(x)
    _widen_all(x, out)
    assert out.tobytes() == x.tobytes()


def test_widen_means_the_same_to_the_interpreter():
    """So it runs on the CUDA simulator."""
    half = np.array([1.5, -(2.0**-20), 65504.0], np.float16)
    assert [scalar.widen(x) for x in half.view(np.uint16)] == half.astype(np.float32).tolist()
    assert scalar.widen(np.int16(0x3FC0)) == 1.5  # the upper half of a float32
    assert scalar.widen(1.0) == 1.0


# --- random numbers. All seeds are fixed, so these tests either always pass or always fail; the levels say how likely a
# --- perfect generator would have been to fail when the test was written.

LEVEL = 1e-4


def test_every_bit_of_the_hash_is_fair():
    count = 1 << 16
    words = np.empty(count, np.uint64)
    for seed, head, stage in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**62, 1000, 52)):
        _hash_all(seed, head, stage, count, words)
        assert len(np.unique(words)) == count
        ones = ((words[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).sum(axis=0)
        z = (ones - count / 2) / math.sqrt(count / 4)
        # 64 bits, 5 streams: two-sided normal quantile at LEVEL / 320 each
        assert np.abs(z).max() < stats.norm.isf(LEVEL / 640)


def test_hash_avalanche():
    """One more in seed, head, stage or index flips each output bit with probability one half."""
    count = 4096
    base = np.array([_one_hash(s, 3, 5, 7) for s in range(count)], np.uint64)
    for other in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
        moved = [_one_hash(s + other[0], 3 + other[1], 5 + other[2], 7 + other[3]) for s in range(count)]
        differ = base ^ np.array(moved, np.uint64)
        flips = ((differ[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).sum(axis=0)
        z = (flips - count / 2) / math.sqrt(count / 4)
        assert np.abs(z).max() < stats.norm.isf(LEVEL / 512)  # 4 x 64 two-sided comparisons


@numba.njit
def _one_hash(seed, head, stage, index):
    return scalar.hash64(seed, head, stage, index)


@pytest.mark.parametrize("stream", [(0, 0, 0), (1, 0, 0), (0, 7, 18), (123456789, 2, 36)])
def test_uniform_is_uniform(stream):
    u = np.empty(100_000)
    _uniform_all(*stream, u)
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > LEVEL
    pairs = np.histogram2d(u[:-1:2], u[1::2], bins=16, range=[[0, 1], [0, 1]])[0]  # neighbouring draws are independent
    assert stats.chisquare(pairs.ravel()).pvalue > LEVEL


def test_streams_are_independent():
    count = 50_000
    streams = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)]
    u = np.empty((len(streams), count))
    for i, stream in enumerate(streams):
        _uniform_all(*stream, u[i])
    correlation = np.corrcoef(u)[np.triu_indices(len(streams), 1)]
    # correlation of independent samples has standard deviation 1 / sqrt(count); 15 two-sided comparisons
    assert np.abs(correlation).max() < stats.norm.isf(LEVEL / 30) / math.sqrt(count)


def test_normal_is_normal():
    x = np.empty(100_000)
    _normal_all(5, 3, 19, x)
    assert np.isfinite(x).all()
    assert stats.kstest(x, "norm").pvalue > LEVEL
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < stats.norm.isf(LEVEL / 2) / math.sqrt(len(x))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 97, 1000, 1025, 4096, 70_000])
def test_permuted_is_a_permutation(size):
    out = np.empty(size, np.int64)
    for seed, head, stage in ((0, 0, 0), (3, 5, 16)):
        _permute_all(size, seed, head, stage, out)
        assert (np.sort(out) == np.arange(size)).all()


@numba.njit
def _count_places(size, seeds, place, pair):
    for seed in range(seeds):
        first, second = scalar.permuted(0, size, seed, 2, 16), scalar.permuted(1, size, seed, 2, 16)
        place[first] += 1
        pair[first, second] += 1


def test_permutations_are_uniform():
    """Where index 0 lands, and where the pair (0, 1) lands, over many seeds."""
    size = 400
    place, pair = np.zeros(size), np.zeros((size, size))
    _count_places(size, 800_000, place, pair)
    assert stats.chisquare(place).pvalue > LEVEL
    assert stats.chisquare(pair[~np.eye(size, dtype=bool)]).pvalue > LEVEL  # five expected in each cell


@pytest.mark.parametrize("size", [6, 13, 40])
def test_permutations_of_few_are_nearly_uniform(size):
    """The network is a little off on fewer than some hundred positions, where nothing is ever sampled."""
    place, pair = np.zeros(size), np.zeros((size, size))
    _count_places(size, 400_000, place, pair)
    # 0.1 is far above the noise (40 / 400,000 gives 0.01 each) and far below what would matter for a choice of rows
    np.testing.assert_allclose(place / place.mean(), 1.0, atol=0.1)
