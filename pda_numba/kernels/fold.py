"""The largest number of each row of a block, and each row's sum, for the CPU: written as explicit vectors.

    out_r = max_x panel[r, x]      out_r = sum_x panel[r, x]        r = 0 .. NARROW_ROWS - 1, x = 0 .. columns - 1

The columns are whole vectors, which are folded in halves, two rows at a time: what is left of both fits in one vector.
Sums are in a fixed order. Left to itself the compiler goes through a row number by number, each after the other.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from .simd import NARROW_ROWS, VECTOR_BYTES


def _in_halves(builder, vectors, combine):
    """Vectors of one row each to one number of each row, in their order."""
    lanes = vectors[0].type.count  # of a row in its vector
    while lanes > 1:
        width = vectors[0].type.count
        low = [group + x for group in range(0, width, lanes) for x in range(lanes // 2)]
        if len(vectors) > 1:
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
            low += [width + at for at in low]
        else:
            pairs = [(vectors[0], vectors[0])]
        kind = ir.VectorType(ir.IntType(32), len(low))
        masks = [ir.Constant(kind, [at + half for at in low]) for half in (0, lanes // 2)]
        vectors = [combine(builder, *(builder.shuffle_vector(a, b, mask) for mask in masks)) for a, b in pairs]
        lanes //= 2
    return vectors


def _fold(combine):
    """The intrinsic that makes one number of each row by `combine(builder, a, b)`."""

    @intrinsic
    def fold(typingctx, panel, columns, out):
        if panel.layout != "C" or out.layout != "C" or out.dtype != panel.dtype:
            raise TypingError("a fold reads through bare pointers: arrays must be C-contiguous and of one dtype")
        element, size = (ir.FloatType(), 4) if panel.dtype == types.float32 else (ir.DoubleType(), 8)
        width, i64 = VECTOR_BYTES // size, ir.IntType(64)
        vector = ir.VectorType(element, width)

        def codegen(context, builder, signature, arguments):
            panel, columns, out = arguments
            array = context.make_array(signature.args[0])(context, builder, panel)
            stride = cgutils.unpack_tuple(builder, array.shape)[1]
            rows = [builder.gep(array.data, [builder.mul(i64(r), stride)]) for r in range(NARROW_ROWS)]

            def load(row, at):
                return builder.load(builder.bitcast(builder.gep(row, [at]), vector.as_pointer()), align=size)

            totals = [cgutils.alloca_once_value(builder, load(row, i64(0))) for row in rows]
            with cgutils.for_range_slice(builder, i64(width), columns, i64(width), i64) as (at, _):
                for row, total in zip(rows, totals, strict=True):
                    builder.store(combine(builder, builder.load(total), load(row, at)), total)
            found = _in_halves(builder, [builder.load(total) for total in totals], combine)
            target = context.make_array(signature.args[2])(context, builder, out).data
            for i, numbers in enumerate(found):
                place = builder.gep(target, [i64(i * numbers.type.count)])
                builder.store(numbers, builder.bitcast(place, numbers.type.as_pointer()), align=size)
            return context.get_dummy_value()

        return types.void(panel, types.intp, out), codegen

    return fold


largest_of_rows = _fold(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
sum_of_rows = _fold(lambda builder, a, b: builder.fadd(a, b))
