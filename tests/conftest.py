"""Fixtures, and the seeds: every test draws from a generator of its own with a fixed seed."""

import numpy as np
import pytest

from pda_numba.data import real_heads


@pytest.fixture
def rng():
    return np.random.default_rng(20240601)


@pytest.fixture(scope="session")
def text_heads():
    """q, k, v (6, 4096, 32) and the scale of a real text encoder."""
    return real_heads("text")


@pytest.fixture(scope="session")
def speech_heads():
    """q, k, v (8, 1500, 64) and the scale of a real speech encoder."""
    return real_heads("speech")
