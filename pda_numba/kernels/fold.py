"""The largest of a row's numbers, and their sum, for the CPU: written as explicit vectors, which are folded in halves.

    max_x panel[row, x]      sum_x panel[row, x]        x = 0 .. columns - 1, whole vectors

Sums are in a fixed order. Left to itself the compiler goes through a row number by number, each after the other.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from .simd import VECTOR_BYTES


def _fold(combine):
    """The intrinsic that makes one number of a row by `combine(builder, a, b)`."""

    @intrinsic
    def fold(typingctx, panel, row, columns):
        if panel.layout != "C":
            raise TypingError("a fold reads through a bare pointer: the panel must be C-contiguous")
        element, size = (ir.FloatType(), 4) if panel.dtype == types.float32 else (ir.DoubleType(), 8)
        width, i64 = VECTOR_BYTES // size, ir.IntType(64)
        vector = ir.VectorType(element, width)

        def codegen(context, builder, signature, arguments):
            panel, row, columns = arguments
            array = context.make_array(signature.args[0])(context, builder, panel)
            start = builder.gep(array.data, [builder.mul(row, cgutils.unpack_tuple(builder, array.shape)[1])])

            def load(at):
                return builder.load(builder.bitcast(builder.gep(start, [at]), vector.as_pointer()), align=size)

            total = cgutils.alloca_once_value(builder, load(i64(0)))
            with cgutils.for_range_slice(builder, i64(width), columns, i64(width), i64) as (at, _):
                builder.store(combine(builder, builder.load(total), load(at)), total)
            left = builder.load(total)
            while left.type.count > 1:
                half = left.type.count // 2
                low, high = (
                    ir.Constant(ir.VectorType(ir.IntType(32), half), [*range(at, at + half)]) for at in (0, half)
                )
                undefined = ir.Constant(left.type, ir.Undefined)
                left = combine(builder, *(builder.shuffle_vector(left, undefined, part) for part in (low, high)))
            return builder.extract_element(left, ir.IntType(32)(0))

        return panel.dtype(panel, types.intp, types.intp), codegen

    return fold


largest_of = _fold(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
sum_of = _fold(lambda builder, a, b: builder.fadd(a, b))
