"""How every kernel of the package is compiled: one policy, in one place.

`shared`
    A body that both devices inline: plain arithmetic on scalars and arrays, lazily typed.
`cpu_kernel`
    A driver for the CPU: `numba.njit(parallel=True)`, cached on disk, one at a time.
`serial_kernel`
    The same on one core, for small work.

There is no fast-math anywhere: the compiler may not reorder or contract what is written, so that a result does not
depend on how a kernel was inlined, compiled afresh or loaded from the cache. Where speed wants a fused multiply-add or
a sum in several parts, the source says so (`kernels.scalar.fma`, `kernels.simd.dot`).
"""

import functools
import os
import sys
import threading
import time

import numba
from numba.core import event
from numba.extending import register_jitable

shared = register_jitable

# Numba's fallback threading layer ("workqueue") aborts the process when two Python threads enter parallel
# code at once. A parallel kernel uses every core anyway, so nothing is lost by letting them in one by one.
_ONE_AT_A_TIME = threading.Lock()


def _unlock_in_child():
    # A fork while another thread was in a kernel leaves the child's copy locked for good.
    global _ONE_AT_A_TIME
    _ONE_AT_A_TIME = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


def _compile(function, *, parallel):
    return numba.njit(parallel=parallel, nogil=True, cache=True, error_model="numpy")(function)


def serial_kernel(function):
    """Compile `function` for one core: for work so small that waking the others costs more than it saves."""
    return _compile(function, parallel=False)


def cpu_kernel(function):
    """Compile `function` as a CPU driver: parallel, without the GIL, cached on disk."""
    compiled = _compile(function, parallel=True)

    @functools.wraps(function)
    def run(*args):
        with _ONE_AT_A_TIME:
            return compiled(*args)

    run.dispatcher = compiled  # type: ignore[attr-defined]
    return run


class _CompileNotice(event.Listener):
    """Says once, on a terminal, that the kernels are being compiled, if that takes more than `after` seconds."""

    def __init__(self, after=5.0):
        self.after = after
        self.started = None
        self.running = 0
        self.told = False

    def on_start(self, _event):
        self.running += 1
        if self.started is None:
            self.started = time.monotonic()
            timer = threading.Timer(self.after, self._tell)
            timer.daemon = True
            timer.start()

    def on_end(self, _event):
        self.running -= 1

    def _tell(self):
        if self.running and not self.told and sys.stderr.isatty():
            self.told = True
            print(
                "pda_numba: compiling its kernels for this machine; this happens once, "
                "later runs load them from the cache.",
                file=sys.stderr,
            )


@functools.cache  # once per process
def announce_slow_compilation():
    """Install the notice above (called on the first kernel use, not at import)."""
    event.register("numba:compile", _CompileNotice())
