"""Which heads have a model of their past, from which keys, and whether a new one is good enough.

A model is fitted to the recent queries but the last `HELD`. These are answered both by the model and exactly, at their
own places in the sequence: what they say of the error decides whether the model is taken, and stands for audits until
there are some.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from .ledger import Ledger
from .past import compress
from .plan import ROWS_PER_RANK
from .problem import Problem
from .recall import Model, over_model, with_model
from .rows import rows
from .steps import Queries, blend, over_ranges

HELD = 64  # of the recent queries, the last: held out of the fit
RANKS = (64, 128, 256)  # tried in this order without a rank of the caller's
# Queries are within reach up to this multiple of the largest leverage of a fitted row when left out, and up to this.
_REACH, _LEAST_REACH = 2.0, 2.0
_HEAVY_SHARE = 2
_WORTH = 3.0  # a model is tried where an exact step reads so many times the keys of a step with one
_AMPLE = 0.6  # a rank whose limit exceeds this share of tol is followed by the next one: landmarks cost little
_MOST_BEYOND = 0.25  # of the queries may be beyond its reach


@dataclass
class HeadModel:
    """One head's model: arrays on the host."""

    tiles: Any
    table: Any
    rank: int
    heavy_k: Any
    heavy_v: Any
    heavy: int
    reach: float  # largest leverage that is trusted
    boundary: int  # it stands for the keys before this one
    errors: Any = None  # squared errors of the held-out queries that are within reach, and their leverage
    leverage: Any = None
    size: float = 0.0  # mean |out|^2 of the held-out queries


def ranks_to_try(rank, queries):
    """The ranks that so many recent queries suffice for."""
    wanted = RANKS if rank is None else (rank,)
    return tuple(r for r in wanted if ROWS_PER_RANK * r <= queries - HELD)


def worth_fitting(past, recent, ranks):
    """Those of the ranks with which a step reads so many keys less than an exact one that a model is worth it."""
    return tuple(r for r in ranks if past + recent >= _WORTH * (recent + heavy_keys(recent) + r) and r < past)


def heavy_keys(recent):
    """How many of the past's keys are kept as they are: few beside the recent ones."""
    return recent // _HEAVY_SHARE


class Models:
    """The models of all heads of a cache, on the host and packed for the kernels."""

    def __init__(self, template: Problem, values):
        self.template, self.values = template, values
        self.of_head: list[HeadModel | None] = [None] * len(template.query_head)
        self.boundary = np.zeros(len(self.of_head), np.int64)
        self.packed: Model | None = None

    def put(self, head, model):
        self.of_head[head] = model
        self.boundary[head] = 0 if model is None else model.boundary
        self.packed = None

    def reach(self):
        return np.array([0.0 if m is None else m.reach for m in self.of_head])

    def ready(self):
        """For the kernels; None where no head has a model."""
        if self.packed is None and self.boundary.any():
            self.packed = self._pack(self.of_head)
        return self.packed

    @property
    def nbytes(self):
        packed = self.ready()
        return 0 if packed is None else sum(x.nbytes for x in packed)

    def fit(self, storage, queries, heads, boundary, ranks, tol):
        """Models of the keys before `boundary` for heads that share their keys, None where none is good enough."""
        template, device = self.template, self.template.device
        known, held = queries[:, :-HELD], queries[:, -HELD:]
        known, held = (device.hold(np.ascontiguousarray(x)) for x in (known, held))
        keys, values = storage.of_head(template.key_head[heads[0]], boundary)
        one = np.zeros_like(template.key_head)
        problem = dataclasses.replace(template, q=known, k=keys, v=values, key_head=one)
        asked = dataclasses.replace(problem, q=held)
        exact, recent = self._exact(asked, storage, heads, boundary)
        models: dict[int, HeadModel] = {}
        left, seen = np.asarray(heads), None
        for rank in ranks:
            past, seen = compress(problem, left, rank, heavy_keys(queries.shape[1]), seen)
            new = [_head_model(past, i, boundary) for i in range(len(left))]
            limit = self._judge(asked, left, new, exact, recent)
            for head, model, own in zip(left, new, limit, strict=True):
                if tol is None or own <= tol:
                    models[head] = model
            more = np.zeros(len(left), bool) if tol is None else limit > _AMPLE * tol
            seen, left = seen.keep(more), left[more]
            if not len(left):
                break
        device.recycle()
        return [models.get(h) for h in heads]

    def _exact(self, asked, storage, heads, boundary):
        """Of the held-out queries: exact answers (heads, HELD, E) and what the recent keys say, both on the host."""
        device, count = asked.device, len(heads)
        stop = storage.length - HELD + 1 + np.arange(HELD)
        whole = dataclasses.replace(self.template, q=asked.q, k=storage.k, v=storage.v)
        recent = over_ranges(whole, heads, np.full(count, boundary), stop)
        out, lse, _ = rows(asked, heads)
        past = out.reshape(count * HELD, out.shape[2]), lse.reshape(count * HELD)
        exact, _ = blend(asked, past, recent)
        parts = [device.download(x) for x in (exact, *recent)]
        parts = [x.reshape(count, HELD, *x.shape[1:]) for x in parts]
        place = {h: i for i, h in enumerate(heads)}
        return (place, parts[0]), (parts[1], parts[2])

    def _judge(self, asked, heads, models, exact, recent):
        """The limits of what the models would be off by; notes down their errors on the held-out queries."""
        device, (place, truth) = asked.device, exact
        own = [place[h] for h in heads]
        truth, near = truth[own].astype(np.float64), [x[own].reshape(-1, *x.shape[2:]) for x in recent]
        every: list[HeadModel | None] = [None] * len(self.of_head)
        for h, model in zip(heads, models, strict=True):
            every[h] = model
        past = over_model(asked, _every(device, heads, HELD), self._pack(every))
        guess, leverage = with_model(asked, tuple(device.upload(x) for x in near), past)
        guess, leverage = device.download(guess), device.download(leverage)
        leverage = leverage.reshape(len(heads), HELD)
        within = leverage <= np.array([[m.reach] for m in models])
        guess = self.values.clip(np.repeat(heads, HELD), guess).reshape(truth.shape)
        squares, sizes = np.square(guess - truth).sum(axis=2), np.square(truth).sum(axis=2).mean(axis=1)
        account = Ledger(len(heads))
        for i, model in enumerate(models):
            model.errors, model.leverage = squares[i][within[i]], leverage[i][within[i]].astype(np.float64)
            model.size = float(sizes[i])
            account.open(i, model.errors, model.leverage, model.size)
        none = np.zeros((len(heads), 0))
        limit = account.outlook(none, none)
        return np.where(within.mean(axis=1) >= 1 - _MOST_BEYOND, limit, np.inf)

    def _pack(self, models):
        """Arrays of one shape for all heads, on the device."""
        device, element = self.template.device, self.template.element
        given = [m for m in models if m is not None]

        def stack(name):
            first = getattr(given[0], name)
            out = np.zeros((len(models), max(len(getattr(m, name)) for m in given), first.shape[1]), element)
            for h, model in enumerate(models):
                if model is not None:
                    part = getattr(model, name)
                    out[h, : len(part)] = part
            return device.hold(out)

        counts = [
            device.hold(np.array([0 if m is None else getattr(m, x) for m in models], np.int64))
            for x in ("rank", "heavy")
        ]
        return Model(stack("tiles"), stack("table"), counts[0], stack("heavy_k"), stack("heavy_v"), counts[1])


def _every(device, heads, count):
    """`count` queries of each of the heads."""
    time = np.tile(np.arange(count), len(heads))
    return Queries(device.upload(np.repeat(heads, count)), device.upload(time))


def _head_model(past, i, boundary):
    heavy = past.heavy
    count, reach = int(heavy.count[i]), max(_REACH * float(past.leverage[i]), _LEAST_REACH)
    parts = past.tiles[i], past.table[i], int(past.found[i]), heavy.k[i], heavy.v[i]
    return HeadModel(*parts, count, reach, boundary)
