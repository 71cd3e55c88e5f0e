"""Singular values and factors on a real card: those of the CPU, within rounding."""

import numpy as np
import pytest

from pda_numba import factorize, spectrum
from pda_numba.data import smooth_heads

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("causal", [False, True])
def test_spectrum(causal):
    q, k, _ = smooth_heads((3, 1500, 32))
    expected, found = (spectrum(q, k, rank=20, causal=causal, device=device) for device in ("cpu", "cuda"))
    assert found.device == "cuda"
    # float32: rounding is relative to the first
    np.testing.assert_allclose(found.singular_values, expected.singular_values, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.error, expected.error, rtol=1e-2)
    np.testing.assert_allclose(found.frobenius_norm, expected.frobenius_norm, rtol=1e-5)


def test_factorize():
    q, k, _ = smooth_heads((3, 3000, 32))
    expected, found = (factorize(q, k, rank=32, device=device) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(found.error, expected.error, rtol=0.2)  # other roundings may choose another ridge
    assert (found.error < 0.2).all()
