"""The small stages of the backward pass on the simulator, as on the CPU, and their races."""

import numpy as np
import pytest
import simulator
from common import host, on_cuda
from problems import flat, heads

from pda_numba import dense
from pda_numba.backward import Gradients
from pda_numba.device import Cuda
from pda_numba.fit_adjoint import fit_adjoint
from pda_numba.kernels.simd import padded
from pda_numba.landmarks_adjoint import landmarks_adjoint
from pda_numba.near_adjoint import near_adjoint
from pda_numba.residuals import _number_cpu, _number_cuda
from pda_numba.rows import rows

pytestmark = pytest.mark.cudasim


def agree(run, cpu, gpu, tolerance):
    """`run` on both devices: arrays that differ by rounding alone."""
    for own, true in zip(run(gpu), run(cpu), strict=True):
        np.testing.assert_allclose(own, true, rtol=0, atol=tolerance * max(np.abs(true).max(), 1e-30))


def zeros(problem):
    return Gradients(*(problem.device.zeros(x.shape, problem.element) for x in (problem.q, problem.k, problem.v)))


def sample(rng, n, m, count, d=6, e=4, dtype=np.float64):
    """A problem on both devices, and some of its rows with their outputs and lse."""
    q, k, v = (rng.standard_normal((2, *s)).astype(dtype) for s in ((n, d), (m, d), (m, e)))
    problem = flat(q, k, v)
    which = np.stack([rng.permutation(n)[:count] for _ in range(2)])
    out, lse, _ = rows(problem, heads(problem), which)
    return problem, on_cuda(problem), which, out, lse


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)])
def test_products(turned, rng):
    a, b = rng.standard_normal((2, 5, 7)), rng.standard_normal((2, 9, 70)).astype(np.float32)
    a, b = (x.swapaxes(1, 2).copy() if turn else x for x, turn in zip((a, b), turned, strict=True))
    gpu = Cuda()
    own = dense.multiply(gpu, gpu.upload(a), gpu.upload(b), factor=2.0, turn_a=turned[0], turn_b=turned[1])
    left, right = (x.swapaxes(1, 2) if turn else x for x, turn in zip((a, b), turned, strict=True))
    np.testing.assert_allclose(host(own), 2 * left @ right[:, :7].astype(np.float64), rtol=0, atol=1e-13)


@pytest.mark.parametrize("distinct", [False, True])
def test_rows_are_scattered(distinct, rng):
    which = np.array([[3, 0, 5], [1, 1 + distinct, 4]])
    source, out = rng.standard_normal((2, 3, 70)), rng.standard_normal((4, 6, 70)).astype(np.float32)
    place, expected = np.array([2, 0]), out.copy()
    for h in range(2):
        np.add.at(expected[place[h]], which[h], source[h].astype(np.float32))
    gpu = Cuda()
    total = gpu.take(gpu.upload(out), np.arange(4))
    dense.scatter_rows(gpu, *(gpu.upload(x) for x in (place, which, source)), total, distinct=distinct)
    np.testing.assert_allclose(host(total), expected, rtol=1e-6, atol=1e-6)


def run_near(given, window):
    which, lse, d_target = given

    def run(problem):
        device, total = problem.device, zeros(problem)
        d_lse, d_queries = device.zeros(which.shape, np.float64), device.zeros((*which.shape, 6), np.float64)
        lists = (device.upload(x) for x in (which, lse, np.array(window), d_target))
        near_adjoint(problem, heads(problem), *lists, d_lse, d_queries, total)
        return [host(x) for x in (d_lse, d_queries, *total)]

    return run


@pytest.mark.parametrize("n", [1, 40, 150])
def test_near_field(n, rng):
    cpu, gpu, which, _, lse = sample(rng, n, n, min(n, 4))
    lse[0, 0] = np.inf  # a row that counts for nothing
    given = which, lse, rng.standard_normal((*which.shape, 5))
    agree(run_near(given, [-1, 3]), cpu, gpu, 1e-13)
    agree(run_near(given, [70, 0]), cpu, gpu, 1e-13)


def test_every_barrier_of_the_near_field_is_needed(rng):
    _, gpu, which, _, lse = sample(rng, 300, 300, 2)
    run = run_near((which, lse, rng.standard_normal((2, 2, 5))), [140, 70])
    assert not simulator.barriers_without_effect(lambda: run(gpu), "near_adjoint.py")


def run_fit(rng, which, out, lse, rank, rows_of_landmarks=11, dim=6):
    landmarks = np.zeros((2, padded(rows_of_landmarks), dim))
    for h in range(2):
        landmarks[h, : rank[h]] = 0.5 * rng.standard_normal((rank[h], dim))
    target = np.concatenate([out, np.ones((*out.shape[:2], 1))], axis=2)
    weight = rng.uniform(0.5, 1, which.shape)
    weight[1, 2] = 0
    d_table, level = rng.standard_normal((2, landmarks.shape[1], 5)), np.array([1e-4, 1e-6])
    d_landmarks = rng.standard_normal(landmarks.shape)

    def run(problem):
        device = problem.device
        arrays = [device.upload(x) for x in (which, lse, target, weight, level)]
        model = device.upload(landmarks), device.upload(np.array(rank)), device.empty((2, 0, dim), problem.element)
        total = device.take(device.upload(d_landmarks), np.arange(2))
        found = fit_adjoint(problem, heads(problem), *arrays, model, total, device.upload(d_table))
        return [host(x) for x in (total, *found)]

    return run


@pytest.mark.parametrize("rank", [(11, 8), (3, 1)])
def test_fit(rank, rng):
    cpu, gpu, which, out, lse = sample(rng, 60, 50, 20)
    agree(run_fit(rng, which, out, lse, rank), cpu, gpu, 1e-9)  # conditions of up to 1e3, squared in M


def test_every_barrier_of_the_fit_is_needed(rng):
    _, gpu, which, out, lse = sample(rng, 40, 30, 12)
    run = run_fit(rng, which, out, lse, (5, 4), 5)
    assert not simulator.barriers_without_effect(lambda: run(gpu), "fit_adjoint.py")


def run_landmarks(d_landmarks, keys, found, which, nearest, temperature):
    def run(problem):
        device, total = problem.device, zeros(problem)
        given = [device.upload(x) for x in (d_landmarks, keys, found)]
        lists = device.upload(which), device.upload(nearest)
        landmarks_adjoint(problem, heads(problem), *given, lists, device.upload(temperature), total)
        return [host(total.k)]

    return run


def landmark_case(rng, m=40, count=5, samples=70):
    found = np.array([count, 3])
    which = np.stack([rng.integers(m, size=samples) for _ in range(2)])
    nearest = np.stack([rng.integers(f, size=samples) for f in found])
    keys = np.stack([rng.permutation(m)[:count] for _ in range(2)])
    return rng.standard_normal((2, padded(count), 6)), keys, found, which, nearest, np.array([1.0, 0.45])


def test_landmarks(rng):
    cpu, gpu, *_ = sample(rng, 10, 40, 1)
    agree(run_landmarks(*landmark_case(rng)), cpu, gpu, 1e-13)


def test_every_barrier_of_the_landmarks_is_needed(rng):
    _, gpu, *_ = sample(rng, 10, 40, 1)
    run = run_landmarks(*landmark_case(rng))
    assert not simulator.barriers_without_effect(lambda: run(gpu), "landmarks_adjoint.py")


def number(device):
    """The slots of a head with two empty slots among its fitted rows, lists with room to spare, and a lost row."""
    drawn_pi = np.array([[0.5, 0.0, 0.0]])
    flagged, held, lost = np.array([[9, 77]]), np.array([[4, 6, 88]]), np.array([[8, 99]])
    listed = np.concatenate([np.array([[2, 7, 1, 10, 7]]), flagged, held], axis=1)
    counts = [np.array([c]) for c in (1, 2, 1)]
    gpu = device.name == "cuda"
    up = (lambda x: device.take(device.upload(x), np.arange(1))) if gpu else np.copy
    flagged, held, lost, listed = (up(x) for x in (flagged, held, lost, listed))
    lse, slot = up(np.zeros((1, 10))), device.zeros((1, 12), np.int32)
    flags, helds, losses = (device.upload(c) for c in counts)
    task = device.upload(drawn_pi), 5, flagged, flags, held, helds, lost, losses, listed, lse, slot
    device.run(_number_cpu, _number_cuda, (1,), *task)
    return [host(x) for x in (slot, lse, listed, lost)]


def test_slots():
    from pda_numba.device import CPU

    slot, lse, listed, lost = number(CPU)
    np.testing.assert_array_equal(slot[0], [0, 3, 1, 0, 8, 0, 9, 2, -1, 6, 4, 0])
    np.testing.assert_array_equal(np.flatnonzero(np.isinf(lse[0])), [4, 6, 9])
    assert listed.max() <= 10
    assert lost[0, 1] == 0
    for own, true in zip(number(Cuda()), (slot, lse, listed, lost), strict=True):
        np.testing.assert_array_equal(own, true)


def test_every_barrier_of_the_slots_is_needed():
    assert not simulator.barriers_without_effect(lambda: number(Cuda()), "residuals.py")
