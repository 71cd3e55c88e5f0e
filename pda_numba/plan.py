"""The plan: how many rows, what it costs, how much memory, and whether exact attention is cheaper.

Costs are in floating-point operations of the exact kernel. The serial work per head (pivoted QR, the fit) runs at
another speed and has no simple count, so it enters as a measured multiple of R^3.
"""

import math
from dataclasses import dataclass

import numpy as np

from . import _validate
from .core_places import LEVERAGE_COLUMNS
from .kernels.panel import TILE
from .options import options as check_options

DEFAULT_RANK = 128  # with neither rank nor tol
RANKS = (64, 128, 256, 512)  # what the tol loop tries
ROWS_PER_RANK = 4  # exact rows per landmark: half of them uniform, half drawn by leverage
UNIFORM_AUDIT, WEIGHTED_AUDIT = 128, 64  # rows of a certificate
CANDIDATES = 8192  # queries among which the leverage rows are drawn
PANEL = 64  # queries that are drawn as candidates together: one panel of the apply pass, on every device
GROUP_BYTES = 48 * 2**20  # heads that are computed together share this much workspace

# Pivoting and the fits of a head take as long as this many operations of the exact kernel: fixed + cubic R^3.
_SERIAL_FIXED, _SERIAL_CUBIC = 1.5e9, 1250.0
# Of a level's centres a key or a query looks at so many; the keys of a bucket take this much longer than others, for
# every bucket has few queries, anywhere in memory, and each probe as long as so many keys more. As measured at 16,384
# and 131,072 tokens, D = 64 and 256, buckets of 32 to 128 and 1 to 16 probes: within a fifth, but for one of 24 cases.
_CENTRES, _CONTENT_TIME, _PROBE = 215, 1.2, 48
# The loop starts a rank only if it costs at most this share of exact attention: an attempt that fails is cheap.
_ATTEMPT = 0.3


@dataclass(frozen=True)
class Plan:
    """What `attention` would do for given shapes, decided without running.

    Attributes
    ----------
    method : {"pda", "exact"}
        "pda" where low-rank attention is tried; with `tol` it may still end in exact attention.
    rank : int
        First rank that is tried; 0 for exact.
    ranks : tuple of int
        Ranks the tol loop may go through before exact attention is cheaper.
    rows : int
        Exact rows per head at the first rank, certificate included.
    flops_pda, flops_exact : float
        Floating-point operations of all heads, at the first rank and for exact attention.
    workspace_bytes : int
        Memory beyond inputs and output.
    reason : str
    """

    method: str
    rank: int
    ranks: tuple
    rows: int
    flops_pda: float
    flops_exact: float
    workspace_bytes: int
    reason: str

    def __str__(self):
        rows = [
            ("method", self.method),
            ("reason", self.reason),
            ("ranks", ", ".join(map(str, self.ranks)) or "none"),
            ("exact rows per head", f"{self.rows:,}"),
            ("operations, PDA", f"{self.flops_pda:.3g}"),
            ("operations, exact", f"{self.flops_exact:.3g}"),
            ("workspace", f"{self.workspace_bytes / 2**20:.1f} MiB"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def exact_flops(n, m, d, e):
    return 2.0 * n * m * (d + e)


def row_flops(rows, m, d, e):
    return 2.0 * rows * m * (d + e)


def apply_flops(n, d, e, rank, window):
    near = 2.0 * n * (2 * window + TILE // 4) * (d + e) if window else 0.0
    return 2.0 * n * rank * (d + e + 1 + LEVERAGE_COLUMNS) + near


def content_flops(n, m, d, e, probes, near):
    """The near field by content: buckets, probes, and the keys near to every query, at what they take of time."""
    if not probes:
        return 0.0
    size = near.size_for(m)
    levels = max(1.0, math.log2(max(m // size, 2)) / 6)
    search = 2.0 * (3 * m + n) * levels * _CENTRES * d
    return search + 2.0 * n * _CONTENT_TIME * (near.heavy + probes * (size + _PROBE)) * (d + e)


def serial_flops(rank):
    return _SERIAL_FIXED + _SERIAL_CUBIC * rank**3


def pda_flops(n, m, d, e, rank, window=0):
    """One head at one rank, from nothing: rows, fit, leverage, apply, certificate."""
    rows = min(n, ROWS_PER_RANK * rank + UNIFORM_AUDIT + WEIGHTED_AUDIT)
    leverage = 2.0 * min(n, CANDIDATES) * rank * (d + 1 + LEVERAGE_COLUMNS)
    return row_flops(rows, m, d, e) + leverage + apply_flops(n, d, e, rank, window) + serial_flops(rank)


def worth_trying(n, m, d, e, rank, spent=0.0):
    """Does one more rank, on top of what was spent, cost little enough beside exact attention?"""
    return spent + pda_flops(n, m, d, e, rank) <= _ATTEMPT * exact_flops(n, m, d, e)


def ranks_to_try(n, m, d, e):
    """The ranks that the tol loop may go through for one head; empty where exact attention is the better start.

    Rows are kept from one rank to the next, so that the loop spends about what its last rank costs.
    """
    return tuple(r for r in RANKS if r < m and 2 * ROWS_PER_RANK * r <= n and worth_trying(n, m, d, e, r))


def head_workspace(n, m, d, e, rank, itemsize):
    """Bytes beyond inputs and output for one head."""
    sampled = ROWS_PER_RANK * rank + UNIFORM_AUDIT + WEIGHTED_AUDIT
    uniform = ROWS_PER_RANK // 2 * rank + UNIFORM_AUDIT
    masses = uniform * math.ceil(m / TILE) * itemsize
    pool = 10 * rank * 2 * rank * itemsize * 2
    fit = 8 * sampled * (2 * rank + 6 * (e + 1)) + itemsize * sampled * rank
    leverage = 3 * n * itemsize
    partial = 32 * sampled * (e + 2) * itemsize
    return masses + pool + fit + leverage + partial


def together(n, m, d, e, rank, itemsize, heads):
    """How many heads are computed together: as many as share GROUP_BYTES, at least one."""
    return max(1, min(heads, int(GROUP_BYTES // head_workspace(n, m, d, e, rank, itemsize))))


def workspace(n, m, d, e, ranks, itemsize, heads):
    """Bytes beyond inputs and output."""
    if not ranks:
        return exact_workspace(d, e)
    return together(n, m, d, e, ranks[-1], itemsize, heads) * head_workspace(n, m, d, e, ranks[-1], itemsize)


def exact_workspace(d, e):
    """Bytes beyond inputs and output of the exact method: the tiles of one piece of work, per thread."""
    return 8 * (TILE * (d + e) + 8 * 64 * (d + e + 2 * TILE))


def plan(
    q_shape,
    k_shape,
    v_shape,
    dtype="float32",
    *,
    rank=None,
    tol=1e-2,
    window="auto",
    near="auto",
    proj_dim=None,
    method="auto",
):
    """What `attention` would do for arrays of these shapes, without running it.

    Parameters
    ----------
    q_shape, k_shape, v_shape : tuple of int
        Shapes `(..., Hq, N, D)`, `(..., Hkv, M, D)`, `(..., Hkv, M, E)`.
    dtype : str or numpy.dtype
        Dtype of the arrays.
    rank, tol, window, near, proj_dim, method
        As in `attention`.

    Returns
    -------
    Plan

    Raises
    ------
    TypeError, ValueError
        As `attention` would for arrays of these shapes.
    """
    q_shape, k_shape, v_shape = (tuple(map(int, s)) for s in (q_shape, k_shape, v_shape))
    lead = _validate.shapes(q_shape, k_shape, v_shape)
    n, d, m, e = q_shape[-2], q_shape[-1], k_shape[-2], v_shape[-1]
    options = check_options(rank, tol, window, near, proj_dim, method, n=n, m=m, d=d)
    heads = math.prod(lead)
    choice, ranks, reason = decide(n, m, d, e, options)
    first = ranks[0] if ranks else 0
    itemsize = 8 if np.dtype(dtype) == np.float64 else 4
    width = options.near.windows[-1]
    return Plan(
        method=choice,
        rank=first,
        ranks=ranks,
        rows=n if choice == "exact" else min(n, ROWS_PER_RANK * first + UNIFORM_AUDIT + WEIGHTED_AUDIT),
        flops_pda=heads * (pda_flops(n, m, d, e, first, width) if ranks else 0.0),
        flops_exact=heads * exact_flops(n, m, d, e),
        workspace_bytes=workspace(n, m, d, e, ranks, itemsize, heads),
        reason=reason,
    )


def decide(n, m, d, e, options):
    """(method, ranks, reason) before anything is computed."""
    if options.method == "exact":
        return "exact", (), "asked for"
    if options.rank is not None or options.method == "pda":
        ranks = _asked_ranks(n, m, options)
        if ROWS_PER_RANK * ranks[0] + UNIFORM_AUDIT + WEIGHTED_AUDIT >= n:
            return "exact", (), f"rank {ranks[0]} would compute all {n:,} rows exactly"
        if options.method == "auto" and exact_flops(n, m, d, e) <= pda_flops(n, m, d, e, ranks[0]):
            return "exact", (), f"exact is cheaper than rank {ranks[0]}"
        return "pda", ranks, "asked for"
    if options.tol is None:
        if worth_trying(n, m, d, e, DEFAULT_RANK) and m >= DEFAULT_RANK:
            return "pda", (DEFAULT_RANK,), "cheaper than exact"
        return "exact", (), "exact is cheaper"
    ranks = ranks_to_try(n, m, d, e)
    return ("pda", ranks, "low rank may be cheaper") if ranks else ("exact", (), "exact is cheaper")


def _asked_ranks(n, m, options):
    """The ranks of a caller who asked for one, or for low rank whatever it costs."""
    if options.rank is not None:
        return (min(options.rank, m),)
    if options.tol is None:
        return (min(DEFAULT_RANK, m),)
    return tuple(r for r in RANKS if r < m and 2 * ROWS_PER_RANK * r <= n) or (min(RANKS[0], m),)
