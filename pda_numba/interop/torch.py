"""Attention for PyTorch (https://pytorch.org): an autograd function that shares memory with the tensors.

Needs the package `torch`. Tensors on the CPU are read in place; tensors on a GPU are computed there.
"""

import numpy as np
import torch

import pda_numba
from pda_numba.gradient import attention_backward, attention_forward


def attention(q, k, v, **options):
    """Softmax attention that PyTorch can differentiate (once).

    Parameters
    ----------
    q, k, v : torch.Tensor, shape (..., Hq, N, D), (..., Hkv, M, D), (..., Hkv, M, E)
        As for `pda_numba.attention`. bfloat16 on the CPU needs the package `ml_dtypes`.
    **options
        As for `pda_numba.attention_forward`.

    Returns
    -------
    out : torch.Tensor, shape (..., Hq, N, E)
        On the device of `q`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As for `pda_numba.attention`.

    Examples
    --------
    >>> import torch
    >>> from pda_numba.interop.torch import attention
    >>> q = torch.randn(50, 8, requires_grad=True)
    >>> attention(q, q, q).square().sum().backward()
    >>> q.grad.shape
    torch.Size([50, 8])
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    return _Attention.apply(q, k, v, options)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, options):
        arrays = [_as_array(x) for x in (q, k, v)]
        if not any(ctx.needs_input_grad):
            return _as_tensor(pda_numba.attention(*arrays, **options))
        out, ctx.residuals = attention_forward(*arrays, **options)
        ctx.save_for_backward(q, k, v)  # so that torch notices if one of them changes before the backward pass
        return _as_tensor(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        assert len(ctx.saved_tensors) == 3  # looking at them makes torch compare their versions
        gradients = attention_backward(ctx.residuals, _as_array(dout))
        wanted = ctx.needs_input_grad
        return *(_as_tensor(x) if need else None for x, need in zip(gradients, wanted, strict=False)), None


def _as_array(tensor):
    """The tensor's own memory as a NumPy array; a tensor on a GPU as it is."""
    tensor = tensor.detach()
    if tensor.is_cuda:
        return tensor
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _as_tensor(array):
    if isinstance(array, torch.Tensor):
        return array
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
