"""Attention on a real card, end to end: against the float64 oracle, against the CPU, and against itself."""

import math

import naive
import numpy as np
import pytest

import pda_numba
from pda_numba import attention
from pda_numba.data import smooth_heads

pytestmark = pytest.mark.gpu

# Rounding of the output, entrywise, or of the arithmetic with logits of size 10.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-5, "float64": 1e-13}
PDA = {"method": "pda", "tol": None, "return_info": True}


def dtype_named(name):
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if name == "bfloat16" else np.dtype(name)


def smooth(rng, n=2100, d=64, e=64, dtype=np.float32, lead=(), key_lead=None):
    """Queries and keys whose columns fall in size: rank 64 is accurate to a few per cent."""
    spread = 3.0 / (1 + np.arange(d))
    key_lead = lead if key_lead is None else key_lead
    q, k = (spread * rng.standard_normal((*at, n, d)) for at in (lead, key_lead))
    return tuple(x.astype(dtype) for x in (q, k, rng.standard_normal((*key_lead, n, e))))


def oracle(arrays):
    return naive.attention_heads(*(np.asarray(x, np.float64) for x in arrays))


# --- exact ---


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("d", [1, 59, 64, 111, 256])
@pytest.mark.parametrize("n", [1, 2, 63, 97, 500, 1025])
def test_exact_at_awkward_sizes(n, d, name, rng):
    dtype = dtype_named(name)
    shapes = ((2, n, d), (2, n + 3, d), (2, n + 3, 1 if d == 1 else d - d % 3))
    arrays = [rng.standard_normal(s).astype(dtype) for s in shapes]
    out, info = attention(*arrays, method="exact", device="cuda", return_info=True)
    assert info.device == "cuda"
    assert out.dtype == dtype
    assert naive.relative(out, oracle(arrays)) <= ROUNDING[name]


@pytest.mark.parametrize(("n", "m"), [(1, 100_000), (17, 40_000), (4000, 3)])
def test_few_queries_or_few_keys(n, m, rng):
    arrays = [rng.standard_normal(s, dtype=np.float32) for s in ((n, 64), (m, 64), (m, 64))]
    assert naive.relative(attention(*arrays, method="exact", device="cuda"), oracle(arrays)) < 1e-5


def test_values_of_any_width(rng):
    for e in (1, 3, 63, 65, 129, 300):
        arrays = [rng.standard_normal(s, dtype=np.float32) for s in ((300, 32), (400, 32), (400, e))]
        assert naive.relative(attention(*arrays, method="exact", device="cuda"), oracle(arrays)) < 1e-5


def test_large_logits(rng):
    q, k, v = (rng.standard_normal((500, 64), dtype=np.float32) for _ in range(3))
    out = attention(30 * q, 30 * k, v, method="exact", device="cuda")
    assert naive.relative(out, oracle((30 * q, 30 * k, v))) < 1e-3  # logits of size 4000 in float32


# --- low rank ---


@pytest.mark.parametrize("name", ROUNDING)
def test_low_rank(name, rng):
    arrays = smooth(rng, dtype=dtype_named(name), lead=(2,))
    out, info = attention(*arrays, rank=64, device="cuda", **PDA)
    assert (info.method == "pda").all()
    for head, exact in enumerate(oracle(arrays)):
        assert naive.relative(out[head], exact) <= math.hypot(1.1 * info.error_limit[head], ROUNDING[name])
    assert (info.error_limit < 0.3).all()


@pytest.mark.parametrize("d", [1, 59, 64, 111, 256])
@pytest.mark.parametrize("n", [500, 1025])
def test_low_rank_at_awkward_sizes(n, d, rng):
    arrays = smooth(rng, n=n, d=d, e=max(1, d - 2))
    out, info = attention(*arrays, rank=32, device="cuda", **PDA)
    assert info.method == "pda"
    assert naive.relative(out, naive.attention(*arrays)) <= 1.1 * info.error_limit + 1e-5


def test_the_same_rows_and_nearly_the_same_output_as_the_cpu(rng):
    """Draws are the same; a fit amplifies rounding, and ties may fall the other way: errors agree, not bits."""
    arrays = smooth(rng, n=8192, lead=(4,))
    found, expected = (attention(*arrays, rank=128, device=device, **PDA) for device in ("cuda", "cpu"))
    exact = oracle(arrays)
    for head in range(4):
        ours, theirs = (naive.relative(out[head], exact[head]) for out in (found[0], expected[0]))
        assert ours < 1.3 * theirs + 1e-5
    np.testing.assert_allclose(found[1].error_limit, expected[1].error_limit, rtol=0.5)
    np.testing.assert_array_equal(found[1].rank, expected[1].rank)
    assert (np.abs(found[1].rows - expected[1].rows) <= 0.05 * expected[1].rows).all()


@pytest.mark.parametrize("window", [0, 1, 7, 200, 2099])
def test_near_field(window, rng):
    arrays = smooth(rng)
    out, info = attention(*arrays, rank=64, window=window, device="cuda", **PDA)
    assert info.window == window
    assert naive.relative(out, naive.attention(*arrays)) <= 1.1 * info.error_limit
    if window == 2099:
        assert info.error_limit < 1e-3  # nothing is left for the fit


@pytest.mark.parametrize("kind", ["pca", "srht", "gaussian", "orthogonal"])
@pytest.mark.parametrize("calibrate", [True, False])
def test_projections(kind, calibrate, rng):
    arrays = smooth(rng)
    options = {"rank": 64, "window": 0, "projection": kind, "calibrate": calibrate, "proj_dim": 24}
    out, info = attention(*arrays, device="cuda", **options, **PDA)
    assert naive.relative(out, naive.attention(*arrays)) <= 1.1 * info.error_limit


@pytest.mark.parametrize("method", ["exact", "pda"])
def test_grouped_queries_and_broadcasting(method, rng):
    arrays = smooth(rng, lead=(2, 4), key_lead=(1, 2))
    out, info = attention(*arrays, rank=64, device="cuda", **{**PDA, "method": method})
    exact = oracle(arrays)
    for head in np.ndindex(2, 4):
        assert naive.relative(out[head], exact[head]) <= 1.1 * info.error_limit[head] + 1e-5


@pytest.mark.parametrize("tol", [0.3, 0.05, 1e-2])
def test_the_loop_over_ranks_keeps_tol(tol):
    arrays = smooth_heads((4, 16384, 64))
    out, info = attention(*arrays, tol=tol, device="cuda", return_info=True)
    assert (info.method == "pda").any()
    rows = np.random.default_rng(1).choice(16384, 256, replace=False)
    for head in range(4):
        q, k, v = (x[head] for x in arrays)
        assert naive.relative(out[head][rows], naive.attention(q[rows], k, v)) <= 1.2 * tol  # 256 rows of the head


@pytest.mark.parametrize("name", ["text", "speech"])
def test_real_heads(name, text_heads, speech_heads):
    q, k, v, scale = text_heads if name == "text" else speech_heads
    for tol in (0.2, 1e-2):
        out, info = attention(q, k, v, scale=scale, tol=tol, device="cuda", return_info=True)
        exact = naive.attention_heads(q, k, v, scale)
        errors = np.array([naive.relative(a, b) for a, b in zip(out, exact, strict=True)])
        assert np.mean(errors <= 1.1 * info.error_limit + 1e-6) >= 0.8  # 95 % each, six or eight heads
        assert (info.error_limit <= tol).all()


def test_estimate_error(rng):
    arrays = smooth(rng, lead=(2,))
    out = attention(*arrays, rank=64, device="cuda", method="pda", tol=None)
    found, expected = (pda_numba.estimate_error(out, *arrays, device=device) for device in ("cuda", "cpu"))
    np.testing.assert_allclose(found.error, expected.error, rtol=1e-2)
    np.testing.assert_array_equal(found.n_rows, expected.n_rows)


def test_outliers_and_spoiled_values(rng):
    q, k, v = smooth(rng)
    q[[5, 900]] *= 20
    out, info = attention(q, k, v, rank=64, device="cuda", **PDA)
    assert naive.relative(out, naive.attention(q, k, v)) <= 1.1 * info.error_limit
    k[1700, 3] = np.nan
    with pytest.raises(ValueError, match=r"k must be finite.*token 1700, column 3"):
        attention(q, k, v, device="cuda")


def test_info(rng):
    _, info = attention(*smooth(rng), rank=64, device="cuda", **PDA)
    assert info.device == "cuda"
    assert "compute capability" in info.device_reason
    assert {"rows", "landmarks", "fit", "leverage", "apply"} <= set(info.seconds)


# --- the same bits ---


@pytest.mark.parametrize("options", [{"method": "exact"}, {"rank": 64, "method": "pda", "tol": None}])
def test_the_same_call_gives_the_same_bits(options, rng):
    arrays = smooth(rng, lead=(3,))
    first = attention(*arrays, device="cuda", **options)
    for _ in range(3):
        assert attention(*arrays, device="cuda", **options).tobytes() == first.tobytes()
    alone = attention(*(x[1] for x in arrays), device="cuda", **options)
    if options["method"] == "exact":
        np.testing.assert_allclose(alone, first[1], rtol=0, atol=2e-6)  # other splits of the keys
