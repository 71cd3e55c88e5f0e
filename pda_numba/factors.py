"""`AttentionFactors`: explicit low-rank factors of the softmax matrix, applied, truncated, kept in files.

    A ~ sum_r s_r u_r (x) v_r        out = U (s * (V^T v))

    dv = V (s * (U^T dout))          dU = dout (s * (V^T v))^T       dV = v (s * (U^T dout))^T
                                     ds = the sum over the columns of (U^T dout) * (V^T v)

`factorize` makes them.
"""

import os
import zipfile
from dataclasses import dataclass

import numpy as np

from . import _validate
from .info import _table

_FORMAT, _VERSION = "pda_numba.AttentionFactors", 1


@dataclass(frozen=True)
class AttentionFactors:
    """A low-rank factorisation of the softmax matrix of every head: A is about ``left diag(singular_values) right^T``.

    The columns of `left` and `right` are orthonormal. Each pair's sign is such that the entry of largest absolute value
    in the column of `right` is positive.

    Attributes
    ----------
    left : ndarray, shape (..., N, R)
    right : ndarray, shape (..., M, R)
    singular_values : ndarray of float64, shape (..., R)
        Of the approximation, falling.
    error : ndarray
        Estimate of the relative Frobenius error of the matrix, from exact rows: the mended ones, and others that are
        drawn independently of the fit.
    error_limit : ndarray
        Upper limit of the same, at 95 % confidence.
    frobenius_norm : ndarray
        Estimate of the exact matrix's, from the same rows.
    effective_rank : ndarray of int
        Singular values that are above rounding.
    """

    left: np.ndarray
    right: np.ndarray
    singular_values: np.ndarray
    error: np.ndarray
    error_limit: np.ndarray
    frobenius_norm: np.ndarray
    effective_rank: np.ndarray

    @property
    def rank(self):
        """R."""
        return self.singular_values.shape[-1]

    @property
    def nuclear_norm(self):
        """Sum of the singular values, one for each head: about a lower limit of the exact matrix's nuclear norm."""
        return self.singular_values.sum(axis=-1)

    @property
    def nbytes(self):
        """Bytes of the factors."""
        return self.left.nbytes + self.right.nbytes + self.singular_values.nbytes

    def apply(self, v):
        """The output for values v: ``left diag(singular_values) right^T v``, in time linear in N and M.

        Parameters
        ----------
        v : ndarray, shape (..., Hkv, M, E)
            Values, for any E. Leading axes broadcast with those of the factors, whose number of heads is a multiple of
            Hkv.

        Returns
        -------
        ndarray, shape (..., Hq, N, E)
            In the dtype of `v`.
        """
        return self.apply_vjp(v)[0]

    def apply_vjp(self, v):
        """`apply`, and its gradient: with respect to the values, and on request to the factors.

        Parameters
        ----------
        v : ndarray, shape (..., Hkv, M, E)

        Returns
        -------
        out : ndarray, shape (..., Hq, N, E)
        pullback : callable
            ``pullback(dout) -> dv``, of the shape and dtype of `v`: ``right diag(singular_values) left^T dout``.
            ``pullback(dout, factors=True) -> dv, dleft, dsingular_values, dright``, of the shapes of the factors, whose
            entries are independent variables then: that columns are orthonormal is not kept by a step along it.

        Examples
        --------
        >>> import pda_numba, pda_numba.data
        >>> q, k, v = pda_numba.data.smooth_heads((500, 8))
        >>> factors = pda_numba.factorize(q, k, rank=16)
        >>> out, pullback = factors.apply_vjp(v)
        >>> out.shape, pullback(out).shape
        ((500, 8), (500, 8))
        >>> [x.shape for x in pullback(out, factors=True)]
        [(500, 8), (500, 16), (16,), (500, 16)]
        """
        v = self._values(v)
        group = self._group(v)
        own = (np.repeat(v, group, axis=-3) if group > 1 else v).astype(self.left.dtype)
        scales = self.singular_values[..., None].astype(self.left.dtype)
        inside = _transposed(self.right) @ own
        out = self.left @ (scales * inside)

        def pullback(dout, *, factors=False):
            """The gradients with respect to the values, and to the factors."""
            dout = _validate.float_array("dout", dout)
            if dout.shape != out.shape:
                raise ValueError(f"dout must have shape {out.shape}, like the output, got {dout.shape}")
            _validate.flag("factors", factors)
            dout = dout.astype(self.left.dtype)
            outside = _transposed(self.left) @ dout
            dv = self.right @ (scales * outside)
            if group > 1:
                dv = dv.reshape(*dv.shape[:-3], -1, group, *dv.shape[-2:]).sum(axis=-3)
            dv = _sum_to(dv, v.shape).astype(v.dtype)
            if not factors:
                return dv
            dleft, dright = dout @ _transposed(scales * inside), own @ _transposed(scales * outside)
            dvalues = (inside * outside).sum(axis=-1, dtype=float)
            each = (dleft, self.left), (dvalues, self.singular_values), (dright, self.right)
            return dv, *(_sum_to(gradient, x.shape) for gradient, x in each)

        return out.astype(v.dtype), pullback

    def _values(self, v):
        v = _validate.float_array("v", v)
        m = self.right.shape[-2]
        if v.shape[-2] != m:
            raise ValueError(f"v must have {m} rows (axis -2), one for each key, got shape {v.shape}")
        return v

    def _group(self, v):
        """How many heads of the factors share one of the values."""
        if v.ndim == 2 or self.left.ndim == 2:
            return 1
        heads, own = self.left.shape[-3], v.shape[-3]
        if own in (1, heads):
            return 1  # broadcast
        if own == 0 or heads % own:
            raise ValueError(
                f"the number of heads must be a multiple of that of v (axis -3), got {heads} and {own} from shapes "
                f"{self.left.shape} and {v.shape}"
            )
        return heads // own

    def truncate(self, rank):
        """The best approximation of lower rank of this one.

        Parameters
        ----------
        rank : int

        Returns
        -------
        AttentionFactors
            Its `error` adds what is left out as if it were orthogonal to the error so far, `error_limit` as if it were
            parallel.
        """
        rank = _validate.whole("rank", rank, 1, self.rank, high_name=f"the rank of the factors, {self.rank}")
        size = np.where(self.frobenius_norm > 0, self.frobenius_norm, 1)
        lost = np.linalg.norm(self.singular_values[..., rank:], axis=-1) / size
        return AttentionFactors(
            np.ascontiguousarray(self.left[..., :rank]),
            np.ascontiguousarray(self.right[..., :rank]),
            self.singular_values[..., :rank].copy(),
            np.hypot(self.error, lost),
            self.error_limit + lost,
            self.frobenius_norm,
            np.minimum(self.effective_rank, rank),
        )

    def save(self, path):
        """Write the factors to a file (NumPy's npz format, with a version).

        Parameters
        ----------
        path : str or path-like
            Written as it is: no suffix is added.
        """
        with open(os.fspath(path), "wb") as file:
            np.savez(file, format=_FORMAT, version=_VERSION, **vars(self))

    @staticmethod
    def load(path):
        """Read factors that `save` wrote.

        Parameters
        ----------
        path : str or path-like

        Returns
        -------
        AttentionFactors

        Raises
        ------
        ValueError
            If the file holds something else, or factors of a later version.
        """
        path = os.fspath(path)
        try:
            with open(path, "rb") as file:
                found = np.load(file, allow_pickle=False)
                arrays = {name: found[name] for name in found.files}
        except (ValueError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"path must name a file written by AttentionFactors.save, got {path!r}: {error}") from None
        if str(arrays.pop("format", "")) != _FORMAT:
            raise ValueError(f"path must name a file written by AttentionFactors.save, got {path!r}: an npz of others")
        version = int(arrays.pop("version", 0))
        if version != _VERSION:
            raise ValueError(f"path must name factors of version {_VERSION}, got version {version} in {path!r}")
        names = AttentionFactors.__dataclass_fields__
        if set(arrays) != set(names):
            missing = ", ".join(sorted(set(names) ^ set(arrays)))
            raise ValueError(f"path must name factors as they were written, got {path!r}, which differs in {missing}")
        return AttentionFactors(**arrays)

    def __str__(self):
        values = self.singular_values
        return _table(
            values.shape[:-1],
            [
                ("rank", np.full(values.shape[:-1], self.rank), "d"),
                ("effective", self.effective_rank, "d"),
                ("largest", values[..., 0], ".4g"),
                ("smallest", values[..., -1], ".2e"),
                ("nuclear", np.asarray(self.nuclear_norm), ".4g"),
                ("error", self.error, ".2e"),
                ("95 % limit", self.error_limit, ".2e"),
            ],
        )


def _transposed(x):
    return np.swapaxes(x, -1, -2)


def _sum_to(x, shape):
    """The sum over the axes along which an array of `shape` was broadcast."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1 != x.shape[i]), keepdims=True)
