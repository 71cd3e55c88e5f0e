"""Features, nearest centres and squares on the device, against the CPU drivers."""

import contextlib
import itertools

import numpy as np
import problems
import pytest
import simulator
from common import host, on_cuda

from pda_numba.kernels import staging, tile
from pda_numba.kernels.simd import padded
from pda_numba.products import features, nearest, squares

pytestmark = pytest.mark.cudasim


def tiles(rng, heads, rows, dim, dtype=np.float32):
    out = np.zeros((heads, padded(rows), dim), dtype)
    out[:, :rows] = rng.standard_normal((heads, rows, dim))
    return out


def make(rng, n, d, heads=2, dtype=np.float32):
    q, k, v = (rng.standard_normal((heads, n, c)).astype(dtype) for c in (d, d, 3))
    problem = problems.flat(q, k, v)
    return problem, on_cuda(problem), problems.heads(problem)


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize(("d", "dtype"), [(9, np.float32), (70, np.float32), (5, np.float64), (8, np.float16)])
def test_features(projected, d, dtype, rng):
    problem, device, heads = make(rng, 20, d, dtype=dtype)
    up, element = device.device.upload, problem.element
    rank, which = np.array([37, 3]), rng.integers(20, size=(2, 5))
    lse = rng.standard_normal((2, 5)).astype(element)
    landmarks = tiles(rng, 2, 37, 4 if projected else d, element)
    basis = tiles(rng, 2, 4, d, element) if projected else np.empty((2, 0, d), element)
    arrays = which, lse, landmarks, rank, basis
    expected = features(problem, heads, *arrays)
    got = host(features(device, heads, *(up(x) for x in arrays)))
    tolerance = 1e-11 if element == np.float64 else 1e-4  # exp of a float32 logit of size 10
    for h, r in enumerate(rank):
        np.testing.assert_allclose(got[h, :r], expected[h, :r], rtol=tolerance)
        assert not got[h, r:].any()


def test_nearest(rng):
    problem, device, heads = make(rng, 90, 6)
    centres, count, which = tiles(rng, 2, 35, 6), np.array([35, 1]), rng.integers(90, size=(2, 70))
    expected = nearest(problem, heads, which, centres, count)
    got = nearest(device, heads, *(device.device.upload(x) for x in (which, centres, count)))
    np.testing.assert_array_equal(host(got), expected)


def test_squares(rng):
    problem, device, heads = make(rng, 70, 6)
    directions = tiles(rng, 2, 16, 6)
    expected = squares(problem, heads, directions)
    np.testing.assert_allclose(host(squares(device, heads, device.device.upload(directions))), expected, rtol=1e-5)


@pytest.mark.parametrize("element", [np.float32, np.float64])
def test_a_register_block_at_once_is_that_as_written(element, rng):
    """For every thread: b keys or a value columns by a queries."""
    a, width = tile.geometry(element).a, tile.geometry(element).columns
    rows, buffers = (rng.standard_normal((5, n)).astype(element) for n in (staging.THREADS, width))
    for b, t in itertools.product((staging.KEYS_PER_THREAD, a), range(staging.THREADS)):
        query = staging.swizzle(3, staging.block_query(0, t, a), staging.THREADS)
        key = staging.swizzle(3, staging.block_key(0, t, a), a * b)
        start, found = rng.standard_normal(a * b).astype(element), []
        for way in (contextlib.nullcontext, simulator.as_written):
            acc, left, right = start.copy(), np.empty(a, element), np.empty(a, element)
            with way():
                tile._outer(acc, left, right, rows, 2, query, buffers, 4, key, a, b)
            found.append((acc, left, right[:b]))
        for one, other in zip(*found, strict=True):
            np.testing.assert_array_equal(one, other)


def test_every_barrier_is_needed(rng):
    _, device, heads = make(rng, 70, 70, heads=1)
    directions = device.device.upload(tiles(rng, 1, 40, 70))
    with simulator.as_written():
        assert not simulator.barriers_without_effect(lambda: host(squares(device, heads, directions)))
