"""The bookkeeping of a decoder, on the host: when it audits, when it fits anew, what it knows of values and lengths."""

import math

import numpy as np

from .steps import Queries

# An answer of load 1 is audited with chance AUDITS, or FIRST / its number since the fit if that is more.
AUDITS, FIRST = 1 / 32, 4.0
_DRAWS = 1024  # positions whose audits are drawn together
_PATIENCE, _LONGEST = 128, 2**14  # answers after which a fit has paid for the next one, at first and at most
_MANY, _MOST_BEYOND = 16, 0.25  # a model is renewed when more queries, and more than this share, are beyond its reach
_HALF_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-9}


class Rows:
    """The rows of a step: T queries of every head, the last ones of `length` tokens."""

    def __init__(self, heads, count, length, device):
        self.heads, self.count, self.first = heads, count, length - count
        self.head, self.time = np.repeat(np.arange(heads), count), np.tile(np.arange(count), heads)
        self.queries = Queries(device.upload(self.head), device.upload(self.time))
        self.stop = self.first + 1 + np.arange(count)  # of the keys that each query sees


class Draws:
    """Numbers in [0, 1) that decide which answers are audited: a function of seed, key head and position alone.

    Heads that share keys share the numbers: where several are audited at once the keys are read once.
    """

    def __init__(self, seed, key_head):
        self.seed, self.key_head = seed, key_head
        self.known = -1, np.zeros((0, len(key_head)))

    def __call__(self, first, count):
        """Of the positions first .. first + count: (heads, count)."""
        blocks = range(first // _DRAWS, (first + count - 1) // _DRAWS + 1)
        start = first - blocks[0] * _DRAWS
        return np.concatenate([self._block(b) for b in blocks])[start : start + count].T

    def _block(self, number):
        if self.known[0] != number:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, number]))
            every = generator.random((_DRAWS, self.key_head.max(initial=0) + 1))
            self.known = number, every[:, self.key_head]
        return self.known[1]


class Schedule:
    """When a head may be fitted: a fit that lasts too short a time makes the head wait longer before the next one."""

    def __init__(self, heads):
        self.now, self.fits, self.taken = 0, np.zeros(heads, np.int64), np.zeros(heads, np.int64)
        self.since, self.wait = np.zeros(heads, np.int64), np.full(heads, _PATIENCE)
        self.beyond, self.over = np.zeros(heads, np.int64), np.zeros(heads, bool)

    def audit_chance(self, loads):
        """Of the next answers, by their loads (heads, T)."""
        age = (self.now - self.since)[:, None] + 1 + np.arange(loads.shape[1])
        return np.minimum(np.maximum(FIRST / age, AUDITS) * loads, 1)

    def note_beyond(self, beyond):
        self.beyond += beyond.sum(axis=1)

    def step(self, count):
        """`count` more answers; which heads many queries of were beyond their model's reach since its fit."""
        self.now += count
        age = self.now - self.since
        self.wait[self.over & (age < self.wait)] *= 2
        self.wait[self.over & (age > 4 * self.wait)] = _PATIENCE
        self.wait = np.minimum(self.wait, _LONGEST)
        self.over = np.zeros_like(self.over)
        return (self.beyond > _MANY) & (self.beyond > _MOST_BEYOND * age)

    def ready(self):
        """Heads whose last fit was long enough ago."""
        return (self.now - self.since >= self.wait) | (self.fits == 0)

    def fitted(self, head, good):
        """A fit has been made; one that was not good enough makes the wait longer."""
        self.fits[head] += 1
        self.since[head], self.beyond[head] = self.now, 0
        if good:
            self.taken[head] += 1
        else:
            self.wait[head] = min(2 * self.wait[head], _LONGEST)


class Values:
    """What the statement and the answers need to know of keys and values: the values' ranges, and typical lengths."""

    def __init__(self, problem, ranges, dtype):
        self.dtype = dtype
        self.epsilon = float(np.finfo(problem.element).eps)
        self.half_unit = _HALF_UNIT.get(dtype.name, 0.0)
        self.low, self.high = ranges.low, ranges.high
        self.longest, self.squares = np.zeros(len(problem.k)), np.zeros(len(problem.v))
        for h in range(len(problem.k)):
            self._measure(slice(h, h + 1), problem.k[h : h + 1], problem.v[h : h + 1])
        self.key_head, self.query_head, self.scale = problem.key_head, problem.query_head, problem.scale

    def add(self, k, v):
        """New tokens (heads, T, columns), as they are stored."""
        self._measure(slice(None), k, v)
        values = self._floats(v)
        self.low, self.high = np.minimum(self.low, values.min(axis=1)), np.maximum(self.high, values.max(axis=1))

    def clip(self, heads, out):
        """Attention is a mean of values, whatever the model says."""
        place = self.key_head[heads]
        return np.clip(out, self.low[place], self.high[place])

    def slips(self, q, sizes, length):
        """Squared errors (heads, T) that rounding alone may cause in answers of squared size `sizes`; see `scan`."""
        logits = self.scale * np.sqrt(self._square(q).sum(axis=2))[self.query_head] * self.longest[self.key_head, None]
        typical = np.sqrt(self.squares / length)[self.key_head, None]
        slip = self.epsilon * (2 + math.sqrt(q.shape[2]) * logits) * typical
        return slip * slip + self.half_unit**2 * sizes

    def _measure(self, heads, k, v):
        longest = np.sqrt(self._square(k).sum(axis=2).max(axis=1))
        self.longest[heads] = np.maximum(self.longest[heads], longest)
        self.squares[heads] += self._square(v).sum(axis=(1, 2))

    def _floats(self, stored):
        return stored.view(self.dtype).astype(self.low.dtype, copy=False)

    def _square(self, stored):
        return np.square(self._floats(stored), dtype=np.float64)
