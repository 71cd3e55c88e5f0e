"""What the examples share: Adam, the loop over steps, checkpoints, and the report.

All runs (every method, every seed) advance together, one step each in turn, so that a comparison of their times sees
the same machine, and one checkpoint holds them all. What a step draws at random depends on seed and step alone: a run
that is resumed gives the same bits as one that was never interrupted.

A task is an object with

    name, settings                                 for titles and to refuse to resume something else
    initial(seed)                                  parameters, a dictionary of arrays
    batch(seed, step)                              whatever `gradient` takes
    gradient(parameters, batch, attend)            loss, dictionary of gradients
    evaluate(parameters, attend)                   loss, accuracy, what each call reports, on held-out data
    head_dim

where `attend` is None for the model without its attention, or the options of `pda_numba.attention`.
"""

import json
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path

import click
import numpy as np
import report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import pda_numba

METHODS = ("exact", "pda", "none")
COLUMNS = ("loss", "seconds", "cpu_seconds")


class Adam:
    """Kingma and Ba, https://arxiv.org/abs/1412.6980, after a short warm-up, with a step that shrinks as 1 / sqrt(t).

    The rate depends on the step and not on how many are planned, so that a run can be prolonged.
    """

    def __init__(self, parameters, rate, warmup=20, settle=100):
        self.rate, self.warmup, self.settle = rate, warmup, settle
        self.mean = {name: np.zeros_like(x) for name, x in parameters.items()}
        self.square = {name: np.zeros_like(x) for name, x in parameters.items()}

    def update(self, parameters, gradients, step):
        """Change `parameters` in place; the first step is 0."""
        t = step + 1
        rate = self.rate * min(1.0, t / self.warmup, (self.settle / t) ** 0.5)
        for name, g in gradients.items():
            m, s = self.mean[name], self.square[name]
            m += 0.1 * (g - m)
            s += 0.01 * (g * g - s)
            parameters[name] -= rate * (m / (1 - 0.9**t)) / (np.sqrt(s / (1 - 0.99**t)) + 1e-8)


class Run:
    """One training: a method, a seed, parameters, what Adam remembers, one line per step."""

    def __init__(self, task, method, seed, rate):
        self.task, self.method, self.seed = task, method, seed
        self.parameters = task.initial(seed)  # the same for all methods
        self.adam = Adam(self.parameters, rate)
        self.log = []

    def step(self, step, rank):
        batch = self.task.batch(self.seed, step)
        wall, cpu = time.perf_counter(), time.process_time()
        loss, gradients = self.task.gradient(self.parameters, batch, options_of(self.method, rank, step))
        self.adam.update(self.parameters, clipped(gradients), step)
        self.log.append((loss, time.perf_counter() - wall, time.process_time() - cpu))

    def arrays(self):
        """Everything that is needed to go on; the arrays themselves, by name."""
        kinds = {"parameters": self.parameters, "mean": self.adam.mean, "square": self.adam.square}
        named = {f"{kind}/{name}": x for kind, group in kinds.items() for name, x in group.items()}
        return {f"{self.method}/{self.seed}/{name}": x for name, x in named.items()}

    def losses(self):
        return np.array([line[0] for line in self.log])


def options_of(method, rank, seed=0):
    """For `pda_numba.attention`. Every step draws other rows, so that their errors average out over the steps."""
    options = {"exact": {"method": "exact"}, "pda": {"method": "pda", "rank": rank, "seed": seed}, "none": None}
    return options[method]


def clipped(gradients, limit=1.0):
    """Gradients with a common norm of at most `limit`."""
    norm = float(np.sqrt(sum(float(np.vdot(g, g)) for g in gradients.values())))
    return gradients if norm <= limit else {name: g * (limit / norm) for name, g in gradients.items()}


def save(path, task, runs, step, rank):
    """Write a checkpoint; an interruption leaves the last one whole."""
    arrays = {name: x for run in runs for name, x in run.arrays().items()}
    arrays |= {f"{run.method}/{run.seed}/log": np.array(run.log).reshape(-1, len(COLUMNS)) for run in runs}
    about = json.dumps({"task": task.name, "rank": rank, "runs": len(runs), **task.settings})
    unfinished = path.with_suffix(".part.npz")
    np.savez(unfinished, step=step, about=about, **arrays)
    os.replace(unfinished, path)


def load(path, task, runs, rank):
    """Fill `runs` from a checkpoint; the next step."""
    with np.load(path) as kept:
        about = {"task": task.name, "rank": rank, "runs": len(runs), **task.settings}
        if json.loads(str(kept["about"])) != about:
            raise click.ClickException(f"{path} is of other settings, {kept['about']}")
        for run in runs:
            for name, x in run.arrays().items():
                x[...] = kept[name]
            run.log = [tuple(line) for line in kept[f"{run.method}/{run.seed}/log"].tolist()]
        return int(kept["step"])


def progress():
    """A bar on a terminal (standard error), nothing elsewhere."""
    columns = TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn()
    console = Console(stderr=True)
    shown = sys.stderr.isatty() and console.is_terminal
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not shown)


def advance(task, runs, first, last, rank, checkpoint, save_every):
    """Steps `first` to `last` of all runs."""
    with progress() as bar:
        shown = bar.add_task(task.name, total=last, completed=first)
        for step in range(first, last):
            for run in runs:
                run.step(step, rank)
            losses = {m: np.mean([run.log[-1][0] for run in runs if run.method == m]) for m in METHODS}
            text = ", ".join(f"{method} {loss:.3f}" for method, loss in losses.items())
            bar.update(shown, advance=1, description=text)
            if bar.disable and (step + 1) % 10 == 0:
                click.echo(f"step {step + 1}: {text}")
            if (step + 1) % save_every == 0 or step + 1 == last:
                save(checkpoint, task, runs, step + 1, rank)


def peak_of_step(task, method, rank):
    """Bytes that one step takes beyond what was resident before it, in a process of its own: a step leaves memory
    with the allocator, which the next one would be given for nothing. NaN where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return float("nan")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (task, method, rank))


def _peak(task, method, rank):
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)
    if method != "none":
        few = np.random.default_rng(0).standard_normal((3, 1, 1024, task.head_dim), dtype=np.float32)
        out, pullback = pda_numba.attention_vjp(*few, **options_of(method, rank))
        pullback(out)  # the kernels are loaded now, which is not this step's doing
    run, batch = Run(task, method, 0, 0.0), task.batch(0, 0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts afresh
    before = _resident("VmRSS")
    task.gradient(run.parameters, batch, options_of(method, rank))
    return _resident("VmHWM") - before


def _resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def experiment(task, out, *, seeds, steps, rank, rate, resume, memory=True, save_every=20):
    """Train all methods from the same beginnings, evaluate them, write the report; the runs."""
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)  # the report says how large the errors were
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.npz"
    runs = [Run(task, method, seed, rate) for seed in range(seeds) for method in METHODS]
    first = 0
    if resume:
        if not checkpoint.exists():
            raise click.ClickException(f"{checkpoint} does not exist: nothing to resume")
        first = load(checkpoint, task, runs, rank)
    advance(task, runs, first, steps, rank, checkpoint, save_every)
    results, infos = zip(*(evaluated(task, run, rank) for run in runs), strict=True)
    peaks = {method: peak_of_step(task, method, rank) for method in METHODS if memory}
    report.write(task, out, runs, results, peaks, infos[METHODS.index("pda")])
    return runs


def evaluated(task, run, rank):
    """What a run has come to on held-out text, with the attention it was trained with and with exact attention."""
    loss, accuracy, infos = task.evaluate(run.parameters, options_of(run.method, rank))
    exact = (loss, accuracy)
    if run.method == "pda":
        exact = task.evaluate(run.parameters, options_of("exact", rank))[:2]
    errors = [x for info in infos for x in np.ravel(info.error)[np.ravel(info.method) == "pda"]]
    error = float(np.median(errors)) if errors else float("nan")
    numbers = {"loss": loss, "accuracy": accuracy, "exact_loss": exact[0], "exact_accuracy": exact[1], "error": error}
    return numbers, infos[:2]


def options(*, steps, tokens, rank, rate):
    """The options of all examples, with the defaults of one."""
    given = [
        click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Output folder."),
        click.option("--seeds", default=3, show_default=True, help="How many seeds."),
        click.option("--steps", default=steps, show_default=True, help="Training steps, those resumed included."),
        click.option("--tokens", default=tokens, show_default=True, help="Tokens in a sequence, at most."),
        click.option("--rank", default=rank, show_default=True, help="Rank of PDA."),
        click.option("--rate", default=rate, show_default=True, help="Learning rate of Adam."),
        click.option("--resume", is_flag=True, help="Go on from the checkpoint in the output folder."),
        click.option("--quick", is_flag=True, help="A smoke run of some seconds: little of everything."),
    ]

    def add(command):
        for one in reversed(given):
            command = one(command)
        return command

    return add
