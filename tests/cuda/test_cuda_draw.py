"""The draws on the simulator: the same rows as on the CPU, in any order of the threads; every barrier is needed."""

import contextlib

import numpy as np
import pytest
import simulator
from common import host, on_cuda
from problems import flat

from pda_numba import draw
from pda_numba._jit import cuda_kernel, serial_kernel

pytestmark = pytest.mark.cudasim

ORDERS = [contextlib.nullcontext, simulator.backwards]


def problem_of(count, n, seed=0):
    problem = flat(*(np.zeros((count, x, 1), np.float32) for x in (n, 1, 1)), seed=seed)
    return problem, on_cuda(problem), np.arange(count)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [1, 63, 97, 500])
def test_uniform_rows(n, order):
    cpu, gpu, heads = problem_of(3, n)
    for first, count in ((0, n), (n // 3, n - n // 3)):
        with order():
            rows = draw.uniform_rows(gpu, heads[[2, 0]], count, first=first, stage=draw.JUDGE)
        np.testing.assert_array_equal(host(rows), draw.uniform_rows(cpu, heads[[2, 0]], count, first=first, stage=40))


def weights(n, rng):
    spread = rng.exponential(size=(4, n)) ** 4
    spread[1] *= rng.random(n) < 0.5
    spread[2, : n // 2] = 0
    spread[3, 5:] = 0
    return spread


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("n", "count"), [(1, 1), (63, 9), (97, 40), (500, 64), (500, 0)])
def test_weighted_rows(n, count, order, rng):
    cpu, gpu, heads = problem_of(4, n)
    weight = weights(n, rng)
    with order():
        drawn = draw.weighted_rows(gpu, heads, gpu.device.upload(weight), count, stage=draw.AUDIT)
    place, pi, scale = draw.weighted_rows(cpu, heads, weight, count, stage=draw.AUDIT)
    np.testing.assert_array_equal(host(drawn[0]), place)
    np.testing.assert_allclose(host(drawn[1]), pi, rtol=1e-12)  # sums over shares, in another order
    np.testing.assert_allclose(host(drawn[2]), scale, rtol=1e-12)


# --- bodies for other teams ---


@cuda_kernel(64)
def _bodies_cuda(values, weight, u, once, size, picked):
    draw.sort(values)
    size[0] = draw.distinct(values, values.shape[0] - 1, once)
    picked[0], picked[1], picked[2] = draw.pick(weight, weight.shape[0], u)


@serial_kernel
def _bodies_cpu(values, weight, u, once, size, picked):
    draw.sort(values)
    size[0] = draw.distinct(values, values.shape[0] - 1, once)
    picked[0], picked[1], picked[2] = draw.pick(weight, weight.shape[0], u)


def bodies(kernel, values, weight, u):
    once, size, picked = np.full(len(values), 7), np.zeros(1, np.int64), np.zeros(3)
    values = values.copy()
    kernel(values, weight, u, once, size, picked)
    return values, once[: size[0]], once[size[0] :], picked


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("length", "n"), [(2, 1), (64, 63), (512, 97), (1024, 500)])
def test_sort_distinct_pick(length, n, order, rng):
    values = rng.integers(300, size=length)
    weight = rng.exponential(size=n) * (rng.random(n) < 0.7)
    for u in (0.0, 0.3, 1 - 2**-53):
        with order():
            ordered, once, rest, picked = bodies(lambda *args: _bodies_cuda.launch(1, 0, *args), values, weight, u)
        np.testing.assert_array_equal(ordered, np.sort(values))
        np.testing.assert_array_equal(once, np.unique(ordered[:-1]))
        assert (rest == 0).all()
        on_cpu = bodies(_bodies_cpu, values, weight, u)[3]
        np.testing.assert_allclose(picked, on_cpu, rtol=0, atol=1e-9 * max(1, n))
        assert picked[0] == on_cpu[0]


def test_every_barrier_is_needed(rng):
    """Without any one of them some order of the threads gives another result."""
    _, gpu, heads = problem_of(4, 500)
    weight, values = gpu.device.upload(weights(500, rng)), rng.integers(300, size=256)

    def everything():
        drawn = [host(x) for x in draw.weighted_rows(gpu, heads, weight, 40, stage=draw.AUDIT)]
        return [*drawn, *bodies(lambda *args: _bodies_cuda.launch(1, 0, *args), values, host(weight)[0], 0.3)]

    assert not simulator.barriers_without_effect(everything, "draw.py")
