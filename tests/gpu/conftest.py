"""Tests on a real card: `pytest -m gpu` runs all of them, and skips them with the reason where there is none."""

import pytest
from numba.core import config

from pda_numba.gpu import why_no_gpu


def pytest_collection_modifyitems(items):
    ours = [item for item in items if item.get_closest_marker("gpu")]
    reason = "NUMBA_ENABLE_CUDASIM is set" if config.ENABLE_CUDASIM else why_no_gpu() if ours else None
    if reason:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))
