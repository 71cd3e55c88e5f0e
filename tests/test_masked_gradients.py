"""Gradients of low rank under masks, against automatic differentiation of the same algorithm with its choices held
fixed: every part's output and lse by `frozen`, the merge and the exact rows in dense matrices."""

import autograd.numpy as anp
import frozen
import masks
import numpy as np
import pytest
from autograd import grad
from autograd.scipy.special import logsumexp

from pda_numba import attention_backward, attention_forward
from pda_numba.masked import seen_problem
from pda_numba.parts import blocks, layouts

PDA = {"method": "pda", "rank": 12, "tol": None}
MASKS = ["causal", "holes", "lengths, causal", "holes, causal", "packed, causal", "rows"]


class Part:
    """One head's share of a rectangle with its choices held fixed; `queries` are the heads of q that share it."""

    def __init__(self, problem, part, place, rectangle, queries, own, q, k, v):
        self.queries, self.own = queries, own * rectangle.queries
        self.rows = slice(rectangle.query, rectangle.query + rectangle.queries)
        self.keys = slice(rectangle.key, rectangle.key + rectangle.keys)
        self.choice = frozen.choices(problem, part, place)
        own = self.inputs(q, k, v)
        self.penalty = frozen.penalty(*own, self.choice)
        raw = frozen.fitted_rows(*own, self.choice, self.penalty)
        low, high = own[2].min(axis=0), own[2].max(axis=0)
        self.clipped = np.where(raw < low, low, np.where(raw > high, high, np.nan))

    def inputs(self, q, k, v):
        """From all heads of q, and the keys and values of the group."""
        return anp.concatenate([q[h][self.rows] for h in self.queries]), k[self.keys], v[self.keys]

    def __call__(self, q, k, v):
        inputs, own = self.inputs(q, k, v), slice(self.own, self.own + self.rows.stop - self.rows.start)
        out = frozen.forward(*inputs, self.choice, self.penalty, self.clipped)
        return out[own], frozen.normalisers(*inputs, self.choice, self.penalty)[own]


class FrozenHead:
    """One head of a call: its parts, leaves, and exact rows."""

    def __init__(self, residuals, kept, place, arrays):
        call, head = residuals.call, kept.heads[place]
        problem = seen_problem(call.problem, kept.heads, call.mask)
        self.pattern = call.mask.patterns[call.mask.pattern[head]]
        n = problem.shape[0]
        self.query, self.key = call.problem.query_head[head], call.problem.key_head[head]
        self.keys = np.arange(problem.shape[1]) if self.pattern.keys is None else self.pattern.keys
        self.seen = between(self.pattern.spans(n), len(self.keys))
        for layout in layouts(problem, kept.heads, call.mask, call.options):
            if place in layout.groups:
                self.leaves = between(layout.spans, len(self.keys))
        self.exact = np.arange(n) if kept.exact[place] else self.pattern.exact_rows
        self.scale, self.parts = problem.scale, []
        every, (_, k, v) = arrays[0], self.own(*arrays)
        for group in kept.groups:
            parts = blocks(problem, kept.heads, group.members, group.shape)
            for part in group.parts:
                for i, member in enumerate(part.heads):
                    places, rectangle = group.members[member]
                    if place in places:
                        queries = problem.query_head[kept.heads[list(places)]]
                        chosen = parts.problem, part, i, rectangle, queries, places.index(place)
                        self.parts.append(Part(*chosen, every, k, v))

    def own(self, q, k, v):
        """The head's arrays, from those of all heads."""
        return q[self.query], k[self.key][self.keys], v[self.key][self.keys]

    def __call__(self, q, k, v):
        every, (q, k, v) = q, self.own(q, k, v)
        direct = self.scale * (q @ k.T)
        outs, logs = [], []
        for rows, visible in ((slice(None), self.leaves),):
            weights, log = masked(direct[rows], visible)
            outs.append(weights @ v)
            logs.append(log)
        for part in self.parts:
            out, log = part(every, k, v)
            before, after = part.rows.start, len(q) - part.rows.stop
            outs.append(anp.concatenate([anp.zeros((before, v.shape[1])), out, anp.zeros((after, v.shape[1]))]))
            logs.append(anp.concatenate([anp.full(before, NOTHING), log, anp.full(after, NOTHING)]))
        shares = anp.exp(anp.array(logs) - logsumexp(anp.array(logs), axis=0)[None])
        merged = anp.sum(anp.array(outs) * shares[:, :, None], axis=0)
        chosen = np.isin(np.arange(len(q)), self.exact)[:, None]
        exact = masked(direct, self.seen)[0] @ v
        return anp.where(self.seen.any(axis=1)[:, None], anp.where(chosen, exact, merged), 0.0)


NOTHING = -1e300  # the lse of a part without keys


def between(spans, m):
    return (np.arange(m) >= spans[:, :1]) & (np.arange(m) < spans[:, 1:])


def masked(scores, visible):
    """The softmax over what is visible, and its lse."""
    some = visible.any(axis=1)
    scores = anp.where(visible, scores, -1e30)
    log = logsumexp(scores, axis=1)
    return anp.where(visible, anp.exp(scores - log[:, None]), 0.0), anp.where(some, log, NOTHING)


@pytest.fixture(params=MASKS, scope="module")
def case(request):
    options, _ = masks.MASKS[request.param](700, 760, 2)
    arrays = masks.problem(700, 760, batch=2, key_heads=1, dtype=np.float64)
    out, residuals = attention_forward(*arrays, **PDA, **options)
    dout = np.random.default_rng(3).standard_normal(out.shape)
    gradients = attention_backward(residuals, dout)
    flat = [x.reshape(-1, *x.shape[2:]) for x in arrays]
    heads = {h: FrozenHead(residuals, kept, i, flat) for kept in residuals.parts for i, h in enumerate(kept.heads)}
    assert any(head.parts for head in heads.values())
    return flat, [heads[h] for h in sorted(heads)], out, dout, gradients


def rounding(heads):
    """1e-10, or what the worst fit's condition makes of rounding: a ridge of 1e-16 sigma_1^2 leaves 1e8 of it."""
    levels = [part.choice["level"] for head in heads for part in head.parts]
    return max(1e-10, 1e-15 * min(levels) ** -0.5)


def test_the_frozen_algorithm_is_the_forward_pass(case):
    flat, heads, out, _, _ = case
    for head, own in zip(heads, out.reshape(-1, *out.shape[2:]), strict=True):
        assert np.abs(head(*flat) - own).max() <= rounding(heads) * np.abs(own).max()


def test_gradients_agree_with_automatic_differentiation(case):
    flat, heads, _, dout, gradients = case
    dout = dout.reshape(-1, *dout.shape[2:])

    def loss(q, k, v):
        return sum((head(q, k, v) * own).sum() for head, own in zip(heads, dout, strict=True))

    for i, own in enumerate(gradients):
        true = grad(loss, i)(*flat)
        assert np.abs(own.reshape(true.shape) - true).max() <= rounding(heads) * np.abs(true).max()


def test_gradients_agree_with_central_differences(case):
    """Along random directions: 1e-6, from a step of 1e-5 of numbers of size 1 that are rounded at 1e-16."""
    flat, heads, _, dout, gradients = case
    dout, rng = dout.reshape(-1, *dout.shape[2:]), np.random.default_rng(4)
    for _ in range(3):
        direction = [rng.standard_normal(x.shape) for x in flat]
        ends = []
        for step in (1e-5, -1e-5):
            moved = [x + step * d for x, d in zip(flat, direction, strict=True)]
            ends.append(sum((head(*moved) * own).sum() for head, own in zip(heads, dout, strict=True)))
        slope = (ends[0] - ends[1]) / 2e-5
        parts = [(g.reshape(d.shape) * d).sum() for g, d in zip(gradients, direction, strict=True)]
        size = sum(np.abs(g.reshape(d.shape) * d).sum() for g, d in zip(gradients, direction, strict=True))
        assert abs(sum(parts) - slope) < 1e-6 * max(abs(slope), 1e-3 * size)
