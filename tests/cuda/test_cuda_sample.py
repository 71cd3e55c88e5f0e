"""The glue between the stages of a fit on the simulator: the same rows, weights and choices as on the CPU."""

import contextlib

import numpy as np
import pytest
import simulator
from common import host, on_cuda
from problems import flat

from pda_numba import sample, solve, trial
from pda_numba.device import CPU, Cuda
from pda_numba.plan import PANEL
from pda_numba.sample import Sample

pytestmark = pytest.mark.cudasim

ORDERS = [contextlib.nullcontext, simulator.backwards]


def sample_of(rng, device, heads, n, uniform=6, drawn=4):
    """A sample with made-up outputs."""
    rows = np.stack([rng.choice(n, uniform + drawn, replace=False) for _ in range(heads)])
    pi = rng.random((heads, uniform + drawn))
    pi[:, -1] = 0
    out, lse = rng.standard_normal((heads, uniform + drawn, 2)), rng.standard_normal((heads, uniform + drawn))
    first, last = np.s_[:, :uniform], np.s_[:, uniform:]
    arrays = (
        *(x[first] for x in (rows, out, lse)),
        rng.standard_normal((heads, uniform, 3)),
        pi[first],
        *(x[last] for x in (rows, out, lse, pi)),
    )
    return Sample(*(device.upload(np.ascontiguousarray(x)) for x in arrays), device)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [63, 500, 20_000])
def test_leverage_design(n, order, rng):
    problem = flat(*(np.zeros((3, x, 1), np.float32) for x in (n, 1, 1)))
    every, results = np.arange(3), []
    for case in (problem, on_cuda(problem)):
        again, device = np.random.default_rng(5), case.device
        with order() if device is not CPU else contextlib.nullcontext():
            starts, fraction = sample.candidates(case, every)
            shape = 3, starts.shape[1] * PANEL
            leverage = device.upload((again.exponential(size=shape) ** 4).astype(np.float32))
            own = sample_of(again, device, 3, n)
            left_out = device.upload(again.exponential(size=(3, 6)))
            *drawn, own = sample.draw_by_leverage(case, every, own, starts, fraction, leverage, left_out, 30)
            results.append([host(x) for x in (starts, *drawn, own.uniform_pi, own.weights(n))])
            if n == 63:  # fewer rows are left than asked for, or as many
                assert not set(host(drawn[0])[0, host(drawn[1])[0] > 0]) & set(host(own.rows)[0])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-12, atol=0)  # sums over shares, in another order


def test_sample_keeps_heads(rng):
    parts = [sample_of(np.random.default_rng(1), device, 4, 90) for device in (CPU, Cuda())]
    for which in (np.array([True, False, True, False]), np.array([3]), np.ones(4, bool)):
        kept = [part.keep(which) for part in parts]
        for name in ("rows", "out", "lse", "masses", "uniform_pi", "drawn_pi"):
            np.testing.assert_array_equal(host(getattr(kept[1], name)), getattr(kept[0], name))


def test_choice_of_the_trial(rng):
    device, count = Cuda(), len(trial.TEMPERATURES)
    loo, fields = rng.random((3 * count, 3)), np.array([[-1, 0], [32, 0], [-1, 8]])
    costs = np.array([1, 1.1, 1.3])
    loo[count : 2 * count] = 0.5  # of equal ones the first
    found = np.array([0, 7, 500])
    for order in ORDERS:
        chosen, ranks, slope = ([device.zeros((3,), t) for _ in range(k)] for t, k in ((int, 4), (int, 2), (float, 1)))
        temperature, least = (device.zeros((3,), float) for _ in range(2))
        up = device.upload
        with order():
            given = up(loo), up(fields), up(costs)
            device.run(None, trial._choose_trial_cuda, (1,), *given, *chosen, temperature, least)
            device.run(None, trial._halve_cuda, (1,), up(found), *ranks)
            device.run(None, solve._fall_cuda, (1,), up(loo[:3].copy()), up(loo[3:6].copy()), *slope)
        judged = (loo * costs).reshape(3, -1).argmin(axis=1)
        np.testing.assert_array_equal(host(least), (loo * costs).reshape(3, -1).min(axis=1))
        tile, table, window, probes = map(host, chosen)
        np.testing.assert_array_equal(tile, np.arange(3) * count + judged // 3)
        np.testing.assert_array_equal(table, tile * 3 + judged % 3)
        np.testing.assert_array_equal(np.stack([window, probes], axis=1), fields[judged % 3])
        np.testing.assert_array_equal(host(temperature), np.array(trial.TEMPERATURES)[judged // 3])
        np.testing.assert_array_equal(np.stack([*map(host, ranks)]), [[1, 7, 64], [1, 3, 250]])
        np.testing.assert_allclose(host(*slope), np.log2(loo[:3, 0] / loo[3:6, 0]), rtol=1e-14, atol=1e-15)


def test_columns(rng):
    device, x = Cuda(), rng.standard_normal((7, 40)).astype(np.float32)
    out = host(trial.columns_of(device, device.upload(x), 5, 17, 24))
    np.testing.assert_array_equal(out, np.pad(x[:, 5:22], ((0, 0), (0, 7))))
    np.testing.assert_array_equal(trial.columns_of(CPU, x, 5, 17, 24), out)


def test_every_barrier_is_needed():
    """Without any one of them some order of the threads gives another result."""
    problem = on_cuda(flat(*(np.zeros((2, x, 1), np.float32) for x in (300, 1, 1))))

    def run():
        rng, device = np.random.default_rng(5), problem.device
        starts, fraction = sample.candidates(problem, np.arange(2))
        own, leverage = sample_of(rng, device, 2, 300), device.upload(rng.random((2, starts.shape[1] * PANEL)))
        left_out = device.upload(np.ones((2, 6)))
        *drawn, _ = sample.draw_by_leverage(problem, np.arange(2), own, starts, fraction, leverage, left_out, 300)
        return [host(x) for x in drawn]

    assert not simulator.barriers_without_effect(run, "sample.py")
