"""What the benchmark scripts share: timing in turn, tables in Markdown, and what was measured where."""

import statistics
import time
from importlib.metadata import version

import llvmlite.binding
import numba


def alternate(calls, repeats):
    """Median seconds of every call in `calls` (name -> function), taken in turn so that all see the same machine."""
    for call in calls.values():
        call()
    seconds = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def print_table(title, header, rows):
    """A Markdown table; numbers are given as text or as floats with three significant digits."""
    cells = [header, *([f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    print(f"\n{title}\n", *lines, sep="\n", flush=True)


def print_versions(*others):
    """One line that says what was measured and on what."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("pda_numba", *others))
    print(f"{packages}; CPU {llvmlite.binding.get_host_cpu_name()}, {numba.get_num_threads()} threads", flush=True)
