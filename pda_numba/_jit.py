"""How every kernel of the package is compiled: one policy, in one place.

`shared`
    A body of both devices: plain arithmetic on scalars and arrays, lazily typed.
`inlined`
    The same, for bodies that a pass calls in its inner loops: the CPU's compiler inlines these too. A call costs more
    there than it seems, since every array is passed as seven numbers on the stack.
`cpu_kernel`
    A driver for the CPU: `numba.njit(parallel=True)`, cached on disk, one at a time.
`serial_kernel`
    The same on one core, for small work.
`cuda_kernel`
    A driver for an NVIDIA GPU: `numba.cuda.jit`, compiled at its first launch.
`CudaSteps`
    Several of them in place of one that would spill registers.
`device_body`
    A body of CUDA drivers alone, always inlined.

There is no fast-math anywhere: the compiler may not reorder or contract what is written, so that a result does not
depend on how a kernel was inlined, compiled afresh or loaded from the cache. Where speed wants a fused multiply-add or
a sum in several parts, the source says so (`kernels.scalar.fma`, `kernels.simd.dot`).
"""

import functools
import os
import sys
import threading
import time
from typing import Any

import numba
from numba.core import config, event
from numba.extending import overload, register_jitable

shared = register_jitable
inlined = register_jitable(forceinline=True)

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


# --- CUDA: nothing here imports numba.cuda before a kernel is launched (half a second, and a driver) ---


class _LazyCuda:
    """Stands for the module `numba.cuda` in the files with CUDA drivers until the first of them is used."""

    def __getattr__(self, name):
        return getattr(import_cuda(), name)


cuda: Any = _LazyCuda()


@functools.cache  # once per process
def import_cuda():
    """`numba.cuda`, put in the place of its stand-in in every module of the package: the compiler reads globals."""
    from numba import cuda as module

    stand_in = cuda
    for name, loaded in list(sys.modules.items()):
        if name.split(".")[0] == __package__ and vars(loaded).get("cuda") is stand_in:
            loaded.cuda = module  # type: ignore[attr-defined]
    return module


def device_body(function):
    """A body of CUDA drivers alone (a schedule, not arithmetic), inlined wherever it is called.

    Accumulators stay in registers only if all that touches them is inlined and unrolled.
    """
    overload(function, jit_options={"forceinline": True}, strict=False, target="cuda")(lambda *args: function)
    return function


SIMULATED = bool(vars(config)["ENABLE_CUDASIM"])  # Numba's simulator stands for the GPU (NUMBA_ENABLE_CUDASIM=1)
SIMULATED_TEAM = 64


class CudaKernel:
    """A driver for an NVIDIA GPU, compiled at its first launch and cached on disk."""

    def __init__(self, function, threads, blocks_per_multiprocessor):
        self.function, self.threads = function, threads
        self.bounds = (threads, blocks_per_multiprocessor)
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    @functools.cached_property
    def compiled(self):
        module = import_cuda()
        if SIMULATED:
            return module.jit(self.function)
        return module.jit(cache=True, launch_bounds=self.bounds)(self.function)

    def launch(self, grid, stream, *args):
        # The simulator takes its time over every thread; bodies work with teams of any size.
        threads = min(self.threads, SIMULATED_TEAM) if SIMULATED else self.threads
        self.compiled[grid, threads, stream](*args)


def cuda_kernel(threads, blocks_per_multiprocessor=1):
    """Compile a function as a CUDA driver with so many threads per block."""
    return lambda function: CudaKernel(function, threads, blocks_per_multiprocessor)


class CudaSteps:
    """Drivers that take the same arguments, launched one after the other."""

    def __init__(self, *kernels):
        self.kernels = kernels

    def launch(self, grid, stream, *args):
        for kernel in self.kernels:
            kernel.launch(grid, stream, *args)
