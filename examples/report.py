"""What is left of an experiment: a table per run and per method, a csv of every step, the curves as a picture."""

import csv
import os

import click
import llvmlite.binding
import matplotlib
import numba
import numpy as np
from tables import table

matplotlib.use("Agg")

import matplotlib.pyplot as plt

import pda_numba

LABELS = {"exact": "exact attention", "pda": "PDA", "none": "no attention"}
COLOURS = {"exact": "#8a8f98", "pda": "#1f6fb4", "none": "#d9601a"}


def write(task, out, runs, results, peaks, infos):
    """`steps.csv`, `runs.csv`, `report.md` and `curves.png` in the folder `out`; the report is also printed."""
    _write_steps(out / "steps.csv", runs)
    _write_runs(out / "runs.csv", runs, results)
    said = "\n\n".join(["What PDA reports of its first calls on held-out text, seed 0:", *map(str, infos)])
    text = "\n\n".join([_versions(task), _per_run(runs, results), _per_method(runs, results, peaks), said])
    (out / "report.md").write_text(text + "\n", encoding="utf-8")
    click.echo(text)
    draw(out / "curves.png", task, runs)


def _write_steps(path, runs):
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["method", "seed", "step", "loss", "seconds", "cpu_seconds"])
        for run in runs:
            lines.writerows([run.method, run.seed, step, *line] for step, line in enumerate(run.log))


def _write_runs(path, runs, results):
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["method", "seed", *results[0]])
        lines.writerows([run.method, run.seed, *result.values()] for run, result in zip(runs, results, strict=True))


def _versions(task):
    cpu, threads = llvmlite.binding.get_host_cpu_name(), numba.get_num_threads()
    versions = f"pda_numba {pda_numba.__version__}, numba {numba.__version__}, numpy {np.__version__}"
    settings = ", ".join(f"{name} {value}" for name, value in task.settings.items())
    return f"{versions}; CPU {cpu}, {threads} of {os.cpu_count()} threads\n\n{task.name}: {settings}"


def _per_run(runs, results):
    """The loss of the last tenth of the training, and the held-out text with both kinds of attention."""
    header = [
        "run",
        "seed",
        "training loss",
        "held-out loss",
        "accuracy",
        "with exact: loss",
        "accuracy",
        "PDA's error",
    ]
    rows = []
    for run, result in zip(runs, results, strict=True):
        numbers = [result["loss"], result["accuracy"], result["exact_loss"], result["exact_accuracy"]]
        error = "" if np.isnan(result["error"]) else f"{100 * result['error']:.1f} %"
        rows.append([LABELS[run.method], run.seed, *(f"{x:.4f}" for x in [_last_tenth(run), *numbers]), error])
    return table(header, rows)


def _per_method(runs, results, peaks):
    """Means, with the standard deviation over seeds behind them."""
    header = ["method", "held-out loss", "accuracy", "s per step", "CPU s per step", "peak of a step, MB"]
    rows = []
    for method in dict.fromkeys(run.method for run in runs):
        own = [i for i, run in enumerate(runs) if run.method == method]
        losses, accuracies = ([results[i][name] for i in own] for name in ("loss", "accuracy"))
        times = np.array([line[1:] for i in own for line in runs[i].log])
        seconds = (f"{x:.3g}" for x in np.median(times, axis=0))
        peak = f"{peaks[method] / 1e6:.0f}" if np.isfinite(peaks.get(method, np.nan)) else ""
        rows.append([LABELS[method], _spread(losses), _spread(accuracies), *seconds, peak])
    return table(header, rows)


def _last_tenth(run):
    losses = run.losses()
    return losses[-max(1, len(losses) // 10) :].mean()


def _spread(values):
    spread = f" +- {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):.4f}{spread}"


def draw(path, task, runs):
    """Loss against step and against the time that the steps took; thin lines are seeds, thick ones their mean."""
    style = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True, layout="constrained")
        for method in dict.fromkeys(run.method for run in runs):
            own = [run for run in runs if run.method == method]
            curves = np.array([smooth(run.losses()) for run in own])
            minutes = np.array([np.cumsum([line[1] for line in run.log]) for run in own]) / 60
            for axes, x in ((left, np.arange(1, curves.shape[1] + 1) + 0 * minutes), (right, minutes)):
                axes.plot(x.T, curves.T, color=COLOURS[method], lw=0.8, alpha=0.5)
                axes.plot(x.mean(0), curves.mean(0), color=COLOURS[method], lw=2.4, label=LABELS[method])
        left.set(xlabel="step", ylabel="training loss, smoothed", title=task.name)
        right.set(xlabel="minutes spent in steps, one seed")
        left.legend()
        figure.savefig(path, dpi=120, facecolor="white")
        plt.close(figure)


def smooth(losses, share=0.9):
    """Exponential mean, without the bias of its beginning."""
    total = weight = 0.0
    smoothed = []
    for loss in losses:
        total, weight = share * total + (1 - share) * loss, share * weight + (1 - share)
        smoothed.append(total / weight)
    return np.array(smoothed)
