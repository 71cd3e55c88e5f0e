"""Long work with a responsive command line: a thread works, the main thread waits, shows progress and hears signals.

A compiled kernel does not return to the interpreter until it is done, and Python handles signals in the main
thread only: without the thread, Ctrl-C would wait for the kernel.
"""

import sys
import threading

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_workers: list[threading.Thread] = []


def busy():
    """Whether some work is still running (after an interruption)."""
    return any(worker.is_alive() for worker in _workers)


def call(work, *args, **options):
    """`work(*args, **options)` in a thread of its own; its result or its exception."""
    outcome = {}

    def run():
        try:
            outcome["result"] = work(*args, **options)
        except BaseException as error:
            outcome["error"] = error

    worker = threading.Thread(target=run, name="pda-numba work", daemon=True)
    _workers.append(worker)
    worker.start()
    while worker.is_alive():
        worker.join(0.2)
    _workers.remove(worker)
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


class Steps:
    """Progress on a terminal (standard error), silent otherwise: `with Steps(total) as steps: steps.next("what")`."""

    def __init__(self, total=None):
        columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
        if total is not None:
            columns[2:2] = [BarColumn(bar_width=24), MofNCompleteColumn()]
        console = Console(stderr=True)
        self._progress = Progress(
            *columns,
            console=console,
            transient=True,
            redirect_stdout=False,
            disable=not (sys.stderr.isatty() and console.is_terminal),
        )
        self._task = self._progress.add_task("", total=total)
        self._begun = False

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *_error):
        self._progress.stop()

    def next(self, description):
        """Say what is done now; the step before it is finished."""
        self._progress.update(self._task, description=description, advance=1 if self._begun else 0)
        self._begun = True

    def at(self, done, total):
        """Progress inside one step: `done` of `total`."""
        self._progress.update(self._task, completed=done, total=total)
