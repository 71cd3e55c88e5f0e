"""Tests of the CUDA drivers without a GPU: on Numba's simulator, in a process of its own (NUMBA_ENABLE_CUDASIM=1)."""

import pytest
from numba.core import config

if config.ENABLE_CUDASIM:
    import simulator

    simulator.install()


def pytest_collection_modifyitems(items):
    if not config.ENABLE_CUDASIM:
        for item in items:
            if item.get_closest_marker("cudasim"):
                item.add_marker(pytest.mark.skip(reason="needs NUMBA_ENABLE_CUDASIM=1"))
