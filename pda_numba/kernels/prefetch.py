"""Memory asked for ahead of its use, on the CPU: rows that lie anywhere take longer to come than to be worked on."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .._jit import shared
from .simd import two_schedules

AHEAD = 16  # rows that are asked for before they are needed
_LINE = 64  # bytes of a cache line


@intrinsic
def _prefetch(typingctx, array, i):
    def codegen(context, builder, signature, arguments):
        array, i = arguments
        found = context.make_array(signature.args[0])(context, builder, array)
        stride, *below = cgutils.unpack_tuple(builder, found.strides)
        i64, i32, byte = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
        start = builder.gep(builder.bitcast(found.data, byte), [builder.mul(i, stride)])
        kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        size = builder.mul(below[0], cgutils.unpack_tuple(builder, found.shape)[1]) if below else i64(1)
        first = builder.ptrtoint(start, i64)
        last = builder.add(first, size)
        line = builder.and_(first, i64(-_LINE))  # a row of four lines that begins within one lies in five
        with cgutils.for_range_slice(builder, line, last, i64(_LINE), i64) as (at, _):
            builder.call(ask, [builder.inttoptr(at, byte), i32(0), i32(3), i32(1)])  # to be read, soon, data
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@shared
def _ask(array, i):
    _prefetch(array, i)


@shared
def _ask_nobody(array, i):
    pass


@two_schedules(_ask, _ask_nobody)
def prefetch(array, i):
    """Asks for element i of a vector, or row i of a matrix; the GPU's other warps hide what it waits for."""
