"""Movement of data on the device, and the team's reductions."""

import contextlib
import itertools

import numpy as np
import pytest
import simulator
from common import host

from pda_numba._jit import cuda_kernel
from pda_numba.device import CPU, Cuda
from pda_numba.kernels.team import barrier, group_max, group_sum, member, members, part, sum_before, team_max, team_sum

pytestmark = pytest.mark.cudasim


WAYS = [contextlib.nullcontext, simulator.as_written]
ORDERS = [contextlib.nullcontext, simulator.backwards]


@pytest.fixture
def device():
    return Cuda()


def test_movers_do_what_numpy_does(device, rng):
    a, b = rng.standard_normal((3, 5, 2)), rng.standard_normal((3, 1, 2))
    index = np.array([2, 0, 0, 1])
    on_a, on_b = device.upload(a), device.upload(b)
    np.testing.assert_array_equal(host(device.concatenate([on_a, on_b])), CPU.concatenate([a, b]))
    np.testing.assert_array_equal(host(device.take(on_a, index)), a[index])
    np.testing.assert_array_equal(host(device.take(on_a, device.upload(index))), a[index])
    np.testing.assert_array_equal(host(device.repeat(on_a, 3)), CPU.repeat(a, 3))
    assert not host(device.zeros((3, 700), np.float32)).any()


def test_arena_gives_every_array_its_own_memory(device):
    arrays = [device.empty((size,), np.int64) for size in (1, 31, 32, 33, 10**7)]
    for value, array in enumerate(arrays):
        array.copy_to_device(np.full(array.shape, value, np.int64))
    for value, array in enumerate(arrays):
        assert (host(array) == value).all()
    device.recycle()
    assert len(device.chunks) == 2
    assert device.empty((0, 3), np.float32).shape == (0, 3)


@cuda_kernel(64)
def _reduce(x, out):
    start, stop = part(x.shape[0])
    own = x[0] - x[0]
    for i in range(start, stop):
        own += x[i]
    out[0] = team_sum(own)
    out[1] = team_max(own)
    before = sum_before(stop - start)
    if member() == members() - 1:
        out[2] = before + stop - start
    barrier()


@pytest.mark.parametrize("size", [1, 63, 64, 97, 500])
def test_reductions(size, rng):
    x = rng.standard_normal(size)
    per_member = -(-size // 64)
    sums = [x[i : i + per_member].sum() for i in range(0, 64 * per_member, per_member)]
    found = []
    for way, order in itertools.product(WAYS, ORDERS):
        found.append(np.zeros(3))
        with way(), order():
            _reduce.launch(1, 0, x, found[-1])
    np.testing.assert_allclose(found[0], [x.sum(), max(sums), size], rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(found, np.tile(found[0], (4, 1)))


@cuda_kernel(64)
def _reduce_groups(x, out):
    own = x[member()]
    size = 1
    while size <= 64:
        out[0, member()] += group_sum(own, size)
        out[1, member()] += group_max(own, size)
        size *= 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_groups_at_once_are_those_as_written(dtype, rng):
    x = rng.standard_normal(64).astype(dtype)
    x[5] = np.nan  # which `max` keeps or not, by its place
    found = []
    for way in WAYS:
        found.append(np.zeros((2, 64), dtype))
        with way():
            _reduce_groups.launch(1, 0, x, found[-1])
    np.testing.assert_array_equal(*found)
    assert np.isnan(found[0][0]).all()
    assert not np.isnan(found[0][1]).all()


@cuda_kernel(64)
def _reduce_again(x, out):
    for i in range(2):  # a reduction may begin while others still read the result of the last one
        out[member(), 3 * i] = team_sum(x[member(), i])
        out[member(), 3 * i + 1] = team_max(-x[member(), i])
        out[member(), 3 * i + 2] = sum_before(x[member(), i])


def test_every_barrier_of_the_reductions_is_needed(rng):
    x = rng.standard_normal((64, 2))

    def run():
        out = np.zeros((64, 6))
        _reduce_again.launch(1, 0, x, out)
        return out

    with simulator.as_written():
        assert not simulator.barriers_without_effect(run, "team.py")
