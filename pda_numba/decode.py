"""Decoding: attention of the newest tokens to a sequence that grows, without a pass over all of it at every step.

    [ 0 .. P )    the past: a low-rank model fitted to the recent queries, its heaviest keys, and audits (`past`)
    [ P .. L )    recent keys, exactly                                                                  (`steps`)

Every head has a boundary P of its own; 0 says that it has no model and everything is exact. A step answers by the
model; where it is drawn for an audit, or its query is beyond the fit's reach, by an exact pass over the past too. The
audits feed the statement (`ledger`). Once the limit exceeds tol the head is answered exactly, and fitted anew if the
last fit has lasted long enough to pay for another.
"""

import dataclasses
import math

import numpy as np

from . import _validate
from ._cache import Ring, Storage
from ._jit import announce_slow_compilation
from .cadence import AUDITS, Draws, Rows, Schedule, Values
from .device import CPU, Cuda
from .fitting import HELD, Models, ranks_to_try, worth_fitting
from .gpu import estimated_seconds, open_stream, resolve_device
from .info import DecodeInfo
from .ledger import EVEN, Ledger
from .plan import exact_flops
from .recall import over_model, with_model
from .scan import find_ranges
from .steps import Queries, blend, over_keys, over_ranges

_STEPS_AHEAD = 1000  # for device="auto": how many steps a cache is made for
_GAP = 8  # the fitted queries stay recent / _GAP keys away from the boundary
_GROWTH = 16  # a fit is renewed when the recent keys have grown by the length / _GROWTH


class AttentionCache:
    """Keys and values of a sequence that grows, and attention of its newest tokens to all of it.

    Recent keys are attended to exactly. The past is a low-rank model, fitted to the recent queries, beside its heaviest
    keys; random audits against exact attention measure what it costs, and where it would not keep `tol` the head is
    computed exactly.

    Parameters
    ----------
    q : ndarray, shape (..., Hq, N, D)
        The queries of the last N tokens, float16, float32, float64 or bfloat16; more than `recent` of them do not help.
    k : ndarray, shape (..., Hkv, M, D)
        Keys, M >= N. Leading axes broadcast with those of `q`; `Hq` is a multiple of `Hkv`. Copied.
    v : ndarray, shape (..., Hkv, M, E)
        Values. Copied.
    rank : int, optional
        Number of landmarks. By default the smallest of 64, 128 and 256 that keeps `tol`.
    tol : float or None, default 1e-2
        Largest relative Frobenius error of each head's answers since its last refresh, kept with 95 % confidence. With
        None the model is used whatever its error, and refreshed only as the sequence grows.
    recent : int, default 2048
        The model is fitted to so many queries, and at least so many keys are attended to exactly.
    method : {"auto", "exact"}
        "exact" never fits a model.
    scale : float, optional
        Factor on the logits, by default 1/sqrt(D).
    seed : int
        Seed of all random draws.
    device : {"auto", "cpu", "cuda"}
        Where the cache lives and runs.
    check_finite : bool, default True
        Raise if an input holds NaN or infinity.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it must be and what it was.
    RuntimeError
        If `device="cuda"` is not available.

    Attributes
    ----------
    prefill_info : AttentionInfo or None
        What `prefill` reports of the prompt's own attention.

    See Also
    --------
    prefill : attention of a whole prompt, and its cache.

    Examples
    --------
    >>> import numpy as np, pda_numba
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((2, 500, 16), dtype=np.float32) for _ in range(3))
    >>> cache = pda_numba.AttentionCache(q, k, v)
    >>> q_t, k_t, v_t = (rng.standard_normal((2, 1, 16), dtype=np.float32) for _ in range(3))
    >>> cache.append(k_t, v_t)
    >>> cache.attend(q_t).shape
    (2, 1, 16)
    >>> cache.length
    501
    """

    def __init__(
        self,
        q,
        k,
        v,
        *,
        rank=None,
        tol=1e-2,
        recent=2048,
        method="auto",
        scale=None,
        seed=0,
        device="auto",
        check_finite=True,
    ):
        problem, self._lead, self._dtype = _validate.build_problem(q, k, v, scale, seed)
        n, m, _, _ = problem.shape
        if n > m:
            raise ValueError(f"q must have at most as many tokens as k, got {n:,} and {m:,}")
        self._rank = None if rank is None else _validate.whole("rank", rank, 1)
        self._tol = None if tol is None else _validate.positive("tol", tol)
        self._recent = _validate.whole("recent", recent, 2 * HELD)
        self._method = _validate.choice("method", method, ("auto", "exact"))
        self._check_finite = _validate.flag("check_finite", check_finite)
        self.prefill_info = None
        self._q_lead, self._k_lead = q.shape[:-2], k.shape[:-2]
        self._place = resolve_device(device, seconds=_seconds_ahead(problem))
        announce_slow_compilation()
        self._start(problem)

    def _start(self, problem):
        ranges = find_ranges(problem, self._dtype, check_finite=self._check_finite)
        heads, device = len(problem.query_head), CPU if self._place[0] == "cpu" else Cuda(open_stream())
        self._storage = Storage(device, problem.k, problem.v)
        self._queries = Ring(problem.q[:, -self._recent :], self._recent)
        none = device.hold(np.ascontiguousarray(problem.q[:, :0]))
        self._template = dataclasses.replace(problem, q=none, k=none, v=none, device=device)
        self._values = Values(problem, ranges, self._dtype)
        self._models = Models(self._template, self._values)
        self._ledger, self._schedule = Ledger(heads), Schedule(heads)
        self._drawn = Draws(problem.seed, problem.key_head)
        self._fit(np.arange(heads))

    # --- the two calls of a step ---

    def append(self, k_t, v_t):
        """Add the keys and values of the next tokens.

        Parameters
        ----------
        k_t : ndarray, shape (..., Hkv, T, D)
            T >= 1, in the dtype and with the leading axes of `k`.
        v_t : ndarray, shape (..., Hkv, T, E)

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what it must be and what it was; nothing has been added then.
        """
        _, _, dim, values = self._shape
        k, v = self._tokens("k_t", k_t, self._k_lead, dim), self._tokens("v_t", v_t, self._k_lead, values)
        if k.shape[1] != v.shape[1]:
            raise ValueError(f"k_t and v_t must have the same number of tokens, got {k.shape[1]} and {v.shape[1]}")
        self._storage.append(k, v)
        self._values.add(k, v)

    def attend(self, q_t, *, return_info=False):
        """Attention of the last tokens, to all tokens up to their own.

        Parameters
        ----------
        q_t : ndarray, shape (..., Hq, T, D)
            The queries of the last T tokens, whose keys have been appended; in the dtype and with the leading axes of
            `q`.
        return_info : bool, default False
            Also return a `DecodeInfo`.

        Returns
        -------
        out : ndarray, shape (..., Hq, T, E)
        info : DecodeInfo
            Only if `return_info`.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what it must be and what it was.
        """
        _validate.flag("return_info", return_info)
        q = self._tokens("q_t", q_t, self._q_lead, self._shape[2])
        if q.shape[1] > self.length:
            raise ValueError(f"q_t must have at most as many tokens as the cache, got {q.shape[1]} and {self.length}")
        out, exact = self._answer(q)
        self._queries.add(q)
        out = out.astype(self._dtype).reshape(*self._lead, *out.shape[1:])
        info = self._info(exact) if return_info else None
        self._renew(q.shape[1])
        return (out, info) if return_info else out

    def refresh(self):
        """Fit every head anew to the last `recent` queries, whether that is due or not, if the past is long enough."""
        self._fit(np.arange(len(self._template.query_head)))

    # --- what it holds ---

    @property
    def length(self):
        """Tokens so far."""
        return self._storage.length

    @property
    def error(self):
        """Estimated relative Frobenius error of all answers so far, per head."""
        return self._ledger.overall()[0].reshape(self._lead)

    @property
    def error_limit(self):
        """Upper limit of `error` at 95 % confidence, per head."""
        return self._ledger.overall()[1].reshape(self._lead)

    @property
    def rank(self):
        """Landmarks of every head's model; 0 where a head is exact."""
        return np.array([0 if m is None else m.rank for m in self._models.of_head]).reshape(self._lead)

    @property
    def method(self):
        """ "pda" or "exact", per head."""
        return np.where(self._models.boundary > 0, "pda", "exact").reshape(self._lead)

    @property
    def nbytes(self):
        """Bytes of keys, values, recent queries and models, room to grow included."""
        return self._storage.nbytes + self._queries.nbytes + self._models.nbytes

    def __str__(self):
        device, seed = self._template.device.label, self._template.seed
        return (
            f"{self._info(np.zeros_like(self._models.boundary))}\n"
            f"{self.length:,} tokens, {self.nbytes / 2**20:.1f} MiB, device {device} ({self._place[1]})\n"
            f"{self._dtype}, tol {self._tol}, seed {seed}"
        )

    def __repr__(self):
        exact = int((self._models.boundary == 0).sum())
        return f"<AttentionCache: {self.length:,} tokens, {self._models.boundary.size} heads, {exact} of them exact>"

    # --- how ---

    @property
    def _shape(self):
        """Query heads, tokens, D, E."""
        k, v = self._storage.k, self._storage.v
        return len(self._template.query_head), self._storage.length, k.shape[2], v.shape[2]

    def _tokens(self, name, value, lead, columns):
        """`value` checked and flattened: (heads, T, columns), 16-bit floats as integers."""
        array = _validate.float_array(name, value)
        if array.dtype != self._dtype:
            raise TypeError(f"{name} must have dtype {self._dtype}, like the cache, got {array.dtype}")
        if array.shape[:-2] != lead or array.shape[-1] != columns or not array.shape[-2]:
            wanted = ", ".join([*map(str, lead), "T", str(columns)])
            raise ValueError(f"{name} must have shape ({wanted}) with T at least 1, got {array.shape}")
        if self._check_finite and not np.isfinite(array).all():
            raise ValueError(f"{name} must be finite, got NaN or infinity; check_finite=False skips this test")
        flat = _validate.bits(array).reshape(math.prod(lead), *array.shape[-2:])
        return np.ascontiguousarray(flat)

    def _answer(self, q):
        """Answers (heads, T, E) in the arithmetic's dtype, and which of them are exact (heads, T)."""
        (heads, length, _, _), count, device = self._shape, q.shape[1], self._template.device
        problem = dataclasses.replace(self._template, q=device.upload(q), k=self._storage.k, v=self._storage.v)
        rows = Rows(heads, count, length, device)
        boundary = self._models.boundary
        model = self._models.ready() if count <= length - boundary.max() else None
        start = np.repeat(boundary if model else np.zeros_like(boundary), count)
        near = over_ranges(problem, np.arange(heads), start[::count], rows.stop)
        out, exact, loads = device.download(near[0]), np.ones((heads, count), bool), None
        if model is not None:
            out, exact, loads = self._guess(problem, rows, start, near, model)
        out = out.reshape(heads, count, -1)
        device.recycle()
        sizes = np.square(out, dtype=np.float64).sum(axis=2)
        self._ledger.answer(sizes, self._values.slips(q, sizes, length), loads)
        return out, exact

    def _guess(self, problem, rows, start, near, model):
        """The model's answers, but for the rows that are audited, beyond its reach, or of heads that exceed tol."""
        device, modelled = problem.device, start > 0
        guess, leverage = with_model(problem, near, over_model(problem, rows.queries, model))
        guess, leverage = device.download(guess), device.download(leverage).astype(np.float64)
        guess = np.where(modelled[:, None], self._values.clip(rows.head, guess), guess)
        shape = rows.heads, rows.count
        within = leverage <= np.repeat(self._models.reach(), rows.count)
        loads = self._ledger.loads(leverage.reshape(shape))
        chance, draws = self._schedule.audit_chance(loads), self._drawn(rows.first, rows.count)
        audited = modelled & within & (draws < chance).ravel()
        beyond = modelled & ~within
        out = guess.copy()
        self._exactly(problem, rows, start, near, audited | beyond, out)
        errors = np.square(out - guess, dtype=np.float64).sum(axis=1).reshape(shape)
        self._ledger.audit(audited.reshape(shape), draws < EVEN * AUDITS, errors, loads, chance)
        self._schedule.note_beyond(beyond.reshape(shape))
        exact = ~modelled | audited | beyond
        loads = np.where(exact.reshape(shape), 0, loads)
        over = self._over(loads, np.square(out, dtype=np.float64).sum(axis=1).reshape(shape))
        rest = ~exact & np.repeat(over, rows.count)
        self._exactly(problem, rows, start, near, rest, out)
        return out, (exact | rest).reshape(shape), np.where(rest.reshape(shape), 0, loads)

    def _exactly(self, problem, rows, start, near, which, out):
        """Exact answers for some rows, into `out`: the past key by key, beside what is known of the recent keys."""
        if not which.any():
            return
        device, chosen = problem.device, np.flatnonzero(which)
        queries = Queries(device.upload(rows.head[chosen]), device.upload(rows.time[chosen]))
        zero, stop = np.zeros(len(chosen), np.int64), start[chosen]
        past = over_keys(problem, queries, device.upload(zero), device.upload(stop), int(stop.max()))
        recent = tuple(device.take(x.reshape(len(x), -1), chosen) for x in near)
        exact, _ = blend(problem, past, (recent[0], recent[1].reshape(-1)))
        out[chosen] = device.download(exact)

    def _over(self, loads, sizes):
        """Heads whose limit exceeds tol, if answers of these loads are the model's too."""
        if self._tol is None:
            return np.zeros(len(loads), bool)
        over = self._ledger.outlook(loads, sizes) > self._tol
        self._schedule.over = over & (self._models.boundary > 0)
        return self._schedule.over

    # --- fits ---

    def _renew(self, count):
        """After `count` more tokens: heads over tol lose their model; those that it is time for are fitted anew."""
        schedule, boundary = self._schedule, self._models.boundary
        for head in np.flatnonzero(schedule.over):
            self._models.put(head, None)
        beyond = schedule.step(count)
        span = self._recent + self._recent // _GAP
        outgrown = (boundary > 0) & (self.length - boundary >= span + max(self._recent, self.length // _GROWTH))
        due = (beyond | outgrown | (boundary == 0)) & schedule.ready()
        if due.any() and self._ranks():
            self._fit(np.flatnonzero(due))

    def _ranks(self):
        """The ranks that are worth a fit now, and the boundary it would have; None if there are none."""
        if self._method == "exact":
            return None
        known = min(self._queries.seen, self._recent)
        boundary = self.length - known - known // _GAP
        ranks = worth_fitting(boundary, self.length - boundary, ranks_to_try(self._rank, known))
        return (ranks, boundary) if ranks else None

    def _fit(self, heads):
        """Fit some heads to the recent queries; those whose fit is not good enough keep the model they have, if any."""
        found = self._ranks()
        if not found:
            return
        ranks, boundary = found
        queries, keys = self._queries.last(), self._template.key_head[heads]
        for key in np.unique(keys):
            group = heads[keys == key]
            for head, model in zip(group, self._fitted(queries, group, boundary, ranks), strict=True):
                self._schedule.fitted(head, model is not None)
                if model is not None:
                    self._models.put(head, model)
                    self._ledger.open(head, model.errors, model.leverage, model.size)

    def _fitted(self, queries, heads, boundary, ranks):
        return self._models.fit(self._storage, queries, heads, boundary, ranks, self._tol)

    def _info(self, exact):
        error, limit, row_error, share, audits = self._ledger.statement()
        columns = {
            "method": self.method,
            "error": error,
            "error_limit": limit,
            "row_error": row_error,
            "share": share,
            "rank": self.rank,
            "recent": self.length - self._models.boundary,
            "audits": audits,
            "exact": exact.sum(axis=1) if exact.ndim > 1 else exact,
            "refreshes": self._schedule.taken.copy(),
        }
        return DecodeInfo(**{name: x.reshape(self._lead) for name, x in columns.items()})


def _seconds_ahead(problem):
    """(CPU, GPU): what exact steps would take on either."""
    _, m, d, e = problem.shape
    flops = len(problem.query_head) * exact_flops(_STEPS_AHEAD, m, d, e)
    return estimated_seconds(flops, "exact", problem.element.itemsize, problem.k.nbytes + problem.v.nbytes)
