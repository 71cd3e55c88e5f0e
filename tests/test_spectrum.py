"""The softmax matrix as an operator, and its singular values, against dense matrices in float64."""

import masks
import naive
import numpy as np
import problems
import pytest

import pda_numba
from pda_numba import spectrum, theory
from pda_numba.device import CPU
from pda_numba.matrix import Softmax, heads_of, queries_of_keys
from pda_numba.orthonormal import orthonormal
from pda_numba.spectrum import Spectrum

# --- an orthonormal basis ---


@pytest.mark.parametrize(("n", "count"), [(1, 1), (5, 3), (97, 97), (500, 60)])
def test_orthonormal(n, count, rng):
    x = rng.standard_normal((2, n, count)) * 10.0 ** -np.linspace(0, 12, count)
    kept = x.copy()
    q, r = orthonormal(x)
    assert (x == kept).all()
    # rounding of sums of up to 500 products
    np.testing.assert_allclose(np.swapaxes(q, 1, 2) @ q, np.broadcast_to(np.eye(count), r.shape), rtol=0, atol=1e-13)
    np.testing.assert_allclose(q @ r, x, rtol=0, atol=1e-14 * np.abs(x).max(axis=1, keepdims=True).max())
    assert (np.tril(r, -1) == 0).all()


def test_orthonormal_without_full_rank(rng):
    x = np.zeros((1, 30, 6))
    x[0, :, 1] = x[0, :, 3] = rng.standard_normal(30)
    x[0, :, 4] = rng.standard_normal(30)
    x[0, :, 5] = 2 * x[0, :, 4] - x[0, :, 1]
    q, r = orthonormal(x)
    np.testing.assert_allclose(q[0].T @ q[0], np.eye(6), rtol=0, atol=1e-14)
    np.testing.assert_allclose(q @ r, x, rtol=0, atol=1e-13)
    assert (np.flatnonzero(np.diag(r[0])) == [1, 4]).all()


# --- products ---


@pytest.mark.parametrize(("n", "m"), [(1, 1), (63, 97), (500, 97), (97, 1100)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products(n, m, dtype, rng):
    q, k, _ = problems.make("peaked", n, m, seed=1, dtype=dtype) if n > 6 else problems.make("gaussian", n, m, seed=1)
    q, k = q.astype(dtype), k.astype(dtype)
    a = naive.softmax(naive.logits(q, k))
    matrix = Softmax(CPU, q[None], k[None], q.shape[1] ** -0.5, 0)
    x, y = rng.standard_normal((m, 9)), rng.standard_normal((n, 9))
    # logits of up to about 100, rounded: so many units in the last place of the weights
    rounding = 100 * np.finfo(dtype).eps
    assert naive.relative(matrix.transposed_times(y[None])[0], a.T @ y) <= rounding
    assert naive.relative(matrix.times(x[None])[0], a @ x) <= rounding
    np.testing.assert_allclose(matrix.row_squares()[0], np.square(a).sum(axis=1), rtol=2 * rounding)


@pytest.mark.parametrize("name", masks.MASKS)
@pytest.mark.parametrize(("n", "m"), [(2, 63), (63, 2), (97, 300), (300, 97)])
def test_which_queries_see_a_key(name, n, m):
    from pda_numba.mask import check

    options, seen = masks.MASKS[name](n, m, 3)
    names = "causal", "query_lengths", "key_lengths", "key_mask", "cu_seqlens", "exact_rows"
    mask = check(tuple(options.get(x, False if x == "causal" else None) for x in names), (3, 1), n, m)
    for b in range(3):
        pattern = mask.patterns[mask.pattern[b]]
        keys = np.arange(m) if pattern.keys is None else pattern.keys
        spans = queries_of_keys(pattern, len(keys))
        found = (spans[:, :1] <= np.arange(n)) & (np.arange(n) < spans[:, 1:])
        np.testing.assert_array_equal(found.T, seen[b][:, keys])


# --- singular values ---


def dense(q, k):
    return np.linalg.svd(naive.softmax(naive.logits(q, k)), compute_uv=False)


@pytest.mark.parametrize("kind", ["decaying", "peaked", "duplicated", "outliers", "gaussian"])
@pytest.mark.parametrize(("n", "m"), [(1024, 1024), (500, 97), (97, 1025)])
def test_leading_singular_values(kind, n, m):
    q, k, _ = problems.make(kind, n, m, seed=0)
    rank = 16
    found, s = spectrum(q, k, rank=rank), dense(q, k)
    # where they hardly fall, n_iter=2 leaves the last of 16 up to a percent short
    np.testing.assert_allclose(found.singular_values, s[:rank], rtol=1e-2 if (kind, n) == ("gaussian", 1024) else 1e-3)
    assert (found.singular_values <= s[:rank] * (1 + 1e-5)).all()  # float32
    norm = np.linalg.norm(s)
    best = np.sqrt(np.append(np.cumsum(np.square(s[::-1]))[::-1], 0)) / norm
    assert found.frobenius_norm == pytest.approx(norm, rel=1e-5)
    np.testing.assert_allclose(found.tail, best[: rank + 1], rtol=0.01, atol=1e-6)
    # leave-one-out: it is about a basis with one column less, and a mean of 26 squares
    assert 0.95 * best[rank] <= found.error <= 1.2 * best[rank]
    assert s[:rank].sum() * (1 - 1e-2) <= found.nuclear_norm <= s.sum() * (1 + 1e-5)
    for tol in (0.5, 0.2, 0.1):
        needed = int(np.argmax(best <= tol))
        assert found.rank_for(tol) == (needed if needed <= rank else -1)


def test_the_leave_one_out_estimate_is_right_on_average():
    """One power iteration and few columns, so that the estimate is of something that varies."""
    q, k, _ = problems.make("decaying", 300, 200, seed=3)
    s = dense(q, k)
    found = [spectrum(q, k, rank=6, n_oversamples=2, n_iter=0, seed=seed) for seed in range(20)]
    last = np.sqrt(np.square(s[6:]).sum() / np.square(s).sum())
    mean = np.sqrt(np.mean([np.square(f.error) for f in found]))
    spread = np.std([f.error for f in found]) / np.sqrt(len(found))
    assert mean >= last
    assert mean <= 2 * last  # without power iterations the basis is that much worse than the best
    assert spread < 0.1 * mean
    best = spectrum(q, k, rank=6, n_iter=3).error
    assert last * 0.95 <= best <= 1.1 * last


def test_more_iterations_are_closer():
    q, k, _ = problems.make("gaussian", 500, seed=2)
    s = dense(q, k)[:20]
    wrong = [np.max(1 - spectrum(q, k, rank=20, n_iter=i).singular_values / s) for i in range(4)]
    assert wrong[0] > 2 * wrong[1] > 4 * wrong[2] > 8 * wrong[3] > 0


def test_all_singular_values():
    q, k, _ = problems.make("decaying", 60, 40, seed=0, dtype=np.float64)
    found = spectrum(q, k, rank=40, n_iter=1)
    np.testing.assert_allclose(found.singular_values, dense(q, k), rtol=0, atol=1e-13)
    assert found.error == 0
    assert found.tail[-1] == 0
    assert found.nuclear_norm == pytest.approx(dense(q, k).sum())


def test_a_flat_spectrum():
    q, k = theory.permutation_attention(400, mass=0.95)
    found = spectrum(q, k, rank=30)
    assert found.singular_values[-1] > 0.9
    assert found.rank_for(0.9) == -1
    assert found.error > 0.9


def test_heads_are_those_of_single_calls():
    q, k, _ = masks.problem(200, 150, batch=2)
    found = spectrum(q, k[:1], rank=5)
    assert found.singular_values.shape == (2, 4, 5)
    assert found.error.shape == found.rank_for(0.1).shape == (2, 4)
    for b, h in np.ndindex(2, 4):
        s = dense(q[b, h], k[0, h // 2])
        np.testing.assert_allclose(found.singular_values[b, h], s[:5], rtol=1e-3)


@pytest.mark.parametrize("name", masks.MASKS)
def test_masks(name):
    make, (n, m) = masks.MASKS[name], (130, 97)
    options, seen = make(n, m, 3)
    options.pop("exact_rows", None)
    q, k, _ = masks.problem(n, m, key_heads=1)
    hidden = ~seen.any(axis=1)
    k[:, 0][hidden] = np.nan  # never read
    found = spectrum(q, k, rank=6, **options)
    for b, h in np.ndindex(3, 2):
        a = masks.weights(q[b, h], k[b, 0], seen[b])
        s = np.linalg.svd(a, compute_uv=False)[:6]
        np.testing.assert_allclose(found.singular_values[b, h], s, rtol=2e-3, atol=1e-5)
        assert found.frobenius_norm[b, h] == pytest.approx(np.linalg.norm(a), rel=1e-5)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_other_dtypes_and_strides(name):
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if name == "bfloat16" else np.dtype(name)
    q, k, _ = problems.make("decaying", 200, 150, seed=4)
    q, k = (np.stack([x, x], axis=1)[:, ::-1].astype(dtype).transpose(1, 0, 2) for x in (q, k))
    found = spectrum(q, k, rank=8, scale=0.3)
    s = np.linalg.svd(naive.softmax(naive.logits(q[0], k[0], 0.3)), compute_uv=False)
    np.testing.assert_allclose(found.singular_values, np.stack([s[:8]] * 2), rtol=1e-3)
    assert found.dtype == ("float64" if name == "float64" else "float32")


def test_read_only_arrays_are_not_compiled_for(rng):
    q, k = (rng.standard_normal((2, 9, 3)).astype(np.float32) for _ in range(2))
    q.flags.writeable = k.flags.writeable = False
    with heads_of(q, k, None, 0, "cpu", True, lambda *sizes: 1.0) as heads:
        assert heads.problem.q.flags.writeable
        assert heads.problem.k.flags.writeable


def test_seeds_and_text():
    q, k, _ = problems.make("decaying", 120, seed=5)
    one, same, other = (spectrum(q, k, rank=4, n_iter=0, seed=seed) for seed in (1, 1, 2))
    assert (one.singular_values == same.singular_values).all()
    assert (one.singular_values != other.singular_values).any()
    text = str(one).splitlines()
    assert text[0].split()[:3] == ["head", "largest", "value"]
    assert f"{float(one.singular_values[0]):.4g}" in text[1]
    assert "120 queries, 120 keys, 0 power iterations, 10 columns more than the rank, seed 1" in text[-2]
    assert text[-1].endswith("float32")
    assert "-1: more than 4" in str(spectrum(*problems.make("gaussian", 120, seed=0)[:2], rank=4))
    assert isinstance(one, Spectrum)
    assert one.rank == 4


def test_no_heads():
    found = spectrum(np.zeros((0, 5, 4), np.float32), np.zeros((0, 5, 4), np.float32), rank=2)
    assert found.singular_values.shape == (0, 2)
    assert found.rank_for(0.5).shape == (0,)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank must be at least 1, got 0"),
        ({"rank": 9}, ValueError, "rank must be between 1 and the smaller of N and M, 8, got 9"),
        ({"rank": 2.0}, TypeError, "rank must be an integer, got 2.0"),
        ({"rank": 2, "n_iter": -1}, ValueError, "n_iter must be at least 0, got -1"),
        ({"rank": 2, "n_oversamples": -1}, ValueError, "n_oversamples must be at least 0, got -1"),
        ({"rank": 2, "device": "tpu"}, ValueError, "device must be 'auto', 'cpu' or 'cuda', got 'tpu'"),
        ({"rank": 2, "causal": 1}, TypeError, "causal must be True or False, got 1"),
        ({"rank": 2, "scale": 0}, ValueError, "scale must be a finite number above 0, got 0"),
    ],
)
def test_errors(options, error, message, rng):
    q, k = rng.standard_normal((9, 3)), rng.standard_normal((8, 3))
    with pytest.raises(error, match=message):
        spectrum(q, k, **options)


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        ((9, 3), (1, 8, 3), r"q and k must have the same number of axes, got shapes \(9, 3\) and \(1, 8, 3\)"),
        ((9, 3), (0, 3), r"k must hold at least one key, got shape \(0, 3\)"),
        ((9, 3), (8, 4), r"q and k must have the same last axis, got shapes \(9, 3\) and \(8, 4\)"),
        ((3, 9, 3), (2, 8, 3), "query heads must be a multiple of the number of key heads"),
        ((0, 3), (8, 3), "rank must be between 1 and the smaller of N and M, 0, got 2"),
    ],
)
def test_shapes(q, k, message):
    with pytest.raises(ValueError, match=message):
        spectrum(np.zeros(q), np.zeros(k), rank=2)


def test_input_that_is_not_finite(rng):
    q, k = rng.standard_normal((2, 9, 3))
    q[4, 1] = np.nan
    with pytest.raises(ValueError, match="q must be finite, got NaN or infinity at token 4, column 1"):
        spectrum(q, k, rank=2)
    with pytest.raises(ValueError, match="tol must be a finite number above 0"):
        spectrum(k, k, rank=2).rank_for(0)
    assert pda_numba.spectrum is spectrum
