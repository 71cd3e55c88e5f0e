"""A team of threads that works on one head together: a block on the GPU, a single thread on the CPU.

A body written for a team shares its loops out, and meets at barriers where one member reads what another wrote:

    for i in range(member(), n, members()):
        ...
    barrier()

On the CPU `member()` is 0 and `members()` is 1 at compile time, and a barrier is nothing, so that the same body is an
ordinary loop there. Every member must reach every barrier and every reduction; these add in an order that depends on
the size of the team alone.

Run by the interpreter, these functions belong to Numba's CUDA simulator.
"""

import operator

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic, overload

from .._jit import shared

LARGEST_TEAM = 1024


def _simulated():
    from numba.cuda.simulator.kernel import _get_kernel_context

    return _get_kernel_context()


def _on_both(cpu, gpu):
    """Give a function its compiled meanings: `cpu` and `gpu` take the arguments' types and return an implementation."""

    def register(function):
        overload(function)(cpu)
        overload(function, target="cuda")(gpu)
        return function

    return register


def _cuda_member():
    from numba import cuda

    return lambda: cuda.threadIdx.x


@_on_both(lambda: lambda: 0, _cuda_member)
def member():
    """This thread's place in the team."""
    return _simulated().threadIdx.x


def _cuda_members():
    from numba import cuda

    return lambda: cuda.blockDim.x


@_on_both(lambda: lambda: 1, _cuda_members)
def members():
    """How many threads the team has (a power of two)."""
    return _simulated().blockDim.x


def _cuda_barrier():
    from numba import cuda

    return lambda: cuda.syncthreads()


@_on_both(lambda: lambda: None, _cuda_barrier)
def barrier():
    """Wait for the whole team; what it wrote before can be read after."""
    _simulated().syncthreads()


# --- reductions, through an array in shared memory ---


def _fold(combine):
    """What `combine` makes of each group of `size` neighbours, known to all of them: pairs at half the distance, and
    so on.
    """

    @shared
    def fold(scratch, x, size):
        t = member()
        scratch[t] = x
        barrier()
        step = size // 2
        while step > 0:
            if t % size < step:
                scratch[t] = combine(scratch[t], scratch[t + step])
            barrier()
            step //= 2
        result = scratch[t - t % size]
        barrier()
        return result

    return fold


_fold_sum, _fold_max = _fold(operator.add), _fold(max)


@shared
def _scan(scratch, x, size):
    """Sum over the members before this one (Hillis and Steele 1986)."""
    t = member()
    scratch[t] = x
    barrier()
    step = 1
    while step < size:
        earlier = scratch[t - step] if t >= step else x - x
        barrier()
        scratch[t] += earlier
        barrier()
        step *= 2
    result = scratch[t - 1] if t > 0 else x - x
    barrier()
    return result


@intrinsic
def _shared_scratch(typingctx, like):
    """An array of LARGEST_TEAM elements in shared memory.

    A function is linked once for each of its callers, and its array may not clash with itself: `cuda.shared.array`
    makes a symbol that does.
    """
    from numba.cuda import shared as space
    from numba.cuda import types

    array = types.Array(like, 1, "C")

    def codegen(context, builder, signature, arguments):
        before = set(builder.module.globals)
        parts = types.literal(LARGEST_TEAM), types.DType(like)
        out = context.get_function(space.array, array(*parts))(builder, (None, None))
        for name in set(builder.module.globals) - before:
            symbol = builder.module.globals[name]
            if isinstance(symbol, ir.GlobalVariable):
                symbol.linkage = "linkonce_odr"
        return out

    return array(like), codegen


def _through_shared_memory(fold):
    """For CUDA: `fold` with an array of the argument's type."""
    return lambda x, size: lambda x, size: fold(_shared_scratch(x), x, size)


def _simulate(fold, x, size):
    return fold(_simulated().shared.array(LARGEST_TEAM, np.result_type(x)), x, size)


@_on_both(lambda x, size: lambda x, size: x, _through_shared_memory(_fold_sum))
def group_sum(x, size):
    """The sum of x over each group of `size` neighbours (a power of two; on the CPU there are none)."""
    return _simulate(_fold_sum, x, size)


@_on_both(lambda x, size: lambda x, size: x, _through_shared_memory(_fold_max))
def group_max(x, size):
    """The largest x of each group of `size` neighbours."""
    return _simulate(_fold_max, x, size)


@_on_both(lambda x, size: lambda x, size: x - x, _through_shared_memory(_scan))
def _before(x, size):
    return _simulate(_scan, x, size)


@shared
def team_sum(x):
    """The sum of x over the team."""
    return group_sum(x, members())


@shared
def team_max(x):
    """The largest x of the team."""
    return group_max(x, members())


@shared
def sum_before(x):
    """The sum of x over the members before this one."""
    return _before(x, members())


@shared
def part(n):
    """This member's share of 0 .. n as one contiguous range, in the order of the members: (start, stop)."""
    size = (n + members() - 1) // members()
    start = min(member() * size, n)
    return start, min(start + size, n)
