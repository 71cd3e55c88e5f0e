"""From the fit to the output on the simulator: as on the CPU, whatever the order of the threads."""

import contextlib
from types import SimpleNamespace

import naive
import numpy as np
import pytest
import simulator
from common import host, on_cuda
from problems import flat

from pda_numba import certify, draw, finish, holdout, rows
from pda_numba.content import nothing
from pda_numba.core import LEFT_ALONE, LEVERAGE_COLUMNS
from pda_numba.device import CPU, Cuda
from pda_numba.info import Clock
from pda_numba.kernels.simd import padded
from pda_numba.results import (
    COLUMNS,
    ERROR,
    EXACT_ROWS,
    FALLBACK_ROWS,
    FLAGGED_ROWS,
    HELD_OUT_ROWS,
    LEAVE_ONE_OUT,
    PROBES,
    RANK,
)

pytestmark = pytest.mark.cudasim

ORDERS = [contextlib.nullcontext, simulator.backwards]


def copied(device, array):
    """A copy on the device: uploads are kept, and this one changes."""
    out = device.empty(array.shape, array.dtype)
    if device.name == "cpu":
        out[...] = array
    else:
        out.copy_to_device(array)
    return out


# --- is a head worth it? ---


@pytest.mark.parametrize("hope", [0.1, np.inf])
def test_gate(hope):
    loo, slope = np.array([0.1, 0.2, np.nan, 0.0]), np.arange(4.0)
    found, window, probes = np.array([7, 8, 9, 10]), np.array([-1, 0, 32, -1]), np.array([0, 4, 0, 16])
    outcomes = []
    for device in (CPU, Cuda()):
        rank, edges = device.empty(4, np.int64), device.empty(4, np.int64)
        report = device.zeros((4, COLUMNS), np.float64)
        facts = (device.upload(x) for x in (loo, slope, found, window, probes))
        device.run(finish._gate_cpu, finish._gate_cuda, (1,), *facts, hope, rank, edges, report)
        outcomes.append([host(x) for x in (rank, edges, report)])
    for on_cpu, on_gpu in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(on_cpu, on_gpu)
    rank, edges, report = outcomes[0]
    assert rank.tolist() == ([7, 8, 9, 10] if hope == np.inf else [7, 0, 0, 10])
    assert edges.tolist() == [0, 4, 4, 0]
    np.testing.assert_array_equal(report[:, LEAVE_ONE_OUT], loo)
    np.testing.assert_array_equal(report[:, RANK], found)
    np.testing.assert_array_equal(report[:, PROBES], probes)


# --- doubtful rows ---


def doubtful(rng, n, samples=9, drawn=4):
    """leverage, reach, state, fitted rows, their leverage, pi of the drawn ones; a head each of another kind."""
    heads = 5
    leverage = rng.exponential(size=(heads, n + 3)).astype(np.float32) * 8
    far = rng.exponential(size=(heads, n)).astype(np.float32)
    leverage[1] = np.round(leverage[1] / 20) * 20  # many equal ones
    leverage[2, rng.random(n + 3) < 0.3] = np.inf
    leverage[3] = 0  # nothing to flag but what is far
    far[3, :2] = 50
    fitted = rng.integers(n, size=(heads, samples))
    row_leverage = rng.exponential(size=(heads, samples)) * 0.2
    row_leverage[:, 0] = LEFT_ALONE
    row_leverage[:, -1] = 1e6  # a slot that is not filled
    pi = rng.random((heads, drawn))
    pi[:, -1] = 0
    state = np.zeros((heads, n), np.int32)
    np.put_along_axis(state, fitted, holdout.EXACT, axis=1)
    return leverage, far, state, fitted, row_leverage, pi


def flagged_by_sorting(leverage, far, state, fitted, row_leverage, pi, budget):
    """The rows that are flagged and lost, of one head."""
    filled = np.r_[np.ones(len(fitted) - len(pi), bool), pi > 0]
    own = np.where(row_leverage < LEFT_ALONE, row_leverage, 0)[filled].max()
    n = len(far)
    by_leverage = leverage[:n].astype(float) / max(4 * own, 10)
    doubt = np.maximum(by_leverage, far.astype(float) / max(2 * far[fitted[filled]].max(), 4))
    rows = np.flatnonzero((doubt > 1) & (state != holdout.EXACT))
    rows = rows[np.argsort(-doubt[rows], kind="stable")]
    return np.sort(rows[:budget]), np.sort(rows[budget:][np.isinf(leverage[rows[budget:]])])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("n", "budget"), [(1, 1), (63, 5), (97, 40), (500, 64), (500, 300)])
def test_flagged_rows(n, budget, order, rng):
    arrays = doubtful(rng, n)
    rank = np.array([3, 3, 3, 3, 0])
    for device in (CPU, Cuda()):
        state = copied(device, arrays[2])
        uploaded = [state if i == 2 else device.upload(x) for i, x in enumerate(arrays)]
        order_bits, flagged = device.empty((5, n), np.int64), device.empty((5, budget), np.int64)
        flags, losses = device.empty(5, np.int64), device.empty(5, np.int64)
        report = device.zeros((5, COLUMNS), np.float64)
        lists = order_bits, flagged, flags, losses, report
        with order():
            device.run(finish._flag_cpu, finish._flag_cuda, (5,), device.upload(rank), *uploaded, *lists)
        lost, flagged, flags, losses, report = (host(x) for x in lists)
        np.testing.assert_array_equal(report[:, FLAGGED_ROWS], flags + losses)
        np.testing.assert_array_equal(report[:, FALLBACK_ROWS], losses)
        assert flags[4] == losses[4] == 0  # rank 0
        for h in range(4):
            expected = flagged_by_sorting(*(x[h] for x in arrays), budget)
            np.testing.assert_array_equal(flagged[h, : flags[h]], expected[0])
            np.testing.assert_array_equal(lost[h, : losses[h]], expected[1])
            bits = host(state)[h]
            np.testing.assert_array_equal(np.flatnonzero(bits & holdout.FLAGGED), expected[0])
            np.testing.assert_array_equal(np.flatnonzero(bits & holdout.LOST), expected[1])


# --- exact rows, and landmarks alone ---


def small(rng, n=97, m=150, d=4, e=3, heads=3):
    q, k, v = (rng.standard_normal((heads, x, y)).astype(np.float32) for x, y in ((n, d), (m, d), (m, e)))
    problem = flat(q, k, v, seed=3)
    return problem, on_cuda(problem), np.arange(heads)


def pass_of(problem, heads, rank, out, norm, state):
    device = problem.device
    report = device.zeros((len(heads), COLUMNS), np.float64)
    arrays = (copied(device, x) for x in (out, norm, state))
    return finish._Pass(problem, heads, device.upload(rank), *arrays, report)


@pytest.mark.parametrize("order", ORDERS)
def test_exact_rows_are_placed(order, rng):
    cpu, gpu, _ = small(rng)
    heads, rank = np.array([2, 0]), np.array([4, 0])
    out = rng.standard_normal((3, 97, 3)).astype(np.float32)
    norm, state = np.full((2, 128), np.nan, np.float32), np.full((2, 97), holdout.LOST, np.int32)
    which, count = np.array([[5, 96, 5, 0], [1, 2, 3, 4]]), np.array([3, 4])
    values = rng.standard_normal((2, 4, 3)).astype(np.float32)
    values[0, 2] = values[0, 0]  # the same row again
    for problem in (cpu, gpu):
        step = pass_of(problem, heads, rank, out, norm, state)
        with order():
            step.place(*(problem.device.upload(x) for x in (which, count, values)), None)
        placed, norms, states = host(step.out), host(step.norm), host(step.state)
        expected = out.copy()
        expected[2, [5, 96]] = values[0, :2]
        np.testing.assert_array_equal(placed, expected)  # head 0 has rank 0
        np.testing.assert_allclose(norms[0, [5, 96]], np.square(values[0, :2]).sum(axis=1), rtol=1e-6)
        assert np.isnan(norms).sum() == norms.size - 2
        assert np.flatnonzero(states == holdout.EXACT).tolist() == [5, 96]


@pytest.mark.parametrize("order", ORDERS)
def test_mend(order, rng):
    """Two flagged rows a head; the lost rows become the softmax over the landmarks."""
    cpu, gpu, heads = small(rng)
    budget, rank = 2, np.array([16, 0, 8])
    out, norm = np.zeros((3, 97, 3), np.float32), np.zeros((3, 128), np.float32)
    leverage, far = np.zeros((3, 128), np.float32), np.zeros((3, 97), np.float32)
    leverage[0, [3, 50, 60, 96]] = np.inf
    leverage[1, :] = np.inf
    leverage[2, [8, 20, 30]] = np.inf, 1e5, 1e4
    keys = np.stack([rng.choice(150, 16, replace=False) for _ in heads])
    found = np.array([16, 16, 8])  # the third head's are listed twice: the same softmax
    fitted = certify.Fitted(np.zeros((3, 1), np.int64), np.zeros((3, 1)), np.zeros((3, 1)))
    for problem in (cpu, gpu):
        device = problem.device
        step = pass_of(problem, heads, rank, out, norm, np.zeros((3, 97), np.int32))
        sample = SimpleNamespace(drawn_pi=device.empty((3, 0), np.float64))
        solved = SimpleNamespace(keys=device.upload(keys), found=device.upload(found), sample=sample)
        with order():
            weights = device.upload(leverage), device.upload(far)
            finish._mend(step, solved, certify.Fitted(*map(device.upload, fitted)), *weights, budget)
        mended, norms, states, report = host(step.out), host(step.norm), host(step.state), host(step.report)
        assert report[:, FLAGGED_ROWS].tolist() == [4, 0, 2]
        assert report[:, FALLBACK_ROWS].tolist() == [2, 0, 0]
        for h, exact, lost in ((0, [3, 50], [60, 96]), (1, [], []), (2, [8, 20], [])):
            assert np.flatnonzero(states[h] == holdout.EXACT).tolist() == exact
            assert np.flatnonzero(mended[h].any(axis=1)).tolist() == exact + lost
            # float32, logits up to 10
            true = naive.attention(cpu.q[h, exact], cpu.k[h], cpu.v[h])
            np.testing.assert_allclose(mended[h, exact], true, rtol=0, atol=1e-5)
            alone = naive.attention(cpu.q[h, lost], cpu.k[h, keys[h]], cpu.v[h, keys[h]])
            np.testing.assert_allclose(mended[h, lost], alone, rtol=0, atol=1e-5)
            np.testing.assert_allclose(norms[h, :97], np.square(mended[h]).sum(axis=1), rtol=1e-6)


def test_redundant_landmarks_are_listed_again():
    for device in (CPU, Cuda()):
        keys, found = device.upload(np.array([[5, 6, 7], [1, 2, 0]])), device.upload(np.array([3, 2]))
        repeated = device.empty((2, 8), np.int64)
        device.run(finish._repeat_keys_cpu, finish._repeat_keys_cuda, (2,), keys, found, repeated)
        assert host(repeated).tolist() == [[5, 6, 7, 5, 6, 7, 5, 6], [1, 2, 1, 2, 1, 2, 1, 2]]


# --- all of it ---


def made_up_fit(problem, heads, rank, samples):
    """A `Solved` by a hand-made fit: every landmark's value with weight one, a leverage of some tens."""
    device, (_, _, d, e) = problem.device, problem.shape
    which = draw.uniform_rows(problem, heads, samples)
    exact, lse, _ = rows.rows(problem, heads, which)
    rng = np.random.default_rng(1)
    tiles = rng.standard_normal((len(heads), padded(rank), d)).astype(np.float32)
    table = np.zeros((len(heads), padded(rank), padded(e + 1 + LEVERAGE_COLUMNS)), np.float32)
    table[:, :rank, :e] = rng.standard_normal((len(heads), rank, e))
    table[:, :rank, e] = 1
    table[:, :rank, e + 1 :] = 2 * rng.standard_normal(table[:, :rank, e + 1 :].shape)
    drawn_pi = device.empty((len(heads), 0), np.float64)
    sample = SimpleNamespace(rows=which, out=exact, lse=lse, uniform=which, drawn_pi=drawn_pi)
    upload = device.upload
    return SimpleNamespace(
        sample=sample,
        keys=upload(rng.integers(problem.shape[1], size=(len(heads), rank))),
        found=upload(np.array([rank, rank - 1, rank])),
        basis=device.empty((len(heads), 0, d), np.float32),
        tiles=upload(tiles),
        table=upload(table),
        window=upload(np.array([-1, 3, -1])),
        near=nothing(problem, 3),
        loo=upload(np.array([0.05, 0.1, 0.3])),
        slope=upload(np.zeros(len(heads))),
        row_error=upload(rng.random((len(heads), samples))),
        row_leverage=upload(0.1 * rng.random((len(heads), samples))),
    )


@pytest.mark.parametrize("order", ORDERS)
def test_finish(order, rng):
    """The third head is not worth it; the second has a near field."""
    cpu, gpu, heads = small(rng, n=210, m=210)
    low, high = cpu.v.min(axis=1), cpu.v.max(axis=1)
    outcomes = []
    for problem in (cpu, gpu):
        device = problem.device
        ranges = SimpleNamespace(low=device.upload(low), high=device.upload(high))
        out = device.zeros((3, 210, 3), np.float32)
        with order():
            solved = made_up_fit(problem, heads, 8, 16)
            beside = finish.Beside(*(device.zeros((3, 210), np.float32) for _ in range(2)))
            report, _ = finish.finish(problem, heads, solved, 8, 0.2, ranges, out, Clock(), beside)
        outcomes.append((host(out), host(report), *map(host, beside)))
    (out, report, lse, leverage), (on_gpu, report_gpu, *beside_gpu) = outcomes
    for own, other in zip((lse[:2], leverage[:2]), beside_gpu, strict=True):
        np.testing.assert_allclose(other[:2], own, rtol=1e-3, atol=1e-4)
    assert (leverage[0] == 0).sum() == report[0, EXACT_ROWS] + report[0, HELD_OUT_ROWS]
    # float32: sums over eight landmarks, logits up to 10
    np.testing.assert_allclose(on_gpu, out, rtol=0, atol=1e-4)
    assert not out[2].any()
    np.testing.assert_array_equal(report_gpu[:, [FLAGGED_ROWS, EXACT_ROWS]], report[:, [FLAGGED_ROWS, EXACT_ROWS]])
    np.testing.assert_allclose(report_gpu, report, rtol=1e-3)
    assert (report[:2, ERROR] > 0.1).all()
    assert not report[2, ERROR:].any()
    exact = naive.attention(cpu.q[0], cpu.k[0], cpu.v[0])
    right = np.abs(out[0] - exact).max(axis=1) < 1e-5
    assert right.sum() >= report[0, EXACT_ROWS] + report[0, HELD_OUT_ROWS]
    assert report[0, EXACT_ROWS] > 16  # some rows were flagged


def test_finish_meets_no_barrier_of_its_own(rng):
    """Sums over the team keep its steps apart (and the orders above agree)."""
    device = Cuda()
    arrays = [device.upload(x) for x in doubtful(rng, 97)]
    with simulator.barriers_met() as met:
        lists = device.empty((5, 97), np.int64), device.empty((5, 9), np.int64), device.empty(5, np.int64)
        rest = device.empty(5, np.int64), device.zeros((5, COLUMNS), np.float64)
        device.run(None, finish._flag_cuda, (5,), device.upload(np.ones(5, np.int64)), *arrays, *lists, *rest)
    assert met
    assert not [place for place in met if place[0].endswith("finish.py")]
