"""Theorems 6 and 7 of the PDA paper as an experiment: does the gradient's variance fall like 1/R + 1/m, and does the
limit of training fall like 1/sqrt(R)?

    python experiments/gradient_variance.py --out results

Theorem 6: Var[d out/d theta] <= C (eps^2 + 1/R + 1/m). Measured: the variance over seeds of dL/dq, dL/dk and dL/dv for
a fixed loss, summed over entries, relative to |exact gradient|^2; for the paper's own algorithm (one random projection,
fit to the projected problem) over m, and over R without projection.

Theorem 7: (1/T) sum_t |grad L(theta_t)|^2 <= C_1/T + C_2 (eps + 1/sqrt(R) + 1/sqrt(m)). Measured: a layer
softmax(x W_q (x W_k)^T) x W_v is trained by gradient descent towards a teacher's output, with gradients of rank R and a
new seed at every step; the mean squared norm of the *exact* gradient over the last third of the steps.

Writes variance.csv, training.csv and gradient_variance.png.
"""

import click
import numpy as np
from common import command, exponent, picture, show, write

from pda_numba import attention_vjp
from pda_numba.data import real_heads, smooth_heads

PDA = {"method": "pda", "tol": None, "window": 0}
PROJECTED = {"projection": "gaussian", "calibrate": False}
RANKS, DIMS = (16, 32, 64, 128), (4, 8, 16, 24)
_RATE = 0.02  # of gradient descent: five times as much diverges


def problems(tokens):
    """Name -> q, k, v, scale: a made-up smooth head, and a real one of middling difficulty."""
    q, k, v = smooth_heads((tokens, 32))
    yield "smooth", (q, k, v, 32**-0.5)
    q, k, v, scale = real_heads("text")
    yield "text", (q[3, :tokens], k[3, :tokens], v[3, :tokens], scale)


# --- Theorem 6 ---


def gradients(arrays, scale, dout, **options):
    """dq, dk and dv in one vector."""
    _, pullback = attention_vjp(*arrays, scale=scale, **options)
    return np.concatenate([x.ravel() for x in pullback(dout)])


def spread(arrays, scale, dout, true, seeds, **options):
    """(variance, squared bias) over the seeds, relative to |true|^2."""
    found = np.stack([gradients(arrays, scale, dout, seed=s, **PDA, **options) for s in range(seeds)])
    size = np.square(true).sum()
    mean = found.mean(axis=0)
    variance = np.square(found - mean).sum() / (seeds - 1)
    # the mean of the seeds has a variance of its own, which would count as bias
    return variance / size, max(np.square(mean - true).sum() - variance / seeds, 0.0) / size


def measure_variance(tokens, seeds):
    rows = []
    for name, (*arrays, scale) in problems(tokens):
        dout = np.random.default_rng(1).standard_normal(arrays[2].shape, np.float32)
        true = gradients(arrays, scale, dout, method="exact")
        for rank in RANKS:
            rows.append((name, "R", rank, *spread(arrays, scale, dout, true, seeds, rank=rank)))
        for m in DIMS:
            rows.append((name, "m", m, *spread(arrays, scale, dout, true, seeds, rank=64, proj_dim=m, **PROJECTED)))
    return rows


# --- Theorem 7 ---


def layer(x, weights, **options):
    """The output, and the function from its gradient to those of the weights."""
    out, pullback = attention_vjp(*(x @ w for w in weights), **options)
    return out, lambda dout: [x.T @ d for d in pullback(dout)]


def train(tokens, steps, rank):
    """Squared norms of the exact gradient along gradient descent with gradients of rank R (exact ones for None)."""
    rng = np.random.default_rng(0)
    dim = 16
    x = smooth_heads((tokens, dim), seed=2)[0] / 3
    teacher, weights = ([rng.standard_normal((dim, dim)).astype(np.float32) for _ in range(3)] for _ in range(2))
    target, _ = layer(x, teacher, method="exact")
    found = []
    for step in range(steps):
        out, back = layer(x, weights, method="exact")
        true = back((out - target) / tokens)
        found.append(sum(float(np.square(g).sum()) for g in true))
        if rank is not None:
            out, back = layer(x, weights, rank=rank, seed=step, **PDA)
            true = back((out - target) / tokens)
        weights = [w - np.float32(_RATE) * g for w, g in zip(weights, true, strict=True)]
    return found


def measure_training(tokens, steps):
    return {rank: train(tokens, steps, rank) for rank in (None, *RANKS)}


# --- results ---


def verdicts(variance, training):
    lines = []
    for name in dict.fromkeys(row[0] for row in variance):
        for by in ("R", "m"):
            chosen = [row for row in variance if row[:2] == (name, by)]
            p = exponent([r[2] for r in chosen], [r[3] for r in chosen])
            lines.append(f"{name}: variance ~ {by}^{p:.2f} (the theorem: {by}^-1); squared bias {chosen[-1][4]:.2g}")
    tail = {rank: np.mean(values[-len(values) // 3 :]) for rank, values in training.items()}
    p = exponent(RANKS, [tail[r] for r in RANKS])
    lines.append(
        f"training: limit of the squared gradient ~ R^{p:.2f} (the theorem: R^-0.5); exact {tail[None]:.2g}, "
        + ", ".join(f"R = {r} {tail[r]:.2g}" for r in RANKS)
    )
    return lines


def draw(path, variance, training):
    with picture(path, 3) as axes:
        for axis, by, title in zip(axes, ("R", "m"), ("over the rank", "over the projected dimension"), strict=False):
            for name in dict.fromkeys(row[0] for row in variance):
                chosen = np.array([row[2:] for row in variance if row[:2] == (name, by)], float)
                (line,) = axis.loglog(chosen[:, 0], chosen[:, 1], "o-", label=f"{name}, variance")
                axis.loglog(chosen[:, 0], chosen[0, 1] * chosen[0, 0] / chosen[:, 0], ":", color=line.get_color())
                axis.loglog(chosen[:, 0], chosen[:, 2], "x--", color=line.get_color(), label=f"{name}, squared bias")
            axis.set(title=f"Theorem 6, {title}", xlabel=by, ylabel=f"relative to |gradient|² (dotted: 1/{by})")
            axis.legend()
        for rank, values in training.items():
            axes[2].semilogy(values, label="exact" if rank is None else f"R = {rank}")
        axes[2].set(title="Theorem 7", xlabel="step", ylabel="|exact gradient|²")
        axes[2].legend()


@command(__doc__)
@click.option("--tokens", default=2048, show_default=True)
@click.option("--seeds", default=20, show_default=True)
@click.option("--steps", default=240, show_default=True)
def main(out, tokens, seeds, steps):
    variance, training = measure_variance(tokens, seeds), measure_training(tokens // 2, steps)
    header = ["head", "over", "size", "variance", "squared bias"]
    write(out, "variance.csv", header, variance)
    write(out, "training.csv", ["step", "exact", *RANKS], zip(range(steps), *training.values(), strict=True))
    draw(out / "gradient_variance.png", variance, training)
    title = "Variance and squared bias over seeds, relative to |exact gradient|^2"
    show(f"N = {tokens}, {seeds} seeds, {steps} steps", [(title, header, variance)], verdicts(variance, training))


if __name__ == "__main__":
    main()
