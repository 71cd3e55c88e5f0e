"""Pictures.

The demo's: on the left what was claimed against what is true, on the right time against length. That of a spectrum:
singular values, and what is left of the matrix behind them. That of an explanation: the latter with what low rank
claims, and where the attention goes.
"""

from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker

BLUE, ORANGE, GREY, INK = "#1f6fb4", "#d9601a", "#8a8f98", "#22262b"
_STYLE: dict[Any, Any] = {
    "font.size": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "axes.titleweight": "bold",
    "axes.titlesize": 14,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 12,
    "svg.fonttype": "none",
}


def draw(by_tol, by_rank, lengths, tol, path, kind):
    """Write the picture to `path` as `kind` (png, svg, pdf)."""
    with plt.rc_context(_STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
        _errors(left, by_tol, by_rank, tol)
        _times(right, lengths)
        figure.savefig(path, format=kind, dpi=150, facecolor="white")
        plt.close(figure)


def draw_spectrum(found, path, kind):
    """Write the picture of a `Spectrum`, a line for each head."""
    with plt.rc_context(_STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
        for head, colour in _heads(found.error.shape):
            values = found.singular_values[head]
            left.plot(np.arange(1, len(values) + 1), np.where(values > 0, values, np.nan), color=colour, lw=2)
        left.set(yscale="log", xlabel="index", ylabel="singular value")
        left.set_title("Singular values of exact attention")
        _tails(right, found)
        right.set_title("The best approximation of each rank")
        for axes in (left, right):
            axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.8)
        figure.savefig(path, format=kind, dpi=150, facecolor="white")
        plt.close(figure)


def draw_explanation(explanation, path, kind):
    """Write the picture of an `explain.Explanation`."""
    with plt.rc_context(_STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
        if explanation.found is not None:
            _tails(left, explanation.found)
        for info, marker in ((explanation.low, "o"), (explanation.chosen, "D")):
            for head, colour in _heads(info.method.shape):
                if info.method[head] == "pda":
                    left.plot(info.rank[head], info.error[head], marker, color=colour, ms=8, mec="white", mew=0.8)
        left.set(yscale="log", xlabel="rank", ylabel="relative error")
        left.set_title("Best of each rank (lines); claimed (dots)")
        left.grid(axis="y", color=GREY, alpha=0.25, lw=0.8)
        _bars(right, explanation.shares)
        figure.savefig(path, format=kind, dpi=150, facecolor="white")
        plt.close(figure)


def _heads(shape):
    """[(head, its colour)]."""
    heads = list(np.ndindex(shape))
    return list(zip(heads, plt.get_cmap("viridis")(np.linspace(0, 0.85, len(heads))), strict=True))


def _name(head):
    return "head " + " ".join(map(str, head)) if head else None


def _tails(axes, found):
    """What the best approximation of each rank leaves, a line for each head."""
    heads = _heads(found.error.shape)
    for head, colour in heads:
        tail = found.tail[head]
        axes.plot(np.arange(len(tail)), np.where(tail > 0, tail, np.nan), color=colour, lw=2, label=_name(head))
    axes.set(yscale="log", xlabel="rank", ylabel="relative Frobenius error")
    if 1 < len(heads) <= 12:
        axes.legend(loc="best", ncols=2)


def _bars(axes, shares):
    """Shares of the attention's mass: a group of bars for each head."""
    heads = list(np.ndindex(next(iter(shares.values())).shape))
    height, colours = 0.8 / len(shares), (BLUE, "#7fb2dd", ORANGE, GREY)
    for i, ((name, share), colour) in enumerate(zip(shares.items(), colours[-len(shares) :], strict=True)):
        axes.barh(np.arange(len(heads)) + i * height, 100 * share.ravel(), height, color=colour, label=name)
    if len(heads) <= 16:
        axes.set_yticks(np.arange(len(heads)) + 0.4 - height / 2, [_name(head) or "" for head in heads])
    axes.set(xlabel="percent of the attention", xlim=(0, 100))
    axes.invert_yaxis()
    axes.set_title("Where the attention goes")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)


def _errors(axes, by_tol, by_rank, tol):
    groups = [(by_rank, BLUE, "o", "rank 64"), (by_tol, ORANGE, "D", f"target {100 * tol:g} %")]
    for results, colour, marker, label in groups:
        true, claimed, limit = (
            np.array([getattr(one, name) for one in results]) for name in ("true", "claimed", "limit")
        )
        axes.vlines(true, np.minimum(claimed, limit), limit, color=colour, lw=2, alpha=0.55)
        axes.plot(true, claimed, marker, color=colour, ms=8, mec="white", mew=0.8, label=label)
    values = [x for one in by_tol + by_rank for x in (one.true, one.claimed, one.limit) if x > 0]
    low, high = min(values) / 1.4, max(values) * 1.4
    axes.plot([low, high], [low, high], color=GREY, lw=1.2, zorder=0)
    axes.fill_between([low, high], [low, high], low, color=GREY, alpha=0.10, lw=0, zorder=0)
    axes.text(0.97, 0.05, "claimed too little", ha="right", color=INK, alpha=0.7, transform=axes.transAxes)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{100 * x:g} %"))
        axis.set_minor_locator(ticker.NullLocator())
    axes.set(xlabel="true error", ylabel="claimed error, bar to its 95 % limit")
    axes.set_title(f"{len(by_rank)} real heads: claimed and true error")
    axes.legend(loc="upper left")


def _times(axes, lengths):
    tokens = np.array([one.tokens for one in lengths])
    seconds = np.array([one.seconds for one in lengths])
    exact = np.array([one.exact_seconds for one in lengths])
    last = int(np.flatnonzero([one.exact_measured for one in lengths])[-1])
    axes.plot(tokens[: last + 1], exact[: last + 1], "-s", color=GREY, ms=7, lw=2.2, label="exact")
    if last + 1 < len(tokens):
        axes.plot(tokens[last:], exact[last:], "--", color=GREY, lw=2.2, label="exact, by its quadratic law")
    axes.plot(tokens, seconds, "-o", color=BLUE, ms=8, lw=2.6, label="pda_numba, rank 128")
    for one in lengths[::-2]:
        _mark_factor(axes, one)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds")
    axes.set_xticks(tokens, [f"{n // 1024}k" for n in tokens])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.8)
    axes.set_title("Time for one head")
    axes.legend(loc="upper left")


def _mark_factor(axes, one):
    """How many times faster, between the two curves, where there is room."""
    if one.exact_seconds < 3 * one.seconds:
        return
    axes.vlines(one.tokens, 1.25 * one.seconds, one.exact_seconds / 1.25, color=ORANGE, lw=1.2, alpha=0.7)
    axes.annotate(
        f"{one.exact_seconds / one.seconds:,.0f}x",
        (one.tokens, np.sqrt(one.seconds * one.exact_seconds)),
        ha="center",
        va="center",
        fontweight="bold",
        color=ORANGE,
        bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"},
    )
