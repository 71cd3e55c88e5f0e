"""The flattened problem that every stage works on: three-axis arrays, which head reads which keys, the scale."""

from dataclasses import dataclass

import numpy as np

from .kernels.scalar import LOG2_E


@dataclass(frozen=True)
class Problem:
    """`q (Hq, N, D)`, `k (Hk, M, D)`, `v (Hk, M, E)`; head h reads the queries of
    `query_head[h]` and the keys of `key_head[h]`.

    16-bit floats are seen as integers of the same width (`kernels.scalar.widen`); `element` is the dtype of the
    arithmetic, `factor` the logits' scale in units of log 2.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    query_head: np.ndarray
    key_head: np.ndarray
    element: np.dtype
    scale: float
    seed: int

    @property
    def factor(self):
        return self.element.type(self.scale * LOG2_E)

    @property
    def shape(self):
        """N, M, D, E."""
        return self.q.shape[1], self.k.shape[1], self.q.shape[2], self.v.shape[2]

    def arrays(self, heads):
        """What every driver begins with: the arrays, and for each head of the call its place in them."""
        return self.q, self.k, self.v, self.query_head[heads], self.key_head[heads]
