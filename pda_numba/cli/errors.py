"""How the command line ends: exit codes, one-line messages, signals.

0 done    1 anything else that went wrong    2 bad usage or input    128 + n stopped by signal n
"""

import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass

import click

from . import files, waiting

FAILED, BAD_INPUT = 1, 2
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Stopped(BaseException):
    """A signal asked the process to stop. Not an `Exception`, so that nothing on the way swallows it."""

    def __init__(self, number):
        super().__init__(number)
        self.number = number


@dataclass
class Settings:
    """What holds for the whole process: whether errors come with their traceback."""

    debug: bool = False


@contextlib.contextmanager
def bad_input():
    """The package's own checks raise ValueError and TypeError: on the command line that is bad input."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise files.BadInput(str(error)) from error


class Commands(click.Group):
    """A group that reports every failure in one line and knows the exit codes above."""

    def main(self, args=None, prog_name=None, standalone_mode=True, **extra):  # type: ignore[override]
        """Run the command line and leave the process with its exit code."""
        settings = Settings(debug=os.environ.get("PDA_NUMBA_DEBUG", "") not in ("", "0"))
        with _signals_raise(), _plain_warnings():
            try:
                code = super().main(args, prog_name, standalone_mode=False, obj=settings, **extra)
                sys.stdout.flush()
            except BaseException as error:
                code = _report(error, prog_name or "pda-numba", settings.debug)
        _leave(code if isinstance(code, int) else 0)


def _report(error, program, debug):
    """Say what went wrong in one line and return the exit code."""
    files.remove_unfinished()
    if isinstance(error, SystemExit):
        return error.code
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        # The reader of our output has gone (`pda-numba info | head -1`): nothing is left to say, and no one to hear it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    if debug:
        traceback.print_exception(error)
    message, code = _describe(error, program)
    click.echo(f"{program}: " + " ".join(message.split()), err=True)
    return code


def _describe(error, program):
    """One line for the user, and the exit code."""
    if isinstance(error, Stopped):
        return f"stopped by {signal.Signals(error.number).name}", 128 + error.number
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return "stopped by SIGINT", 128 + signal.SIGINT
    if isinstance(error, click.UsageError):
        context = error.ctx.command_path if error.ctx else program
        return f"error: {error.format_message()} (see '{context} --help')", BAD_INPUT
    if isinstance(error, click.ClickException):
        return f"error: {error.format_message()}", error.exit_code
    if isinstance(error, MemoryError):
        return f"error: out of memory ({error}); 'pda-numba plan' tells what a call needs", FAILED
    return f"error: {type(error).__name__}: {error} (--debug shows the traceback)", FAILED


@contextlib.contextmanager
def _signals_raise():
    """Let each stop signal raise `Stopped` in the main thread, once: the clean-up itself is not interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal ignored from the start (nohup) stays ignored.
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    mine = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]

    def stop(number, _frame):
        for other in mine:
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(number)

    for number in mine:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])


@contextlib.contextmanager
def _plain_warnings():
    """Show a warning as one line, without the source line it came from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_rest, **_more: click.echo(
            "warning: " + " ".join(str(message).split()), err=True
        )
        yield


def _leave(code):
    """End the process. A kernel that still runs in its thread cannot be asked to stop: then do not wait for it."""
    if waiting.busy():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
