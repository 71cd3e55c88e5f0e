"""The sampled rows' targets on the simulator, as on the CPU."""

import contextlib

import numpy as np
import pytest
import simulator
from common import host, on_cuda
from problems import flat, heads

from pda_numba.near import targets
from pda_numba.rows import rows

pytestmark = pytest.mark.cudasim

ORDERS = [contextlib.nullcontext, simulator.backwards]
WINDOWS = np.array([[-1, 0, 5], [3, 70, 200], [-1, -1, -1]])


def problems(rng, n, dtype):
    q, k, v = (rng.standard_normal((h, n, x)).astype(dtype) for h, x in ((3, 6), (1, 6), (1, 4)))
    problem = flat(q, k, v)
    every = heads(problem)
    which = np.stack([np.r_[0, n - 1, rng.integers(n, size=3)] for _ in every])
    out, lse, _ = rows(problem, every, which)
    return problem, on_cuda(problem), every, (which, out, lse)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("n", "dtype"), [(1, np.float32), (63, np.float16), (97, np.float64), (500, np.float32)])
def test_targets(n, dtype, order, rng):
    cpu, gpu, every, given = problems(rng, n, dtype)
    with order():
        far = targets(gpu, every, *map(gpu.device.upload, given), gpu.device.upload(WINDOWS))
    # sums of at most 401 terms whose weights add up to at most 1, values of size 3: 40 roundings
    np.testing.assert_allclose(
        host(far), targets(cpu, every, *given, WINDOWS), rtol=0, atol=40 * np.finfo(cpu.element).eps
    )


def test_every_barrier_is_needed(rng):
    """Without any one of them some order of the threads gives another result."""
    _, gpu, every, given = problems(rng, 300, np.float32)
    gpu.device.pieces = 1  # so that the team has several rows, one after the other
    every, given = every[:2], [gpu.device.upload(np.ascontiguousarray(x[:2, :1])) for x in given]
    given.append(gpu.device.upload(np.array([[2, 140]] * 2)))
    assert not simulator.barriers_without_effect(lambda: host(targets(gpu, every, *given)), "near.py")
