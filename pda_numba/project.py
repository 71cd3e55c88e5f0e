"""Stage 1: projection of the head dimension, D to m.

    scores after projection: scale (q P_Q) . (k P_K), with the scale of the original D

Random kinds use one P for both sides, scaled so that the mean of (q P) . (k P) over P is q . k:

    "gaussian"     independent N(0, 1/m) entries
    "orthogonal"   sqrt(D/m) times a random matrix with orthonormal columns
    "srht"         random signs, Walsh-Hadamard transform, m of its coordinates (Ailon and Chazelle 2006; Tropp 2011)

"pca" is a pair of matrices, from the data (`pair`).
"""

import dataclasses
import math

import numpy as np
from numba import prange
from scipy import linalg

from . import _validate, draw
from ._jit import cpu_kernel, cuda, cuda_kernel, serial_kernel, shared
from .dense import multiply, scatter_rows
from .device import CPU
from .kernels.groups import neighbours
from .kernels.scalar import hash64, permuted, widen
from .kernels.simd import dot, padded
from .kernels.team import barrier, member, members
from .pair import balanced_pairs, query_basis

RANDOM_KINDS = ("srht", "gaussian", "orthogonal")

# --- bodies: the transform ---


@shared
def _hadamard(x):
    """Walsh-Hadamard transform of a vector whose length is a power of two, in place, not normalised."""
    size = x.shape[0]
    half = 1
    while half < size:
        across = neighbours(half)
        for start in range(member() // across * 2 * half, size, members() // across * 2 * half):
            for i in range(start + member() % across, start + half, across):
                a, b = x[i], x[i + half]
                x[i], x[i + half] = a + b, a - b
        barrier()
        half *= 2


@shared
def _transform(x, signs, kept, factor, buffer, out):
    """One row: random signs, the transform, the kept coordinates."""
    for d in range(member(), buffer.shape[0], members()):
        buffer[d] = widen(x[d]) * signs[d] if d < x.shape[0] else out.dtype.type(0)
    barrier()
    _hadamard(buffer)
    for c in range(member(), out.shape[0], members()):
        out[c] = buffer[kept[c]] * factor
    barrier()


# --- bodies: products ---


@shared
def _project_row(x, mean, p, buffer, out):
    """out = (x - mean) P for one row, P given by its columns; 1 in the coordinate behind them, if there is one."""
    for d in range(member(), x.shape[0], members()):
        buffer[0, d] = np.float64(widen(x[d])) - mean[d]
    barrier()
    for c in range(member(), out.shape[0], members()):
        out[c] = dot(p, c, buffer, 0, x.shape[0]) if c < p.shape[0] else 1.0
    barrier()


# --- CPU drivers ---


@serial_kernel
def _signs_and_coordinates(size, seed, signs, kept):
    for d in range(size):
        signs[d] = -1 if hash64(seed, 1, draw.PROJECTION, d) & np.uint64(1) else 1
    for c in range(kept.shape[0]):
        kept[c] = permuted(c, size, seed, 0, draw.PROJECTION)


@cpu_kernel
def _srht_cpu(x, signs, kept, factor, work, out):
    for piece in prange(work.shape[0]):
        for i in range(piece, x.shape[0], work.shape[0]):
            _transform(x[i], signs, kept, factor, work[piece], out[i])


@cpu_kernel
def _project_cpu(x, source, index, mean, p, work, out):
    tiles, rows, _ = out.shape
    for piece in prange(work.shape[0]):
        for item in range(piece, tiles * rows, work.shape[0]):
            t, i = item // rows, item % rows
            _project_row(x[source[t], i], mean[index[t]], p[index[t]], work[piece], out[t, i])


# --- CUDA drivers ---

_ROW_TEAM, _SHARED = 64, 2048


def _srht_driver(element):
    """Rows of up to _SHARED coordinates are transformed in shared memory, longer ones in `work`."""

    @cuda_kernel(_ROW_TEAM)
    def srht_cuda(x, signs, kept, factor, work, out):
        piece = cuda.blockIdx.x
        shared = cuda.shared.array(_SHARED, element)
        for i in range(piece, x.shape[0], work.shape[0]):
            if signs.shape[0] <= _SHARED:
                _transform(x[i], signs, kept, factor, shared[: signs.shape[0]], out[i])
            else:
                _transform(x[i], signs, kept, factor, work[piece], out[i])

    return srht_cuda


_SRHT_CUDA = {element: _srht_driver(np.dtype(element)) for element in (np.float32, np.float64)}


@cuda_kernel(_ROW_TEAM)
def _project_cuda(x, source, index, mean, p, work, out):
    tiles, rows, _ = out.shape
    piece = cuda.blockIdx.x
    for item in range(piece, tiles * rows, work.shape[0]):
        t, i = item // rows, item % rows
        _project_row(x[source[t], i], mean[index[t]], p[index[t]], work[piece], out[t, i])


# --- stage ---


def srht(x, count, seed, element, device=CPU):
    """Rows of x (n, D) to (n, count), on the device that holds them."""
    size = 1 << (x.shape[1] - 1).bit_length()
    signs, kept = np.empty(size, element), np.empty(count, np.int64)
    _signs_and_coordinates(size, seed, signs, kept)
    out = device.empty((x.shape[0], count), element)
    work = device.empty((min(device.pieces, x.shape[0]), size), element)
    factor = np.dtype(element).type(1.0 / math.sqrt(count))
    task = x, device.upload(signs), device.upload(kept), factor, work, out
    device.run(_srht_cpu, _SRHT_CUDA[np.dtype(element).type], (work.shape[0],), *task)
    return out


def random_matrix(dim, count, kind, seed, dtype):
    """P (dim, count) of a random kind, on the host."""
    if kind == "srht":
        return srht(np.eye(dim), count, seed, np.float64).astype(dtype)
    gaussian = np.random.Generator(np.random.Philox(seed)).standard_normal((dim, count))
    if kind == "gaussian":
        return (gaussian / np.sqrt(count)).astype(dtype)
    q, r = linalg.qr(gaussian, mode="economic")
    return (q * np.sign(np.diag(r)) * np.sqrt(dim / count)).astype(dtype)


def head_bases(problem, heads, proj_dim, kind):
    """What the apply pass needs of a projection: `basis (heads, m' padded, D)`, P_K by columns (heads, m, D), and a
    function that projects landmarks, of which each head has `repeats` sets in a row.

    For "pca" there is one more coordinate, q . mean(k): the projected logits keep the true ones' common shift.
    """
    device, dim, count = problem.device, problem.shape[2], len(heads)
    if kind != "pca":
        basis, p = np.zeros((1, padded(proj_dim), dim), problem.element), _random_rows(problem, proj_dim, kind)
        basis[0, :proj_dim] = p

        def project_by_one(landmarks, repeats):
            every = np.arange(len(landmarks))
            return _project(problem, landmarks, every, 0 * every, *_without_mean(problem, p))

        return device.repeat(device.upload(basis), count), device.repeat(device.upload(p[None]), count), project_by_one
    p_q, p_k, mean = balanced_pairs(problem, heads, proj_dim)
    basis = query_basis(problem, p_q, mean)

    def project_by_own(landmarks, repeats):
        every = np.arange(len(landmarks))
        return _project(problem, landmarks, every, every // repeats, mean, p_k, ones=1)

    return basis, p_k, project_by_own


def _random_rows(problem, count, kind):
    """The columns of a random P, as rows."""
    return np.ascontiguousarray(random_matrix(problem.shape[2], count, kind, problem.seed, np.float64).T)


def _without_mean(problem, p):
    """What `_project` takes for one P that all arrays share."""
    return problem.device.upload(np.zeros((1, p.shape[1]))), problem.device.upload(p[None])


def _project(problem, x, source, index, mean, p, ones=0):
    """(x[source[t]] - mean[index[t]]) P[index[t]] for every t, and `ones` more coordinates that are 1."""
    device = problem.device
    out = device.empty((len(source), x.shape[1], p.shape[1] + ones), problem.element)
    work = device.empty((min(device.pieces, len(source) * x.shape[1]), 1, x.shape[2]), np.float64)
    source, index = device.upload(source), device.upload(index)
    device.run(_project_cpu, _project_cuda, (work.shape[0],), x, source, index, mean, p, work, out)
    return out


def projected_problem(problem, heads, proj_dim, kind):
    """The problem of calibrate=False: q P_Q and k P_K of these heads in place of q and k, the scale as it was."""
    device, own = problem.device, np.arange(len(heads))
    query_head, key_head = problem.query_head[heads], problem.key_head[heads]
    if kind == "pca":
        p_q, p_k, mean = balanced_pairs(problem, heads, proj_dim)
        zero = device.zeros(mean.shape, np.float64)
        q = _project(problem, problem.q, query_head, own, zero, p_q)
        k = _project(problem, problem.k, key_head, own, mean, p_k)  # a shift of a row's logits: softmax does not see it
    elif kind == "srht":
        q, k = (
            _transformed(problem, x, place, proj_dim) for x, place in ((problem.q, query_head), (problem.k, key_head))
        )
    else:
        mean, p = _without_mean(problem, _random_rows(problem, proj_dim, kind))
        q, k = (
            _project(problem, x, place, 0 * own, mean, p)
            for x, place in ((problem.q, query_head), (problem.k, key_head))
        )
    v = device.take(problem.v, key_head)
    return dataclasses.replace(problem, q=q, k=k, v=v, query_head=own, key_head=own)


def projected_adjoint(problem, heads, proj_dim, kind, d_q, d_k, gradients):
    """Add dq = dq~ P_Q^T and dk = dk~ P_K^T, of q~ and k~ (heads, N or M, m), to the gradients of q and k.

    The matrices, and the mean of the keys, are held fixed. No two of the heads may share queries or keys.
    """
    device, own = problem.device, np.arange(len(heads))
    if kind == "pca":
        p_q, p_k, _ = balanced_pairs(problem, heads, proj_dim)
        one = device.repeat(device.upload(np.eye(proj_dim)[None]), len(heads))
        back, index = [multiply(device, p, one, turn_a=True) for p in (p_q, p_k)], own
    else:
        p = np.ascontiguousarray(random_matrix(problem.shape[2], proj_dim, kind, problem.seed, np.float64))
        back, index = 2 * [device.upload(p[None])], 0 * own
    places = problem.query_heads(heads), problem.key_heads(heads)
    for x, p, own_place, total in zip((d_q, d_k), back, places, gradients, strict=False):
        zero = device.zeros((len(heads), proj_dim), np.float64)
        every = device.repeat(device.upload(np.arange(x.shape[1])[None]), len(heads))
        scatter_rows(device, own_place, every, _project(problem, x, own, index, zero, p), total, distinct=True)


def _transformed(problem, x, place, count):
    """The transform of the arrays `place` of x."""
    flat = srht(x.reshape(-1, x.shape[2]), count, problem.seed, problem.element, problem.device)
    return problem.device.take(flat.reshape(x.shape[0], x.shape[1], count), place)


def as_element(x, element):
    """Stored elements (16-bit floats as integers) as float32 or float64."""
    if x.dtype == np.int16:
        return (x.astype(np.int32) << 16).view(np.float32).astype(element, copy=False)
    return x.view(np.float16).astype(element) if x.dtype == np.uint16 else x.astype(element, copy=False)


# --- public ---


def project(x, proj_dim, *, kind="srht", seed=0):
    """Project the last axis of `x` to `proj_dim` random coordinates that keep inner products on average.

    Parameters
    ----------
    x : ndarray, shape (..., N, D)
        float16, float32, float64 or bfloat16.
    proj_dim : int
        Between 1 and D.
    kind : {"srht", "gaussian", "orthogonal"}
        "srht" is the subsampled randomized Hadamard transform, in O(N D log D) by a fast transform.
    seed : int
        Queries and keys must be projected with the same seed.

    Returns
    -------
    ndarray, shape (..., N, proj_dim)
        float64 for float64 input, else float32. The mean over seeds of ``project(a) . project(b)`` is ``a . b``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as above.
    """
    x = _validate.float_array("x", x)
    proj_dim, seed = _check(x.shape[-1], proj_dim, kind, seed)
    element = np.float64 if x.dtype == np.float64 else np.float32
    flat = _validate.bits(x).reshape(-1, x.shape[-1])
    if kind == "srht":
        out = srht(flat, proj_dim, seed, element)
    else:
        out = as_element(flat, element) @ random_matrix(x.shape[-1], proj_dim, kind, seed, element)
    return out.reshape(*x.shape[:-1], proj_dim)


def projection_matrix(dim, proj_dim, *, kind="srht", seed=0, dtype=np.float32):
    """The matrix P (dim, proj_dim) that `project` multiplies by.

    Parameters
    ----------
    dim, proj_dim : int
        D, and m between 1 and D.
    kind : {"srht", "gaussian", "orthogonal"}
    seed : int
    dtype : numpy.dtype
        float32 or float64.

    Returns
    -------
    ndarray, shape (dim, proj_dim)

    Raises
    ------
    TypeError, ValueError
        If an argument is not as above.
    """
    dim = _validate.whole("dim", dim, 1)
    proj_dim, seed = _check(dim, proj_dim, kind, seed)
    if np.dtype(dtype) not in (np.float32, np.float64):
        raise TypeError(f"dtype must be float32 or float64, got {np.dtype(dtype)}")
    return random_matrix(dim, proj_dim, kind, seed, np.dtype(dtype))


def projection_pair(q, k, proj_dim, *, seed=0):
    """The data-driven pair (P_Q, P_K): q P_Q (k P_K)^T is close to the best rank-m factor of q (k - mean)^T.

    Parameters
    ----------
    q : ndarray, shape (..., H, N, D)
    k : ndarray, shape (..., H, M, D)
    proj_dim : int
        Between 1 and D.
    seed : int
        Seed of the row sample (at most 4096 rows of each).

    Returns
    -------
    p_q, p_k : ndarray, shape (..., H, D, proj_dim)
        float64. Keys are meant to be centred first: ``(k - k.mean(-2)) @ p_k``; softmax does not see the difference.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as above.
    """
    problem, lead, _ = _validate.build_problem(q, k, k, None, seed)
    proj_dim = _check(problem.q.shape[2], proj_dim, "srht", seed)[0]
    pairs = balanced_pairs(problem, np.arange(len(problem.query_head)), proj_dim)[:2]
    return tuple(np.ascontiguousarray(p.transpose(0, 2, 1)).reshape(*lead, -1, proj_dim) for p in pairs)


def _check(dim, proj_dim, kind, seed):
    _validate.choice("kind", kind, RANDOM_KINDS)
    proj_dim = _validate.whole("proj_dim", proj_dim, 1, dim, high_name=f"the dimension {dim}")
    return proj_dim, _validate.whole("seed", seed, 0, 2**63 - 1, high_name="2**63 - 1")
