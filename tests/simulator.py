"""Numba's CUDA simulator with its threads taken in turn, for speed and for tests of races.

The simulator runs every CUDA thread in a thread of the operating system, and asks them in a loop whether they wait at
a barrier: minutes for what takes a second here, where the threads of a block are fibers (greenlets) and each runs until
its next barrier. The order is fixed, forwards or backwards, so that a missing barrier gives a wrong result every time.
Shared memory starts as NaN.

What takes most of the time, and is the same everywhere, is done at once: the register block of a product of tiles by
NumPy, and the steps of a reduction without the barriers between them. `as_written` does them as the package does.
"""

import contextlib
import functools
import sys

import numpy as np
from greenlet import getcurrent, greenlet
from numba.cuda.simulator import kernel, kernelapi

from pda_numba.kernels import staging, team, tile

_BACKWARDS = [False]
_SKIPPED: set = set()
_SEEN: set = set()
_PLACES: dict = {}


def _barrier(self=None):
    frame = sys._getframe(1)
    if frame.f_code is team.barrier.__code__:
        frame = frame.f_back
    key = id(frame.f_code), frame.f_lasti  # the number of a line is dear
    if key not in _PLACES:
        _PLACES[key] = (frame.f_code.co_filename, frame.f_lineno), frame.f_code  # which lives on, and with it its id
    place = _PLACES[key][0]
    _SEEN.add(place)
    if place not in _SKIPPED:
        getcurrent().parent.switch()


class _Fiber(greenlet):
    """One thread; to the bodies of a team also the simulator's module."""

    syncthreads = staticmethod(_barrier)

    def __init__(self, run, block, thread, reduction):
        super().__init__(run)
        self.blockIdx, self.threadIdx, self.reduction = kernelapi.Dim3(*block), kernelapi.Dim3(*thread), reduction
        module = kernel._get_kernel_context()
        self.blockDim, self.shared = module.blockDim, module.shared


class _Block(kernel.BlockManager):
    def run(self, grid_point, *args):
        points, reduction = list(np.ndindex(*self._block_dim)), ({}, {})
        if _BACKWARDS[0]:
            grid_point = tuple(n - 1 - i for n, i in zip(self._grid_dim, grid_point, strict=True))

        def thread():
            with np.errstate(all="ignore"):  # integers that wrap around, as hashes do
                self._f(*args)

        live = [_Fiber(thread, grid_point, point, reduction) for point in points]
        while live:
            for fiber in reversed(live) if _BACKWARDS[0] else live:
                fiber.switch()
            live = [fiber for fiber in live if not fiber.dead]


class _Shared(kernelapi.FakeCUDAShared):
    def array(self, shape, dtype, alignment=None):
        frame = sys._getframe(1)
        dtype = kernelapi.numpy_support.as_dtype(dtype) if hasattr(dtype, "bitwidth") else np.dtype(dtype)
        place = frame.f_code.co_filename, frame.f_lineno, dtype
        if place not in self._allocations:
            fresh = np.zeros(shape, dtype)
            self._allocations[place] = fresh
            fresh[...] = np.nan if dtype.kind == "f" else np.iinfo(dtype).max if dtype.kind in "iu" else True
        return self._allocations[place]


# --- at once ---

_IN_STEPS, _OUTER = team._simulate, tile._outer
_COMBINE = {team._fold_sum: np.add, team._fold_max: lambda a, b: np.where(b > a, b, a)}  # as `max` treats NaN


def _reduce(fold, x, size):
    """The same sums in the same order, for a whole group, by the first of it to come back."""
    if fold not in _COMBINE:
        return _IN_STEPS(fold, x, size)
    fiber = getcurrent()
    own, (values, results) = fiber.threadIdx.x, fiber.reduction
    values[own] = x
    results.clear()
    _SEEN.add((team.__file__, 0))
    fiber.parent.switch()
    first = own - own % size
    if first not in results:
        left = np.array([values[t] for t in range(first, first + size)])
        while left.size > 1:
            left = _COMBINE[fold](*np.split(left, 2))
        results[first] = left[0]
    result = results[first]
    fiber.parent.switch()
    return result


@functools.cache
def _places(first, count, block, a):
    return first + np.array([block(x, 0, a) for x in range(count)])


def _multiply(acc, left, right, rows, i, query, buffers, j, key, a, b):
    left[:a] = rows[i][_places(query, a, staging.block_query, a)]
    right[:b] = buffers[j][_places(key, b, staging.block_key, a)]
    product = acc.reshape(b, a)
    product += right[:b, None] * left[:a]


def _at_once():
    team._simulate, tile._outer = _reduce, _multiply


@contextlib.contextmanager
def as_written():
    """Nothing is done at once."""
    team._simulate, tile._outer = _IN_STEPS, _OUTER
    try:
        yield
    finally:
        _at_once()


def install():
    """Put the fibers in place of the simulator's threads, for the whole process."""
    kernel.BlockManager = _Block
    kernelapi.FakeCUDAShared = _Shared
    kernelapi.FakeCUDAModule.threadIdx = property(lambda self: getcurrent().threadIdx)
    kernelapi.FakeCUDAModule.blockIdx = property(lambda self: getcurrent().blockIdx)
    kernelapi.FakeCUDAModule.syncthreads = _barrier
    kernel.FakeWithinKernelCUDAArray = lambda array: array._ary  # plain arrays index faster than their wrappers
    team._simulated = getcurrent
    _at_once()


@contextlib.contextmanager
def backwards():
    """Run the blocks of a launch, and the threads of every block, from the last to the first."""
    _BACKWARDS[0] = True
    try:
        yield
    finally:
        _BACKWARDS[0] = False


@contextlib.contextmanager
def without_barrier(place):
    """Take out the barrier at (file, line)."""
    _SKIPPED.add(place)
    try:
        yield
    finally:
        _SKIPPED.discard(place)


@contextlib.contextmanager
def barriers_met():
    """The set of the places of all barriers that are met inside."""
    _SEEN.clear()
    yield _SEEN


def barriers_without_effect(run, *files):
    """Places of the barriers that `run` meets whose removal it does not notice, in either order of the threads.

    Of `files`, or of all but the reductions in team.py, whose own are tested once. `run` returns an array or several;
    an error inside a kernel counts as noticed.
    """

    def results():
        try:
            return _arrays(run())
        except Exception:
            return None

    with barriers_met() as seen:
        reference = _arrays(run())
    with backwards():
        assert _same(_arrays(run()), reference)
    places = sorted(p for p in seen if (p[0].endswith(files) if files else not p[0].endswith("team.py")))
    assert places
    left = []
    for place in places:
        with without_barrier(place):
            forwards_too = results()
            with backwards():
                outcomes = forwards_too, results()
        if all(outcome is not None and _same(outcome, reference) for outcome in outcomes):
            left.append(place)
    return left


def _arrays(result):
    return [result] if isinstance(result, np.ndarray) else list(result)


def _same(a, b):
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))
