"""Section 7.3 of the PDA paper as an experiment: language modelling and long documents at several R and m.

    python experiments/end_to_end.py --out results
    python experiments/end_to_end.py --archive linux-doc-6.1_6.1.192-3_all.deb

The trainings of `examples/`, shorter: masked characters of Python's own sources (two layers, two heads, rotary
positions), and the subject of long documents (one layer). Every run of a seed has the same beginning and the same
batches; they differ in their attention, forwards and backwards:

    exact, none              exact attention, and the model without its attention
    R = 16, R = 64           low rank with whatever near field helps; never exact attention
    R = 64, m = 8, m = 4     the features of the low-rank part projected by the pair from the data, fitted to exact rows
    paper, m = 8, m = 4      one random orthogonal projection, and everything fitted to the projected problem; R = 64

Reported is the loss on held-out text with the attention of the training, and with exact attention instead. How far
seeds lie apart is known from exact attention and from none, the cheap ones; the others are compared on the first seed.

The documents are the Linux kernel's if they have been fetched (`python examples/fetch_documents.py`) or are given.
Otherwise long modules of Python's standard library stand in, whose subject is the package they lie in; there are few.

Writes end_to_end.csv and end_to_end.png.
"""

import sys
import sysconfig
import time
import warnings
from pathlib import Path

import click
import numpy as np
from common import command, picture, show, verdict, write

import pda_numba

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import fetch_documents
import long_documents
import masked_characters
import training

PDA = {"method": "pda", "rank": 64}
PAPER = PDA | {"projection": "orthogonal", "calibrate": False, "near": "none"}
METHODS = {
    "exact": {"method": "exact"},
    "R = 16": PDA | {"rank": 16},
    "R = 64": PDA,
    "R = 64, m = 8": PDA | {"proj_dim": 8},
    "R = 64, m = 4": PDA | {"proj_dim": 4},
    "paper, m = 8": PAPER | {"proj_dim": 8},
    "paper, m = 4": PAPER | {"proj_dim": 4},
    "none": None,
}
TESTS = 40  # documents
HEADER = [
    "task",
    "attention",
    "seed",
    "training loss",
    "held-out loss",
    "accuracy",
    "loss, exact",
    "error",
    "CPU s/step",
]


# --- tasks ---


def library_documents():
    """(package, text) of the long modules of Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        package, *rest = path.relative_to(root).parts
        if rest and not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & {package, *rest}:
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) >= fetch_documents.SHORTEST:
                yield package, text


def tasks(tokens, archive):
    """The two tasks, and what the documents are."""
    fetched = archive or (fetch_documents.cache_directory() / "linux-doc-6.1.json.gz").exists()
    documents = fetch_documents.documents(archive=archive) if fetched else list(library_documents())
    text, held_out = masked_characters.standard_library(3_000_000)
    characters = masked_characters.Characters(text, held_out, tokens=tokens, tests=8)
    subjects = long_documents.Documents(documents, tokens=2 * tokens)
    subjects.held_out = subjects.held_out[:TESTS]
    return (characters, subjects), "Linux" if fetched else "Python's library (a stand-in)"


# --- training ---


def train(task, seed, attend, steps, rate=5e-3):
    """Parameters, the loss of every step, and processor seconds of a step (median)."""
    parameters = task.initial(seed)
    adam, losses, seconds = training.Adam(parameters, rate), [], []
    for step in range(steps):
        start = time.process_time()
        # other rows are drawn at every step, so that their errors average out
        own = attend and attend | {"seed": step}
        loss, gradients = task.gradient(parameters, task.batch(seed, step), own)
        adam.update(parameters, training.clipped(gradients), step)
        losses.append(loss)
        seconds.append(time.process_time() - start)
    return parameters, losses, float(np.median(seconds))


def measure(both, steps, seeds):
    """The rows of the table, and the losses of the first seed for the picture."""
    rows, curves = [], {}
    for task in both:
        for name, attend in METHODS.items():
            for seed in range(seeds if name in ("exact", "none") else 1):
                parameters, losses, seconds = train(task, seed, attend, steps)
                loss, accuracy, infos = task.evaluate(parameters, attend)
                judged = attend and METHODS["exact"]
                exact = loss if judged is attend else task.evaluate(parameters, judged)[0]
                error = float(np.median([np.median(info.error) for info in infos])) if infos else 0.0
                last = float(np.mean(losses[-max(1, steps // 10) :]))
                rows.append((task.name, name, seed, last, loss, float(accuracy), exact, error, seconds))
                click.echo(f"{task.name}, {name}, seed {seed}: {loss:.3f}", err=True)
                curves.setdefault((task.name, name), losses)
    return rows, curves


# --- results ---


def losses_of(rows, task, attention):
    """On held-out text, one for each seed."""
    return np.array([r[HEADER.index("held-out loss")] for r in rows if r[:2] == (task, attention)])


def verdicts(rows):
    return [line for task in dict.fromkeys(r[0] for r in rows) for line in verdicts_of(rows, task)]


def verdicts_of(rows, task):
    exact, none = (losses_of(rows, task, name) for name in ("exact", "none"))
    gain, spread = (none - exact).mean(), np.ptp(exact)
    needed = gain > spread
    beside = {name: losses_of(rows, task, name)[0] - exact[0] for name in METHODS}
    # a tenth of what attention is worth is little; where it is worth nothing, what seeds are worth
    allowed = 0.1 * gain if needed else spread
    yield verdict(
        f"{task}: the task needs attention",
        "confirmed" if needed else "refuted",
        f"Without it the mean loss is {gain:+.3f} beside that of exact attention, whose seeds lie {spread:.3f} apart",
    )
    groups = {
        "low rank": ("R = 16", "R = 64"),
        "low rank and the pair from the data": ("R = 64, m = 8", "R = 64, m = 4"),
        "the paper's projection": ("paper, m = 8", "paper, m = 4"),
    }
    for label, names in groups.items():
        yield verdict(
            f"{task}: trains with {label} as with exact attention",
            "confirmed" if all(beside[name] <= allowed for name in names) else "refuted",
            "Held-out loss beside that of exact attention: "
            + ", ".join(f"{name} {beside[name]:+.3f}" for name in names)
            + f"; {allowed:.3f} is allowed"
            + ("" if needed else ", which says little of a task that does not need attention"),
        )


def draw(path, curves):
    names = list(dict.fromkeys(task for task, _ in curves))
    with picture(path, len(names)) as axes:
        for axis, task in zip(axes, names, strict=True):
            exact = np.array(curves[task, "exact"])
            width = max(1, len(exact) // 6)  # a running mean: single batches hide the curves
            for name in [x for x in METHODS if x != "exact"]:
                apart = np.convolve(curves[task, name] - exact, np.full(width, 1 / width), "valid")
                axis.plot(np.arange(len(apart)) + width, apart, label=name)
            axis.set(title=task, xlabel="step", ylabel="training loss less that of exact attention")
        axes[0].legend(fontsize=7)


@command(__doc__)
@click.option("--tokens", default=1024, show_default=True, help="Of a window; documents have up to twice as many.")
@click.option("--steps", default=40, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--archive", type=click.Path(exists=True, dir_okay=False), help="Debian's linux-doc-6.1, if it is here.")
def main(out, tokens, steps, seeds, archive):
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)  # the errors are in the table
    both, documents = tasks(tokens, archive)
    rows, curves = measure(both, steps, seeds)
    write(out, "end_to_end.csv", HEADER, rows)
    draw(out / "end_to_end.png", curves)
    about = [f"{task.name}: {', '.join(f'{k} {v}' for k, v in task.settings.items())}" for task in both]
    sizes = f"{steps} steps, {seeds} seeds, documents of {documents}\n" + "\n".join(about)
    show(sizes, [("Loss in nats", HEADER, rows)], verdicts(rows))


if __name__ == "__main__":
    main()
