"""What the experiments share: heads and matrices, csv and tables, pictures, verdicts, processes of their own."""

import contextlib
import csv
import io
import multiprocessing
import os
import pathlib
import sys
import textwrap

import click
import numba
import numpy as np

import pda_numba

VERDICTS = ("confirmed", "corrected", "refuted")
STARTED = os.times()


def command(doc):
    """A click command whose help is the first paragraph of `doc`, with the option that all experiments have."""

    def wrap(function):
        path = click.Path(path_type=pathlib.Path, file_okay=False)
        option = click.option("--out", default="results", show_default=True, type=path, help="Folder for the results.")
        return click.command(help=doc.split("\n\n")[0])(option(function))

    return wrap


# --- numbers ---


def softmax(q, k, scale):
    """The softmax matrix of one head, in float64."""
    return of_logits(scale * (q.astype(float) @ k.astype(float).T))


def of_logits(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def off(found, true):
    """Relative error in the Frobenius norm."""
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def exponent(sizes, values):
    """p of values ~ size^p, by least squares in the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


# --- results ---


def write(folder, name, header, rows):
    """A csv file in the folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def table(header, rows):
    """Columns of text; floats with three digits."""
    cells = [header, *([f"{x:.3g}" if isinstance(x, (float, np.floating)) else str(x) for x in row] for row in rows)]
    widths = [max(len(str(row[i])) for row in cells) for i in range(len(header))]
    lines = ["  ".join(str(x).ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def verdict(statement, word, measured):
    """One line: what the paper says, what became of it, and the numbers."""
    if word not in VERDICTS:
        raise ValueError(f"word must be one of {', '.join(VERDICTS)}, got {word!r}")
    return f"{word.upper()}: {statement}. {measured}"


def show(sizes, tables, verdicts):
    """Print what ran, the tables (title, header, rows), the verdicts, and how long it took."""
    print(f"pda_numba {pda_numba.__version__}, {numba.get_num_threads()} threads; {sizes}")
    for title, header, rows in tables:
        print(f"\n{title}\n\n{table(header, rows)}")
    print(
        "\n"
        + "\n".join(textwrap.fill(line, 110, subsequent_indent="    ", break_on_hyphens=False) for line in verdicts)
    )
    now = os.times()
    # with the processes that were started; what they wait for, and other programs, is in the clock alone
    processor = sum(now[:4]) - sum(STARTED[:4])
    print(f"\nTook {now.elapsed - STARTED.elapsed:.0f} s by the clock, {processor:.0f} s of processor time")


@contextlib.contextmanager
def picture(path, panels):
    """Axes side by side; what is drawn on them becomes a png of 256 colours, which is a small file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from PIL import Image

    figure, axes = plt.subplots(1, panels, figsize=(4.4 * panels, 4), layout="constrained")
    yield axes
    whole = io.BytesIO()
    figure.savefig(whole, dpi=100)
    plt.close(figure)
    Image.open(whole).convert("RGB").quantize(256).save(path, optimize=True)


# --- processes of their own ---


def in_fresh_process(function, *arguments):
    """The result of a function in a new interpreter, whose memory no earlier measurement has touched."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def peak_of(call):
    """What a call returns, and the bytes it took beyond what was resident before it; NaN where the system does not
    tell."""
    if not sys.platform.startswith("linux"):
        return call(), float("nan")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts afresh
    before = _resident("VmRSS")
    result = call()
    return result, float(_resident("VmHWM") - before)


def _resident(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
