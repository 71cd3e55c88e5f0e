"""The scan of the inputs on the device."""

import numpy as np
import problems
import pytest
import simulator
from common import host, on_cuda

from pda_numba.scan import find_ranges, scan_array

pytestmark = pytest.mark.cudasim


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_same_ranges(dtype, rng):
    q, k, v = (rng.standard_normal((2, n, 70)).astype(dtype) for n in (1, 300, 300))
    problem = problems.flat(q, k, v)
    expected, got = (find_ranges(p, q.dtype, check_finite=True) for p in (problem, on_cuda(problem)))
    np.testing.assert_array_equal(host(got.low), v.min(axis=1))
    np.testing.assert_array_equal(host(got.high), v.max(axis=1))
    np.testing.assert_allclose(got.slip, expected.slip, rtol=1e-12)  # sums of float64 in another order


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["q", "v"])
def test_what_is_not_finite_is_named(value, name, rng):
    arrays = {n: rng.standard_normal((2, 300, 3)).astype(np.float32) for n in ("q", "k", "v")}
    arrays[name][1, 260, 2] = value
    problem = on_cuda(problems.flat(**arrays))
    with pytest.raises(ValueError, match=f"{name} must be finite, .* at head 1, token 260, column 2"):
        find_ranges(problem, np.dtype(np.float32), check_finite=True)
    find_ranges(problem, np.dtype(np.float32), check_finite=False)


def test_it_meets_no_barrier_of_its_own(rng):
    """Only those of the sums over the team; and the order of the threads does not matter."""
    q, k, v = (rng.standard_normal((1, 300, 3)).astype(np.float32) for _ in range(3))
    problem = on_cuda(problems.flat(q, k, v))

    def run():
        report = problem.device.zeros((1, 3), np.float64)
        scan_array(problem.device, problem.element, problem.q, 0, report)
        return host(report)

    with simulator.barriers_met() as met:
        reference = run()
    assert met
    assert all(place[0].endswith("team.py") for place in met)
    with simulator.backwards():
        np.testing.assert_array_equal(run(), reference)
