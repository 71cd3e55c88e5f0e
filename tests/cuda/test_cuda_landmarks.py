"""Landmarks on the simulator: the same pool, the same pivots, the same centres as on the CPU."""

import contextlib

import numpy as np
import pytest
import simulator
from common import host, on_cuda
from problems import flat, heads

from pda_numba import draw, landmarks
from pda_numba.rows import rows

pytestmark = pytest.mark.cudasim

ORDERS = [contextlib.nullcontext, simulator.backwards]


def problems(rng, n, m, dtype=np.float32, shape=(3, 1), d=5):
    """`shape` is how many heads of queries and of keys there are."""
    q, k = (rng.standard_normal((h, x, d)).astype(dtype) for h, x in zip(shape, (n, m), strict=True))
    problem = flat(1.5 * q if dtype != np.float16 else q, k, k[:, :, :1])
    return problem, on_cuda(problem), heads(problem)


def pilots(problem, every, count):
    which = draw.uniform_rows(problem, every, count)
    _, lse, masses = rows(problem, every, which, masses=True)
    return which, lse, masses


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("n", "m", "dtype", "apart"),
    [(1, 1, np.float32, -1), (63, 63, np.float16, -1), (97, 300, np.float32, -1), (500, 500, np.float64, 130)],
)
def test_pool(n, m, dtype, apart, order, rng):
    cpu, gpu, every = problems(rng, n, m, dtype)
    given = pilots(cpu, every, min(n, 4))
    with order():
        pool, size = landmarks.draw_pool(gpu, every, *map(gpu.device.upload, given), 12, apart=apart)
    true, true_size = landmarks.draw_pool(cpu, every, *given, 12, apart=apart)
    np.testing.assert_array_equal(host(size), true_size)
    np.testing.assert_array_equal(host(pool), true)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_gather(dtype, rng):
    cpu, gpu, every = problems(rng, 7, 63, dtype)
    which, size = rng.integers(63, size=(3, 13)), np.array([13, 0, 5])
    np.testing.assert_array_equal(
        host(landmarks.gather(gpu, every, gpu.device.upload(which), gpu.device.upload(size))),
        landmarks.gather(cpu, every, which, size),
    )


def pivots(problem, every, columns, pool, size, count):
    upload = problem.device.upload
    own = problem.device.repeat(upload(columns), 1)  # `choose` overwrites them, and an uploaded array is for all
    return [host(x) for x in landmarks.choose(problem, every, own, upload(pool), upload(size), count)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("pool", "n", "rank"), [(1, 1, 1), (24, 33, 33), (40, 20, 6)])
def test_pivots(pool, n, rank, order, rng):
    cpu, gpu, every = problems(rng, 3, 3, d=1)
    columns = (rng.random((3, pool, rank)) @ rng.random((3, rank, n))).astype(np.float32)
    columns[1, ::3] = 0
    numbers = np.sort(rng.integers(1000, size=(3, pool)), axis=1)
    size = np.array([pool, pool, max(pool // 2, 1)])
    with order():
        keys, found = pivots(gpu, every, columns, numbers, size, 8)
    true, true_found = pivots(cpu, every, columns, numbers, size, 8)
    np.testing.assert_array_equal(found, true_found)
    np.testing.assert_array_equal(keys, true)


@pytest.mark.parametrize("order", ORDERS)
def test_refine_and_shrink(order, rng, monkeypatch):
    cpu, gpu, every = problems(rng, 3, 97, np.float16)
    keys, found = rng.integers(97, size=(3, 9)), np.array([9, 3, 6])
    nearest = landmarks.nearest
    centres, mean = landmarks.refine(cpu, every, keys, found, 63)

    def on_host(problem, heads, which, tiles, count):
        return problem.device.upload(nearest(cpu, heads, host(which), host(tiles), host(count)))

    monkeypatch.setattr(landmarks, "nearest", on_host)
    upload = gpu.device.upload
    with order():
        own_centres, own_mean = landmarks.refine(gpu, every, upload(keys), upload(found), 63)
        tiles = landmarks.shrink(gpu, every, own_centres, own_mean, (1.0, 0.3))
    # sums in float64 and in the sample's order: the same bits
    np.testing.assert_array_equal(host(own_centres), centres)
    np.testing.assert_array_equal(host(own_mean), mean)
    # one may fuse the product and the sum
    np.testing.assert_allclose(host(tiles), landmarks.shrink(cpu, every, centres, mean, (1.0, 0.3)), rtol=2e-7, atol=0)


def needed(run):
    """Without any one barrier of landmarks.py some order of the threads gives another result than `run()`."""
    assert not simulator.barriers_without_effect(run, "landmarks.py")


def test_every_barrier_of_the_pool_is_needed(rng):
    cpu, gpu, every = problems(rng, 97, 9000, shape=(1, 1), d=1)  # more tiles than members
    given = [gpu.device.upload(x) for x in pilots(cpu, every, 3)]
    gpu.device.pieces = 2  # so that a team has several rows, one after the other
    empty = gpu.device.empty

    def zeros(shape, dtype):  # what is read too early is known
        out = empty(shape, dtype)
        out.copy_to_device(np.zeros(out.shape, dtype))
        return out

    gpu.device.empty = zeros
    needed(lambda: [host(x) for x in landmarks.draw_pool(gpu, every, *given, 6, apart=60)])


def test_every_barrier_of_pivoting_is_needed(rng):
    _, gpu, every = problems(rng, 3, 3, shape=(1, 1))
    columns, upload = rng.random((1, 12, 12)).astype(np.float32), gpu.device.upload

    def run():
        own = gpu.device.repeat(upload(columns), 1)
        chosen = landmarks.choose(gpu, every, own, upload(np.arange(12)[None]), upload(np.array([12])), 5)
        return [host(x) for x in (*chosen, own)]  # what is left of the columns tells more than the choice

    needed(run)
