"""Exact rows on the device: the same numbers as on the CPU, within rounding."""

import naive
import numpy as np
import problems
import pytest
import simulator
from common import host, on_cuda

from pda_numba.rows import rows

pytestmark = pytest.mark.cudasim


def both(q, k, v, which=None, **options):
    problem = problems.flat(q, k, v)
    device = on_cuda(problem)
    heads = problems.heads(problem)
    given = None if which is None else device.device.upload(which)
    return rows(problem, heads, which, **options), [host(x) for x in rows(device, heads, given, **options)]


@pytest.mark.parametrize(("n", "m", "d", "e"), [(1, 1, 1, 1), (2, 63, 4, 3), (97, 130, 20, 8), (3, 65, 66, 70)])
def test_rows_match_the_oracle(n, m, d, e):
    q, k, v = problems.make("gaussian", n, m, d, e, seed=1)
    (out, lse, _), (on_device, lse_on_device, _) = both(q, k, v)
    exact = naive.attention(q, k, v)
    plain = naive.relative(naive.attention_in(np.float32, q, k, v), exact)
    assert naive.relative(on_device[0], exact) <= max(2 * plain, 1e-7)
    np.testing.assert_allclose(on_device, out, rtol=2e-5, atol=2e-6)  # float32, sums in another order
    np.testing.assert_allclose(lse_on_device, lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_dtypes_and_shared_heads(dtype, rng):
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in ((4, 5, 9), (2, 37, 9), (2, 37, 6)))
    which = rng.integers(5, size=(4, 3))
    (out, _, mass), (on_device, _, mass_on_device) = both(q, k, v, which, masses=True)
    tolerance = 1e-12 if dtype == np.float64 else 2e-5
    np.testing.assert_allclose(on_device, out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(mass_on_device, mass, rtol=tolerance, atol=10 * tolerance)


def test_masses_of_several_tiles(rng):
    q, k, v = problems.make("peaked", 3, 300, 8, 4, seed=2)
    (_, lse, mass), (_, _, mass_on_device) = both(q, k, v, masses=True)
    np.testing.assert_allclose(mass_on_device, mass, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(np.logaddexp2.reduce(mass_on_device, axis=2), lse, rtol=1e-5, atol=1e-4)


def test_splits_are_merged(rng):
    q, k, v = problems.make("gaussian", 2, 2100, 4, 4, seed=3)
    (out, lse, _), (on_device, lse_on_device, _) = both(q, k, v)
    np.testing.assert_allclose(on_device, out, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse_on_device, lse, rtol=1e-6, atol=1e-5)


def test_only_the_used_rows_are_written_to_their_place(rng):
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((2, 20, 4), (2, 30, 4), (2, 30, 3)))
    problem = problems.flat(q, k, v)
    device = on_cuda(problem)
    which, used = np.array([[3, 19, 0], [7, 7, 7]]), np.array([2, 0])
    place = device.device.upload(np.full((2, 20, 3), 9, np.float32))
    rows(device, np.arange(2), device.device.upload(which), used=device.device.upload(used), place=place)
    expected = np.full((2, 20, 3), 9, np.float32)
    expected[0, [3, 19]] = naive.attention(q[0], k[0], v[0])[[3, 19]]
    np.testing.assert_allclose(host(place), expected, rtol=2e-5, atol=2e-6)


def test_strided_inputs_are_read_in_place(rng):
    q, k, v = (np.asfortranarray(rng.standard_normal((1, 40, 6)).astype(np.float32)) for _ in range(3))
    problem = problems.flat(*(x[:, ::2, ::-1] for x in (q, k, v)))
    (out, _, _), (on_device, _, _) = both(*(x[:, ::2, ::-1] for x in (q, k, v)))
    np.testing.assert_allclose(on_device, out, rtol=2e-5, atol=2e-6)
    assert not problem.q.flags.c_contiguous


@pytest.mark.parametrize(("e", "dtype"), [(70, np.float32), (20, np.float64)])
def test_blocks_share_no_columns(e, dtype):
    q, k, v = (x.astype(dtype) for x in problems.make("gaussian", 3, 4, 2, e, seed=5))
    problem = on_cuda(problems.flat(q, k, v))
    forwards = host(rows(problem, np.arange(1))[0])
    with simulator.backwards():
        np.testing.assert_array_equal(host(rows(problem, np.arange(1))[0]), forwards)


def test_every_barrier_is_needed():
    q, k, v = problems.make("gaussian", 70, 40, 68, 5, seed=4)
    problem = on_cuda(problems.flat(q, k, v))
    assert not simulator.barriers_without_effect(lambda: host(rows(problem, np.arange(1))[0]))
