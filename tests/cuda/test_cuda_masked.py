"""Masks on the device: the same outputs, statements and gradients as on the CPU, within rounding."""

import math

import masks
import numpy as np
import pytest
import simulator
from common import host, on_cuda
from foreign import Foreign
from numba import cuda as numba_cuda
from problems import flat

from pda_numba import attention, attention_backward, attention_forward, merge, rectangles
from pda_numba.backward import Gradients
from pda_numba.device import CPU, Cuda
from pda_numba.kernels import scalar
from pda_numba.rows import rows
from pda_numba.rows_adjoint import rows_adjoint

pytestmark = pytest.mark.cudasim


@pytest.fixture
def small_leaves(monkeypatch):
    """Rectangles of a size that the simulator can bear."""
    monkeypatch.setattr(rectangles, "LEAF", 8)


def results(arrays, move=lambda x: x, **options):
    """(out, info, [dq, dk, dv]) as NumPy's."""
    out, residuals = attention_forward(*(move(x) for x in arrays), **options)
    dout = np.random.default_rng(9).standard_normal(out.shape).astype(host(out).dtype)
    return host(out), residuals.info, [host(x) for x in attention_backward(residuals, move(dout))]


def agree(cpu, cuda, tolerance):
    for a, b in zip((cpu[0], *cpu[2]), (cuda[0], *cuda[2]), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * np.abs(a).max(initial=1e-30))
    for name in ("method", "rank", "effective_rank", "rows", "empty_rows", "rectangles", "flagged_rows"):
        np.testing.assert_array_equal(getattr(cuda[1], name), getattr(cpu[1], name), err_msg=name)
    np.testing.assert_allclose(cuda[1].error_limit, cpu[1].error_limit, rtol=1e-3, atol=1e-6)


# --- exact ---


@pytest.mark.parametrize("mask", masks.MASKS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-13)])
def test_exact(mask, dtype, tolerance, small_leaves):
    options, _ = masks.MASKS[mask](23, 41, 3)
    arrays = masks.problem(23, 41, group=1, d=4, e=3, dtype=dtype)
    cpu, cuda = (results(arrays, method="exact", device=name, **options) for name in ("cpu", "cuda"))
    agree(cpu, cuda, tolerance)


@pytest.mark.parametrize("mask", ["holes, causal", "packed, causal"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_arrays_on_the_device(mask, dtype, small_leaves):
    options, _ = masks.MASKS[mask](17, 23, 2)
    arrays = masks.problem(17, 23, batch=2, group=2, d=4, e=3, dtype=dtype, key_heads=1)
    cpu = results(arrays, method="exact", **options)
    agree(cpu, results(arrays, numba_cuda.to_device, method="exact", **options), 2e-3 if dtype == np.float16 else 1e-5)
    turned = [x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for x in arrays]
    agree(cpu, results(turned, Foreign, method="exact", **options), 2e-3 if dtype == np.float16 else 1e-5)


def test_many_tiles_of_spans(rng):
    """Spans that begin and end anywhere, over several tiles of keys and several splits."""
    problem = flat(*(rng.standard_normal((1, n, 3)) for n in (68, 1100, 1100)))
    low = rng.integers(0, 1100, (1, 68))
    spans = np.stack([low, np.minimum(low + rng.integers(0, 400, low.shape), 1100)], axis=2).astype(np.int32)
    problem = problem.__class__(**{**vars(problem), "spans": spans, "pattern": np.zeros(1, int)})
    device, heads = on_cuda(problem), np.arange(1)
    which = rng.permuted(np.arange(68)[None], axis=1)[:, :9]
    for own in (None, which):
        found = [rows(p, heads, None if own is None else p.device.upload(own))[:2] for p in (problem, device)]
        for a, b in zip(*found, strict=True):
            np.testing.assert_allclose(host(b), a, rtol=1e-12, atol=1e-12)
        about = found[0][1], rng.standard_normal(found[0][1].shape), rng.standard_normal(found[0][0].shape)
        sums = []
        for p in (problem, device):
            gradients = Gradients(*(p.device.zeros(x.shape, np.float64) for x in (p.q, p.k, p.v)))
            listed = None if own is None else p.device.upload(own)
            rows_adjoint(p, heads, *(p.device.upload(x) for x in about), gradients, listed)
            sums.append([host(x) for x in gradients])
        for a, b in zip(*sums, strict=True):
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-12 * np.abs(a).max())


@pytest.mark.parametrize("mask", ["causal", "lengths, causal"])
def test_no_output_knows_a_later_key(mask, monkeypatch, small_leaves):
    """Nor one that nobody sees; NaN included."""
    patched = type("Math", (), {**{k: staticmethod(v) for k, v in vars(math).items() if callable(v)}})
    patched.floor = staticmethod(np.floor)  # of NaN, which Python's own refuses
    monkeypatch.setattr(scalar, "math", patched)
    options, _ = masks.MASKS[mask](40, 40, 2)
    q, k, v = masks.problem(40, 40, batch=2, group=1, d=4, e=3)
    outputs = []
    for value in (0.0, np.nan):
        keys, values = k.copy(), v.copy()
        keys[:, :, 21:], values[:, :, 21:] = value, value
        arrays = (numba_cuda.to_device(x) for x in (q, keys, values))
        with np.errstate(all="ignore"):
            out, residuals = attention_forward(*arrays, method="exact", check_finite=False, **options)
            dout = np.zeros(out.shape, np.float32)
            dout[:, :, :21] = 1
            gradients = attention_backward(residuals, numba_cuda.to_device(dout))
        outputs.append([host(x)[:, :, :21] for x in (out, *gradients)])
    for a, b in zip(*outputs, strict=True):
        np.testing.assert_array_equal(a, b)


# --- low rank ---

PDA = {"method": "pda", "rank": 5, "tol": None}


@pytest.mark.parametrize("mask", ["causal", "holes, causal"])
def test_low_rank(mask, small_leaves):
    options, _ = masks.MASKS[mask](230, 280, 1)
    arrays = masks.problem(230, 280, batch=1, group=1, d=4, e=3, dtype=np.float64, key_heads=1)
    cpu, cuda = (results(arrays, device=name, **PDA, **options) for name in ("cpu", "cuda"))
    assert (cpu[1].rectangles > 0).all()
    agree(cpu, cuda, 1e-7)  # coefficients that cancel, gradients through a ridge


# --- stages ---


def test_merge(rng):
    heads, n, e = 3, 7, 3
    out, part = rng.standard_normal((4, 10, e)), rng.standard_normal((heads, n, e))
    lse, part_lse = rng.standard_normal((2, 10)), rng.standard_normal((heads, n))
    lse[0, 3], part_lse[1, 2] = -np.inf, -np.inf
    leverage, part_leverage = rng.random((2, 10)), rng.random((heads, n))
    out[1, 3] = 0
    tasks = np.array([1, 1, 0]), np.array([1, 3, 0]), np.array([0, 1, 1]), np.array([0, 3, 0])
    found = []
    for device in (CPU, Cuda()):
        own = [x.copy() if device is CPU else numba_cuda.to_device(x) for x in (out, lse, leverage)]
        merge.merge(device, *map(device.upload, (part, part_lse, part_leverage, *tasks)), *own)
        found.append([host(x) for x in own])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-14)
    total = np.exp2(lse[0, :7]) + np.exp2(part_lse[0])
    np.testing.assert_allclose(found[0][1][0, :7], np.log2(total), rtol=1e-12, atol=1e-12)
    added = (np.exp2(part_lse[0]) / total) ** 2 * part_leverage[0]
    np.testing.assert_allclose(found[0][2][0, :7], leverage[0, :7] + added, rtol=1e-12)
    both = np.exp2(lse[0, :7])[:, None] * out[1, :7] + np.exp2(part_lse[0])[:, None] * part[0]
    np.testing.assert_allclose(found[0][0][1, :7], both / total[:, None], rtol=1e-12)


def test_every_barrier_counts(small_leaves):
    """Of the kernels with spans, forwards and backwards; see `simulator.barriers_without_effect`."""
    arrays = [numba_cuda.to_device(x) for x in masks.problem(70, 70, batch=1, group=1, d=4, e=3)]
    dout = numba_cuda.to_device(np.ones((1, 2, 70, 3), np.float32))

    def run():
        out, residuals = attention_forward(*arrays, causal=True, method="exact", check_finite=False)
        return [host(x) for x in (out, *attention_backward(residuals, dout))]

    assert simulator.barriers_without_effect(run, "rows.py", "adjoint_tiles.py") == []


def test_bad_masks_are_named_before_anything_is_read():
    arrays = [numba_cuda.to_device(x) for x in masks.problem(9, 9, batch=2)]
    with pytest.raises(ValueError, match="key_lengths must be between 0 and the number of keys 9, got 10"):
        attention(*arrays, key_lengths=10)
