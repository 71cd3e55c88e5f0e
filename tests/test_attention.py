"""The public call, end to end: every dtype and layout, `out`, the info, real heads, and degenerate inputs."""

import math
import warnings

import naive
import numpy as np
import pytest
from problems import make

import pda_numba
from pda_numba import attention

PDA = {"method": "pda", "tol": None}


def smooth(rng, n=1100, d=16, e=8, dtype=np.float32, lead=()):
    """A problem on which rank 32 is accurate to about one per cent."""
    spread = 2.0 / (1 + np.arange(d))
    q, k = (spread * rng.standard_normal((*lead, n, d)) for _ in range(2))
    return tuple(x.astype(dtype) for x in (q, k, rng.standard_normal((*lead, n, e))))


# --- shapes, dtypes, layouts ---


@pytest.mark.parametrize("method", ["exact", "pda"])
@pytest.mark.parametrize("name", ["float16", "float32", "float64", "bfloat16"])
def test_dtypes(name, method, rng):
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if name == "bfloat16" else np.dtype(name)
    q, k, v = smooth(rng, dtype=dtype)
    out, info = attention(q, k, v, rank=32, return_info=True, **{**PDA, "method": method})
    assert out.dtype == dtype
    assert out.shape == (1100, 8)
    assert info.method == method
    assert info.dtype == str(dtype)
    exact = naive.attention(*(x.astype(np.float64) for x in (q, k, v)))
    # Rounding of the result to the output's dtype (2^-8 and 2^-11 for the short ones, entrywise), or of float32/float64
    # arithmetic with logits of size 10; the low-rank error on top of it must be within its own limit.
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 5e-6, "float64": 1e-13}[name]
    limit = 0.0 if method == "exact" else float(info.error_limit)
    assert naive.relative(out, exact) <= math.hypot(rounding, limit)
    assert limit < 0.2


@pytest.mark.parametrize("method", ["exact", "pda"])
def test_any_strides(method, rng):
    q, k, v = smooth(rng, lead=(2,))
    options = {"rank": 32, "window": 32, **PDA, "method": method}
    plain = attention(q, k, v, **options)
    swapped = [np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (q, k, v)]  # tokens outermost
    wide = [np.repeat(x, 2, axis=-1)[..., ::2] for x in (q, k, v)]
    backward = [np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :] for x in (q, k, v)]
    for arrays in (swapped, wide, backward):
        # The compiled code for other strides may add in another order: rounding, magnified by the fit's condition.
        np.testing.assert_allclose(attention(*arrays, **options), plain, rtol=0, atol=1e-3 if method == "pda" else 2e-6)


@pytest.mark.parametrize("method", ["exact", "pda"])
def test_grouped_queries_and_broadcasting(method, rng):
    """Query heads share key heads in groups; leading axes broadcast: the same as repeating the arrays by hand."""
    q, k, v = smooth(rng, lead=(2, 2))
    q4 = np.concatenate([q, 0.7 * q], axis=1)  # (2, 4, N, D) over (1, 2, N, D)
    out, info = attention(q4, k[:1], v[:1], rank=32, return_info=True, **{**PDA, "method": method})
    assert out.shape == (2, 4, 1100, 8)
    assert info.error.shape == info.method.shape == (2, 4)
    exact = naive.attention_heads(q4, k[:1], v[:1])
    for head in np.ndindex(2, 4):
        assert naive.relative(out[head], exact[head]) <= (2e-6 if method == "exact" else float(info.error_limit[head]))
    # head 1 of the first batch shares key head 0 with head 0, and draws other random numbers
    alone = attention(q4[0, :1], k[0, :1], v[0, :1], rank=32, **{**PDA, "method": method})
    assert alone[0].tobytes() == out[0, 0].tobytes()


def test_two_axes_are_one_head(rng):
    q, k, v = smooth(rng)
    flat, info = attention(q, k, v, rank=32, return_info=True, **PDA)
    assert info.error.shape == ()
    assert flat.tobytes() == attention(q[None], k[None], v[None], rank=32, **PDA).tobytes()


@pytest.mark.parametrize("shapes", [((700, 24), (1900, 24), (1900, 3)), ((1900, 24), (300, 24), (300, 40))])
def test_cross_attention_with_other_value_dimension(shapes, rng):
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    q /= 1 + np.arange(24, dtype=np.float32)
    out, info = attention(q, k, v, rank=48, return_info=True, **PDA)
    assert info.method == "pda"
    assert info.window == 0  # no near field is tried where queries and keys are not the same tokens
    true = naive.relative(out, naive.attention(q, k, v))
    assert true <= info.error_limit < 0.3


@pytest.mark.parametrize("window", [0, 1, 7, 200, 1099])
def test_windows(window, rng):
    q, k, v = smooth(rng)
    out, info = attention(q, k, v, rank=32, window=window, return_info=True, **PDA)
    assert info.window == window
    assert naive.relative(out, naive.attention(q, k, v)) <= info.error_limit
    if window == 1099:
        assert info.error_limit < 1e-3  # nothing is left for the fit: rounding of the differences


@pytest.mark.parametrize("kind", ["pca", "srht", "gaussian", "orthogonal"])
@pytest.mark.parametrize("calibrate", [True, False])
def test_projections(kind, calibrate, rng):
    """The certificate looks at the original problem, whatever the projection did."""
    q, k, v = smooth(rng)
    options = {"rank": 32, "window": 0, "projection": kind, "calibrate": calibrate}
    out, info = attention(q, k, v, proj_dim=8, return_info=True, **options, **PDA)
    true = naive.relative(out, naive.attention(q, k, v))
    assert true <= 1.1 * info.error_limit  # the limit holds at 95 % only
    assert info.error == pytest.approx(true, rel=0.35)  # some 200 rows
    if kind == "pca":
        assert true < 0.1  # 8 of 16 decaying coordinates hold nearly all of q . k
    plain = naive.relative(attention(q, k, v, rank=32, window=0, **PDA), naive.attention(q, k, v))
    assert calibrate or true >= plain


def test_fewer_keys_than_coordinates_can_be_projected(rng):
    q, k, v = smooth(rng)
    out = attention(q, k[:5], v[:5], rank=5, proj_dim=12, **PDA)
    # five landmarks span attention to five keys; float32, condition of the fit below 1e3
    assert naive.relative(out, naive.attention(q, k[:5], v[:5])) < 1e-2


# --- out ---


@pytest.mark.parametrize("method", ["exact", "pda"])
def test_out_is_filled_and_returned(method, rng):
    q, k, v = smooth(rng, lead=(2,))
    options = {"rank": 32, **PDA, "method": method}
    plain = attention(q, k, v, **options)
    holder = np.full((2, 1100, 16), np.nan, np.float32)
    for out in (np.empty_like(plain), holder[..., ::2], np.asfortranarray(np.empty_like(plain))):
        assert attention(q, k, v, out=out, **options) is out
        assert (out == plain).all()
    assert np.isnan(holder[..., 1::2]).all()


def test_out_in_half_precision(rng):
    q, k, v = smooth(rng, n=200, dtype=np.float16)
    out = np.empty((200, 8), np.float16)
    assert attention(q, k, v, method="exact", out=out) is out
    assert (out == attention(q, k, v, method="exact")).all()


def test_inputs_are_not_changed(rng):
    arrays = smooth(rng)
    before = [x.tobytes() for x in arrays]
    attention(*arrays, rank=32, **PDA)
    attention(*arrays, method="exact")
    assert [x.tobytes() for x in arrays] == before


def test_read_only_inputs(rng):
    q, k, v = smooth(rng, n=100)
    plain = attention(q, k, v)
    for x in (q, k, v):
        x.flags.writeable = False
    np.testing.assert_allclose(attention(q, k, v), plain, rtol=0, atol=5e-7)  # four roundings of size 1


# --- the info ---


def test_info_of_low_rank(rng):
    q, k, v = smooth(rng, lead=(2,))
    out, info = attention(q, k, v, rank=32, return_info=True, seed=5, **PDA)
    exact = naive.attention_heads(q, k, v)
    assert (info.method == "pda").all()
    assert (info.rank == 32).all()
    assert ((info.effective_rank > 0) & (info.effective_rank <= 32)).all()
    assert info.seed == 5
    assert info.tol is None
    assert info.device == "cpu"
    assert info.flops > 0
    assert info.workspace_bytes > 0
    assert {"rows", "landmarks", "fit", "leverage", "apply"} <= set(info.seconds)
    assert all(t >= 0 for t in info.seconds.values())
    for h in range(2):
        errors = naive.row_errors(out[h], exact[h])
        # the rows that were computed exactly are exact in the output: float32 rounding, logits of size 10
        assert (errors < 1e-5).sum() >= info.rows[h] > 4 * 32
        assert naive.relative(out[h], exact[h]) <= info.error_limit[h]
        assert np.mean(errors <= info.row_error[h]) >= info.row_share[h] > 0.97
        assert 0 < info.error[h] < info.error_limit[h]
        assert np.isfinite(info.leave_one_out[h])
    text = str(info)
    assert all(word in text for word in ("pda", "95 % limit", "device cpu", "float32"))
    assert len(text.splitlines()) >= 5


def test_info_of_exact(rng):
    q, k, v = smooth(rng, n=50)
    out, info = attention(q, k, v, return_info=True)
    assert info.method == "exact"
    assert info.rows == 50
    assert info.rank == info.effective_rank == info.window == info.flagged_rows == 0
    assert naive.relative(out, naive.attention(q, k, v)) <= info.error_limit < 1e-4
    assert info.row_share == 1.0
    assert np.isnan(info.leave_one_out)
    assert "exact" in str(info)


def test_warning_where_the_given_rank_misses_tol(rng):
    q, k, v = (rng.standard_normal((1100, 16)).astype(np.float32) for _ in range(3))
    with pytest.warns(pda_numba.AccuracyWarning, match="rank=32"):
        attention(q, k, v, rank=32, tol=1e-3, method="pda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v, rank=32, **PDA)
        attention(q, k, v, rank=32, tol=5.0, method="pda")


def test_auto_is_exact_where_that_is_cheaper(rng):
    q, k, v = smooth(rng, n=300)
    assert attention(q, k, v, return_info=True)[1].method == "exact"
    assert attention(q, k, v, tol=None, return_info=True)[1].method == "exact"


def test_auto_gives_up_on_heads_without_structure(rng):
    """Gaussian queries in 32 dimensions with large logits: low rank cannot keep tol, and the answer is exact anyway."""
    n = 6000
    q, k, v = (rng.standard_normal((n, d)).astype(np.float32) for d in (32, 32, 32))
    out, info = attention(2 * q, k, v, tol=1e-3, return_info=True)
    assert info.method == "exact"
    which = rng.choice(n, 50, replace=False)
    assert naive.relative(out[which], naive.attention(2 * q[which], k, v)) < 1e-5  # float32, logits of size 30


def test_plan_says_what_happens(rng):
    q, k, v = smooth(rng)
    for options in ({"rank": 32, **PDA}, {"method": "exact"}, {}, {"tol": None}):
        planned = pda_numba.plan(q.shape, k.shape, v.shape, **options)
        _, info = attention(q, k, v, return_info=True, **options)
        assert planned.method == info.method
        assert planned.workspace_bytes == info.workspace_bytes
        assert planned.method in str(planned)


# --- real heads ---

LIMITS = {"text": {32: 0.15, 64: 0.12, 128: 0.085}, "speech": {32: 0.13, 64: 0.10, 128: 0.07}}


@pytest.fixture(scope="module")
def exact_real(text_heads, speech_heads):
    heads = {"text": text_heads, "speech": speech_heads}
    return {name: naive.attention_heads(q, k, v, scale) for name, (q, k, v, scale) in heads.items()}


@pytest.mark.parametrize("rank", [32, 64, 128])
@pytest.mark.parametrize("name", ["text", "speech"])
def test_real_heads(name, rank, text_heads, speech_heads, exact_real):
    """Medians over the heads, each the middle of three seeds: the limits that the package promises."""
    q, k, v, scale = text_heads if name == "text" else speech_heads
    errors = []
    for seed in range(3):
        out, info = attention(q, k, v, rank=rank, scale=scale, seed=seed, return_info=True, **PDA)
        assert (info.method == "pda").all()
        errors.append([naive.relative(a, b) for a, b in zip(out, exact_real[name], strict=True)])
    assert np.median(np.median(errors, axis=0)) <= LIMITS[name][rank]
    assert np.max(errors) < 1.0


# Errors of the best approximation of each head's attention matrix at ranks 32, 64 and 128, from
# [[naive.best_low_rank_error(q[h], k[h], v[h], rank, scale) for rank in (32, 64, 128)] for h in range(len(q))]
BEST = {
    "speech": [
        [0.6229, 0.5189, 0.3966],
        [0.7397, 0.6357, 0.5286],
        [0.0815, 0.0469, 0.0237],
        [0.8753, 0.7202, 0.4542],
        [0.3104, 0.1963, 0.1100],
        [0.1308, 0.0745, 0.0364],
        [0.7962, 0.5740, 0.2982],
        [0.4676, 0.2774, 0.0871],
    ],
    "text": [
        [0.0760, 0.0403, 0.0253],
        [0.6087, 0.5061, 0.3920],
        [0.2057, 0.1210, 0.0707],
        [0.3163, 0.2017, 0.1357],
        [0.0558, 0.0321, 0.0148],
        [0.0291, 0.0121, 0.0049],
    ],
}


@pytest.mark.parametrize("rank", [32, 64, 128])
@pytest.mark.parametrize("name", ["text", "speech"])
def test_real_heads_beside_the_best_low_rank(name, rank, text_heads, speech_heads, exact_real):
    """No head is worse than 3.5 times the best approximation of its attention matrix, and half of them beat it."""
    q, k, v, scale = text_heads if name == "text" else speech_heads
    out = attention(q, k, v, rank=rank, scale=scale, **PDA)
    errors = np.array([naive.relative(a, b) for a, b in zip(out, exact_real[name], strict=True)])
    best = np.array(BEST[name])[:, (32, 64, 128).index(rank)]
    assert (errors <= 3.5 * best).all(), errors / best
    assert np.mean(errors < best) >= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("head", [2, 7])
def test_the_best_low_rank_errors_are_those(head, speech_heads):
    q, k, v, scale = speech_heads
    for rank, expected in zip((32, 64, 128), BEST["speech"][head], strict=True):
        found = naive.best_low_rank_error(q[head], k[head], v[head], rank, scale)
        assert found == pytest.approx(expected, abs=6e-5)  # four digits were written down


# --- degenerate inputs ---


@pytest.mark.parametrize("method", ["auto", "pda", "exact"])
def test_no_queries(method):
    for lead in ((), (3,), (2, 3)):
        q, k, v = (np.ones((*lead, *s), np.float32) for s in ((0, 4), (7, 4), (7, 3)))
        out, info = attention(q, k, v, method=method, return_info=True)
        assert out.shape == (*lead, 0, 3)
        assert info.error.shape == lead


@pytest.mark.parametrize("method", ["auto", "pda", "exact"])
def test_no_values(method):
    for lead in ((), (3,), (2, 3)):
        q, k, v = (np.ones((*lead, *s), np.float32) for s in ((5, 4), (7, 4), (7, 0)))
        assert attention(q, k, v, method=method).shape == (*lead, 5, 0)


@pytest.mark.parametrize(
    ("q_lead", "k_lead", "lead"),
    [((0, 2), (0, 2), (0, 2)), ((0,), (1,), (0,)), ((0,), (0,), (0,)), ((2, 0), (2, 0), (2, 0))],
)
def test_no_heads(q_lead, k_lead, lead):
    q, k, v = np.ones((*q_lead, 5, 4)), np.ones((*k_lead, 7, 4)), np.ones((*k_lead, 7, 3))
    out, info = attention(q, k, v, return_info=True)
    assert out.shape == (*lead, 5, 3)
    assert info.error.shape == lead
    assert isinstance(str(info), str)


def test_no_keys_is_an_error():
    with pytest.raises(ValueError, match="at least one key"):
        attention(np.ones((5, 4)), np.ones((0, 4)), np.ones((0, 3)))


LOW = [{"method": "exact"}, {"rank": 32, **PDA}]


@pytest.mark.parametrize("options", LOW)
def test_one_key(options, rng):
    q, k, v = smooth(rng)
    out = attention(q, k[:1], v[:1], **options)
    np.testing.assert_allclose(out, np.broadcast_to(v[0], out.shape), rtol=1e-6)  # five roundings


@pytest.mark.parametrize("options", LOW)
@pytest.mark.parametrize("what", ["zero queries", "zero keys", "equal keys"])
def test_uniform_attention(what, options, rng):
    """Every row is the mean of the values."""
    q, k, v = smooth(rng)
    if what == "zero queries":
        q = 0 * q
    else:
        k = 0 * k + (k[:1] if what == "equal keys" else 0)
    out = attention(q, k, v, **options)
    mean = v.astype(float).mean(axis=0)
    np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), rtol=0, atol=2e-6)  # 1100 additions of size 1


@pytest.mark.parametrize("options", LOW)
def test_all_zero(options):
    zero = np.zeros((1100, 8), np.float32)
    out, info = attention(zero, zero, zero, return_info=True, **options)
    assert (out == 0).all()
    assert info.error_limit < 1e-6


@pytest.mark.parametrize("options", LOW)
def test_equal_values(options, rng):
    q, k, _ = smooth(rng)
    v = np.full((1100, 3), -2.5, np.float32)
    # Sum and normaliser round apart, each over 128 additions a tile: some ten eps.
    np.testing.assert_allclose(attention(q, k, v, **options), -2.5, rtol=5e-6)


@pytest.mark.parametrize("tiny", [1e-40, 1e-44])
def test_denormals(tiny, rng):
    """float32 denormals in the values come out as they went in; in queries and keys they are like zero."""
    q, k, v = smooth(rng)
    small = (tiny * (1 + np.arange(8))).astype(np.float32)
    out = attention(q, k[:1], small[None], method="exact")
    # two steps between denormals
    np.testing.assert_allclose(out, np.broadcast_to(small, out.shape), rtol=0, atol=3e-45)
    for options in LOW:
        out = attention((q * tiny).astype(np.float32), (k * tiny).astype(np.float32), v, **options)
        np.testing.assert_allclose(out, np.broadcast_to(v.mean(axis=0), out.shape), rtol=0, atol=2e-6)


def test_huge_logits_exact(rng):
    """Logits of 1e4 and beyond: attention is the value of the largest key."""
    q, k, v = (rng.standard_normal((200, d)).astype(np.float32) for d in (16, 16, 4))
    out = attention(1e4 * q, k, v, method="exact")
    scores = naive.logits(1e4 * q, k)
    gap = np.diff(np.sort(scores, axis=1)[:, -2:], axis=1)[:, 0]
    clear = gap > 50  # e^-50 of a second key is below rounding; logits of 1e5 are exact to 0.1 in float32
    assert clear.sum() > 150
    np.testing.assert_allclose(out[clear], v[scores.argmax(axis=1)][clear], rtol=1e-5, atol=1e-6)
    assert (out >= v.min(axis=0)).all()
    assert (out <= v.max(axis=0)).all()


def test_huge_logits_low_rank_are_reported(rng):
    """Low rank cannot follow attention to single keys: the output stays within the values, and the limit says so."""
    q, k, v = (rng.standard_normal((1100, d)).astype(np.float32) for d in (16, 16, 4))
    out, info = attention(1e4 * q, k, v, rank=32, return_info=True, **PDA)
    assert np.isfinite(out).all()
    assert (out >= v.min(axis=0) - 1e-6).all()
    assert (out <= v.max(axis=0) + 1e-6).all()
    true = naive.relative(out, naive.attention(1e4 * q, k, v))
    assert true <= 1.1 * info.error_limit
    assert true < 1.5


def test_lengths_whose_squares_overflow(rng):
    """Queries of 1e25 against keys of 1e-25: the logits are harmless, and so must the error statement be."""
    q, k, v = smooth(rng, n=100)
    out, info = attention(q * np.float32(1e25), k * np.float32(1e-25), v, return_info=True)
    np.testing.assert_allclose(out, attention(q, k, v), rtol=0, atol=5e-6)  # two roundings more, logits of size 10
    assert naive.relative(out, naive.attention(q, k, v)) <= info.error_limit


def test_values_far_from_zero(rng):
    """A large common offset of the values is kept to its own rounding."""
    q, k, v = smooth(rng)
    for options in LOW:
        out = attention(q, k, v + 1000, **options).astype(float)
        assert naive.relative(out, naive.attention(q, k, v + 1000)) < 1e-3


def test_nan_passes_through_without_the_check(rng):
    """check_finite=False skips the scan's error, and a NaN in one query stays in its own row."""
    q, k, v = smooth(rng, n=100)
    clean = attention(q, k, v, method="exact")
    q[3, 2] = np.nan
    out = attention(q, k, v, method="exact", check_finite=False)
    assert np.isnan(out[3]).all()
    assert (np.delete(out, 3, axis=0) == np.delete(clean, 3, axis=0)).all()


def test_outlier_queries_are_mended():
    """A handful of queries far from all others: their rows may not ruin the output."""
    for seed in range(3):
        q, k, v = make("outliers", 2048, seed=seed)
        out, info = attention(q, k, v, rank=64, return_info=True, **PDA)
        exact = naive.attention(q, k, v)
        assert naive.relative(out, exact) <= 1.1 * info.error_limit
        assert naive.row_errors(out, exact).max() < 3.0  # clipped to the values, so never far off


def test_paper_variant_with_shared_key_heads(rng):
    """calibrate=False clips every query head to the values of its own key head."""
    q, k, v = (rng.standard_normal((heads, 1000, 8), np.float32) for heads in (8, 2, 2))
    v[1] *= 100
    options = {"rank": 32, "proj_dim": 8, "calibrate": False, "tol": None, "method": "pda"}
    shared = attention(q, k, v, **options)
    alone = attention(q, k.repeat(4, axis=0), v.repeat(4, axis=0), **options)
    np.testing.assert_array_equal(shared, alone)
    assert (np.abs(shared).max(axis=(1, 2)) <= np.abs(v).max(axis=(1, 2)).repeat(4)).all()


def test_limit_of_exact_heads_allows_for_cancellation(rng):
    """Values that average out: rounding is small beside them, not beside the output."""
    q, k = (rng.standard_normal((4000, 8), np.float32) * np.float32(s) for s in (1e-2, 1e-2))
    v = np.where(np.arange(4000)[:, None] % 2, 1, -1).astype(np.float32)
    out, info = attention(q, k, v, method="exact", return_info=True)
    assert naive.relative(out, naive.attention(q, k, v)) <= info.error_limit
