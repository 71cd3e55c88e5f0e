"""Loads and stores for CUDA: one number without the check for a negative index, or four neighbours as one instruction.

Imported with numba.cuda, never before.
"""

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

_I64 = ir.IntType(64)


def _pointer(context, builder, array_type, array, indices, vector):
    parts = context.make_array(array_type)(context, builder, array)
    shape, strides = (cgutils.unpack_tuple(builder, x) for x in (parts.shape, parts.strides))
    indices = [builder.sext(i, _I64) if i.type.width < 64 else i for i in indices]
    address = cgutils.get_item_pointer2(
        context, builder, parts.data, shape, strides, array_type.layout, indices, wraparound=False
    )
    return builder.bitcast(address, vector.as_pointer(address.type.addrspace))


def _vector(context, array_type):
    """Four elements, and the alignment in bytes that a caller of these functions promises."""
    size = array_type.dtype.bitwidth // 8
    return ir.VectorType(context.get_data_type(array_type.dtype), 4), min(16, 4 * size)


@intrinsic
def load4(typingctx, array, i, j):
    """array[i, j : j + 4]."""

    def codegen(context, builder, signature, arguments):
        vector, align = _vector(context, signature.args[0])
        address = _pointer(context, builder, signature.args[0], arguments[0], arguments[1:], vector)
        loaded = builder.load(address, align=align)
        parts = [builder.extract_element(loaded, ir.IntType(32)(c)) for c in range(4)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(array.dtype, 4)(array, i, j), codegen


@intrinsic
def store4(typingctx, array, i, j, x, y, z, w):
    """array[i, j : j + 4] = x, y, z, w."""

    def codegen(context, builder, signature, arguments):
        vector, align = _vector(context, signature.args[0])
        address = _pointer(context, builder, signature.args[0], arguments[0], arguments[1:3], vector)
        value = ir.Constant(vector, ir.Undefined)
        for c, part in enumerate(arguments[3:]):
            value = builder.insert_element(value, part, ir.IntType(32)(c))
        builder.store(value, address, align=align)
        return context.get_dummy_value()

    return types.void(array, i, j, x, y, z, w), codegen


@intrinsic
def load(typingctx, array, i, j):
    """array[i, j] for i, j >= 0."""

    def codegen(context, builder, signature, arguments):
        element = context.get_data_type(signature.args[0].dtype)
        return builder.load(_pointer(context, builder, signature.args[0], arguments[0], arguments[1:], element))

    return array.dtype(array, i, j), codegen


@intrinsic
def store(typingctx, array, i, j, x):
    """array[i, j] = x for i, j >= 0."""

    def codegen(context, builder, signature, arguments):
        element = context.get_data_type(signature.args[0].dtype)
        address = _pointer(context, builder, signature.args[0], arguments[0], arguments[1:3], element)
        builder.store(arguments[3], address)
        return context.get_dummy_value()

    return types.void(array, i, j, x), codegen
