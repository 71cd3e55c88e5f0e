"""What the forward pass leaves for the backward pass.

Of a low-rank head: its exact rows (queries, outputs, lse), the weights and the ridge of the fit, landmarks and
coefficients, and one number for every query: 0 where the output is the fit's, 1 + the row's place in the list of exact
rows, or -1 where it is the softmax over the landmarks. Of an exact head: outputs and lse. Everything else is computed
again.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._jit import cuda, cuda_kernel, serial_kernel, shared
from .finish import ExactRows
from .kernels.team import barrier, member, members
from .results import FALLBACK_ROWS, FLAGGED_ROWS, HELD_OUT_ROWS, PROBES

LOST = -1  # in `slot`

# --- body, for a team ---


@shared
def _number_list(rows, count, first, slot):
    for p in range(member(), count, members()):
        slot[rows[p]] = first + p + 1


@shared
def _number(drawn_pi, fitted, flagged, flags, held, helds, lost, losses, rows, lse, slot):
    """One head: the slots of its queries; entries of the list of exact rows that count for nothing get an infinite lse.

    The list is the fitted rows, the flagged ones, the held-out ones. A slot of the fitted rows that was drawn with
    probability 0 holds some row, which is exact too: it may be anywhere else in the list, or several times.
    """
    uniform = fitted - drawn_pi.shape[0]
    if member() == 0:  # the first of several such slots stays, unless the row is listed elsewhere
        for p in range(fitted - 1, uniform - 1, -1):
            if drawn_pi[p - uniform] <= 0:
                slot[rows[p]] = p + 1
    barrier()
    for p in range(member(), fitted, members()):
        if p < uniform or drawn_pi[p - uniform] > 0:
            slot[rows[p]] = p + 1
    _number_list(flagged, flags, fitted, slot)
    _number_list(held, helds, fitted + flagged.shape[0], slot)
    for p in range(member(), lost.shape[0], members()):
        if p < losses:
            slot[lost[p]] = LOST
        else:
            lost[p] = 0
    barrier()
    for p in range(member(), rows.shape[0], members()):
        behind = p >= fitted + flags if p < fitted + flagged.shape[0] else p >= fitted + flagged.shape[0] + helds
        rows[p] = 0 if p >= fitted and behind else rows[p]
        if slot[rows[p]] != p + 1:
            lse[p] = np.inf


# --- drivers ---


@serial_kernel
def _number_cpu(drawn_pi, fitted, flagged, flags, held, helds, lost, losses, rows, lse, slot):
    for h in range(len(slot)):
        task = drawn_pi[h], fitted, flagged[h], flags[h], held[h], helds[h], lost[h], losses[h]
        _number(*task, rows[h], lse[h], slot[h])


@cuda_kernel(256)
def _number_cuda(drawn_pi, fitted, flagged, flags, held, helds, lost, losses, rows, lse, slot):
    h = cuda.blockIdx.x
    task = drawn_pi[h], fitted, flagged[h], flags[h], held[h], helds[h], lost[h], losses[h]
    _number(*task, rows[h], lse[h], slot[h])


# --- what is kept ---


@dataclass(frozen=True)
class _Part:
    """Some heads: arrays with one entry per head in every field but `heads` and those that are no arrays."""

    heads: np.ndarray

    def arrays(self):
        names = (f.name for f in dataclasses.fields(self) if f.name not in ("heads", "held", "widest"))
        return {name: getattr(self, name) for name in names}

    def over(self, change):
        """With `change` made to every array."""
        return dataclasses.replace(self, **{name: change(x) for name, x in self.arrays().items()})

    def of(self, device, which):
        """Only the heads at the places `which`."""
        part = self if len(which) == len(self.heads) else self.over(lambda x: device.take(x, which))
        return dataclasses.replace(part, heads=self.heads[which])

    @property
    def nbytes(self):
        return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in self.arrays().values())


@dataclass(frozen=True)
class Exact(_Part):
    """Heads of exact attention."""

    out: Any  # (heads, N, E)
    lse: Any  # (heads, N)


@dataclass(frozen=True)
class LowRank(_Part):
    """Heads whose fits have one rank."""

    held: tuple  # which of the exact rows were held out, as a range
    rows: Any  # exact rows (heads, n); those of the fit come first
    out: Any  # (heads, n, E)
    lse: Any  # (heads, n), infinite where the entry counts for nothing
    slot: Any  # (heads, N) int32
    pi: Any  # probabilities of the held-out ones, (heads, held)
    lost: Any  # rows that are the softmax over the landmarks (heads, most), and how many
    losses: Any
    weight: Any  # of the fit's rows
    ridge: Any
    keys: Any  # that the landmarks began as
    found: Any
    temperature: Any
    landmarks: Any
    table: Any  # [Z, z_den]
    window: Any
    basis: Any  # of the projection (heads, 0, D) without
    projection: Any  # P_K by columns, (heads, m, D)
    probes: Any  # of every query (heads, N, most), by content; (heads, 1, 1) without
    counts: Any  # how many of them count
    bucket: Any  # of every key (heads, M, 1)
    order: Any  # the keys by bucket (heads, M)
    start: Any  # where each bucket begins (heads, buckets + 1)
    widest: int  # keys of a bucket at most


def keep_low_rank(problem, heads, kept, solved, finished, report):
    """A `LowRank` of the heads where `kept` is true, from a rank's step."""
    device, (n, _, _, e) = problem.device, problem.shape
    flagged, held_out, (lost, losses) = finished.flagged, finished.held_out, finished.lost
    counts = report[kept]
    flagged = _cut(device, flagged, int((counts[:, FLAGGED_ROWS] - counts[:, FALLBACK_ROWS]).max()))
    held_out = _cut(device, held_out, int(counts[:, HELD_OUT_ROWS].max()))
    lost = device.columns(lost, int(counts[:, FALLBACK_ROWS].max()))
    sample = solved.sample
    rows, out, lse = (
        device.concatenate([getattr(sample, name), getattr(flagged, name), getattr(held_out, name)])
        for name in ("rows", "out", "lse")
    )
    fitted, slot = sample.rows.shape[1], device.zeros((len(heads), n), np.int32)
    lists = flagged.rows, flagged.count, held_out.rows, held_out.count, lost, losses
    task = sample.drawn_pi, fitted, *lists, rows, lse, slot
    device.run(_number_cpu, _number_cuda, (len(heads),), *task)
    first = fitted + flagged.rows.shape[1]
    rank, width = solved.table.shape[1:]
    table = device.columns(solved.table.reshape(-1, width), e + 1).reshape(len(heads), rank, e + 1)
    part = LowRank(
        np.asarray(heads),
        (first, first + held_out.rows.shape[1]),
        *(rows, out, lse, slot, device.columns(finished.pi, held_out.rows.shape[1]), lost, losses),
        *(solved.weight, solved.ridge),
        *(solved.keys, solved.found, solved.temperature, solved.tiles, table),
        *(solved.window, solved.basis, solved.projection),
        *_kept_content(device, solved, int(counts[:, PROBES].max())),
    )
    return part.of(device, np.flatnonzero(kept))


def _kept_content(device, solved, most):
    """The near field by content, with no more probes than some head uses."""
    near, (heads,) = solved.near, solved.window.shape
    if not most or solved.by_bucket is None:
        none = device.empty((heads, 1, 1), np.int32), device.zeros(heads, np.int64)
        return *none, device.empty((heads, 0, 1), np.int32), *(device.empty((heads, 0), np.int64) for _ in range(2)), 0
    n, buckets = near.probes.shape[1], solved.by_bucket
    probes = device.columns(near.probes.reshape(heads * n, -1), most).reshape(heads, n, most)
    return probes, near.count, buckets.bucket, buckets.keys, buckets.start, buckets.widest


def _cut(device, listed, most):
    """A list of exact rows without the columns that no head uses."""
    rows, out, lse = (device.columns(x, most) for x in (listed.rows, listed.out, listed.lse))
    return ExactRows(rows, listed.count, out, lse)
