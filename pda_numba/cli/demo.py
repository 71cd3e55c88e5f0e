"""`pda-numba demo`: claimed against true error on real attention heads, then time up to long sequences."""

import importlib.resources
import importlib.util
import os
import time
from dataclasses import dataclass

import click
import numpy as np

import pda_numba

from . import files, reference, text, waiting

SETS = {
    "text": ("encoder_text_N4096_D32.npz", "a sentence encoder reading a novel: 6 heads, 4,096 tokens, D = 32"),
    "speech": ("encoder_speech_N1500_D64.npz", "a speech encoder, 30 s of speech: 8 heads, 1,500 tokens, D = 64"),
}
RANK = 64  # of the real heads' second table
LONG_RANK, DIM = 128, 64  # of the long sequences
PATIENCE = 8.0  # seconds: exact attention is timed while it is expected to take no longer
ENOUGH = 0.5  # seconds: a call is repeated, for the best time, until they are spent
CHECKED_ROWS = 1024


@dataclass(frozen=True)
class HeadResult:
    """One real head by low rank; `auto` is the method that `method="auto"` chooses for it."""

    data: str
    head: int
    auto: str
    rank: int
    window: int
    claimed: float
    limit: float
    true: float
    seconds: float
    exact_seconds: float


@dataclass(frozen=True)
class LengthResult:
    """One long sequence. `exact_measured` is False where the exact time is the quadratic law's."""

    tokens: int
    seconds: float
    exact_seconds: float
    exact_measured: bool
    claimed: float
    limit: float
    true: float
    workspace: int


def run(out, max_tokens, seed, tol, device):
    """The whole demo: two tables of real heads, one of long sequences, a picture."""
    if importlib.util.find_spec("matplotlib") is None:
        _measure(max_tokens, seed, tol, device)
        click.echo("No picture: matplotlib is not installed. To get one: pip install matplotlib")
        return
    with files.picture(out, "--out") as target:
        by_tol, by_rank, longer = _measure(max_tokens, seed, tol, device)
        from . import figure

        figure.draw(by_tol, by_rank, longer, tol, target.temporary, os.path.splitext(out)[1].lower()[1:])
        target.finish()
    click.echo(f"Picture: {out}")


def _measure(max_tokens, seed, tol, device):
    lengths = [n for n in (4096 << i for i in range(64)) if n <= max_tokens]
    heads = {name: _load(name) for name in SETS}
    each = sum(len(q) for q, _k, _v, _scale in heads.values())
    with waiting.Steps(1 + 4 * each) as steps:
        steps.next("preparing the kernels (the first run compiles them)")
        waiting.call(_warm_up, device)
        truth = _truth(heads, steps, tol, seed, device)
        by_tol = _low_rank(heads, truth, steps, f"target {tol:g}", tol=tol, seed=seed, device=device)
        by_rank = _low_rank(heads, truth, steps, f"rank {RANK}", rank=RANK, tol=None, seed=seed, device=device)
    _print_heads(by_tol, by_rank, tol)
    with waiting.Steps(len(lengths)) as steps:
        longer = _lengths(lengths, seed, steps, device)
    _print_lengths(longer)
    return by_tol, by_rank, longer


# --- real heads ---


def _load(name):
    source = importlib.resources.files("pda_numba") / "data" / SETS[name][0]
    with source.open("rb") as file, np.load(file) as arrays:
        return *(arrays[x].astype(np.float32) for x in "qkv"), float(arrays["scale"])


def _warm_up(device):
    """Compile or load every kernel that is timed below."""
    q, k, v = smooth_head(2048, 0)
    pda_numba.attention(q, k, v, rank=RANK, tol=None, method="pda", device=device)
    pda_numba.attention(q, k, v, method="exact", device=device)


def _each(heads):
    for name, (queries, keys, values, scale) in heads.items():
        for h, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
            yield (name, h), (q, k, v), scale


def _truth(heads, steps, tol, seed, device):
    """{(set, head): (exact output in float64, seconds of exact attention in float32, what "auto" chooses)}."""
    truth = {}
    for place, (q, k, v), scale in _each(heads):
        steps.next(f"{place[0]} head {place[1]}: the true output, float64")
        exact = waiting.call(reference.exact_rows, q, k, v, np.arange(len(q)), scale)
        steps.next(f"{place[0]} head {place[1]}: exact and automatic")
        seconds, _ = waiting.call(_timed, q, k, v, scale=scale, method="exact", device=device)
        choices = {"scale": scale, "tol": tol, "seed": seed, "device": device}
        _, info = waiting.call(pda_numba.attention, q, k, v, return_info=True, **choices)
        truth[place] = exact, seconds, str(info.method)
    return truth


def _low_rank(heads, truth, steps, title, **choices):
    results = []
    for place, (q, k, v), scale in _each(heads):
        steps.next(f"{place[0]} head {place[1]}: {title}")
        seconds, (out, info) = waiting.call(_timed, q, k, v, scale=scale, method="pda", **choices)
        exact, exact_seconds, auto = truth[place]
        results.append(
            HeadResult(
                data=place[0],
                head=place[1],
                auto=auto,
                rank=int(info.rank),
                window=int(info.window),
                claimed=float(info.error),
                limit=float(info.error_limit),
                true=reference.relative_error(out, exact),
                seconds=seconds,
                exact_seconds=exact_seconds,
            )
        )
    return results


def _timed(q, k, v, least=2, **choices):
    """(best wall time of three, or of `least` where they are long, (output, info))."""
    times: list[float] = []
    while len(times) < least or (len(times) < 3 and sum(times) < ENOUGH):
        start = time.perf_counter()
        result = pda_numba.attention(q, k, v, return_info=True, **choices)
        times.append(time.perf_counter() - start)
    return min(times), result


def _print_heads(by_tol, by_rank, tol):
    text.show(*(f"{name}: {description}" for name, (_file, description) in SETS.items()), "")
    text.show(_heads_table(f"Real heads, low rank with a target: error at most {tol:g}", by_tol), "")
    text.show(_heads_table(f"Real heads, low rank {RANK}, no target", by_rank), "")
    both = by_tol + by_rank
    held = sum(one.true <= one.limit for one in both)
    missed = sum(one.limit > tol for one in by_tol)
    exact = sum(one.auto == "exact" for one in by_tol)
    text.show(
        "claimed, limit: from the call itself, the limit at 95 % confidence. true: plain NumPy, float64.",
        f"The true error is within the limit on {held} of {len(both)} results.",
        f"Low rank cannot promise the target on {missed} of {len(by_tol)} heads; the call says so in its limit.",
        f'auto: what method="auto" does at this target; it computes {exact} of {len(by_tol)} heads exactly,',
        "because low rank would miss the target or gain too little at these short lengths.",
        "",
    )


def _heads_table(title, results):
    columns = ["data<", "head", "rank", "window", "claimed", "limit", "true", "time", "exact", "faster", "auto"]
    rows = [
        (
            one.data,
            one.head,
            one.rank or "exact",
            one.window,
            text.error(one.claimed),
            text.error(one.limit),
            text.error(one.true),
            text.seconds(one.seconds),
            text.seconds(one.exact_seconds),
            text.factor(one.exact_seconds / one.seconds),
            one.auto,
        )
        for one in results
    ]
    last = [i for i in range(len(results) - 1) if results[i].data != results[i + 1].data]
    return text.table(title, columns, rows, sections=last)


# --- long sequences ---


def smooth_head(tokens, seed, dim=DIM):
    """A made-up head whose spectrum decays, as those of most trained heads do: (q, k, v) float32.

    Columns of queries and keys have falling size; the values are a smooth function of the key, and noise of their own.
    """
    rng = np.random.default_rng([seed, tokens])
    size = np.float32(1.5 * dim**0.25) / (1 + np.arange(dim, dtype=np.float32))
    q, k = (_walk(rng, tokens, dim) * size for _ in range(2))
    mix = rng.standard_normal((dim, dim), dtype=np.float32) / np.linalg.norm(size)
    v = np.tanh(k @ mix) + rng.standard_normal((tokens, dim), dtype=np.float32)
    return q, k, v


def _walk(rng, tokens, dim):
    """Unit-variance columns: a part that drifts along the sequence and a part of its own for every token."""
    knots = rng.standard_normal((65, dim), dtype=np.float32)
    place = np.linspace(0, 64, tokens, endpoint=False, dtype=np.float32)
    left = place.astype(np.int64)
    angle = (place - left.astype(np.float32))[:, None] * np.float32(np.pi / 2)
    drift = np.cos(angle) * knots[left] + np.sin(angle) * knots[left + 1]
    return np.sqrt(np.float32(0.5)) * (drift + rng.standard_normal((tokens, dim), dtype=np.float32))


def _lengths(lengths, seed, steps, device):
    results = []
    law = None  # seconds per token squared, from the longest exact run
    for tokens in lengths:
        steps.next(f"{tokens:,} tokens")
        q, k, v = waiting.call(smooth_head, tokens, seed)
        choices = {"rank": LONG_RANK, "tol": None, "method": "pda", "seed": seed, "device": device}
        seconds, (out, info) = waiting.call(_timed, q, k, v, **choices)
        measured = law is None or law * tokens**2 <= PATIENCE
        if measured:
            exact_seconds, _ = waiting.call(_timed, q, k, v, 1, method="exact", device=device)
            law = exact_seconds / tokens**2
        rows = np.sort(np.random.default_rng([seed, 2]).choice(tokens, CHECKED_ROWS, replace=False))
        exact = waiting.call(reference.exact_rows, q, k, v, rows, reference.default_scale(q))
        results.append(
            LengthResult(
                tokens=tokens,
                seconds=seconds,
                exact_seconds=law * tokens**2,
                exact_measured=measured,
                claimed=float(info.error),
                limit=float(info.error_limit),
                true=reference.relative_error(out[rows], exact),
                workspace=info.workspace_bytes,
            )
        )
    return results


def _print_lengths(results):
    columns = ["tokens", "time", "exact", "faster", "claimed", "limit", "true", "memory", "full matrix"]
    rows = [
        (
            f"{one.tokens:,}",
            text.seconds(one.seconds),
            ("" if one.exact_measured else "~ ") + text.seconds(one.exact_seconds),
            text.factor(one.exact_seconds / one.seconds),
            text.error(one.claimed),
            text.error(one.limit),
            text.error(one.true),
            text.size(one.workspace),
            text.size(4 * one.tokens**2),
        )
        for one in results
    ]
    text.show(
        f"Long sequences: a made-up smooth head, D = E = {DIM}, float32, rank {LONG_RANK}, certificate included.",
        f"~: not run, the quadratic law of the longest exact run. true: plain NumPy on {CHECKED_ROWS:,} random rows.",
        "",
        text.table(None, columns, rows),
        "",
    )
