"""The adjoint of exact rows on the device: the same sums as on the CPU, within rounding."""

import numpy as np
import problems
import pytest
import simulator
from common import host, on_cuda

from pda_numba import rows_adjoint as module
from pda_numba.backward import Gradients
from pda_numba.rows import rows

pytestmark = pytest.mark.cudasim


def make(rng, n, m, d, e, dtype=np.float32, heads=2, listed=None):
    """A problem, and what `rows_adjoint` is told of its rows."""
    q, k, v = (rng.standard_normal((heads, *s)).astype(dtype) for s in ((n, d), (m, d), (m, e)))
    problem = problems.flat(q, k, v)
    which = None if listed is None else np.array([rng.permutation(n)[:listed] for _ in range(heads)])
    out, lse, _ = rows(problem, np.arange(heads), which)
    offset, cotangent = (rng.standard_normal(x.shape).astype(problem.element) for x in (lse, out))
    return problem, which, [lse, offset, cotangent]


def gradients(problem, which, about, **options):
    """(dq, dk, dv), and with keep=True the rows' dq."""
    device = problem.device
    total = Gradients(*(device.zeros(x.shape, problem.element) for x in (problem.q, problem.k, problem.v)))
    which = None if which is None else device.upload(which)
    about = [device.upload(x) for x in about]
    kept = module.rows_adjoint(problem, np.arange(len(about[0])), *about, total, which, **options)
    return [host(x) for x in (*total, *([] if kept is None else [kept]))]


def compare(problem, which, about, tolerance=2e-6, **options):
    for expected, got in zip(
        gradients(problem, which, about, **options), gradients(on_cuda(problem), which, about, **options), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.max(np.abs(expected)))


@pytest.mark.parametrize(("n", "m", "d", "e"), [(1, 1, 1, 1), (3, 63, 4, 5), (70, 45, 9, 8), (34, 33, 66, 70)])
def test_all_rows(n, m, d, e, rng):
    compare(*make(rng, n, m, d, e, heads=1))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_dtypes(dtype, rng):
    compare(*make(rng, 20, 40, 20, 18, dtype), tolerance=1e-14 if dtype == np.float64 else 2e-6)


def test_chosen_rows_some_of_which_do_not_count(rng):
    problem, which, about = make(rng, 30, 50, 6, 5, listed=7)
    about[0][0, 2] = about[0][1, :3] = np.inf
    which[1, 0] = which[1, 4]  # a row that does not count may be any
    compare(problem, which, about, keep=True)


def test_splits_are_added_up(monkeypatch, rng):
    monkeypatch.setattr(module, "_splits", lambda problem, items, keys: (3, 128))
    compare(*make(rng, 3, 300, 2, 3, heads=1, listed=2), keep=True)


def test_gradients_are_added_to(rng):
    problem, _, about = make(rng, 5, 6, 3, 2, heads=1)
    problem = on_cuda(problem)
    device = problem.device
    total = Gradients(*(device.upload(np.ones(x.shape, np.float32)) for x in (problem.q, problem.k, problem.v)))
    total = Gradients(*(device.take(x, np.arange(1)) for x in total))  # what was uploaded is for reading
    module.rows_adjoint(problem, np.arange(1), *(device.upload(x) for x in about), total)
    for once, more in zip(gradients(problem, None, about), total, strict=True):
        np.testing.assert_allclose(host(more), 1 + once, rtol=1e-6)


def test_heads_read_their_own_queries_and_keys(rng):
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((4, 9, 3), (2, 11, 3), (2, 11, 4)))
    problem, heads = problems.flat(q, k, v), np.array([1, 2])  # one for each head of the keys
    device = on_cuda(problem)
    out, lse, _ = rows(problem, heads)
    results = []
    for where in (problem, device):
        total = Gradients(*(where.device.zeros(x.shape, np.float32) for x in (problem.q, problem.k, problem.v)))
        module.rows_adjoint(where, heads, *(where.device.upload(x) for x in (lse, -lse, out)), total)
        results.append([host(x) for x in total])
    for expected, got in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.max(np.abs(expected)))
    assert not results[1][0][[0, 3]].any()


def test_every_barrier_is_needed(rng):
    problem, _, about = make(rng, 34, 33, 2, 66, heads=1)
    problem = on_cuda(problem)
    assert not simulator.barriers_without_effect(lambda: gradients(problem, None, about))
