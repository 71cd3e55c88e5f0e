"""The flattened problem that every stage works on: three-axis arrays, which head reads which keys, the scale."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .device import CPU
from .kernels.scalar import LOG2_E


@dataclass(frozen=True)
class Problem:
    """`q (Hq, N, D)`, `k (Hk, M, D)`, `v (Hk, M, E)`, in the memory of `device`; head h reads the queries of
    `query_head[h]` and the keys of `key_head[h]`.

    16-bit floats are seen as integers of the same width (`kernels.scalar.widen`); `element` is the dtype of the
    arithmetic, `factor` the logits' scale in units of log 2. Heads are numbered on the host, and so are the masks:
    query i of head h sees the keys `spans[pattern[h], i]` (`kernels.span`), all of them if there are no spans.
    """

    q: Any
    k: Any
    v: Any
    query_head: np.ndarray
    key_head: np.ndarray
    element: np.dtype
    scale: float
    seed: int
    device: Any = CPU
    spans: np.ndarray | None = None
    pattern: np.ndarray | None = None
    group: int = 1  # heads of a call whose queries lie one behind the other, as those of one head here
    merged: bool = False  # is the output to be merged with others, by its normalisers?

    @property
    def factor(self):
        return self.element.type(self.scale * LOG2_E)

    @property
    def shape(self):
        """N, M, D, E."""
        return self.q.shape[1], self.k.shape[1], self.q.shape[2], self.v.shape[2]

    def arrays(self, heads):
        """What every driver begins with: the arrays, and for each head of the call its place in them."""
        return self.q, self.k, self.v, self.query_heads(heads), self.key_heads(heads)

    def seen(self, heads):
        """The spans, and for each head of the call its place in them."""
        spans = np.empty((1, 0, 2), np.int32) if self.spans is None else self.spans
        pattern = np.zeros(len(heads), np.int64) if self.pattern is None else self.pattern[heads]
        return self.device.upload(spans), self.device.upload(pattern)

    def query_heads(self, heads):
        return self.device.upload(self.query_head[heads])

    def key_heads(self, heads):
        return self.device.upload(self.key_head[heads])
