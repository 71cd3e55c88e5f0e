"""Tell the subject of long documents, 8,192 to 32,768 characters each, at their full length.

    python examples/fetch_documents.py
    python examples/long_documents.py --out /tmp/documents

The documents are the Linux kernel's, their subject is the directory they lie in. A token is four characters: the mean
of hashed embeddings of the character trigrams that begin there. One layer of attention lets every token see the whole
document, features of the sum are averaged over it, and a softmax classifies. There are no positions: what a text is
about does not depend on where in it a word stands. Documents keep their own lengths, so there is nothing to pad.

Gradients are by hand, around `pda_numba.attention_vjp`. The same training is done with exact attention, with PDA, and
without attention, from the same weights with the same documents; see `training`.
"""

from collections import Counter

import click
import fetch_documents
import numpy as np
import training
from scipy import sparse

import pda_numba

LONGEST = 32_768
PER_TOKEN = 4


class Documents:
    """The task that `training` trains."""

    name = "long documents"

    def __init__(self, documents, *, tokens, classes=5, batch=2, width=32, head_dim=16, hidden=64, buckets=4096):
        subjects = sorted(name for name, _ in Counter(x for x, _ in documents).most_common(classes))
        kept = [(subjects.index(x), text) for x, text in documents if x in subjects]
        examples = [(subject, hashed(text[: min(LONGEST, PER_TOKEN * tokens)], buckets)) for subject, text in kept]
        order = np.random.default_rng(0).permutation(len(examples))
        self.held_out = [examples[i] for i in order[::4]]
        self.examples = [examples[i] for n, i in enumerate(order) if n % 4]
        self.size, self.width, self.head_dim = batch, width, head_dim
        self.hidden, self.buckets, self.classes = hidden, buckets, len(subjects)
        lengths = [len(x) // PER_TOKEN for _, x in examples]
        self.settings = {
            "documents": len(self.examples),
            "held out": len(self.held_out),
            "subjects": " ".join(subjects),
            "tokens": f"{min(lengths)} to {max(lengths)} (mean {np.mean(lengths):.0f})",
            "batch": batch,
            "head dim": head_dim,
        }

    def initial(self, seed):
        rng, w, d, inner = np.random.default_rng([seed, 0]), self.width, self.head_dim, self.hidden
        p = {"embedding": rng.normal(0, 0.1, (self.buckets, w))}
        p |= {name: rng.normal(0, w**-0.5, (w, d)) for name in ("q", "k", "v")}
        p |= {"o": rng.normal(0, d**-0.5, (d, w)), "up": rng.normal(0, w**-0.5, (w, inner)), "up0": np.zeros(inner)}
        p |= {"out": rng.normal(0, 0.1 * inner**-0.5, (inner, self.classes)), "out0": np.zeros(self.classes)}
        return {name: x.astype(np.float32) for name, x in p.items()}

    def batch(self, seed, step):
        """Documents in an order that is shuffled anew in every round through them."""
        at = np.arange(step * self.size, (step + 1) * self.size)
        rounds, places = np.divmod(at, len(self.examples))
        order = {n: np.random.default_rng([seed, 1, n]).permutation(len(self.examples)) for n in set(rounds.tolist())}
        return [self.examples[order[n][i]] for n, i in zip(rounds.tolist(), places, strict=True)]

    def gradient(self, parameters, batch, attend):
        total, sums = 0.0, {name: np.zeros_like(x) for name, x in parameters.items()}
        for subject, document in batch:
            logits, pullback = forward(parameters, document, attend)
            loss, slope = cross_entropy(logits, subject)
            total += loss / len(batch)
            for name, g in pullback(slope).items():
                sums[name] += g / len(batch)
        return total, sums

    def evaluate(self, parameters, attend):
        losses, hits, infos = [], [], []
        for subject, document in self.held_out:
            logits, _ = forward(parameters, document, attend, infos)
            losses.append(cross_entropy(logits, subject)[0])
            hits.append(logits.argmax() == subject)
        return float(np.mean(losses)), float(np.mean(hits)), infos


def hashed(text, buckets):
    """The buckets of a text's trigrams, cut to whole tokens."""
    codes = np.frombuffer(text.encode("latin-1", errors="replace"), dtype=np.uint8).astype(np.uint32)
    trigrams = codes[:-2] | codes[1:-1] << 8 | codes[2:] << 16
    mixed = (trigrams * np.uint32(2654435761)) >> np.uint32(16)
    return (mixed % buckets).astype(np.int32)[: len(mixed) // PER_TOKEN * PER_TOKEN]


def forward(p, document, attend, infos=None):
    """Logits, and the function that maps their gradient to those of the parameters."""
    tokens, dtype = len(document) // PER_TOKEN, p["embedding"].dtype
    share = np.full(len(document), 1 / PER_TOKEN, dtype=dtype)
    rows = np.arange(0, len(document) + 1, PER_TOKEN)
    bag = sparse.csr_array((share, document, rows), shape=(tokens, len(p["embedding"])))
    x, x_back = normed(bag @ p["embedding"])
    y, attention_back = (x, None) if attend is None else attended(p, x, attend, infos)
    z, z_back = normed(y)
    features = np.maximum(z @ p["up"] + p["up0"], 0)
    pooled, pooled_back = normed(features.mean(0, keepdims=True))

    def pullback(slope):
        grads = {"out": np.outer(pooled, slope), "out0": slope}
        d_features = pooled_back((p["out"] @ slope)[None]) / tokens * (features > 0)
        grads |= {"up": z.T @ d_features, "up0": d_features.sum(0)}
        dx = z_back(d_features @ p["up"].T)
        if attend is not None:
            dx, inside = attention_back(dx)
            grads |= inside
        grads["embedding"] = bag.T @ x_back(dx)
        return grads

    return (pooled @ p["out"] + p["out0"])[0], pullback


def attended(p, x, attend, infos):
    """x + attention(x), and its pullback; to `infos`, what the call reports."""
    q, k, v = (x @ p[name] for name in ("q", "k", "v"))
    out, residuals = pda_numba.attention_forward(q, k, v, **attend)
    if infos is not None:
        infos.append(residuals.info)

    def pullback(dy):
        dq, dk, dv = pda_numba.attention_backward(residuals, dy @ p["o"].T)
        grads = {"o": out.T @ dy, "q": x.T @ dq, "k": x.T @ dk, "v": x.T @ dv}
        return dy + dq @ p["q"].T + dk @ p["k"].T + dv @ p["v"].T, grads

    return x + out @ p["o"], pullback


def normed(x):
    """Layer norm without a gain, and its pullback."""
    apart = x - x.mean(1, keepdims=True)
    size = np.sqrt((apart * apart).mean(1, keepdims=True) + 1e-5)
    y = apart / size
    return y, lambda dy: (dy - dy.mean(1, keepdims=True) - y * (dy * y).mean(1, keepdims=True)) / size


def cross_entropy(logits, subject):
    """Loss in nats, and its gradient."""
    chances = np.exp(logits - logits.max())
    chances /= chances.sum()
    loss = -float(np.log(chances[subject]))
    chances[subject] -= 1
    return loss, chances


@click.command(help=__doc__)
@training.options(steps=200, tokens=LONGEST // PER_TOKEN, rank=64, rate=5e-3)
@click.option("--archive", type=click.Path(exists=True, dir_okay=False), help="Debian's linux-doc-6.1, if it is here.")
def main(out, seeds, steps, tokens, rank, rate, resume, quick, archive):
    documents, batch = fetch_documents.documents(archive=archive), 2
    if quick:
        seeds, steps, tokens, rank, batch = min(seeds, 1), min(steps, 12), min(tokens, 512), min(rank, 16), 1
        documents = documents[:: max(1, len(documents) // 40)]
    task = Documents(documents, tokens=tokens, batch=batch)
    training.experiment(task, out, seeds=seeds, steps=steps, rank=rank, rate=rate, resume=resume, memory=not quick)


if __name__ == "__main__":
    main()
