"""Factors of a fit on the device: those of the CPU, within rounding."""

import numpy as np
import pytest
from foreign import Foreign

from pda_numba import factorize

pytestmark = pytest.mark.cudasim


def test_factors(rng):
    q, k = (rng.standard_normal((2, n, 3)).astype(np.float32) for n in (24, 20))
    expected = factorize(q, k, rank=3, n_rows=6, device="cpu")
    found = factorize(Foreign(q), Foreign(k), rank=3, n_rows=6)
    for name, value in vars(expected).items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=0, atol=5e-6 * np.abs(value).max())  # float32
