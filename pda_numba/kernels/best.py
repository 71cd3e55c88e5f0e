"""The best few scores of every lane of a panel, and whose they are, for the CPU: written as explicit vectors.

    best[0] >= best[1] >= ...      found[p]: the row that best[p] belongs to

A new score s goes before the first that is worse, and moves those behind it on by one:

    best[p] = best[p - 1]  if s > best[p - 1],  s  if s > best[p],  best[p]  otherwise

Of equals the first stays first. Left to itself the compiler compares lane by lane, which takes longer than the product
that made the scores.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from .simd import VECTOR_BYTES

MOST = 16  # scores that are kept


@intrinsic
def keep_best(typingctx, scores, count, bias, first, allowed, best, found):
    """The first `count` rows of `scores`, plus bias[first], ..., into `best (1 to MOST, lanes)`.

    Their names are first, first + 1, ..., and go into `found`. `allowed (lanes)` is 0 for the lanes that this is about,
    minus infinity for the others. What is kept stays in registers, which needs code for every number of rows.
    """
    if any(array.layout != "C" for array in (scores, bias, allowed, best, found)) or found.dtype != types.int32:
        raise TypingError("keep_best reads through bare pointers: arrays must be C-contiguous, and `found` of int32")
    element, size = (ir.FloatType(), 4) if scores.dtype == types.float32 else (ir.DoubleType(), 8)
    width = VECTOR_BYTES // size
    i64, i32 = ir.IntType(64), ir.IntType(32)
    numbers, names = ir.VectorType(element, width), ir.VectorType(i32, width)

    def codegen(context, builder, signature, arguments):
        def data(position):
            return context.make_array(signature.args[position])(context, builder, arguments[position]).data

        scores, biases, allowed, best, found = (data(position) for position in (0, 2, 4, 5, 6))
        count, first = arguments[1], arguments[3]

        def at(pointer, row, half, vector):
            place = builder.add(builder.mul(row, i64(2 * width)), i64(half * width))
            return builder.bitcast(builder.gep(pointer, [place]), vector.as_pointer())

        def everywhere(value, vector):
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, i32(0))
            return builder.shuffle_vector(one, one, ir.Constant(names, [0] * width))

        def insert(new, cells):
            kept = [[builder.load(cell) for cell in pair] for pair in cells]
            better = [builder.fcmp_ordered(">", new[0], number) for number, _ in kept]
            for p, pair in enumerate(cells):
                shifted = zip(kept[p - 1], new, strict=True)
                above = [builder.select(better[p - 1], *both) for both in shifted] if p else new
                for cell, mine, old in zip(pair, above, kept[p], strict=True):
                    builder.store(builder.select(better[p], mine, old), cell)

        def go_through(slots, half):
            cells = []
            for p in range(slots):
                number = builder.load(at(best, i64(p), half, numbers), align=size)
                whose = builder.load(at(found, i64(p), half, names), align=4)
                cells.append((cgutils.alloca_once_value(builder, number), cgutils.alloca_once_value(builder, whose)))
            allow = builder.load(at(allowed, i64(0), half, numbers), align=size)
            with cgutils.for_range(builder, count) as loop:
                name = builder.add(first, loop.index)
                score = builder.fadd(builder.load(at(scores, loop.index, half, numbers), align=size), allow)
                score = builder.fadd(score, everywhere(builder.load(builder.gep(biases, [name])), numbers))
                better = builder.fcmp_ordered(">", score, builder.load(cells[-1][0]))
                some = builder.icmp_unsigned("!=", builder.bitcast(better, ir.IntType(width)), ir.IntType(width)(0))
                with builder.if_then(some):
                    insert((score, everywhere(builder.trunc(name, i32), names)), cells)
            for p, (number, whose) in enumerate(cells):
                builder.store(builder.load(number), at(best, i64(p), half, numbers), align=size)
                builder.store(builder.load(whose), at(found, i64(p), half, names), align=4)

        array = context.make_array(signature.args[5])(context, builder, arguments[5])
        rows = cgutils.unpack_tuple(builder, array.shape)[0]
        end = builder.append_basic_block("kept")
        choice = builder.switch(rows, end)
        for slots in range(1, MOST + 1):
            block = builder.append_basic_block(f"keep_{slots}")
            choice.add_case(i64(slots), block)
            builder.position_at_end(block)
            for half in range(2):
                go_through(slots, half)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(scores, types.intp, bias, types.intp, allowed, best, found), codegen
