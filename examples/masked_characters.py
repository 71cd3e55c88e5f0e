"""Fill in masked characters of Python's own sources: a bidirectional model of two layers, trained without a framework.

    python examples/masked_characters.py --out /tmp/characters

A window of the standard library's sources has 15 % of its characters masked, and the model names them. It is small:
embeddings, two layers of attention and MLP with layer norms before them, and the embeddings again as classifier.
Positions are rotary (https://arxiv.org/abs/2104.09864): they work at any length, and scores depend on distances.
Gradients are HIPS autograd's, through `pda_numba.interop.autograd`. The same training is done with exact attention,
with PDA, and without attention, from the same weights with the same masks; see `training`.
"""

import sysconfig
from pathlib import Path

import autograd
import autograd.numpy as anp
import click
import numpy as np
import training

import pda_numba
from pda_numba.interop.autograd import attention

ALPHABET = "\n" + "".join(chr(i) for i in range(32, 127))
OTHER, MASK = len(ALPHABET), len(ALPHABET) + 1


def standard_library(limit):
    """Codes of about `limit` characters of Python's own sources: training text, held-out text.

    Every eighth file is held out. Tests and test data of the library are left out: they repeat themselves.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    apart = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}
    files = [x for x in sorted(root.rglob("*.py")) if not apart & set(x.relative_to(root).parts)]
    order = np.random.default_rng(0).permutation(len(files))  # else one package is all there is of a short text
    texts, total = ([], []), 0
    for i, which in enumerate(order):
        texts[i % 8 == 7].append(files[which].read_text(encoding="utf-8", errors="replace"))
        total += len(texts[i % 8 == 7][-1])
        if total > limit and texts[1]:
            break
    return tuple(encoded("".join(x)) for x in texts)


def encoded(text):
    table = np.full(256, OTHER, dtype=np.int16)
    table[[ord(c) for c in ALPHABET]] = np.arange(len(ALPHABET))
    return table[np.frombuffer(text.encode("latin-1", errors="replace"), dtype=np.uint8)]


class Characters:
    """The task that `training` trains."""

    name = "masked characters"

    def __init__(self, text, held_out, *, tokens, width=64, heads=2, layers=2, tests=8):
        self.text, self.held_out, self.tokens = text, held_out, tokens
        self.width, self.heads, self.layers, self.tests = width, heads, layers, tests
        self.head_dim = width // heads // 2
        self.rotation = rotation(tokens, self.head_dim)
        self.settings = {"tokens": tokens, "width": width, "heads": heads, "head dim": self.head_dim, "layers": layers}

    def initial(self, seed):
        rng, w, inner = np.random.default_rng([seed, 0]), self.width, self.heads * self.head_dim
        p = {"embedding": rng.normal(0, 0.15, (MASK + 1, w)), "bias": np.zeros(MASK + 1), "last": np.ones(w)}
        for i in range(self.layers):
            p |= {f"{i}.{name}": rng.normal(0, 0.3 * w**-0.5, (w, inner)) for name in ("q", "k")}
            p |= {f"{i}.v": rng.normal(0, w**-0.5, (w, inner)), f"{i}.q0": self._looks_beside()}
            p |= {f"{i}.k0": np.full((self.heads, 1, self.head_dim), SHARP)}
            p |= {f"{i}.o": rng.normal(0, inner**-0.5, (inner, w)), f"{i}.norm": np.ones(w), f"{i}.norm2": np.ones(w)}
            p |= {f"{i}.up": rng.normal(0, w**-0.5, (w, 2 * w)), f"{i}.up0": np.zeros(2 * w)}
            p |= {f"{i}.down": rng.normal(0, 0.3 * w**-0.5, (2 * w, w))}
        return {name: x.astype(np.float32) for name, x in p.items()}

    def _looks_beside(self):
        """Biases of the queries by which heads begin by looking one character to the left and to the right."""
        cos, sin, turn = self.rotation
        ahead = np.full((1, self.head_dim), SHARP)
        beside = [ahead * cos[1] + side * (ahead @ turn) * sin[1] for side in (1, -1)]
        return np.array([beside[h % 2] for h in range(self.heads)])

    def batch(self, seed, step):
        rng = np.random.default_rng([seed, 1, step])
        start = rng.integers(len(self.text) - self.tokens)
        return self._masked(self.text[start : start + self.tokens], rng)

    def _masked(self, text, rng):
        """What the model sees, which characters are masked, and what they were."""
        where = np.flatnonzero(rng.random(len(text)) < 0.15)
        seen = text.copy()
        seen[where] = MASK
        return seen, where, text[where]

    def gradient(self, parameters, batch, attend):
        of_loss = autograd.value_and_grad(lambda p: cross_entropy(self.logits(p, *batch[:2], attend), batch[2]))
        loss, gradients = of_loss(parameters)
        return float(loss), gradients

    def evaluate(self, parameters, attend):
        losses, hits, infos = [], [], []
        for i in range(self.tests):
            rng = np.random.default_rng([i, 2])
            start = i * (len(self.held_out) - self.tokens) // max(1, self.tests - 1)
            seen, where, what = self._masked(self.held_out[start : start + self.tokens], rng)
            logits = self.logits(parameters, seen, where, attend, infos)
            losses.append(float(cross_entropy(logits, what)))
            hits.append(np.mean(logits.argmax(1) == what))
        return float(np.mean(losses)), float(np.mean(hits)), infos

    def logits(self, p, seen, where, attend, infos=None):
        """Scores of all characters at the places `where`; to `infos`, what each call reports."""
        x = p["embedding"][seen]
        for i in range(self.layers):
            if attend is not None:
                x = x + self._attention(p, i, normed(x, p[f"{i}.norm"]), attend, infos) @ p[f"{i}.o"]
            inside = normed(x, p[f"{i}.norm2"]) @ p[f"{i}.up"] + p[f"{i}.up0"]
            x = x + (inside / (1 + anp.exp(-inside))) @ p[f"{i}.down"]
        return normed(x[where], p["last"]) @ p["embedding"].T + p["bias"]

    def _attention(self, p, i, x, attend, infos):
        shape = len(x), self.heads, self.head_dim
        q, k, v = (anp.transpose(anp.reshape(x @ p[f"{i}.{name}"], shape), (1, 0, 2)) for name in ("q", "k", "v"))
        q, k = self._turned(q + p[f"{i}.q0"]), self._turned(k + p[f"{i}.k0"])
        if infos is None:
            out = attention(q, k, v, **attend)
        else:
            out, info = pda_numba.attention(q, k, v, return_info=True, **attend)
            infos.append(info)
        return anp.reshape(anp.transpose(out, (1, 0, 2)), (len(x), -1))

    def _turned(self, x):
        cos, sin, turn = self.rotation
        return x * cos + (x @ turn) * sin


SHARP = 1.8  # of the heads' first look: its square is what a score falls by, next to the place looked at


def rotation(tokens, dim):
    """cos and sin, (tokens, dim), and the matrix that turns by a right angle; wave lengths from three to `tokens`."""
    frequency = np.repeat(2 * np.pi / np.geomspace(3, tokens, dim // 2), 2)
    angle = np.arange(tokens)[:, None] * frequency
    turn = np.kron(np.eye(dim // 2), [[0.0, 1.0], [-1.0, 0.0]])
    return tuple(x.astype(np.float32) for x in (np.cos(angle), np.sin(angle), turn))


def normed(x, gain):
    """Layer norm. Sums and products with plain numbers only: all else makes autograd leave float32."""
    x = x - anp.sum(x, axis=-1, keepdims=True) * (1 / x.shape[-1])
    square = anp.sum(x * x, axis=-1, keepdims=True) * (1 / x.shape[-1])
    return x / anp.sqrt(square + 1e-5) * gain


def cross_entropy(logits, what):
    """Mean, in nats."""
    logits = logits - anp.max(logits, axis=1, keepdims=True)
    chosen = np.zeros(logits.shape, dtype=np.float32)
    chosen[np.arange(len(what)), what] = 1
    each = anp.log(anp.sum(anp.exp(logits), axis=1)) - anp.sum(logits * chosen, axis=1)
    return anp.sum(each) * (1 / len(what))


@click.command(help=__doc__)
@training.options(steps=200, tokens=4096, rank=32, rate=5e-3)
def main(out, seeds, steps, tokens, rank, rate, resume, quick):
    if quick:
        seeds, steps, tokens, rank = min(seeds, 1), min(steps, 12), min(tokens, 512), min(rank, 16)
    text, held_out = standard_library(300_000 if quick else 6_000_000)
    click.echo(f"{len(text):,} characters to train on, {len(held_out):,} held out")
    task = Characters(text, held_out, tokens=tokens, tests=1 if quick else 8)
    training.experiment(task, out, seeds=seeds, steps=steps, rank=rank, rate=rate, resume=resume, memory=not quick)


if __name__ == "__main__":
    main()
