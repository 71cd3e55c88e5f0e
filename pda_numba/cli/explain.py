"""`pda-numba explain`: what a head's attention is like, what `attention` makes of it, and why."""

import os
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

import pda_numba

from ..options import WINDOWS
from ..plan import RANKS
from . import files, options, reference, spectrum, text, waiting
from .errors import bad_input

SAMPLE = 256  # rows whose weights are looked at: shares of the mass are known to some 3 percent
FEW = 16  # keys: as many as the near field by content takes for its heavy ones
_BLOCK = 2**22  # weights held at once: 32 MiB


@dataclass(frozen=True)
class Explanation:
    """All that is printed and drawn; `found` is None where no singular values were asked for."""

    found: Any  # Spectrum
    shares: dict  # name: (heads...) share of the mass
    chosen: Any  # AttentionInfo of the call as asked for
    low: Any  # AttentionInfo of low rank whatever it costs, at `rank`
    rank: int


def run(q, k, v, plot, values, causal, **choices):
    """Compute, print, and draw if `plot` is a path."""
    with files.picture(plot, "--plot") as target:
        with bad_input(), waiting.Steps() as steps:
            explanation = explain(q, k, v, values, causal, choices, steps)
        _print(explanation, (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]), causal)
        if target is not None:
            from . import figure

            figure.draw_explanation(explanation, target.temporary, os.path.splitext(plot)[1].lower()[1:])
            target.finish()
            click.echo(f"Picture: {plot}")


def explain(q, k, v, values, causal, choices, steps):
    """An `Explanation`; `values` is how many singular values, `choices` are the options of the command."""
    arguments = {**options.for_attention(**choices), "causal": causal}
    matrix = {name: arguments[name] for name in ("scale", "causal", "device", "seed", "check_finite")}
    rank = arguments["rank"] or RANKS[0]
    steps.next("attention as it is chosen")
    chosen = waiting.call(pda_numba.attention, q, k, v, return_info=True, **arguments)[1]
    steps.next(f"low rank {rank}")
    anyway = {**arguments, "rank": rank, "tol": None, "method": "pda"}
    low = waiting.call(pda_numba.attention, q, k, v, return_info=True, **anyway)[1]
    steps.next("where the attention goes")
    scale = reference.default_scale(q) if arguments["scale"] is None else arguments["scale"]
    shares = waiting.call(mass_shares, q, k, scale, causal, arguments["seed"])
    found = None
    if values:
        steps.next("singular values")
        values = min(values, q.shape[-2], k.shape[-2])
        found = waiting.call(pda_numba.spectrum, q, k, rank=values, **matrix)
    return Explanation(found, shares, chosen, low, rank)


# --- where the attention goes ---


def mass_shares(q, k, scale, causal, seed):
    """{name: share of the attention's mass per head}, on uniformly drawn rows, in float64 by plain NumPy.

    In bands of keys around the query (where positions can be compared); in the few keys that hold most of all, the
    same ones for every query; in the few heaviest of each query.
    """
    n, m = q.shape[-2], k.shape[-2]
    seen = np.arange(_first(n, m, causal), n)
    rows = np.sort(np.random.default_rng([seed, 3]).choice(seen, min(SAMPLE, len(seen)), replace=False))
    each = [_head_shares(one[1], one[2], rows, scale, causal) for one in reference.heads(q, k, k)]
    lead = (*np.broadcast_shapes(q.shape[:-3], k.shape[:-3]), *q.shape[-3:-2])
    return {name: np.reshape([one[name] for one in each], lead) for name in each[0]}


def _first(n, m, causal):
    """The first query that sees a key."""
    return max(n - m, 0) if causal else 0


def _head_shares(q, k, rows, scale, causal):
    m = len(k)
    place = rows + m - len(q)  # the key of the same position
    bands = {w: 0.0 for w in WINDOWS if causal or len(q) == m}
    mass, own, step = np.zeros(m), 0.0, max(1, _BLOCK // m)
    few = min(FEW, m)
    for start in range(0, len(rows), step):
        some = place[start : start + step]
        weights = _weights(q[rows[start : start + step]], k, scale, some if causal else None)
        mass += weights.sum(axis=0)
        own += np.partition(weights, m - few, axis=1)[:, m - few :].sum()
        for width in bands:
            bands[width] += _in_band(weights, some, width)
    heavy = np.partition(mass, m - few)[m - few :].sum()
    found = {f"band {width}": share for width, share in bands.items()}
    return {name: x / len(rows) for name, x in {**found, f"heaviest {few}": heavy, f"own {few}": own}.items()}


def _weights(q, k, scale, last):
    """Softmax rows; of query i the keys up to `last[i]` alone, if that is given."""
    scores = (q.astype(float) * scale) @ k.T.astype(float)
    if last is not None:
        scores[np.arange(len(k)) > last[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _in_band(weights, place, width):
    return sum(row[max(p - width, 0) : p + width + 1].sum() for row, p in zip(weights, place, strict=True))


# --- the printout ---


def _print(explanation, shape, causal):
    n, m = shape[:2]
    if explanation.found is not None:
        text.show(spectrum.table(explanation.found), "")
    text.show(_shares_table(explanation.shares), "", _choice_table(explanation), "")
    looked_at = min(SAMPLE, n - _first(n, m, causal))
    click.echo(
        f"shares: of all weights, on {looked_at:,} of {n:,} rows. band w: keys at most w positions away.\n"
        "heaviest: the same keys for every query. own: the heaviest of each query.\n"
        "claimed, limit: from the calls, the limit at 95 % confidence.\n"
        'as asked: with your options. low rank: method="pda" at that rank, without a target.\n'
    )
    for line in (*_reasons(explanation.chosen), *_costs(explanation, shape, causal)):
        click.echo(line)


def _shares_table(shares):
    heads = np.ndindex(next(iter(shares.values())).shape)
    rows = [(text.head(head), *(f"{100 * share[head]:.1f} %" for share in shares.values())) for head in heads]
    return text.table("Where the attention goes", ["head", *shares], rows)


def _choice_table(explanation):
    columns = ["head", "call<", "method<", "rank", "window", "probes", "claimed", "limit"]
    rows = []
    for head in np.ndindex(explanation.chosen.method.shape):
        rows.append((text.head(head), "as asked", *_result(explanation.chosen, head)))
        rows.append(("", f"low rank {explanation.rank}", *_result(explanation.low, head)))
    tol = explanation.chosen.tol
    return text.table(f"What attention chooses, tol {'none' if tol is None else f'{tol:g}'}", columns, rows)


def _result(info, head):
    numbers = (getattr(info, name)[head] or "-" for name in ("rank", "window", "probes"))
    errors = (text.error(float(getattr(info, name)[head])) for name in ("error", "error_limit"))
    return info.method[head], *numbers, *errors


def _reasons(info):
    """A line for each reason, with the heads that it holds for."""
    found: dict[str, list[str]] = {}
    for head in np.ndindex(info.method.shape):
        found.setdefault(f"{info.method[head]}: {info.reason[head]}", []).append(text.head(head))
    return [f"{reason}" + ("" if heads == ["-"] else f" (head {', '.join(heads)})") for reason, heads in found.items()]


def _costs(explanation, shape, causal):
    """Operations: what the plan expects of each rank, and what the calls counted."""
    n, m, d, e = shape
    chosen, low, rank = explanation.chosen, explanation.low, explanation.rank
    heads, pairs = chosen.method.size, float(n * m)
    if causal:
        pairs = float(np.clip(np.arange(n) + 1.0 + m - n, 0, m).sum())
    exact = 2 * heads * pairs * (d + e)
    lines = [f"operations counted: {chosen.flops:.2g} as asked, {low.flops:.2g} low rank {rank}, {exact:.2g} all exact"]
    if not causal:  # the plan knows of no mask
        lines.insert(0, f"operations expected, of exact attention's: {_expected(shape, {rank, *RANKS}) or 'none'}")
    return lines


def _expected(shape, ranks):
    """What the plan expects low rank to cost, its serial work included, relative to exact attention."""
    n, m, d, e = shape
    plans = {r: pda_numba.plan((n, d), (m, d), (m, e), rank=r, tol=None, method="pda") for r in sorted(ranks)}
    told = (f"rank {r} {p.flops_pda / p.flops_exact:.2g}" for r, p in plans.items() if p.method == "pda")
    return ", ".join(told)
