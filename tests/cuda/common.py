"""The same problem on both devices."""

import dataclasses

import numpy as np

from pda_numba.device import Cuda


def on_cuda(problem):
    """A copy of the problem on a CUDA device of its own."""
    device = Cuda()
    arrays = {name: device.upload(getattr(problem, name)) for name in ("q", "k", "v")}
    return dataclasses.replace(problem, device=device, **arrays)


def host(array):
    """A device array as NumPy's."""
    return array if isinstance(array, np.ndarray) else array.copy_to_host()
