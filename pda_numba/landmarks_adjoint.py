"""The adjoint of the landmarks (`landmarks.refine`, `landmarks.shrink`, `project`): from dS~ to the keys.

    S_j = mean + c (C_j - mean)      C_j = (k_j + sum of the n_j sampled keys nearest to it) / (1 + n_j)

    dC_j = c dS_j                    dmean = (1 - c) sum_j dS_j
    a landmark's own key: dC_j / (1 + n_j)      a sampled key: dC_near / (1 + n_near) + dmean / samples

Without the averages n_j is 0 (`landmarks.refine`). Which keys these are, and the temperature c, are held fixed. With a
projection S~ = (S - mean) P_K, and dS = dS~ P_K^T: P_K, and the mean that it was made with, are held fixed too.
"""

import numpy as np
from numba import prange

from ._jit import cpu_kernel, cuda, cuda_kernel, shared
from .kernels.team import barrier, member, members

# --- bodies, for a team: a member has its own columns ---


@shared
def _count_members(nearest, averaged, size):
    """1 + n_j of every landmark."""
    for c in range(member(), size.shape[0], members()):
        size[c] = 1.0
        for i in range(nearest.shape[0] if averaged else 0):
            size[c] += 1.0 if nearest[i] == c else 0.0
    barrier()


@shared
def _to_keys(d_landmarks, keys, found, which, nearest, averaged, temperature, size, dk):
    """One head."""
    _count_members(nearest, averaged, size)
    for d in range(member(), dk.shape[1], members()):
        shift = 0.0
        for c in range(found):
            shift += d_landmarks[c, d]
            dk[keys[c], d] += dk.dtype.type(temperature * d_landmarks[c, d] / size[c])
        shift *= (1.0 - temperature) / max(which.shape[0], 1)
        for i in range(which.shape[0]):
            c = nearest[i]
            own = temperature * d_landmarks[c, d] / size[c] if averaged else 0.0
            dk[which[i], d] += dk.dtype.type(own + shift)


# --- drivers: a team per head ---


@cpu_kernel
def _to_keys_cpu(key_head, d_landmarks, keys, found, which, nearest, averaged, temperature, size, dk):
    for h in prange(len(found)):
        task = keys[h], found[h], which[h], nearest[h], averaged, temperature[h], size[h]
        _to_keys(d_landmarks[h], *task, dk[key_head[h]])


@cuda_kernel(64)
def _to_keys_cuda(key_head, d_landmarks, keys, found, which, nearest, averaged, temperature, size, dk):
    h = cuda.blockIdx.x
    task = keys[h], found[h], which[h], nearest[h], averaged, temperature[h], size[h]
    _to_keys(d_landmarks[h], *task, dk[key_head[h]])


# --- stage ---


def landmarks_adjoint(problem, heads, d_landmarks, keys, found, sample, temperature, gradients):
    """Add dS (heads, R padded, D) to the keys' gradient.

    `keys (heads, R)` are what the landmarks began as, `found (heads,)` how many count, `sample` the keys of the Lloyd
    step and the landmark nearest to each, `temperature (heads,)` what the landmarks were shrunk by.
    """
    device, (which, nearest) = problem.device, sample
    size = device.empty(d_landmarks.shape[:2], np.float64)
    task = d_landmarks, keys, found, which, nearest, not problem.merged, temperature, size, gradients.k
    device.run(_to_keys_cpu, _to_keys_cuda, (len(heads),), problem.key_heads(heads), *task)
