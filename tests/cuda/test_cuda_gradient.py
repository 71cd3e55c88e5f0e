"""`attention_forward` and `attention_backward` on the device: the same gradients as on the CPU, within rounding."""

import dataclasses

import numpy as np
import problems
import pytest
from common import host
from foreign import Foreign
from numba import cuda as numba_cuda

import pda_numba
from pda_numba import attention_backward, attention_forward
from pda_numba.device import Cuda
from pda_numba.residuals import LOST, LowRank

pytestmark = pytest.mark.cudasim


def cotangent(out):
    return np.random.default_rng(9).standard_normal(out.shape).astype(out.dtype)


def gradients(arrays, *, move=lambda x: x, **options):
    """[dq, dk, dv, error], as NumPy's."""
    out, residuals = attention_forward(*(move(x) for x in arrays), **options)
    *found, info = attention_backward(residuals, move(cotangent(host(out))), return_info=True)
    return [*(host(x) for x in found), info.gradient_error]


def compare(expected, got, tolerance):
    for a, b in zip(expected[:3], got[:3], strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * np.max(np.abs(a), initial=1e-30))
    np.testing.assert_allclose(got[3], expected[3], rtol=100 * tolerance, atol=tolerance)


def both(arrays, tolerance, **options):
    expected = gradients(arrays, device="cpu", **options)
    compare(expected, gradients(arrays, device="cuda", **options), tolerance)


def make(rng, heads=(2,), key_heads=None, n=5, m=7, d=4, e=3, dtype=np.float32):
    key_heads = heads if key_heads is None else key_heads
    shapes = (*heads, n, d), (*key_heads, m, d), (*key_heads, m, e)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


# --- exact attention ---


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float64, 1e-14), (np.float16, 2e-3)])
def test_exact(dtype, tolerance, rng):
    both(make(rng, dtype=dtype), tolerance, method="exact")


def test_bfloat16(rng):
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    both(make(rng, dtype=dtype), 2.0**-7, method="exact")


def test_shared_heads_and_batches(rng):
    both(make(rng, (2, 4), (2, 2)), 2e-6, method="exact")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_arrays_on_the_device(dtype, rng):
    arrays = make(rng, dtype=dtype)
    out, residuals = attention_forward(*(numba_cuda.to_device(x) for x in arrays), method="exact")
    found = attention_backward(residuals, numba_cuda.to_device(cotangent(host(out))))
    expected = gradients(arrays, method="exact")
    for x, own, true in zip(arrays, found, expected, strict=False):
        assert type(own) is type(out)
        assert own.dtype == x.dtype
        np.testing.assert_allclose(host(own), true, rtol=0, atol=2e-3 if dtype == np.float16 else 2e-6)


def test_any_strides(rng):
    tokens_first = [x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for x in make(rng, (2, 2))]
    expected = gradients(tokens_first, method="exact")
    compare(expected, gradients(tokens_first, move=Foreign, method="exact"), 2e-6)


def test_nothing_to_do(rng):
    for lead, n, e in (((), 0, 3), ((2,), 4, 0), ((0,), 4, 3)):
        arrays = [np.ones((*lead, *s), np.float32) for s in ((n, 4), (7, 4), (7, e))]
        for move in (lambda x: x, Foreign):
            found = gradients(arrays, move=move, device="cuda")
            assert [x.shape for x in found[:3]] == [x.shape for x in arrays]
            assert not any(x.any() for x in found[:3])


def test_a_cotangent_elsewhere_or_not_finite(rng):
    arrays = make(rng)
    out, residuals = attention_forward(*(Foreign(x) for x in arrays), method="exact")
    dout = cotangent(host(out))
    with pytest.raises(TypeError, match="dout must be on a GPU, like q, got"):
        attention_backward(residuals, dout)
    dout[1, 2, 0] = np.inf
    with pytest.raises(ValueError, match="dout must be finite"):
        attention_backward(residuals, Foreign(dout))
    with pytest.raises(ValueError, match="dout must be finite"):
        attention_backward(attention_forward(*arrays, method="exact", device="cuda")[1], dout)


def test_arrays_that_do_not_fit(monkeypatch, rng):
    arrays = make(rng)
    out, residuals = attention_forward(*arrays, method="exact", device="cuda")
    monkeypatch.setattr(Cuda, "free_bytes", lambda self: 1000)
    needed = 2 * sum(x.nbytes for x in arrays) + out.nbytes
    with pytest.raises(MemoryError, match=rf"needs {needed:,} bytes of device memory .* 875 are free"):
        attention_backward(residuals, cotangent(out))


def test_residuals_outlive_the_forward_pass_and_can_be_used_again(rng):
    arrays = make(rng)
    out, residuals = attention_forward(*arrays, method="exact", device="cuda")
    pda_numba.attention(*(2 * x for x in arrays), method="exact", device="cuda")
    first, second = (attention_backward(residuals, cotangent(out)) for _ in range(2))
    compare([*gradients(arrays, method="exact")[:3], 0], [*first, 0], 2e-6)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


# --- low rank: what the CPU's forward pass kept, moved to the device ---

PDA = {"method": "pda", "tol": None}


def kept(arrays, **options):
    """The output and the residuals of the CPU, and the latter as a forward pass on the device would leave them."""
    out, residuals = attention_forward(*arrays, device="cpu", **options)
    assert all(isinstance(part, LowRank) for part in residuals.parts)
    return out, residuals, moved(residuals)


def moved(residuals):
    device, info = Cuda(), dataclasses.replace(residuals.info, device="cuda")
    return dataclasses.replace(residuals, info=info, parts=[part.over(device.hold) for part in residuals.parts])


def backwards_agree(out, *residuals, tolerance=1e-9):
    results = []
    for where in residuals:
        *found, info = attention_backward(where, cotangent(out), return_info=True)
        results.append([*found, info.gradient_error])
    compare(*results, tolerance)


def make_kind(kind, m=20, **sizes):
    return problems.make(kind, 216, m, **{"d": 4, "e": 3, "dtype": np.float64, **sizes}, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 9])
def test_window(window):
    backwards_agree(*kept(make_kind("clustered"), rank=5, window=window, **PDA))


@pytest.mark.slow
def test_float32():
    backwards_agree(*kept(make_kind("decaying", dtype=np.float32), rank=5, **PDA), tolerance=1e-4)


@pytest.mark.slow
def test_heads_that_share_keys():
    q, k, v = make_kind("decaying", m=10)
    backwards_agree(*kept([np.stack([q, q[::-1]]), k[None], v[None]], rank=5, **PDA))


@pytest.mark.slow
def test_projected():
    backwards_agree(*kept(make_kind("decaying", d=6), rank=5, proj_dim=3, **PDA))


@pytest.mark.slow
@pytest.mark.parametrize("projection", ["pca", "srht"])
def test_the_papers_variant(projection):
    options = {"rank": 5, "proj_dim": 3, "projection": projection, "calibrate": False}
    backwards_agree(*kept(make_kind("decaying", d=6), **options, **PDA))


@pytest.mark.slow
def test_lost_rows():
    out, residuals, _ = kept(make_kind("decaying"), rank=5, **PDA)
    part = residuals.parts[0]
    rows = np.flatnonzero(part.slot[0] == 0)[:3]
    part.slot[0, rows] = LOST
    lost = dataclasses.replace(part, lost=np.append(rows, 0)[None], losses=np.array([3]))
    residuals = dataclasses.replace(residuals, parts=[lost])
    backwards_agree(out, residuals, moved(residuals))


def test_low_rank_wholly_on_the_device():
    arrays = make_kind("decaying")
    expected = gradients(arrays, rank=5, window=3, **PDA)
    compare(expected, gradients(arrays, move=numba_cuda.to_device, rank=5, window=3, **PDA), 1e-8)
