"""Arrays inside arrays: bodies cannot allocate on the GPU, so they carve what they need out of one long workspace.

Slices and `reshape` would do the same, but the GPU's compiler leaves `reshape` a call, to nothing that is there.
"""

import math

from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.imputils import impl_ret_borrowed
from numba.core.typing.templates import infer_global, make_intrinsic_template
from numba.np.arrayobj import populate_array


def view(array, start, shape):
    """The elements of a contiguous array from `start` on, as an array of the shape (a tuple)."""
    return array.reshape(-1)[start : start + math.prod(shape)].reshape(shape)


def _view(typingctx, array, start, shape):
    if array.layout != "C":
        raise TypingError("view reads through a bare pointer: the array must be C-contiguous")

    def codegen(context, builder, signature, arguments):
        array, start, shape = arguments
        source = context.make_array(signature.args[0])(context, builder, array)
        out = context.make_array(signature.return_type)(context, builder)
        sizes, stride = cgutils.unpack_tuple(builder, shape), source.itemsize
        strides: list = []
        for size in reversed(sizes):
            strides.insert(0, stride)
            stride = builder.mul(stride, size)
        populate_array(
            out, builder.gep(source.data, [start]), sizes, strides, source.itemsize, source.meminfo, source.parent
        )
        return impl_ret_borrowed(context, builder, signature.return_type, out._getvalue())

    integers = types.UniTuple(types.intp, len(shape))
    return array.copy(ndim=len(shape), layout="C")(array, types.intp, integers), codegen


infer_global(view, types.Function(make_intrinsic_template(view, _view, "view", prefer_literal=False, kwargs={})))
