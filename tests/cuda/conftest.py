"""Tests of the CUDA drivers without a GPU: on Numba's simulator, in a process of its own (NUMBA_ENABLE_CUDASIM=1)."""

from numba.core import config

if config.ENABLE_CUDASIM:
    import simulator

    simulator.install()
else:
    collect_ignore_glob = ["test_*.py"]
