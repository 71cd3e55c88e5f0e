"""What a call reports: how each head was computed, how wrong it may be, what it cost."""

import contextlib
import dataclasses
import time
from dataclasses import dataclass, field

import numpy as np


class AccuracyWarning(UserWarning):
    """The caller set the rank, and the certificate's upper limit exceeds `tol`."""


@dataclass(frozen=True)
class ErrorEstimate:
    """A measured statement about the error of an attention output; arrays have one entry per head.

    Attributes
    ----------
    error : ndarray of float
        Estimate of |out - exact|_F / |exact|_F.
    error_limit : ndarray of float
        Upper limit of the same, at 95 % confidence.
    row_error : ndarray of float
        Largest error |out_i - exact_i| among the uniformly drawn held-out rows, relative to the root mean square of
        |exact_i|.
    row_share : ndarray of float
        With 95 % confidence at least this share of all rows is off by no more than `row_error`.
    n_rows : ndarray of int
        Held-out rows that were computed exactly.
    """

    error: np.ndarray
    error_limit: np.ndarray
    row_error: np.ndarray
    row_share: np.ndarray
    n_rows: np.ndarray

    def __str__(self):
        return _table(
            self.error.shape,
            [
                ("error", self.error, ".2e"),
                ("95 % limit", self.error_limit, ".2e"),
                ("worst row", self.row_error, ".2e"),
                ("share of rows", self.row_share, ".3f"),
                ("rows", self.n_rows, "d"),
            ],
        )


@dataclass(frozen=True)
class AttentionInfo:
    """How `attention` computed its result; arrays have one entry per head, in the shape of q's leading axes.

    Attributes
    ----------
    method : ndarray of str
        "pda" or "exact".
    reason : ndarray of str
        Why this method.
    rank, effective_rank : ndarray of int
        Landmarks asked for, and those that were not redundant to rounding; 0 for exact.
    rows : ndarray of int
        Rows that were computed exactly, and are exact in the output.
    window : ndarray of int
        Half width of the near field, 0 for none.
    probes : ndarray of int
        Buckets of similar keys that every query attends to exactly, beside the heaviest keys; 0 for none. Under a mask
        window and probes are the largest of the rectangles'.
    error, error_limit, row_error, row_share : ndarray of float
        The certificate, as in `ErrorEstimate`. For exact heads the error is that of rounding.
    leave_one_out : ndarray of float
        Leave-one-out estimate of the error from the fit itself; NaN for exact.
    flagged_rows : ndarray of int
        Rows the fit could not be trusted on: computed exactly, or by the softmax over the landmarks where there were
        too many (`fallback_rows`).
    fallback_rows : ndarray of int
    empty_rows : ndarray of int
        Queries that may not see any key; their output is 0.
    rectangles : ndarray of int
        Under a mask, the rectangles of queries and keys that are of low rank; rank, effective rank and leave-one-out
        error are then the largest of these.
    tol : float or None
    seed : int
    device, device_reason, dtype : str
    flops : float
        Floating-point operations of the passes over keys and queries, all heads.
    workspace_bytes : int
        Memory beyond inputs and output, by the plan's account. Heads are computed in groups that share 48 MiB, or one
        by one where a head needs more.
    seconds : dict
        Wall time of each stage.
    """

    method: np.ndarray
    reason: np.ndarray
    rank: np.ndarray
    effective_rank: np.ndarray
    rows: np.ndarray
    window: np.ndarray
    probes: np.ndarray
    error: np.ndarray
    error_limit: np.ndarray
    row_error: np.ndarray
    row_share: np.ndarray
    leave_one_out: np.ndarray
    flagged_rows: np.ndarray
    fallback_rows: np.ndarray
    empty_rows: np.ndarray
    rectangles: np.ndarray
    tol: float | None
    seed: int
    device: str
    device_reason: str
    dtype: str
    flops: float
    workspace_bytes: int
    seconds: dict = field(repr=False)

    @property
    def near(self):
        """Each head's near field: "none", "window", "content" or "both"."""
        words = np.array(["none", "window", "content", "both"])
        return words[(self.window > 0) + 2 * (self.probes > 0)]

    def __str__(self):
        table = _table(
            self.method.shape,
            [
                ("method", self.method, "s"),
                ("rank", self.rank, "d"),
                ("window", self.window, "d"),
                ("probes", self.probes, "d"),
                ("rows", self.rows, "d"),
                ("error", self.error, ".2e"),
                ("95 % limit", self.error_limit, ".2e"),
                ("worst row", self.row_error, ".2e"),
                ("share", self.row_share, ".3f"),
                ("reason", self.reason, "s"),
            ],
        )
        parts = ", ".join(f"{name} {1e3 * t:.1f} ms" for name, t in self.seconds.items())
        return (
            f"{table}\n"
            f"device {self.device} ({self.device_reason}), {self.dtype}, tol {self.tol}, seed {self.seed}\n"
            f"{self.flops:.3g} operations, workspace {self.workspace_bytes / 2**20:.1f} MiB\n"
            f"{sum(self.seconds.values()):.3f} s: {parts}"
        )


@dataclass(frozen=True)
class DecodeInfo:
    """How a cache computed its answers; arrays have one entry per head, in the shape of q's leading axes.

    The statement is about all answers since the head's last refresh, these ones included.

    Attributes
    ----------
    method : ndarray of str
        "pda" where the head has a model of its past, "exact" where it has none.
    error : ndarray of float
        Estimate of |out - exact|_F / |exact|_F.
    error_limit : ndarray of float
        Upper limit of the same, at 95 % confidence.
    row_error : ndarray of float
        Largest error |out_i - exact_i| of the model seen in an audit, relative to the root mean square of |out_i|.
    share : ndarray of float
        With 95 % confidence at least this share of the answers is off by no more than `row_error`.
    rank : ndarray of int
        Landmarks of the model, 0 for none.
    recent : ndarray of int
        Keys that were attended to exactly by every query.
    audits : ndarray of int
        Random comparisons with the exact answer since the last refresh.
    exact : ndarray of int
        Answers of this call that are exact.
    refreshes : ndarray of int
        Models so far.
    """

    method: np.ndarray
    error: np.ndarray
    error_limit: np.ndarray
    row_error: np.ndarray
    share: np.ndarray
    rank: np.ndarray
    recent: np.ndarray
    audits: np.ndarray
    exact: np.ndarray
    refreshes: np.ndarray

    def __str__(self):
        forms = {"method": "s", "error": ".2e", "error_limit": ".2e", "row_error": ".2e", "share": ".3f"}
        names = [f.name for f in dataclasses.fields(self)]
        return _table(self.method.shape, [(name, getattr(self, name), forms.get(name, "d")) for name in names])


@dataclass(frozen=True)
class GradientInfo:
    """What a backward pass reports; arrays have one entry per head, in the shape of the output's leading axes.

    Attributes
    ----------
    gradient_error : ndarray of float
        Estimate of |dq - exact dq|_F / |exact dq|_F, from the rows that were held out of the fit; 0 for exact heads.
    seconds : dict
        Wall time of each stage.
    """

    gradient_error: np.ndarray
    seconds: dict = field(repr=False)


def _table(shape, columns):
    """Fixed-width text, one line per head."""
    heads = list(np.ndindex(shape))
    names = ["head"] + [name for name, _, _ in columns]
    lines = [[" ".join(map(str, h)) or "-"] + [format(values[h], form) for _, values, form in columns] for h in heads]
    widths = [max(len(row[c]) for row in [names, *lines]) for c in range(len(names))]
    return "\n".join(
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [names, *lines]
    )


class Clock:
    """Wall time per stage, added up over a call."""

    def __init__(self):
        self.seconds = {}

    @contextlib.contextmanager
    def stage(self, name):
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
