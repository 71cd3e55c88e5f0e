"""Embeddings of long texts with a pretrained sentence encoder in NumPy: its attention exact and by PDA.

    python examples/sentence_encoder.py --out /tmp/encoder

all-MiniLM-L6-v2 has six layers of twelve heads of dimension 32. Texts are windows of novels in the public domain (see
`fetch_novel`); what is reported is the cosine between the embeddings by each method and by exact attention. A method
is a name, or options of `pda_numba.attention`:

    exact               attention by NumPy's matrix products
    average             no attention: every token gets the mean of the values
    first 512           exact, and only the first 512 tokens of the text, which is what the model was made for
    streamed            pda_numba.attention(..., method="exact")
    tol=0.1             pda_numba.attention(..., tol=0.1)
    rank=32             pda_numba.attention(..., rank=32, method="pda"): no head falls back to exact attention
"""

import time
import warnings
from pathlib import Path

import click
import fetch_models
import fetch_novel
import minilm
import numpy as np
from attend import TOOK, Attend, took, warm_up
from rich.console import Console
from rich.progress import track
from tables import table
from word_pieces import WordPieces

import pda_numba

METHODS = "exact;average;first 512;streamed;tol=0.1;tol=0.03;tol=0.01;rank=16;rank=32;rank=64"
OWN = {"exact": minilm.exact, "average": minilm.average, "first 512": minilm.exact}


def attend_by(method):
    """Attention by a method's name; with a rank no head falls back to exact attention, which costs less here."""
    return Attend(method, OWN, **({"method": "pda"} if method.startswith("rank") else {}))


def windows(pieces, texts, count, tokens):
    """`count` windows of so many tokens, taken in turn from the texts at distances as large as they allow."""
    each = -(-count // len(texts))
    found = []
    for text in texts:
        ids = pieces.encode(text[: 8 * tokens * each])
        if len(ids) < tokens * each:
            raise click.ClickException(f"a text of {len(ids)} tokens is too short for {each} windows of {tokens}")
        starts = np.linspace(1, len(ids) - tokens, each).astype(int)
        found.append([np.concatenate([ids[:1], ids[at : at + tokens - 2], ids[-1:]]) for at in starts])
    return [group[i] for i in range(each) for group in found][:count]


def shortened(ids, tokens):
    return np.concatenate([ids[: tokens - 1], ids[-1:]])


def padded(texts):
    """Token ids (texts, tokens), filled up with zeros, and lengths."""
    lengths = [len(x) for x in texts]
    tokens = np.zeros((len(texts), max(lengths)), dtype=np.int64)
    for row, ids in zip(tokens, texts, strict=True):
        row[: len(ids)] = ids
    return tokens, lengths


def embedded(model, texts, method, console):
    """Embeddings of texts one by one, and what it took."""
    attend, found = attend_by(method), []
    start = time.perf_counter()
    for ids in track(texts, description=method, console=console, transient=True, disable=not console.is_terminal):
        ids = shortened(ids, 512) if method == "first 512" else ids
        found.append(model.embed(ids[None], [len(ids)], attend)[0])
    return np.array(found), {"seconds": (time.perf_counter() - start) / len(texts), **attend.said()}


def together(model, texts, method):
    """Embeddings of texts of several lengths as one padded batch, and what it took."""
    tokens, lengths = padded(texts)
    attend, start = attend_by(method), time.perf_counter()
    found = model.embed(tokens, lengths, attend, key_lengths=np.array(lengths))
    return found, {"seconds": time.perf_counter() - start, **attend.said()}


def compared(model, texts, methods, console):
    """A table of the methods, and how far apart different texts are."""
    found, rows = {}, []
    for method in dict.fromkeys(["exact", *methods]):
        found[method], said = embedded(model, texts, method, console)
        cosine = np.sum(found[method] * found["exact"], axis=1)
        cells = [f"{cosine.min():.5f}", f"{cosine.mean():.5f}", f"{said['seconds']:.2f}", *took(said)]
        rows.append([method, *cells])
        console.print(", ".join(rows[-1]), highlight=False)
    between = (found["exact"] @ found["exact"].T)[np.triu_indices(len(texts), 1)]
    said = (
        f"Between different texts, exact: cosine {between.min():.3f} to {between.max():.3f}." if len(texts) > 1 else ""
    )
    return table(["attention", "smallest cosine", "mean", "s per text", *TOOK], rows), said


def compared_padded(model, texts, methods, console):
    """A table of a padded batch: each method against exact attention to every text alone, without padding."""
    exact, _ = embedded(model, texts, "exact", console)
    rows = []
    for method in methods:
        if method == "first 512":
            continue
        found, said = together(model, texts, method)
        cosine = np.sum(found * exact, axis=1)
        rows.append([method, *(f"{x:.5f}" for x in cosine), f"{said['seconds']:.2f}", *took(said)])
    return table(["attention", *(f"{len(x):,} tokens" for x in texts), "s in all", *TOOK], rows)


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Output folder.")
@click.option("--texts", default=6, show_default=True, help="How many texts.")
@click.option("--tokens", default=4096, show_default=True, help="Tokens of each.")
@click.option("--methods", default=METHODS, show_default=True, help="Of attention, with semicolons between.")
@click.option("--text", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="A file in UTF-8.")
@click.option("--archive", type=click.Path(exists=True, dir_okay=False), help="The novels' .deb.")
@fetch_models.options
def main(out, texts, tokens, methods, text, archive, models, accept_terms):
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)  # the table says how large the errors were
    path = fetch_models.fetch("minilm", models, accept_terms)
    model = minilm.MiniLM.from_file(path)
    pieces = WordPieces(path.with_name("vocab.txt").read_text(encoding="utf-8").splitlines())
    novels = [fetch_novel.novel(x, archive=archive) for x in fetch_novel.NOVELS] if text is None else []
    chosen = windows(pieces, novels or [text.read_text(encoding="utf-8")], texts, tokens)
    console, methods = Console(stderr=True), methods.split(";")
    if set(methods) - OWN.keys():
        warm_up(32)
    parts = [f"{texts} texts of {tokens:,} tokens", *compared(model, chosen, methods, console)]
    batch = [shortened(x, tokens * share // 4) for x, share in zip(chosen, (4, 3, 2, 1), strict=False)]
    parts += ["One padded batch with key_lengths: cosines with exact attention to each text alone"]
    parts += [compared_padded(model, batch, methods, console)]
    out.mkdir(parents=True, exist_ok=True)
    report = "\n\n".join(x for x in parts if x)
    (out / "encoder.md").write_text(report + "\n", encoding="utf-8")
    click.echo(report)


if __name__ == "__main__":
    main()
