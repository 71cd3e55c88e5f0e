"""Stage 1: projection of the head dimension, D to m.

    scores after projection: scale (q P_Q) . (k P_K), with the scale of the original D

Random kinds use one P for both sides, scaled so that the mean of (q P) . (k P) over P is q . k:

    "gaussian"     independent N(0, 1/m) entries
    "orthogonal"   sqrt(D/m) times a random matrix with orthonormal columns
    "srht"         random signs, Walsh-Hadamard transform, m of its coordinates (Ailon and Chazelle 2006; Tropp 2011)

"pca" is the pair of matrices, from the data, whose product is the best rank-m factor of Q (K - mean)^T on a sample of
rows. With C_Q = R_Q^T R_Q, C_K = R_K^T R_K the two second moments and R_Q R_K^T = U S W^T:

    P_Q = R_Q^-1 U S^1/2        P_K = R_K^-1 W S^1/2        (first m columns)
"""

import dataclasses
import math

import numpy as np
from numba import prange
from scipy import linalg

from . import _validate, draw
from ._jit import cpu_kernel, shared
from .kernels.scalar import hash64, permuted, widen
from .kernels.simd import padded
from .kernels.small_qr import moment_root, solve_upper
from .kernels.small_svd import orthogonalise_rows

SAMPLE = 4096  # rows of each side from which the "pca" pair is computed
_RIDGE = 1e-12  # relative ridge on the two second moments: directions without data stay finite
RANDOM_KINDS = ("srht", "gaussian", "orthogonal")

# --- bodies ---


@shared
def _hadamard(x):
    """Walsh-Hadamard transform of a vector whose length is a power of two, in place, not normalised."""
    size = x.shape[0]
    half = 1
    while half < size:
        for start in range(0, size, 2 * half):
            for i in range(start, start + half):
                a, b = x[i], x[i + half]
                x[i], x[i + half] = a + b, a - b
        half *= 2


@shared
def _coordinates(size, count, seed, kept):
    for c in range(count):
        kept[c] = permuted(c, size, seed, 0, draw.PROJECTION)


@shared
def _balance(q, k, p_q, p_k):
    """The pair of one head, by the formulas above; singular values in falling order."""
    dim, count = p_q.shape
    root_q, root_k = moment_root(q, _RIDGE), moment_root(k, _RIDGE)
    joint = np.zeros((dim, 2 * dim))  # [R_Q R_K^T, I], to be rotated to [S W^T, U^T]
    for i in range(dim):
        joint[i, dim + i] = 1.0
        for j in range(dim):
            for c in range(max(i, j), dim):
                joint[i, j] += root_q[i, c] * root_k[j, c]
    squares = np.empty(dim)
    orthogonalise_rows(joint, dim, squares)
    order = np.argsort(-squares)
    for c in range(count):
        row = order[c]
        singular = math.sqrt(squares[row])
        for d in range(dim):
            p_q[d, c] = joint[row, dim + d] * math.sqrt(singular)
            p_k[d, c] = joint[row, d] / math.sqrt(singular) if singular > 0 else 0.0
    solve_upper(root_q, p_q)
    solve_upper(root_k, p_k)


# --- CPU drivers ---


@cpu_kernel
def _srht_cpu(x, size, seed, out):
    rows, dim = x.shape
    count = out.shape[1]
    kept = np.empty(count, np.int64)
    _coordinates(size, count, seed, kept)
    pieces = (rows + 255) // 256
    factor = out.dtype.type(1.0 / np.sqrt(count))
    for piece in prange(pieces):
        buffer = np.empty(size, out.dtype)
        for i in range(piece * 256, min(rows, piece * 256 + 256)):
            for d in range(size):
                buffer[d] = 0
            for d in range(dim):
                value = widen(x[i, d])
                buffer[d] = -value if hash64(seed, 1, draw.PROJECTION, d) & np.uint64(1) else value
            _hadamard(buffer)
            for c in range(count):
                out[i, c] = buffer[kept[c]] * factor


@cpu_kernel
def _balance_cpu(q, k, p_q, p_k):
    for h in prange(q.shape[0]):
        _balance(q[h], k[h], p_q[h], p_k[h])


# --- stage ---


def srht(x, count, seed, element):
    """Rows of x (n, D) to (n, count)."""
    size = 1 << (x.shape[1] - 1).bit_length()
    out = np.empty((x.shape[0], count), element)
    _srht_cpu(x, size, seed, out)
    return out


def random_matrix(dim, count, kind, seed, dtype):
    """P (dim, count) of a random kind."""
    if kind == "srht":
        return srht(np.eye(dim), count, seed, np.float64).astype(dtype)
    gaussian = np.random.Generator(np.random.Philox(seed)).standard_normal((dim, count))
    if kind == "gaussian":
        return (gaussian / np.sqrt(count)).astype(dtype)
    q, r = linalg.qr(gaussian, mode="economic")
    return (q * np.sign(np.diag(r)) * np.sqrt(dim / count)).astype(dtype)


def balanced_pair(problem, head, count):
    """(P_Q, P_K, mean of k) of one head, from a sample of its rows, in float64."""
    q, k = sample(problem, head)
    mean = k.mean(axis=0)
    p_q, p_k = (np.empty((q.shape[1], count)) for _ in range(2))
    _balance_cpu(q[None], (k - mean)[None], p_q[None], p_k[None])
    return p_q, p_k, mean


def head_bases(problem, heads, proj_dim, kind):
    """What the apply pass needs of a projection: `basis (heads, m' padded, D)`, and a function that projects landmarks.

    Each head has `repeats` sets of landmarks in a row.

    For "pca" there is one more coordinate, q . mean(k): the projected logits keep the true ones' common shift.
    """
    dim = problem.q.shape[2]
    if kind != "pca":
        p = random_matrix(dim, proj_dim, kind, problem.seed, problem.element)
        return _stacked([p.T] * len(heads), problem.element), lambda landmarks, repeats: landmarks @ p
    pairs = [balanced_pair(problem, h, proj_dim) for h in heads]
    basis = _stacked([np.vstack([p_q.T, mean[None]]) for p_q, _, mean in pairs], problem.element)

    def project_landmarks(landmarks, repeats):
        out = np.ones((*landmarks.shape[:2], proj_dim + 1), problem.element)
        for i, rows in enumerate(landmarks):
            _, p_k, mean = pairs[i // repeats]
            out[i, :, :proj_dim] = (rows - mean) @ p_k
        return out

    return basis, project_landmarks


def _stacked(bases, element):
    """As the panel bodies read them: contiguous, padded to whole register blocks."""
    rows, dim = bases[0].shape
    out = np.zeros((len(bases), padded(rows), dim), element)
    out[:, :rows] = bases
    return out


def projected_problem(problem, heads, proj_dim, kind):
    """The problem of calibrate=False: q P_Q and k P_K of these heads in place of q and k, the scale as it was."""
    queries, keys = [], []
    for head in heads:
        q, k = (as_element(x[place], np.float64) for x, place in _sides(problem, head))
        if kind == "pca":
            p_q, p_k, mean = balanced_pair(problem, head, proj_dim)
            k = k - mean  # a shift of all logits of a row, which softmax does not see
        else:
            p_q = p_k = random_matrix(problem.q.shape[2], proj_dim, kind, problem.seed, np.float64)
        queries.append((q @ p_q).astype(problem.element))
        keys.append((k @ p_k).astype(problem.element))
    return dataclasses.replace(
        problem,
        q=np.stack(queries),
        k=np.stack(keys),
        v=problem.v[problem.key_head[heads]],
        query_head=np.arange(len(heads)),
        key_head=np.arange(len(heads)),
    )


def sample(problem, head):
    """Up to SAMPLE rows of one head's queries and keys, drawn without replacement, in float64."""
    out = []
    for x, place in _sides(problem, head):
        rows = min(SAMPLE, x.shape[1])
        which = draw.uniform_rows(problem, [head], rows, stage=draw.PROJECTION, size=x.shape[1])[0]
        out.append(as_element(x[place][np.sort(which)], np.float64))
    return out


def _sides(problem, head):
    return (problem.q, problem.query_head[head]), (problem.k, problem.key_head[head])


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
    pairs = [balanced_pair(problem, h, proj_dim) for h in range(len(problem.query_head))]
    return tuple(np.stack([pair[side] for pair in pairs]).reshape(*lead, -1, proj_dim) for side in range(2))


def _check(dim, proj_dim, kind, seed):
    _validate.choice("kind", kind, RANDOM_KINDS)
    proj_dim = _validate.whole("proj_dim", proj_dim, 1, dim, high_name=f"the dimension {dim}")
    return proj_dim, _validate.whole("seed", seed, 0, 2**63 - 1, high_name="2**63 - 1")
