"""`attention` and `estimate_error` wholly on the device: the same rows, choices and numbers as on the CPU."""

import functools
import sys

import naive
import numpy as np
import problems
import pytest

import pda_numba
from pda_numba.device import Cuda

pytestmark = pytest.mark.cudasim


def both(*arrays, **options):
    return [pda_numba.attention(*arrays, device=name, return_info=True, **options) for name in ("cpu", "cuda")]


def same_choices(cpu, cuda):
    """Draws, landmarks and windows agree; so do the certificates, but for rounding."""
    for name in ("method", "rank", "effective_rank", "window", "rows", "flagged_rows", "fallback_rows"):
        np.testing.assert_array_equal(getattr(cuda, name), getattr(cpu, name), err_msg=name)
    for name in ("error", "error_limit", "row_error", "leave_one_out"):  # from float32 outputs: their rounding
        np.testing.assert_allclose(getattr(cuda, name), getattr(cpu, name), rtol=1e-3, atol=1e-6, err_msg=name)


def rounding(q, k, v):
    return naive.relative(naive.attention_in(np.float32, q, k, v), naive.attention(q, k, v))


CLUSTERED = {"rank": 6, "method": "pda", "tol": None}


@functools.cache
def clustered(dtype):
    arrays = problems.make("clustered", 310, d=7, e=5, seed=1, dtype=dtype)
    return arrays, both(*arrays, **CLUSTERED)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_low_rank_with_near_field(dtype):
    arrays, ((expected, cpu), (out, cuda)) = clustered(dtype)
    assert out.dtype == dtype
    assert isinstance(out, np.ndarray)
    same_choices(cpu, cuda)
    # Both are approximations with the same coefficients: what is left between them is rounding.
    unit = 2.0**-11 if dtype == np.float16 else 2 * max(rounding(*arrays), 1e-7)
    assert naive.relative(out, expected) <= 2 * unit
    exact = naive.attention(*arrays)
    assert naive.relative(out, exact) <= 1.5 * float(cuda.error_limit)


def test_several_heads_that_share_keys(rng):
    heads = [problems.make(kind, 300, d=6, e=3, seed=2) for kind in ("decaying", "peaked")]
    q, k, v = (np.stack(x) for x in zip(*heads, strict=True))
    q = np.concatenate([q, q[:, ::-1]])[[0, 2, 1, 3]]
    (expected, cpu), (out, cuda) = both(q, k, v, rank=5, method="pda", tol=None, window=9)
    same_choices(cpu, cuda)
    assert naive.relative(out, expected) <= 1e-5  # float32, coefficients that cancel


@pytest.mark.parametrize("kind", ["pca", "srht"])
def test_projected(kind):
    arrays = problems.make("decaying", 300, d=9, e=3, seed=3)
    (expected, cpu), (out, cuda) = both(*arrays, rank=5, method="pda", tol=None, proj_dim=4, projection=kind)
    same_choices(cpu, cuda)
    assert naive.relative(out, expected) <= 1e-5


def test_the_papers_variant():
    arrays = problems.make("decaying", 300, d=9, e=3, seed=3)
    (expected, cpu), (out, cuda) = both(*arrays, rank=5, method="pda", tol=None, proj_dim=4, calibrate=False)
    assert naive.relative(out, expected) <= 1e-5
    np.testing.assert_allclose(cuda.error, cpu.error, rtol=1e-3)


@pytest.mark.parametrize(("n", "m", "d", "e"), [(1, 1, 1, 1), (2, 63, 59, 4), (63, 2, 5, 17), (97, 97, 8, 65)])
def test_exact_at_awkward_sizes(n, m, d, e):
    arrays = problems.make("gaussian", n, m, d, e, seed=4)
    _, (out, info) = both(*arrays, method="exact")
    assert info.device.startswith("cuda")
    assert naive.relative(out, naive.attention(*arrays)) <= max(2 * rounding(*arrays), 2e-7)


def test_tol_is_kept_and_costs_one_wait_per_step(monkeypatch):
    monkeypatch.setattr(sys.modules["pda_numba.plan"], "RANKS", (4, 8))  # pda_numba.plan is the function
    arrays = problems.make("near_uniform", 280, d=6, e=3, seed=5)
    waits = []
    download = Cuda.download
    monkeypatch.setattr(Cuda, "download", lambda self, x: waits.append(x.shape) or download(self, x))
    out, info = pda_numba.attention(*arrays, device="cuda", method="pda", tol=0.5, return_info=True)
    assert naive.relative(out, naive.attention(*arrays)) <= 0.5
    assert info.rank == 4  # one step
    assert len(waits) <= 1, waits  # the scan of NumPy inputs runs on the CPU


def test_estimate_error_agrees(rng):
    arrays = problems.make("decaying", 260, d=5, e=3, seed=6)
    out = (naive.attention(*arrays) * 1.01).astype(np.float32)
    cpu, cuda = (pda_numba.estimate_error(out, *arrays, n_rows=40, device=name) for name in ("cpu", "cuda"))
    for name in ("error", "error_limit", "row_error"):
        np.testing.assert_allclose(getattr(cuda, name), getattr(cpu, name), rtol=1e-4)
    np.testing.assert_array_equal(cuda.n_rows, cpu.n_rows)


def test_same_bits_again():
    arrays, (_, (first, _)) = clustered(np.float32)
    np.testing.assert_array_equal(pda_numba.attention(*arrays, device="cuda", **CLUSTERED), first)
