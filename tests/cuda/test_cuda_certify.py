"""Held-out rows, reach and certificate on the simulator: as on the CPU, whatever the order of the threads."""

import contextlib

import numpy as np
import pytest
import simulator
from common import host, on_cuda
from problems import flat

from pda_numba import certify, draw, holdout
from pda_numba.reach import reach
from pda_numba.results import COLUMNS

pytestmark = pytest.mark.cudasim

ORDERS = [contextlib.nullcontext, simulator.backwards]
HEADS = 3


def problem_of(rng, n, m=5, d=3, e=2, dtype=np.float32):
    """Three heads that share the queries and keys of two."""
    q, k, v = (rng.standard_normal((2, x, y)).astype(dtype) for x, y in ((n, d), (m, d), (m, e)))
    problem = flat(*(np.concatenate([x, x[:1]]) for x in (q, k, v)), seed=4)
    return problem, on_cuda(problem), np.arange(HEADS)


def hold_out(problem, heads, inputs, first, sizes, stage=draw.ROWS):
    """Returns the held-out rows and the state."""
    state, leverage, far, edges, live = (problem.device.upload(x) for x in inputs)
    state = problem.device.concatenate([state])  # a copy: uploads are kept, and this one changes
    work = problem.device.empty(state.shape, np.float64)
    held = holdout.hold_out(problem, heads, first, state, leverage, far, edges, live, work, sizes, stage)
    return held, state


def draws(problem, heads, rng, n, first):
    """State, leverage, reach, edges and live; the leverage has rows to spare behind the N."""
    state = np.zeros((HEADS, n), np.int32)
    np.put_along_axis(state, draw.uniform_rows(problem, heads, first), holdout.EXACT, axis=1)
    leverage = (rng.exponential(size=(HEADS, n + 5)) ** 3).astype(np.float32)
    far = rng.exponential(size=(HEADS, n)).astype(np.float32)
    leverage[0, n // 2], far[0, n // 3] = np.inf, np.nan
    return state, leverage, far, np.array([0, holdout.EDGE, 0]), np.array([7, 2, 0])


def check_held(held, other):
    """The same rows, up to each head's count."""
    count = host(held.count)
    np.testing.assert_array_equal(count, other.count)
    for h in np.flatnonzero(count):
        for name in ("rows", "chance"):
            np.testing.assert_array_equal(host(getattr(held, name))[h, : count[h]], getattr(other, name)[h, : count[h]])
        # t and pi by sums over all rows, in another order
        np.testing.assert_allclose(host(held.pi)[h, : count[h]], other.pi[h, : count[h]], rtol=1e-12)
        np.testing.assert_allclose(host(held.scales)[h], other.scales[h], rtol=1e-12)
        assert host(held.uniform_pi)[h] == other.uniform_pi[h]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("n", "first", "sizes"),
    [(1, 0, (128, 48, 16)), (7, 2, (5, 3, 2)), (97, 10, (20, 12, 6)), (500, 83, (128, 48, 16)), (97, 0, (70, 0, 9))],
)
def test_held_out_rows(n, first, sizes, order, rng):
    cpu, gpu, heads = problem_of(rng, n)
    inputs = draws(cpu, heads, rng, n, first)
    expected, state = hold_out(cpu, heads, inputs, first, sizes, draw.JUDGE)
    with order():
        held, found = hold_out(gpu, heads, inputs, first, sizes, draw.JUDGE)
    check_held(held, expected)
    np.testing.assert_array_equal(host(found), state)
    assert host(held.count)[2] == 0  # not live


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("n", "d", "dtype"), [(1, 1, np.float32), (70, 5, np.float32), (97, 9, np.float64)])
def test_reach(n, d, dtype, order, rng):
    cpu, gpu, heads = problem_of(rng, n, d=d, dtype=dtype)
    with order():
        found = host(reach(gpu, heads))
    # The second moment has a condition of about 1e3 at most (its ridge).
    np.testing.assert_allclose(found, reach(cpu, heads), rtol=1e-3 if dtype == np.float32 else 1e-11)


# --- the certificate ---


def case(rng, n, replaced, first=9):
    """A problem on both devices and everything `judge` wants, as NumPy arrays."""
    cpu, gpu, heads = problem_of(rng, n, e=5)
    inputs = draws(cpu, heads, rng, n, first)
    inputs[4][2] = 1
    held, state = hold_out(cpu, heads, inputs, first, (20, 9, 5))
    out = rng.standard_normal((4, n, 5)).astype(np.float32)
    place = np.array([3, 0, 2])
    truth = (out[place[:, None], np.where(np.arange(held.rows.shape[1]) < held.count[:, None], held.rows, 0)]).copy()
    truth *= 1 + 0.1 * rng.standard_normal(truth.shape).astype(np.float32)
    norm = np.square(out[place]).sum(axis=2)
    fitted = draw.uniform_rows(cpu, heads, first), rng.exponential(size=(HEADS, first)), 5 * rng.random((HEADS, first))
    live = np.array([1, 0, 1])
    if n < 9:  # nothing to be right about
        out[...] = truth[...] = norm[...] = 0
    return cpu, gpu, place, held, (truth, out, norm, state), certify.Fitted(*fitted), (inputs[2], live), replaced


def judged(problem, heads, held, arrays, fitted, weights, replaced):
    upload = problem.device.upload
    report = problem.device.zeros((HEADS, COLUMNS), np.float64)
    held = holdout.HeldOut(*map(upload, held))
    fitted = certify.Fitted(*map(upload, fitted))
    arrays, weights = map(upload, arrays), map(upload, weights)
    certify.judge(problem, heads, held, *arrays, fitted, *weights, report, replaced=replaced)
    return host(report)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("n", [9, 97, 500])
def test_judge(n, replaced, order, rng):
    cpu, gpu, *args = case(rng, n, replaced)
    args[-2][0][0, n // 3] = 1.0  # no NaN here
    expected = judged(cpu, *args)
    with order():
        found = judged(gpu, *args)
    np.testing.assert_allclose(found, expected, rtol=1e-10)  # float64 sums in another order
    assert expected[0].any()
    assert not expected[1].any()  # not live


def test_judge_of_nothing(rng):
    cpu, gpu, *args = case(rng, 11, True)
    args[2] = tuple(np.zeros_like(x) for x in args[2][:3]) + args[2][3:]
    np.testing.assert_array_equal(judged(gpu, *args), judged(cpu, *args))


@pytest.mark.parametrize("order", ORDERS)
def test_squares(order, rng):
    cpu, gpu, _ = problem_of(rng, 97)
    out = rng.standard_normal((5, 97, 7)).astype(np.float32)
    place, which = np.array([4, 0, 2]), np.array([[3, 50, 96], [0, 1, 2], [5, 0, 0]])
    count, norm = np.array([3, 0, 1]), rng.random((HEADS, 130)).astype(np.float32)
    upload, on_gpu = gpu.device.upload, gpu.device.upload(norm.copy())
    with order():
        certify.measure(gpu, place, upload(which), upload(count), upload(out), on_gpu)
        sums = certify.sum_squares(gpu, place, upload(out))
    expected = norm.copy()
    for h, rows in enumerate(which):
        expected[h, rows[: count[h]]] = np.square(out[place[h], rows[: count[h]]]).sum(axis=1)
    np.testing.assert_allclose(host(on_gpu), expected, rtol=2e-7)  # rounded to float32
    np.testing.assert_allclose(sums, np.square(out[place].astype(float)).sum(axis=(1, 2)), rtol=1e-12)
    np.testing.assert_allclose(certify.sum_squares(cpu, place, out), sums, rtol=1e-12)
    with order():
        certify.measure(gpu, place, upload(which[:, :0]), upload(np.full(HEADS, 97)), upload(out), on_gpu)
    np.testing.assert_allclose(host(on_gpu)[:, :97], np.square(out[place]).sum(axis=2), rtol=5e-7)
    np.testing.assert_array_equal(host(on_gpu)[:, 97:], norm[:, 97:])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_judge_output(dtype, rng):
    cpu, gpu, heads = problem_of(rng, 150, dtype=dtype)
    out = rng.standard_normal((HEADS, 150, 2)).astype(dtype)
    expected = certify.judge_output(cpu, heads[:2], out, 20)
    found = host(certify.judge_output(gpu, heads[:2], gpu.device.upload(out), 20))
    np.testing.assert_allclose(found, expected, rtol=1e-4 if dtype == np.float32 else 1e-10)  # pi by the reach


# --- races ---


def test_every_barrier_is_needed(rng):
    cpu, gpu, heads = problem_of(rng, 300, d=9)
    inputs = draws(cpu, heads, rng, 300, 20)

    def everything():
        held, state = hold_out(gpu, heads, inputs, 20, (30, 70, 40))
        rows, pi = host(held.rows), host(held.pi)
        used = np.arange(rows.shape[1]) < host(held.count)[:, None]
        return np.where(used, rows, 0), np.where(used, pi, 0), host(state), host(reach(gpu, heads))

    assert not simulator.barriers_without_effect(everything, "holdout.py", "reach.py", "certify.py")
