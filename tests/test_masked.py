"""Masks: causal, key lengths, key masks, packed sequences, exact rows; each against dense matrices in float64."""

import masks
import naive
import numpy as np
import problems
import pytest

import pda_numba
import pda_numba.data
from pda_numba import attention, attention_backward, attention_forward
from pda_numba.rectangles import LEAF, Segment, divide

PDA = {"method": "pda", "rank": 12, "tol": None}
LENGTHS = [(1, 1), (2, 63), (63, 2), (97, 500), (500, 97), (1025, 1025)]


@pytest.fixture(params=masks.MASKS, scope="module")
def make(request):
    return masks.MASKS[request.param]


# --- the tree of rectangles ---


def covered(n, m, segments, pays):
    """How often each key is seen by each query."""
    spans, low, rest = divide(segments, n, pays)
    seen = np.zeros((n, m), int)
    for i, (a, b) in enumerate(spans):
        seen[i, a:b] += 1
    for query, key, queries, keys, _ in low + rest:
        seen[query : query + queries, key : key + keys] += 1
    return seen


@pytest.mark.parametrize("pays", [lambda n, m: min(n, m) >= 300, lambda n, m: n > m, lambda n, m: False])
@pytest.mark.parametrize("n", [1, LEAF - 1, LEAF, LEAF + 1, 1000, 2048, 3001])
def test_every_key_is_taken_once(n, pays, rng):
    own = np.arange(n)
    kept = np.sort(rng.choice(n + 500, (n + 500) // 2, replace=False))
    cases = {
        "square": (own, own + 1, n),
        "more keys": (own + 700, own + 701, n + 700),
        "fewer keys": (np.clip(own - n // 3, 0, n), np.clip(own + 1 - n // 3, 0, n), n),
        "holes": (np.searchsorted(kept, own + 500), np.searchsorted(kept, own + 501), len(kept)),
        "all": (np.full(n, n), np.full(n, n), n),
    }
    for start, end, m in cases.values():
        seen = covered(n, m, [Segment(0, 0, start, end)], pays)
        assert (seen == (np.arange(m) < end[:, None])).all()


# --- exact ---


@pytest.mark.parametrize(("n", "m"), LENGTHS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exact_attention_under_masks(make, n, m, dtype):
    options, seen = make(n, m, 3)
    q, k, v = masks.problem(n, m, dtype=dtype)
    out, info = attention(q, k, v, method="exact", return_info=True, **options)
    true = masks.attention(q, k, v, seen)
    for b, h in np.ndindex(q.shape[:2]):
        plain = masks.plain(q[b, h], k[b, h // 2], v[b, h // 2], seen[b])
        # twice a plain implementation in this precision; of few keys, or in float64, that may happen to be just right
        assert naive.relative(out[b, h], true[b, h]) <= max(
            2 * naive.relative(plain, true[b, h]), 8 * np.finfo(dtype).eps
        )
    assert (info.empty_rows == (~seen.any(axis=2)).sum(axis=1)[:, None]).all()
    assert (out[~np.broadcast_to(seen.any(axis=2)[:, None], out.shape[:3])] == 0).all()


def test_layouts_and_dtypes(make):
    options, seen = make(300, 350, 2)
    q, k, v = masks.problem(300, 350, batch=2)
    plain = attention(q, k, v, method="exact", **options)
    fortran = [np.asfortranarray(x) for x in (q, k, v)]
    assert np.array_equal(attention(*fortran, method="exact", **options), plain)
    half = [x.astype(np.float16) for x in (q, k, v)]
    true = masks.attention(*half, seen)
    # the output is rounded to 11 bits
    assert naive.relative(attention(*half, method="exact", **options), true) < 2**-11


# --- low rank ---


def test_a_rectangle_is_exact_where_its_near_field_would_cost_more():
    """Both heads have one rectangle for which low rank alone would pay."""
    smooth, peaked = (
        (x[0] for x in pda_numba.data.smooth_heads((1, 7168, 64))),
        problems.make("peaked", 7168, d=64, e=64, seed=0),
    )
    q, k, v = (np.stack(x) for x in zip(smooth, peaked, strict=True))
    out, info = attention(q, k, v, causal=True, rank=32, tol=None, return_info=True)
    assert list(info.method) == ["pda", "exact"]
    assert list(info.rectangles) == [1, 0]
    _, info = attention(q[1], k[1], v[1], causal=True, rank=32, tol=None, method="pda", return_info=True)
    assert info.rectangles > 1  # whatever it costs
    assert info.near == "content"
    exact = attention(q[1], k[1], v[1], causal=True, method="exact")
    assert naive.relative(out[1], exact) < 1e-6  # sums in another order


@pytest.mark.parametrize(("n", "m"), [(1100, 1100), (900, 1300), (1300, 900)])
def test_low_rank_under_masks(make, n, m):
    options, seen = make(n, m, 3)
    q, k, v = masks.problem(n, m)
    out, info = attention(q, k, v, return_info=True, **PDA, **options)
    true = masks.attention(q, k, v, seen)
    assert (info.rectangles > 0).any()
    for b, h in np.ndindex(q.shape[:2]):
        error = naive.relative(out[b, h], true[b, h])
        assert error <= 1.5 * max(info.error_limit[b, h], 1e-6)  # a limit at 95 %, of 12 heads
        assert error < 0.25
        assert (info.method[b, h] == "pda") == (info.rectangles[b, h] > 0)


@pytest.mark.parametrize("mask", ["causal", "holes, causal", "packed, causal"])
def test_tol_is_kept(mask):
    options, seen = masks.MASKS[mask](2500, 2500, 2)
    q, k, v = masks.problem(2500, 2500, batch=2)
    for tol in (0.1, 0.02, 1e-4):
        out, info = attention(q, k, v, tol=tol, return_info=True, **options)
        for b, h in np.ndindex(q.shape[:2]):
            assert naive.relative(out[b, h], masks.attention(q, k, v, seen)[b, h]) <= tol
        assert (info.error_limit <= tol).all()


def test_last_rows_are_exact_by_default():
    q, k, v = masks.problem(1000, 1000, batch=1)
    seen = masks.below(1000, 1000)[None]
    true = masks.attention(q, k, v, seen)
    out = attention(q, k, v, causal=True, **PDA)
    assert naive.relative(out[..., -64:, :], true[..., -64:, :]) < 1e-6
    assert naive.relative(out[..., -80:-64, :], true[..., -80:-64, :]) > 1e-4
    out = attention(q, k, v, causal=True, exact_rows=[-100, 700], **PDA)
    assert naive.relative(out[..., [900, 700], :], true[..., [900, 700], :]) < 1e-6
    assert naive.relative(out[..., -64:, :], true[..., -64:, :]) > 1e-4
    none, one = (attention(q, k, v, causal=True, exact_rows=rows, **PDA) for rows in ([], slice(7, 7)))
    assert np.array_equal(none, one)


def test_last_rows_are_before_the_padding():
    q, k, v = masks.problem(1000, 1000, batch=1)
    out = attention(q, k, v, causal=True, key_lengths=[900], **PDA)
    true = masks.attention(q, k, v, masks.below(1000, 1000)[None] & (np.arange(1000) < 900))
    assert naive.relative(out[..., 836:900, :], true[..., 836:900, :]) < 1e-6
    assert naive.relative(out[..., -64:, :], true[..., -64:, :]) > 1e-4


# --- what is not seen does not matter ---


def spoiled(k, v, where, value):
    k, v = k.copy(), v.copy()
    k[where], v[where] = value, value
    return k, v


@pytest.mark.parametrize(
    "method", [{"method": "exact"}, PDA, {"method": "pda", "tol": 0.05}], ids=["exact", "rank", "tol"]
)
@pytest.mark.filterwarnings("ignore::pda_numba.info.AccuracyWarning")  # of the outputs that do know it
@pytest.mark.parametrize("value", [3.0, np.nan, np.inf], ids=str)
@pytest.mark.parametrize(("n", "m"), [(1200, 1200), (700, 1000)])
def test_no_output_knows_a_later_key(method, value, n, m):
    """Any later key or value changes no bit; nor do the gradients of what was before it, where only that counts."""
    q, k, v = masks.problem(n, m, batch=1)
    options = {"causal": True, "check_finite": False, "exact_rows": slice(-64, None)} | method
    for first in (m - 1, m - 150, m - 600):
        rows = first - (m - n)  # queries that see no key from `first` on
        outputs = []
        for keys, values in ((k, v), spoiled(k, v, np.s_[:, :, first:], value)):
            out, residuals = attention_forward(q, keys, values, **options)
            dout = np.zeros_like(out)
            dout[:, :, :rows] = np.random.default_rng(1).standard_normal(dout[:, :, :rows].shape)
            outputs.append((out[:, :, :rows], *attention_backward(residuals, dout)))
        for name, a, b in zip(("out", "dq", "dk", "dv"), *outputs, strict=True):
            assert np.array_equal(a, b), (name, first)


@pytest.mark.parametrize("mask", ["lengths", "lengths, causal", "holes", "holes, causal"])
@pytest.mark.parametrize("value", [3.0, np.nan], ids=str)
def test_masked_keys_do_not_matter(mask, value):
    options, seen = masks.MASKS[mask](1200, 1200, 3)
    q, k, v = masks.problem(1200, 1200)
    hidden = np.broadcast_to(~seen.any(axis=1)[:, None], k.shape[:3])
    assert hidden.any()
    outputs = []
    for keys, values in ((k, v), spoiled(k, v, hidden, value)):
        out, residuals = attention_forward(q, keys, values, **PDA, **options)  # finite as far as anyone sees
        outputs.append((out, *attention_backward(residuals, np.ones_like(out))))
    for a, b in zip(*outputs, strict=True):
        assert np.array_equal(a, b)
    assert (outputs[0][2][hidden] == 0).all()
    assert (outputs[0][3][hidden] == 0).all()


# --- gradients ---


@pytest.mark.parametrize(("n", "m"), LENGTHS)
def test_exact_gradients_under_masks(make, n, m):
    options, seen = make(n, m, 3)
    q, k, v = masks.problem(n, m, dtype=np.float64)
    out, residuals = attention_forward(q, k, v, method="exact", **options)
    dout = np.random.default_rng(2).standard_normal(out.shape)
    true = masks.gradients(q, k, v, seen, dout)
    for own, exact in zip(attention_backward(residuals, dout), true, strict=True):
        # float64 rounds at 1e-16; sums of up to a thousand terms. One key alone has no gradient, but for rounding.
        assert np.abs(own - exact).max() <= 1e-13 * max(np.abs(exact).max(), 0.01)


def test_float32_gradients_under_a_causal_mask():
    q, k, v = masks.problem(1025, 1025, batch=1, d=64, e=64)
    seen = masks.below(1025, 1025)[None]
    out, residuals = attention_forward(q, k, v, causal=True, method="exact")
    dout = np.random.default_rng(2).standard_normal(out.shape).astype(np.float32)
    true = masks.gradients(q, k, v, seen, dout)
    for i, own in enumerate(attention_backward(residuals, dout)):
        assert own.dtype == np.float32
        plain = plain_gradients(q[0], k[0], v[0], seen[0], dout[0])[i]
        assert naive.relative(own[0], true[i][0]) <= 3 * naive.relative(plain, true[i][0])


def plain_gradients(q, k, v, seen, dout):
    """Of grouped heads, in the arithmetic of the arrays."""
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    scale = np.float32(q.shape[2] ** -0.5)
    for h in range(len(q)):
        a, dp = masks.plain_weights(q[h], k[h // 2], seen), dout[h] @ v[h // 2].T
        ds = a * (dp - (dp * a).sum(axis=1, keepdims=True))
        dq[h] = scale * (ds @ k[h // 2])
        dk[h // 2] += scale * (ds.T @ q[h])
        dv[h // 2] += a.T @ dout[h]
    return dq, dk, dv


# --- what is said of it ---


def test_heads_alone_or_together_keep_their_limits():
    q, k, v = masks.problem(1500, 1500, batch=2)
    together, info = attention(q, k, v, causal=True, return_info=True, **PDA)
    for b, h in np.ndindex(q.shape[:2]):
        alone = attention(q[b, h], k[b, h // 2], v[b, h // 2], causal=True, **PDA)
        assert naive.relative(together[b, h], alone) <= 2 * info.error_limit[b, h]


def test_a_padded_sequence_is_certified_like_one_alone():
    """Its own held-out rows say what it is off by, not those of a merged output; and they are exact."""
    lengths = np.array([2000, 900])
    q, k, v = (np.stack([x, x])[:, None] for x in problems.make("decaying", 2000, d=16, e=8, seed=3))
    padded = attention(q, k, v, query_lengths=lengths, key_lengths=lengths, return_info=True, near="none", **PDA)
    for b, length in enumerate(lengths):
        true = naive.attention(*(x[b, 0, :length] for x in (q, k, v)))
        assert naive.relative(padded[0][b, 0, :length], true) <= padded[1].error_limit[b, 0]
        alone = attention(*(x[b, 0, :length] for x in (q, k, v)), return_info=True, near="none", **PDA)[1]
        own = padded[1].rows[b, 0] - (2000 - length)  # rows of padding are exact too
        # As many rows for the fit and for the certificate; doubtful ones, at most `rank`, depend on the draws.
        assert abs(int(own) - int(alone.rows)) <= PDA["rank"] + 2


@pytest.mark.parametrize("order", ["C", "F"])
def test_padding_is_zero_in_an_output_of_the_callers(order):
    """New memory is zero already and is left alone; the caller's, and what is copied to it, is cleared."""
    lengths = np.array([1500, 700])
    q, k, v = (np.stack([x, x])[:, None] for x in problems.make("decaying", 1500, d=16, e=8, seed=3))
    options = {"query_lengths": lengths, "key_lengths": lengths, "return_info": True, **PDA}
    fresh, info = attention(q, k, v, **options)
    assert (info.method == "pda").all()
    given = np.full(fresh.shape, np.nan, np.float32, order=order)
    assert attention(q, k, v, out=given, **options)[0] is given
    np.testing.assert_array_equal(given, fresh)
    for b, length in enumerate(lengths):
        assert (fresh[b, 0, length:] == 0).all()
        assert np.abs(fresh[b, 0, :length]).min(axis=0).max() > 0


def test_the_error_of_any_output_under_a_mask(make):
    options, seen = make(700, 800, 2)
    if "exact_rows" in options:
        options = {}
    q, k, v = masks.problem(700, 800, batch=2)
    true = masks.attention(q, k, v, seen)
    out = (true * 1.03).astype(np.float32)
    found = pda_numba.estimate_error(out, q, k, v, **options)
    for b, h in np.ndindex(q.shape[:2]):
        if np.abs(true[b, h]).max() > 0:
            # The same in every row; but the first rows are several times as large as the last, and one row in five is
            # looked at: the estimate's own deviation is about a tenth.
            assert abs(found.error[b, h] / 0.03 - 1) < 0.3
            assert found.error_limit[b, h] > 0.028
        else:
            assert found.error[b, h] == 0


def test_estimate_of_the_gradient_is_not_claimed():
    q, k, v = masks.problem(1100, 1100, batch=1)
    out, residuals = attention_forward(q, k, v, causal=True, **PDA)
    *_, info = attention_backward(residuals, out, return_info=True)
    assert np.isnan(info.gradient_error).all()


def test_threads_do_not_change_a_bit(make):
    import numba

    options, _ = make(1100, 1200, 2)
    q, k, v = masks.problem(1100, 1200, batch=2)
    found = []
    for threads in (1, numba.get_num_threads()):
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        try:
            out, residuals = attention_forward(q, k, v, **PDA, **options)
            found.append((out, *attention_backward(residuals, out)))
        finally:
            numba.set_num_threads(before)
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a, b)


# --- bad input ---

BAD = {
    "causal": ({"causal": 1}, TypeError, ["causal", "True or False", "1"]),
    "lengths shape": ({"key_lengths": [3, 4, 5]}, ValueError, ["key_lengths", "(2,)", "(3,)"]),
    "lengths too long": ({"key_lengths": [3, 41]}, ValueError, ["key_lengths", "40", "41"]),
    "lengths negative": ({"key_lengths": -1}, ValueError, ["key_lengths", "-1"]),
    "lengths float": ({"key_lengths": [3.0, 4.0]}, TypeError, ["key_lengths", "integers", "float64"]),
    "query lengths": ({"query_lengths": [3, 31]}, ValueError, ["query_lengths", "queries 30", "31"]),
    "packed lengths": (
        {"query_lengths": [3, 3], "cu_seqlens": ([0, 30], [0, 40])},
        ValueError,
        ["cu_seqlens", "query_lengths", "together"],
    ),
    "mask dtype": ({"key_mask": np.ones((2, 40))}, TypeError, ["key_mask", "boolean", "float64"]),
    "mask shape": ({"key_mask": np.ones((2, 30), bool)}, ValueError, ["key_mask", "(2, 40)", "(2, 30)"]),
    "both": (
        {"key_mask": np.ones((2, 40), bool), "key_lengths": 3},
        ValueError,
        ["key_lengths", "key_mask", "together"],
    ),
    "cu_seqlens end": ({"cu_seqlens": ([0, 30], [0, 39])}, ValueError, ["cu_seqlens", "keys", "40", "39"]),
    "cu_seqlens start": ({"cu_seqlens": ([1, 30], [0, 40])}, ValueError, ["cu_seqlens", "queries", "1"]),
    "cu_seqlens fall": ({"cu_seqlens": ([0, 20, 10, 30], [0, 1, 2, 40])}, ValueError, ["cu_seqlens", "falling"]),
    "cu_seqlens count": ({"cu_seqlens": ([0, 30], [0, 2, 40])}, ValueError, ["cu_seqlens", "as many"]),
    "cu_seqlens axes": ({"cu_seqlens": ([[0, 30]], [0, 40])}, ValueError, ["cu_seqlens", "one axis"]),
    "cu_seqlens three": ({"cu_seqlens": ([0], [0], [0])}, ValueError, ["cu_seqlens", "pair", "3"]),
    "rows beyond": ({"exact_rows": [30]}, ValueError, ["exact_rows", "29", "30"]),
    "rows float": ({"exact_rows": [1.5]}, TypeError, ["exact_rows", "indices"]),
    "rows text": ({"exact_rows": "last"}, TypeError, ["exact_rows", "'last'"]),
    "rows axes": ({"exact_rows": [[1, 2]]}, TypeError, ["exact_rows", "(1, 2)"]),
    "rows slice": ({"exact_rows": slice("a")}, TypeError, ["exact_rows", "slice"]),
    "window": ({"causal": True, "window": 5}, ValueError, ["window", "0", "5"]),
    "calibrate": ({"causal": True, "calibrate": False, "proj_dim": 3}, ValueError, ["calibrate", "True"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_masks_are_named(case):
    changes, kind, words = BAD[case]
    q, k, v = masks.problem(30, 40, batch=2)
    with pytest.raises(kind) as error:
        attention(q, k, v, **changes)
    for word in words:
        assert word in str(error.value)


def test_two_axes_have_no_batch():
    q, k, v = (x[0, 0] for x in masks.problem(30, 40, batch=1, group=1))
    out = pda_numba.attention(q, k, v, key_lengths=7)
    assert naive.relative(out, naive.attention(q, k[:7], v[:7])) < 1e-6
    mask = np.arange(40) % 3 == 0
    out = pda_numba.attention(q, k, v, key_mask=mask)
    assert naive.relative(out, naive.attention(q, k[mask], v[mask])) < 1e-6
