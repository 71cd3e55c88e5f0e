"""`spectrum`: the leading singular values of the exact softmax matrix of every head, never formed.

A randomized range finder with power iterations, orthogonalised at every half step (Halko, Martinsson and Tropp 2011),
whose blocks are all kept: together they are a block Krylov space, in which singular values converge much faster than in
the last block alone (Musco and Musco 2015), for one wider pass:

    A Omega = Q_0 R_0      A^T Q_i = Z R',  A Z = Q_i+1 R''      [Q_0 .. Q_n] = P R      singular values of P^T A

These are 2 n_iter + 2 passes over all pairs of queries and keys (`matrix`), and there is one more for |A|_F. How much
of A lies outside of the range of the last block Q is estimated by leaving out one column of Omega at a time (Epperly
and Tropp 2024): if M is the product of the triangles, t_i = Q s_i / |s_i| with s_i column i of M^-T is what the range
loses without column i, and

    |A - Q Q^T A|_F^2 is estimated by the mean over i of |(I - Q Q^T + t_i t_i^T) A omega_i|^2
"""

import math
import time
from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import solve_triangular

from . import _validate
from .info import _table
from .matrix import heads_of
from .orthonormal import orthonormal
from .plan import exact_flops

# Below this share of |A|_F^2 what the singular values leave of it is taken from the leave-one-out estimate, not from
# the difference of two nearly equal numbers: float32 knows each to about 1e-6.
_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Spectrum:
    """Leading singular values of exact attention; arrays have one entry per head, in the shape of q's leading axes.

    Attributes
    ----------
    singular_values : ndarray, shape (..., rank)
        Falling. Never above the true ones, but for rounding. Values below 1e-6 times the first (1e-14 in float64) are
        rounding.
    error : ndarray
        Leave-one-out estimate of the relative Frobenius error of the approximation of this rank that they belong to:
        about what a low-rank method can reach at best. Independent of `frobenius_norm`.
    frobenius_norm : ndarray
        |A|_F, exact.
    nuclear_norm : ndarray
        Sum of all computed singular values, oversampling included: a lower limit of the nuclear norm.
    tail : ndarray, shape (..., rank + 1)
        The relative Frobenius norm of what the first r = 0 .. rank singular values leave: the exact norm less what is
        computed, or where that is too little to tell from rounding, the leave-one-out estimate.
    shape : tuple
        Queries and keys, N and M.
    n_oversamples, n_iter, seed : int
    device, device_reason, dtype : str
    seconds : float
        Wall time.
    """

    singular_values: np.ndarray
    error: np.ndarray
    frobenius_norm: np.ndarray
    nuclear_norm: np.ndarray
    tail: np.ndarray
    shape: tuple
    n_oversamples: int
    n_iter: int
    seed: int
    device: str
    device_reason: str
    dtype: str
    seconds: float = field(repr=False)

    @property
    def rank(self):
        """How many singular values there are."""
        return self.singular_values.shape[-1]

    def rank_for(self, tol):
        """The smallest rank that leaves at most `tol` of the matrix, relative in the Frobenius norm.

        Parameters
        ----------
        tol : float

        Returns
        -------
        ndarray of int
            One entry per head; -1 where more than `rank` is needed.
        """
        enough = self.tail <= _validate.positive("tol", tol)
        return np.where(enough.any(axis=-1), enough.argmax(axis=-1), -1)[()]

    def __str__(self):
        values = self.singular_values
        ranks = [(f"rank for {tol:g}", np.asarray(self.rank_for(tol)), "d") for tol in (0.3, 0.1, 0.03)]
        table = _table(
            values.shape[:-1],
            [
                ("largest", values[..., 0], ".4g"),
                (f"value {self.rank}", values[..., -1], ".2e"),
                ("nuclear >=", self.nuclear_norm, ".4g"),
                ("Frobenius", self.frobenius_norm, ".4g"),
                (f"error at {self.rank}", self.error, ".2e"),
                *ranks,
            ],
        )
        more = f"-1: more than {self.rank}\n" if any((x[1] < 0).any() for x in ranks) else ""
        return (
            f"{table}\n{more}"
            f"{self.shape[0]:,} queries, {self.shape[1]:,} keys, {self.n_iter} power iterations, "
            f"{self.n_oversamples} columns more than the rank, seed {self.seed}\n"
            f"{self.seconds:.3f} s on device {self.device} ({self.device_reason}), {self.dtype}"
        )


def spectrum(
    q,
    k,
    *,
    rank,
    n_oversamples=10,
    n_iter=2,
    causal=False,
    query_lengths=None,
    key_lengths=None,
    key_mask=None,
    cu_seqlens=None,
    scale=None,
    seed=0,
    device="auto",
    check_finite=True,
):
    """The leading singular values of the exact softmax matrix of every head: how low its rank really is.

    The matrix ``softmax(scale * q @ k.T)`` is never formed. Takes the time of ``2 n_iter + 3`` exact attentions with
    ``rank + n_oversamples`` value columns, and memory linear in the sequence.

    Parameters
    ----------
    q : array, shape (..., Hq, N, D)
        Queries, as for `attention`: NumPy's or on a GPU. Two axes are one head.
    k : array, shape (..., Hkv, M, D)
        Keys.
    rank : int
        How many singular values.
    n_oversamples : int, default 10
        Columns of the random matrix beyond `rank`.
    n_iter : int, default 2
        Power iterations. More of them help where the singular values fall slowly: in a flat spectrum the last ones
        are some percent too small with 2.
    causal, query_lengths, key_lengths, key_mask, cu_seqlens
        Which keys a query sees, as for `attention`. What is not seen is 0 in the matrix.
    scale : float, optional
        Factor on the logits, by default 1/sqrt(D).
    seed : int
        Seed of the random matrix.
    device : {"auto", "cpu", "cuda"}
        Where to run.
    check_finite : bool, default True
        Raise if an input holds NaN or infinity.

    Returns
    -------
    Spectrum

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it must be and what it was.
    RuntimeError
        If `device="cuda"` is not available.

    References
    ----------
    .. [1] N. Halko, P.-G. Martinsson, J. A. Tropp, "Finding structure with randomness", SIAM Review 53, 2011.
    .. [2] C. Musco, C. Musco, "Randomized block Krylov methods for stronger and faster approximate singular value
       decomposition", NeurIPS 2015.
    .. [3] E. N. Epperly, J. A. Tropp, "Efficient error and variance estimation for randomized matrix computations",
       SIAM Journal on Scientific Computing 46, 2024.

    Examples
    --------
    >>> import pda_numba, pda_numba.data
    >>> q, k = pda_numba.data.smooth_heads((2, 1000, 16))[:2]
    >>> found = pda_numba.spectrum(q, k, rank=20)
    >>> found.singular_values.shape
    (2, 20)
    """
    started = time.perf_counter()
    rank = _validate.whole("rank", rank, 1)
    n_oversamples = _validate.whole("n_oversamples", n_oversamples, 0)
    n_iter = _validate.whole("n_iter", n_iter, 0)
    masks = causal, query_lengths, key_lengths, key_mask, cu_seqlens

    def flops(n, m, d):
        return (2 * n_iter + 3) * exact_flops(n, m, d, rank + n_oversamples)

    with heads_of(q, k, scale, seed, device, check_finite, flops, masks) as heads:
        n, m = heads.problem.shape[:2]
        _validate.whole("rank", rank, 1, min(n, m), high_name=f"the smaller of N and M, {min(n, m)}")
        count = min(rank + n_oversamples, n, m)
        values = np.zeros((len(heads.problem.query_head), count))
        outside, square = np.zeros(len(values)), np.zeros(len(values))
        for group, matrix in heads.groups(8, (2 * n_iter + 5) * count):
            found = _decompose(matrix, group, min(count, *matrix.shape), n_iter, heads.problem.seed)
            values[group, : found[0].shape[1]], outside[group], square[group] = found
        label, reason = heads.device.label, heads.reason
    left = square - np.square(values).sum(axis=1)
    left = np.where(left > _DIFFERENCE * square, left, outside)
    size = np.sqrt(np.where(square > 0, square, 1))[:, None]
    behind = np.cumsum(np.square(values)[:, ::-1], axis=1)[:, ::-1]  # the squares from each value on
    behind = np.concatenate([behind, np.zeros((len(values), 1))], axis=1)[:, : rank + 1]
    lead = heads.lead
    return Spectrum(
        singular_values=values[:, :rank].reshape(*lead, rank),
        error=(np.sqrt(outside + behind[:, rank]) / size[:, 0]).reshape(lead),
        frobenius_norm=np.sqrt(square).reshape(lead),
        nuclear_norm=values.sum(axis=1).reshape(lead),
        tail=np.minimum(np.sqrt(left[:, None] + behind) / size, 1.0).reshape(*lead, rank + 1),
        shape=(n, m),
        n_oversamples=n_oversamples,
        n_iter=n_iter,
        seed=heads.problem.seed,
        device=label,
        device_reason=reason,
        dtype=str(heads.dtype),
        seconds=time.perf_counter() - started,
    )


def _decompose(matrix, heads, count, n_iter, seed):
    """Singular values (heads, count), the estimate of |A - Q Q^T A|_F^2, and |A|_F^2."""
    n, m = matrix.shape
    if not count:  # no key that anybody sees
        return np.zeros((len(heads), 0)), np.zeros(len(heads)), np.zeros(len(heads))
    square = matrix.row_squares().sum(axis=1)
    omega = np.stack([np.random.default_rng([seed, int(h)]).standard_normal((m, count)) for h in heads])
    sketch = matrix.times(omega)
    basis, triangle = orthonormal(sketch)
    triangles, blocks = [triangle], [basis]
    for _ in range(n_iter):
        half, triangle = orthonormal(matrix.transposed_times(basis))
        triangles.append(triangle)
        basis, triangle = orthonormal(matrix.times(half))
        triangles.append(triangle)
        blocks.insert(0, basis)
    whole = basis if len(blocks) == 1 else orthonormal(np.concatenate(blocks, axis=2)[:, :, :n])[0]
    whole = matrix.transposed_times(whole)
    whole = whole if whole.shape[2] <= m else np.swapaxes(whole, 1, 2)
    values = np.linalg.svd(orthonormal(whole)[1], compute_uv=False)[:, :count]
    if count == min(n, m):  # nothing is left out
        return values, np.zeros(len(heads)), square
    return values, _outside(basis, triangles, sketch), square


def _outside(basis, triangles, sketch):
    """The leave-one-out estimate of what the basis does not span, one for each head."""
    out = np.empty(len(basis))
    inside = np.swapaxes(basis, 1, 2) @ sketch
    rest = np.square(sketch - basis @ inside).sum(axis=1)
    for h, own in enumerate(zip(*triangles, strict=True)):
        lost = np.eye(basis.shape[2])
        for triangle in own:
            lost = solve_triangular(_regular(triangle), lost, trans="T", check_finite=False)
            lost /= np.linalg.norm(lost, axis=0)
        out[h] = np.mean(rest[h] + np.square((lost * inside[h]).sum(axis=0)))
    return out


def _regular(triangle):
    """With a diagonal that can be divided by: of a rank below its size, what is not there is lost first."""
    triangle = triangle.copy()
    size = np.abs(np.diag(triangle))
    least = max(size.max() * 1e-20, math.sqrt(np.finfo(float).tiny))
    np.fill_diagonal(triangle, np.where(size > least, np.diag(triangle), least))
    return triangle
