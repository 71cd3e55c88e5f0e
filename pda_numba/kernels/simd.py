"""The inner loop of both devices: a register-blocked product. For the CPU it is written as explicit vectors.

    c[row + r, :] (+)= sum_k a[offset + r * row_stride + k * depth_stride] * b[k, :]        r = 0 .. ROWS - 1

Queries lie in the lanes (the last axis of `b` and `c`), two vectors wide. A block of ROWS x 2 vector accumulators
stays in registers over the whole sum, so that each step is two vector loads, ROWS broadcasts and 2 ROWS fused
multiply-adds. Left to itself the compiler keeps the accumulators in memory, which costs more than half the speed.
The two strides of `a` make one routine serve both products of attention, q . k and weights . v, without a transpose.

On the GPU the lanes may be any number, and the outputs are shared out over the team, without a barrier.
"""

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic, overload

from .._jit import shared
from .scalar import fma
from .team import member, members
from .view import view

_FEATURES = binding.get_host_cpu_features()

# With 512-bit registers (32 of them) a block is 8 x 2; with 256-bit ones (16), or narrower, 4 x 2.
_WIDE = bool(_FEATURES.get("avx512f"))
VECTOR_BYTES = 64 if _WIDE else 32
ROWS = 8 if _WIDE else 4
NARROW_ROWS = 8  # of a block that is one vector wide: as many sums as hide what an addition takes
ROW_PADDING = 8  # panels and tiles are padded to this many rows, a multiple of ROWS on every machine


def lanes(dtype):
    """Queries per panel of the CPU for arithmetic in `dtype`."""
    return 2 * VECTOR_BYTES // np.dtype(dtype).itemsize


def lane_count(panel):
    """The lanes of a panel: on the CPU a constant of its type."""
    return panel.shape[-1]


@overload(lane_count)
def _lane_count_by_type(panel):
    count = lanes(panel.dtype.name)
    return lambda panel: count


def half_lanes(panel):
    """The columns of one vector: on the CPU a constant of the array's type."""
    return lanes(panel.dtype) // 2


@overload(half_lanes)
def _half_lanes_by_type(panel):
    count = lanes(panel.dtype.name) // 2
    return lambda panel: count


@overload(lane_count, target="cuda")
def _lane_count_by_shape(panel):
    return lambda panel: panel.shape[-1]


@shared
def padded(rows, block=ROW_PADDING):
    """`rows` rounded up to whole register blocks."""
    return (rows + block - 1) // block * block


def _vector_fma(builder, vector):
    name = f"llvm.fma.v{vector.count}f{32 if vector.element == ir.FloatType() else 64}"
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)


def _product(rows, vectors):
    """The intrinsic for blocks of `rows` x `vectors` vectors: c[r, x] (+)= sum_k a[r, k] b[k, x].

    Everything is C-contiguous, and addressed in elements: c[at + r stride + x], a[at + r row_stride + k depth_stride],
    b[at + k stride + x].
    """

    @intrinsic
    def product(typingctx, c, c_at, c_stride, a, a_at, row_stride, depth_stride, b, b_at, b_stride, depth, accumulate):
        if not a.layout == b.layout == c.layout == "C":
            raise TypingError("a product reads its operands through bare pointers: they must be C-contiguous")
        element, size = (ir.FloatType(), 4) if c.dtype == types.float32 else (ir.DoubleType(), 8)
        width = VECTOR_BYTES // size
        vector = ir.VectorType(element, width)
        i64 = ir.IntType(64)

        def codegen(context, builder, signature, arguments):
            c, c_at, c_stride, a, a_at, row_stride, depth_stride, b, b_at, b_stride, depth, accumulate = arguments

            def data(position, value, at):
                array = context.make_array(signature.args[position])(context, builder, value)
                return builder.gep(array.data, [at])

            def vector_at(pointer, index):
                return builder.bitcast(builder.gep(pointer, [i64(index * width)]), vector.as_pointer())

            c_rows = [data(0, c, builder.add(c_at, builder.mul(c_stride, i64(r)))) for r in range(rows)]
            a_rows = [data(3, a, builder.add(a_at, builder.mul(row_stride, i64(r)))) for r in range(rows)]
            b_start = data(7, b, b_at)
            fma = _vector_fma(builder, vector)
            zero = ir.Constant(vector, [0.0] * width)
            first = [
                [builder.select(accumulate, builder.load(vector_at(row, j), align=size), zero) for j in range(vectors)]
                for row in c_rows
            ]
            entry = builder.block
            loop, step, end = (builder.append_basic_block(f"block.{part}") for part in ("loop", "step", "end"))
            builder.branch(loop)

            builder.position_at_end(loop)
            k = builder.phi(i64)
            k.add_incoming(i64(0), entry)
            sums = [[builder.phi(vector) for _ in range(vectors)] for _ in range(rows)]
            builder.cbranch(builder.icmp_signed("<", k, depth), step, end)

            builder.position_at_end(step)
            b_row = builder.gep(b_start, [builder.mul(k, b_stride)])
            b_vectors = [builder.load(vector_at(b_row, j), align=size) for j in range(vectors)]
            a_shift = builder.mul(k, depth_stride)
            undefined = ir.Constant(vector, ir.Undefined)
            everywhere = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
            for r in range(rows):
                value = builder.load(builder.gep(a_rows[r], [a_shift]))
                value = builder.insert_element(undefined, value, ir.IntType(32)(0))
                value = builder.shuffle_vector(value, undefined, everywhere)
                for j in range(vectors):
                    sums[r][j].add_incoming(first[r][j], entry)
                    sums[r][j].add_incoming(builder.call(fma, [value, b_vectors[j], sums[r][j]]), step)
            k.add_incoming(builder.add(k, i64(1)), step)
            builder.branch(loop)

            builder.position_at_end(end)
            for r in range(rows):
                for j in range(vectors):
                    builder.store(sums[r][j], vector_at(c_rows[r], j), align=size)
            return context.get_dummy_value()

        at = (types.intp,)
        signature = types.void(c, *at * 2, a, *at * 3, b, *at * 3, types.boolean)
        return signature, codegen

    return product


_wide = _product(ROWS, 2)
_narrow = _product(NARROW_ROWS, 1)


@shared
def _multiply_block(c, row, a, offset, row_stride, depth_stride, b, depth, accumulate):
    width = lane_count(c)
    _wide(c, row * width, width, a, offset, row_stride, depth_stride, b, 0, width, depth, accumulate)


@shared
def multiply_narrow(c, c_at, c_stride, a, a_at, row_stride, depth_stride, b, b_at, b_stride, depth, accumulate):
    """c[r, x] (+)= sum_k a[r, k] b[k, x] for NARROW_ROWS rows and one vector of columns, on the CPU alone.

    Arrays are C-contiguous; `at` and strides are in elements, so that they may have any shape.
    """
    _narrow(c, c_at, c_stride, a, a_at, row_stride, depth_stride, b, b_at, b_stride, depth, accumulate)


@intrinsic
def _dot(typingctx, a, i, b, j, count):
    """sum_x a[i, x] b[j, x] over the first `count` columns: four vectors of partial sums, added up in a fixed order."""
    if not a.layout == b.layout == "C" or a.dtype != b.dtype:
        raise TypingError("dot reads its operands through bare pointers: they must be C-contiguous and of one dtype")
    element, size = (ir.FloatType(), 4) if a.dtype == types.float32 else (ir.DoubleType(), 8)
    width = VECTOR_BYTES // size
    vector, i64 = ir.VectorType(element, width), ir.IntType(64)
    block = 4 * width

    def codegen(context, builder, signature, arguments):
        a, i, b, j, count = arguments

        def row(position, value, index):
            array = context.make_array(signature.args[position])(context, builder, value)
            columns = cgutils.unpack_tuple(builder, array.shape)[1]
            return builder.gep(array.data, [builder.mul(index, columns)])

        a, b = row(0, a, i), row(2, b, j)
        fma = _vector_fma(builder, vector)
        parts = [cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * width)) for _ in range(4)]
        blocks = builder.sdiv(count, i64(block))
        with cgutils.for_range(builder, blocks) as loop:
            start = builder.mul(loop.index, i64(block))
            for part, cell in enumerate(parts):
                here = builder.add(start, i64(part * width))
                x, y = (
                    builder.load(builder.bitcast(builder.gep(base, [here]), vector.as_pointer()), align=size)
                    for base in (a, b)
                )
                builder.store(builder.call(fma, [x, y, builder.load(cell)]), cell)
        first, second, third, fourth = (builder.load(cell) for cell in parts)
        lanes_left = builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth))
        while lanes_left.type.count > 1:  # halves onto each other
            half = ir.VectorType(ir.IntType(32), lanes_left.type.count // 2)
            low = ir.Constant(half, list(range(half.count)))
            high = ir.Constant(half, list(range(half.count, 2 * half.count)))
            undefined = ir.Constant(lanes_left.type, ir.Undefined)
            lanes_left = builder.fadd(
                builder.shuffle_vector(lanes_left, undefined, low), builder.shuffle_vector(lanes_left, undefined, high)
            )
        total = cgutils.alloca_once_value(builder, builder.extract_element(lanes_left, ir.IntType(32)(0)))
        with cgutils.for_range(builder, builder.srem(count, i64(block))) as loop:
            here = builder.add(builder.mul(blocks, i64(block)), loop.index)
            x, y = (builder.load(builder.gep(base, [here])) for base in (a, b))
            builder.store(builder.fma(x, y, builder.load(total)), total)
        return builder.load(total)

    return a.dtype(a, types.intp, b, types.intp, types.intp), codegen


# --- what both devices call ---

_TALL = 4  # outputs of one thread of the GPU, below each other; divides ROWS on every machine


@shared
def _multiply_by_team(c, row, rows, a, offset, row_stride, depth_stride, b, depth, accumulate):
    flat, width = view(a, 0, (a.size,)), c.shape[1]
    zero = c.dtype.type(0)
    for unit in range(member(), rows // _TALL * width, members()):
        down, x = unit // width * _TALL, unit % width
        r, left = row + down, offset + down * row_stride
        first, second, third, fourth = zero, zero, zero, zero
        if accumulate:
            first, second, third, fourth = c[r, x], c[r + 1, x], c[r + 2, x], c[r + 3, x]
        for k in range(depth):
            factor = b[k, x]
            first = fma(flat[left], factor, first)
            second = fma(flat[left + row_stride], factor, second)
            third = fma(flat[left + 2 * row_stride], factor, third)
            fourth = fma(flat[left + 3 * row_stride], factor, fourth)
            left += depth_stride
        c[r, x], c[r + 1, x], c[r + 2, x], c[r + 3, x] = first, second, third, fourth


@shared
def _multiply_block_by_team(c, row, a, offset, row_stride, depth_stride, b, depth, accumulate):
    _multiply_by_team(c, row, ROWS, a, offset, row_stride, depth_stride, b, depth, accumulate)


@shared
def _multiply_by_blocks(c, row, rows, a, offset, row_stride, depth_stride, b, depth, accumulate):
    for r in range(0, rows, ROWS):
        _multiply_block(c, row + r, a, offset + r * row_stride, row_stride, depth_stride, b, depth, accumulate)


@shared
def _dot_in_order(a, i, b, j, count):
    total = a.dtype.type(0)
    for x in range(count):
        total = fma(a[i, x], b[j, x], total)
    return total


@shared
def _block_as_vectors(c, row, a, offset, row_stride, depth_stride, b, depth, accumulate):
    _multiply_block(c, row, a, offset, row_stride, depth_stride, b, depth, accumulate)


@shared
def _dot_as_vectors(a, i, b, j, count):
    return _dot(a, i, b, j, count)


def two_schedules(cpu, gpu):
    """A function that is one body on the CPU and another on the GPU, always inlined; interpreted it is its own."""

    def register(function):
        overload(function, jit_options={"forceinline": True}, strict=False)(lambda *args: cpu)
        overload(function, jit_options={"forceinline": True}, strict=False, target="cuda")(lambda *args: gpu)
        return function

    return register


@two_schedules(_block_as_vectors, _multiply_block_by_team)
def multiply_block(c, row, a, offset, row_stride, depth_stride, b, depth, accumulate):
    """The product above for ROWS rows; no member of the team waits for another."""
    _multiply_block_by_team(c, row, a, offset, row_stride, depth_stride, b, depth, accumulate)


@two_schedules(_multiply_by_blocks, _multiply_by_team)
def multiply_rows(c, row, rows, a, offset, row_stride, depth_stride, b, depth, accumulate):
    """The same for `rows` rows, a multiple of ROWS."""
    _multiply_by_team(c, row, rows, a, offset, row_stride, depth_stride, b, depth, accumulate)


@two_schedules(_dot_as_vectors, _dot_in_order)
def dot(a, i, b, j, count):
    """sum_x a[i, x] b[j, x] over the first `count` columns."""
    return _dot_in_order(a, i, b, j, count)
