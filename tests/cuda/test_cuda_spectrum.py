"""Singular values on the device: the products of the CPU's, and arrays that lie there."""

import masks
import numpy as np
import pytest
from foreign import Foreign

from pda_numba import spectrum
from pda_numba.device import CPU, Cuda
from pda_numba.mask import check
from pda_numba.matrix import Softmax, queries_of_keys

pytestmark = pytest.mark.cudasim


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products(dtype, rng):
    q, k = (rng.standard_normal((2, n, 3)).astype(dtype) for n in (6, 9))
    x, y = rng.standard_normal((2, 9, 2)), rng.standard_normal((2, 6, 2))
    host, device = (Softmax(where, q, k, 0.5, 0) for where in (CPU, Cuda()))
    rounding = 20 * np.finfo(dtype).eps  # of sums of nine terms and an exp
    for one, other in (
        (host.times(x), device.times(x)),
        (host.transposed_times(y), device.transposed_times(y)),
        (host.row_squares(), device.row_squares()),
    ):
        np.testing.assert_allclose(other, one, rtol=0, atol=rounding * np.abs(one).max())


def test_products_under_a_mask(rng):
    options, seen = masks.packed_causal(40, 36, 1)
    pattern = check((True, None, None, None, options["cu_seqlens"], None), (1,), 40, 36).patterns[0]
    q, k = (rng.standard_normal((1, n, 3)).astype(np.float32) for n in (40, 36))
    a = masks.weights(q[0], k[0], seen[0], 0.5)
    matrix = Softmax(Cuda(), q, k, 0.5, 0, (pattern.spans(40), queries_of_keys(pattern, 36)))
    x, y = rng.standard_normal((1, 36, 2)), rng.standard_normal((1, 40, 2))
    for found, expected in ((matrix.times(x)[0], a @ x[0]), (matrix.transposed_times(y)[0], a.T @ y[0])):
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)  # float32
    np.testing.assert_allclose(matrix.row_squares()[0], np.square(a).sum(axis=1), rtol=5e-6)


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_arrays_on_the_device(name, rng):
    q, k = (rng.standard_normal((2, n, 3)).astype(name) for n in (6, 8))
    expected, found = spectrum(q, k, rank=2, n_iter=0), spectrum(Foreign(q), Foreign(k), rank=2, n_iter=0)
    np.testing.assert_allclose(found.singular_values, expected.singular_values, rtol=1e-5)  # float32
    np.testing.assert_allclose(found.error, expected.error, rtol=1e-4)
    assert found.device == "cuda (simulator)"
    assert expected.device == "cpu"
