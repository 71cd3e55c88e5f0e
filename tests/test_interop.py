"""Adapters: each against its library's own exact attention on small sizes, values and gradients; jit, vmap, dtypes."""

import gc
import weakref

import naive
import numpy as np
import pytest
from problems import make

import pda_numba

LOW_RANK = {"rank": 16, "method": "pda", "tol": None}


@pytest.fixture
def arrays():
    return [np.stack(x) for x in zip(*(make("decaying", 97, seed=s) for s in range(3)), strict=True)]


def expected(arrays, options, dout):
    out, pullback = pda_numba.attention_vjp(*arrays, **options)
    return out, pullback(dout)


# --- HIPS autograd ---


def test_autograd_agrees_with_its_own_attention(arrays):
    autograd = pytest.importorskip("autograd")
    import autograd.numpy as anp

    from pda_numba.interop.autograd import attention

    def plain(q, k, v):
        scores = anp.einsum("hid,hjd->hij", q, k) / np.sqrt(q.shape[-1])
        weights = anp.exp(scores - anp.max(scores, axis=-1, keepdims=True))
        return anp.einsum("hij,hje->hie", weights / anp.sum(weights, axis=-1, keepdims=True), v)

    double = [x.astype(np.float64) for x in arrays]
    for i in range(3):
        own, true = (autograd.grad(lambda *x: anp.sum(anp.sin(f(*x))), i)(*double) for f in (attention, plain))  # noqa: B023
        np.testing.assert_allclose(own, true, rtol=0, atol=1e-12 * np.abs(true).max())


def test_autograd_gets_every_gradient_from_one_backward_pass(monkeypatch):
    autograd = pytest.importorskip("autograd")
    from pda_numba.interop import autograd as room

    calls, original = [], room.attention_backward
    monkeypatch.setattr(room, "attention_backward", lambda *x: calls.append(1) or original(*x))
    x = make("decaying", 700, d=16, e=16, seed=1)[0]
    own = autograd.grad(lambda q: (room.attention(q, 2 * q, q * q, **LOW_RANK) ** 2).sum())(x)
    assert len(calls) == 1
    out, (dq, dk, dv) = expected([x, 2 * x, x * x], LOW_RANK, 2 * pda_numba.attention(x, 2 * x, x * x, **LOW_RANK))
    np.testing.assert_allclose(own, dq + 2 * dk + 2 * x * dv, rtol=1e-4, atol=1e-4 * np.abs(own).max())  # float32
    np.testing.assert_array_equal(room.attention(x, 2 * x, x * x, **LOW_RANK), out)


def test_autograd_keeps_nothing_when_it_is_done(arrays, monkeypatch):
    autograd = pytest.importorskip("autograd")
    from pda_numba.interop import autograd as room

    kept, original = [], room.attention_forward

    def forward(*given, **options):
        out, residuals = original(*given, **options)
        kept.append(weakref.ref(residuals))
        return out, residuals

    monkeypatch.setattr(room, "attention_forward", forward)
    autograd.grad(lambda q: (room.attention(q, arrays[1], arrays[2]) ** 2).sum())(arrays[0])
    gc.collect()
    assert len(kept) == 1
    assert kept[0]() is None


def test_autograd_says_that_there_is_no_second_derivative(arrays):
    autograd = pytest.importorskip("autograd")
    from pda_numba.interop.autograd import attention

    def loss(q):
        return (attention(q, arrays[1], arrays[2]) ** 2).sum()

    with pytest.raises(NotImplementedError, match="no second derivatives"):
        autograd.grad(lambda q: (autograd.grad(loss)(q) ** 2).sum())(arrays[0])


# --- JAX ---


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


def test_jax_agrees_with_its_own_attention(jax, arrays):
    """With jit; JAX's layout is (batch, tokens, heads, dim), and values are as long as keys."""
    from pda_numba.interop.jax import attention

    arrays = arrays[0], arrays[1], arrays[0] + arrays[1]
    q, k, v = (jax.numpy.asarray(x) for x in arrays)

    def plain(*x):
        turned = [jax.numpy.moveaxis(y, 0, 1)[None] for y in x]
        return jax.numpy.moveaxis(jax.nn.dot_product_attention(*turned)[0], 1, 0)

    double = naive.attention_heads(*arrays)
    own, true = attention(q, k, v), plain(q, k, v)
    assert naive.relative(own, double) <= 2 * naive.relative(true, double)
    loss = [
        jax.jit(jax.grad(lambda q, k, v, f=f: jax.numpy.sin(f(q, k, v)).sum(), argnums=(0, 1, 2)))
        for f in (attention, plain)
    ]
    for a, b in zip(loss[0](q, k, v), loss[1](q, k, v), strict=True):
        assert naive.relative(a, b) < 1e-5  # float32


def test_jax_maps_over_heads(jax):
    from pda_numba.interop.jax import attention

    arrays = [np.stack(x) for x in zip(*(make("decaying", 700, seed=s) for s in range(2)), strict=True)]
    out, gradients = expected(arrays, LOW_RANK, np.ones_like(arrays[2]))
    mapped = jax.vmap(lambda *x: attention(*x, **LOW_RANK))
    np.testing.assert_array_equal(mapped(*arrays), out)
    for own, true in zip(
        jax.jit(jax.grad(lambda *x: mapped(*x).sum(), argnums=(0, 1, 2)))(*arrays), gradients, strict=True
    ):
        np.testing.assert_array_equal(own, true)


def test_jax_keeps_bfloat16(jax, arrays):
    from pda_numba.interop.jax import attention

    q, k, v = (jax.numpy.asarray(x, jax.numpy.bfloat16) for x in arrays)
    assert attention(q, k, v).dtype == jax.numpy.bfloat16
    assert jax.grad(lambda x: attention(x, k, v).astype(float).sum())(q).dtype == jax.numpy.bfloat16


# --- PyTorch ---


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_torch_agrees_with_its_own_attention(torch, arrays):
    from pda_numba.interop.torch import attention

    found = []
    for function in (attention, torch.nn.functional.scaled_dot_product_attention):
        tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in arrays]
        out = function(*tensors)
        torch.sin(out).sum().backward()
        found.append([out.detach(), *(x.grad for x in tensors)])
    for own, true in zip(*found, strict=True):
        np.testing.assert_allclose(own, true, rtol=0, atol=1e-12 * float(true.abs().max()))


def test_torch_shares_memory_and_notices_changes(torch, arrays):
    from pda_numba.interop import torch as room

    q, k, v = (torch.from_numpy(x) for x in arrays)
    assert room._as_array(q).ctypes.data == q.data_ptr()
    with torch.no_grad():
        assert not room.attention(q, k, v).requires_grad
    q.requires_grad_()
    out = room.attention(q, k, v)
    k += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_torch_low_rank_and_dtypes(torch):
    from pda_numba.interop.torch import attention

    arrays = make("decaying", 700, seed=1)
    for dtype, options in ((torch.float32, LOW_RANK), (torch.bfloat16, {"method": "exact"})):
        q, k, v = (torch.tensor(x, dtype=dtype) for x in arrays)
        q.requires_grad_()
        out = attention(q, k, v, **options)
        out.sum().backward()
        assert out.dtype == q.grad.dtype == dtype
    with pytest.raises(TypeError, match=r"^k must be a torch.Tensor, got ndarray"):
        attention(q, arrays[1], v)
