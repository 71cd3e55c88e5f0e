"""The best few scores of every lane of a panel, and whose they are, for the CPU: written as explicit vectors.

    best[0] >= best[1] >= ...      found[p]: the row that best[p] belongs to

A new score takes the place of the first that is worse, which takes that of the next. Of equals the first stays first.
Left to itself the compiler compares lane by lane, which takes longer than the product that made the scores.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from .simd import VECTOR_BYTES


@intrinsic
def keep_best(typingctx, scores, row, bias, allowed, name, best, found):
    """Row `row` of `scores`, plus `bias`, into `best (count, lanes)`; `name` into `found` where it goes.

    `allowed (lanes)` is 0 for the lanes that this is about, minus infinity for the others.
    """
    if not scores.layout == best.layout == found.layout == allowed.layout == "C" or found.dtype != types.int32:
        raise TypingError("keep_best reads through bare pointers: panels must be C-contiguous, and `found` of int32")
    element, size = (ir.FloatType(), 4) if scores.dtype == types.float32 else (ir.DoubleType(), 8)
    width = VECTOR_BYTES // size
    numbers, names = ir.VectorType(element, width), ir.VectorType(ir.IntType(32), width)
    i64 = ir.IntType(64)

    def codegen(context, builder, signature, arguments):
        scores, row, bias, allowed, name, best, found = arguments

        def pointer(position, value, row, half, vector):
            array = context.make_array(signature.args[position])(context, builder, value)
            place = builder.add(builder.mul(row, i64(2 * width)), i64(half * width))
            return builder.bitcast(builder.gep(array.data, [place]), vector.as_pointer())

        def everywhere(value, vector):
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
            return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width))

        array = context.make_array(signature.args[5])(context, builder, best)
        count = cgutils.unpack_tuple(builder, array.shape)[0]
        last = builder.sub(count, i64(1))
        for half in range(2):
            given = builder.load(pointer(0, scores, row, half, numbers), align=size)
            given = builder.fadd(given, builder.load(pointer(3, allowed, i64(0), half, numbers), align=size))
            score = cgutils.alloca_once_value(builder, builder.fadd(given, everywhere(bias, numbers)))
            whose = cgutils.alloca_once_value(builder, everywhere(name, names))
            worst = builder.load(pointer(5, best, last, half, numbers), align=size)
            better = builder.fcmp_ordered(">", builder.load(score), worst)
            some = builder.icmp_unsigned("!=", builder.bitcast(better, ir.IntType(width)), ir.IntType(width)(0))
            with builder.if_then(some), cgutils.for_range(builder, count) as loop:
                mine, other = builder.load(score), pointer(5, best, loop.index, half, numbers)
                name_mine, name_other = builder.load(whose), pointer(6, found, loop.index, half, names)
                kept, name_kept = builder.load(other, align=size), builder.load(name_other, align=4)
                better = builder.fcmp_ordered(">", mine, kept)
                builder.store(builder.select(better, mine, kept), other, align=size)
                builder.store(builder.select(better, kept, mine), score)
                builder.store(builder.select(better, name_mine, name_kept), name_other, align=4)
                builder.store(builder.select(better, name_kept, name_mine), whose)
        return context.get_dummy_value()

    return types.void(scores, types.intp, scores.dtype, allowed, types.int32, best, found), codegen
