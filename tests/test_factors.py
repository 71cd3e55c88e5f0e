"""Explicit factors of the softmax matrix, against dense matrices in float64."""

import importlib

import masks
import naive
import numpy as np
import problems
import pytest

from pda_numba import AttentionFactors, factorize

made = importlib.import_module("pda_numba.factorize")
kept = importlib.import_module("pda_numba.factors")


def dense(q, k):
    return naive.softmax(naive.logits(q, k))


def product(factors, head=()):
    left, s, right = (getattr(factors, x)[head].astype(float) for x in ("left", "singular_values", "right"))
    return (left * s) @ right.T


def best(a, rank):
    s = np.linalg.svd(a, compute_uv=False)
    return np.sqrt(np.square(s[rank:]).sum() / np.square(s).sum())


@pytest.fixture(scope="module")
def smooth():
    """q, k and their factors of rank 32."""
    q, k, _ = problems.make("decaying", 900, 600, seed=0)
    return q, k, factorize(q, k, rank=32)


# --- what they are ---


@pytest.mark.parametrize("kind", ["clustered", "decaying", "duplicated", "near_uniform", "outliers"])
@pytest.mark.parametrize(("n", "m"), [(700, 700), (1500, 300), (400, 1025)])
def test_factors_of_heads(kind, n, m):
    q, k, _ = problems.make(kind, n, m, seed=0)
    found, a, rank = factorize(q, k, rank=24), dense(q, k), 24
    for x in (found.left, found.right):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x.T @ x, np.eye(rank), rtol=0, atol=1e-5)  # float32
    assert (np.diff(found.singular_values) <= 0).all()
    assert (found.right[np.abs(found.right).argmax(axis=0), np.arange(rank)] > 0).all()
    true = naive.relative(product(found), a)
    assert best(a, rank) <= true * (1 + 1e-6)
    assert true <= 4 * best(a, rank)  # outlying rows cost the most; 1.1 to 3 elsewhere
    assert 0.8 * true <= found.error <= 1.25 * true
    assert true <= found.error_limit <= 1.6 * true
    assert found.frobenius_norm == pytest.approx(np.linalg.norm(a), rel=0.02)
    assert found.nuclear_norm == pytest.approx(found.singular_values.sum())
    assert found.singular_values[0] == pytest.approx(np.linalg.norm(a, 2), rel=0.01)


def test_the_product_is_the_fit(monkeypatch):
    """E / den C A[I], with C from the oracle's ridge on what the fit had before it; one row is mended."""
    seen = []

    class Model(made._Model):
        def __init__(self, *given):
            seen.append(given)
            super().__init__(*given)

    monkeypatch.setattr(made, "_Model", Model)
    monkeypatch.setattr(made, "_to_mend", lambda coordinates, leverage, chosen, count: chosen[:1])
    q, k, _ = problems.make("decaying", 400, 300, seed=3)
    found = factorize(q, k, rank=16)
    _, factor, landmarks, chosen, lse, weight, ridge = seen[0]
    scale, lse = float(factor) * np.log(2), lse * np.log(2)
    features, a = naive.features(q, landmarks, chosen, lse, scale).T, dense(q, k)
    assert ridge > 1e-15  # else the oracle's least squares and the SVD need not agree
    z = naive.ridge(features, np.hstack([a[chosen], np.ones((len(chosen), 1))]), weight, float(ridge))
    e = np.exp(naive.logits(q, landmarks, scale) - naive.logits(q, landmarks, scale).max(axis=1, keepdims=True))
    expected = e @ z[:, :-1] / (e @ z[:, -1:])
    expected[chosen[0]] = a[chosen[0]]
    u, s, vt = np.linalg.svd(expected, full_matrices=False)
    expected = (u[:, :16] * s[:16]) @ vt[:16]
    np.testing.assert_allclose(product(found), expected, rtol=0, atol=2e-5 * expected.max())  # float32 rows and lse


def test_rows_that_the_fit_gets_wrong_are_mended(monkeypatch):
    q, k, _ = problems.make("outliers", 700, 500, seed=1)
    found, a = factorize(q, k, rank=24), dense(q, k)
    monkeypatch.setattr(made, "_to_mend", lambda coordinates, leverage, chosen, count: chosen)
    without = factorize(q, k, rank=24)
    assert naive.relative(product(found), a) < 0.9 * naive.relative(product(without), a)
    assert (np.linalg.norm(product(without), axis=1) <= 1 + 1e-5).all()  # no row of a softmax is longer


def test_the_limit_holds_as_often_as_it_should():
    held, runs = 0, 40
    for seed in range(runs):
        q, k, _ = problems.make(("decaying", "outliers", "duplicated", "clustered")[seed % 4], 900, 500, seed=seed)
        found = factorize(q, k, rank=16, seed=seed)
        held += naive.relative(product(found), dense(q, k)) <= found.error_limit
    assert held >= naive.fewest_successes(runs, 0.95, 1e-3)


def test_few_rows_or_columns_are_decomposed_exactly():
    for n, m in ((60, 1000), (1000, 60), (1, 5)):
        q, k, _ = problems.make("gaussian", n, m, seed=1)
        rank = min(n, m, 20)
        found, a = factorize(q, k, rank=rank), dense(q, k)
        u, s, vt = np.linalg.svd(a, full_matrices=False)
        np.testing.assert_allclose(found.singular_values, s[:rank], rtol=1e-6)
        np.testing.assert_allclose(product(found), (u[:, :rank] * s[:rank]) @ vt[:rank], rtol=0, atol=1e-6)
        assert found.error == found.error_limit == pytest.approx(best(a, rank), abs=1e-12)
        assert found.frobenius_norm == pytest.approx(np.linalg.norm(a))


def test_a_rank_that_is_not_there():
    """Forty different keys."""
    q, k, _ = problems.make("duplicated", 600, 500, seed=2)
    found, a = factorize(q, k, rank=64), dense(q, k)
    assert found.effective_rank <= 40
    assert (found.singular_values[40:] <= 1e-5).all()  # float32
    assert naive.relative(product(found), a) < 0.02
    assert np.isfinite(found.left).all()
    np.testing.assert_allclose(found.right.T @ found.right, np.eye(64), rtol=0, atol=1e-5)


def test_rows_whose_normaliser_is_lost(monkeypatch, smooth):
    """They get their exact one. Here: all that cancel at all."""
    q, k, found = smooth
    asked = []
    normalisers = made._normalisers
    monkeypatch.setattr(made, "_normalisers", lambda *task: asked.append(task[2]) or normalisers(*task))
    monkeypatch.setattr(made, "_LEAST_DEN", 0.999)
    again = factorize(q, k, rank=32)
    assert len(asked[0]) > 100
    a = dense(q, k)
    assert naive.relative(product(again), a) <= 1.5 * naive.relative(product(found), a)
    assert (again.left != found.left).any()


def test_heads():
    q, k, _ = masks.problem(500, 300, batch=2)
    found = factorize(q, k[:1], rank=16)
    assert found.left.shape == (2, 4, 500, 16)
    assert found.right.shape == (2, 4, 300, 16)
    assert found.error.shape == (2, 4)
    for b, h in np.ndindex(2, 4):
        true = naive.relative(product(found, (b, h)), dense(q[b, h], k[0, h // 2]))
        assert 0.7 * true <= found.error[b, h] <= 1.4 * true


def test_no_heads():
    found = factorize(np.zeros((0, 90, 4), np.float32), np.zeros((0, 80, 4), np.float32), rank=2)
    assert found.left.shape == (0, 90, 2)
    assert found.apply(np.zeros((0, 80, 3), np.float32)).shape == (0, 90, 3)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_other_dtypes(name):
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if name == "bfloat16" else np.dtype(name)
    q, k, v = (x.astype(dtype) for x in problems.make("decaying", 60, 900, seed=4))
    found = factorize(q, k, rank=16)
    assert found.left.dtype == (np.float64 if name == "float64" else np.float32)
    out = found.apply(v)
    assert out.dtype == dtype
    exact = product(found) @ v.astype(float)
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 1e-14}[name]
    assert naive.relative(out, exact) <= rounding


def test_seeds_and_text(smooth):
    q, k, found = smooth
    same, other = factorize(q, k, rank=32), factorize(q, k, rank=32, seed=1)
    assert (same.left == found.left).all()
    assert (same.singular_values != other.singular_values).any()
    header, line = str(found).splitlines()
    assert header.split() == [
        "head",
        "rank",
        "effective",
        "largest",
        "smallest",
        "nuclear",
        "error",
        "95",
        "%",
        "limit",
    ]
    assert line.split()[1:3] == ["32", "32"]
    assert f"{float(found.error):.2e}" in line
    assert found.nbytes == (900 + 600) * 32 * 4 + 32 * 8


# --- what they are for ---


@pytest.mark.parametrize("columns", [1, 5, 70])
def test_apply(columns, smooth, rng):
    _, _, found = smooth
    v = rng.standard_normal((600, columns)).astype(np.float32)
    assert naive.relative(found.apply(v), product(found) @ v) <= 1e-6  # float32


@pytest.mark.parametrize(
    ("shape", "values", "out"),
    [
        ((), (), ()),
        ((), (3,), (3,)),
        ((4,), (), (4,)),
        ((4,), (2,), (4,)),
        ((4,), (1,), (4,)),
        ((2, 4), (2, 4), (2, 4)),
        ((2, 4), (1, 2), (2, 4)),
        ((2, 4), (2,), (2, 4)),
        ((4,), (3, 2), (3, 4)),
    ],
)
def test_pullback_is_the_adjoint(shape, values, out, rng):
    """<dout, A v> = <A^T dout, v>, and heads that share values get them."""
    factors = AttentionFactors(
        rng.standard_normal((*shape, 7, 3)),
        rng.standard_normal((*shape, 5, 3)),
        rng.random((*shape, 3)),
        *(np.zeros(shape) for _ in range(4)),
    )
    v = rng.standard_normal((*values, 5, 2))
    result, pullback = factors.apply_vjp(v)
    assert result.shape == (*out, 7, 2)
    dout = rng.standard_normal(result.shape)
    dv = pullback(dout)
    assert dv.shape == v.shape
    other = rng.standard_normal(v.shape)
    assert np.sum(dout * factors.apply(other)) == pytest.approx(np.sum(dv * other), rel=1e-12)
    for index in np.ndindex(out):
        own = index[len(index) - len(shape) :]
        given = np.broadcast_to(v, (*v.shape[:-3], *v.shape[-3:])) if v.ndim == 2 else v
        group = out[-1] // v.shape[-3] if v.ndim > 2 and shape else 1
        place = () if v.ndim == 2 else (*index[len(index) - (v.ndim - 2) : -1], index[-1] // group)
        place = tuple(i if n > 1 else 0 for i, n in zip(place, v.shape, strict=False))
        np.testing.assert_allclose(result[index], product(factors, own) @ given[place], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "values"), [((), ()), ((), (3,)), ((4,), (2,)), ((2, 4), (1, 2)), ((2, 4), ()), ((1, 4), (3, 2))]
)
def test_gradients_of_apply_are_central_differences(shape, values, rng):
    """With respect to values and factors, of <dout, left diag(s) right^T v>: linear in each of them, so that central
    differences are exact but for rounding.
    """
    arrays = {
        "left": rng.standard_normal((*shape, 7, 3)),
        "singular_values": rng.random((*shape, 3)),
        "right": rng.standard_normal((*shape, 5, 3)),
        "v": rng.standard_normal((*values, 5, 2)),
    }

    def output(**moved):
        now = {**arrays, **moved}
        v = now.pop("v")
        rest = {name: np.zeros(shape) for name in ("error", "error_limit", "frobenius_norm", "effective_rank")}
        return AttentionFactors(**now, **rest).apply_vjp(v)

    out, pullback = output()
    dout = rng.standard_normal(out.shape)
    dv, dleft, dvalues, dright = pullback(dout, factors=True)
    np.testing.assert_array_equal(dv, pullback(dout))
    found = {"left": dleft, "singular_values": dvalues, "right": dright, "v": dv}
    for name, x in arrays.items():
        assert found[name].shape == x.shape
        direction = rng.standard_normal(x.shape)
        ahead, behind = (output(**{name: x + step * direction})[0] for step in (0.5, -0.5))
        assert np.sum(dout * (ahead - behind)) == pytest.approx(np.sum(found[name] * direction), rel=1e-11, abs=1e-11)


def test_truncate(smooth):
    q, k, found = smooth
    whole, a = product(found), dense(q, k)
    short = found.truncate(10)
    assert short.rank == 10
    u, s, vt = np.linalg.svd(whole, full_matrices=False)
    np.testing.assert_allclose(product(short), (u[:, :10] * s[:10]) @ vt[:10], rtol=0, atol=1e-6)
    true = naive.relative(product(short), a)
    assert 0.9 * true <= short.error <= 1.1 * true
    assert true <= short.error_limit
    assert short.effective_rank == 10
    assert found.truncate(32).error == found.error


def test_save_and_load(smooth, tmp_path):
    _, _, found = smooth
    path = tmp_path / "factors of a head"
    found.save(path)
    assert [x.name for x in tmp_path.iterdir()] == [path.name]
    for read in (AttentionFactors.load(path), AttentionFactors.load(str(path))):
        for name, value in vars(found).items():
            assert getattr(read, name).dtype == np.asarray(value).dtype
            np.testing.assert_array_equal(getattr(read, name), value)
        assert str(read) == str(found)


def test_files_of_others(smooth, tmp_path):
    found, path = smooth[2], tmp_path / "factors.npz"
    wrong = "path must name a file written by AttentionFactors.save, got "
    for content in (b"", b"not an archive", b"PK\x03\x04 but not one"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=wrong):
            AttentionFactors.load(path)
    np.save(tmp_path / "x.npy", np.zeros(3))
    np.savez(tmp_path / "x.npz", left=np.zeros(3))
    for name in ("x.npy", "x.npz"):
        with pytest.raises(ValueError, match=wrong):
            AttentionFactors.load(tmp_path / name)
    np.savez(path, format=kept._FORMAT, version=2, **vars(found))
    with pytest.raises(ValueError, match=r"path must name factors of version 1, got version 2 in .*factors\.npz"):
        AttentionFactors.load(path)
    np.savez(path, format=kept._FORMAT, version=1, left=found.left)
    with pytest.raises(ValueError, match="which differs in effective_rank, error, error_limit"):
        AttentionFactors.load(path)
    with pytest.raises(FileNotFoundError):
        AttentionFactors.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q, k: factorize(q, k, rank=0), ValueError, "rank must be at least 1, got 0"),
        (
            lambda q, k: factorize(q, k, rank=9),
            ValueError,
            "rank must be between 1 and the smaller of N and M, 8, got 9",
        ),
        (lambda q, k: factorize(q, k, rank=2, n_rows=0), ValueError, "n_rows must be at least 1, got 0"),
        (lambda q, k: factorize(q, k, rank=2, seed=-1), ValueError, "seed must be between 0 and"),
        (lambda q, k: factorize(q, k.astype("f4"), rank=2), TypeError, "q and k must have the same dtype"),
        (lambda q, k: factorize(q * np.nan, k, rank=2), ValueError, "q must be finite, got NaN"),
        (
            lambda q, k: factorize(q, k, rank=2).truncate(3),
            ValueError,
            "rank must be between 1 and the rank of the fac",
        ),
        (
            lambda q, k: factorize(q, k, rank=2).apply(q),
            ValueError,
            "v must have 8 rows (axis -2), one for each key, go",
        ),
        (lambda q, k: factorize(q, k, rank=2).apply([1.0]), TypeError, "v must be a NumPy array of"),
        (lambda q, k: factorize(q, k, rank=2).apply_vjp(k)[1](k), ValueError, "dout must have shape (9, 3), like the"),
        (lambda q, k: factorize(q, k, rank=2).apply_vjp(k)[1](q, factors=1), TypeError, "factors must be"),
        (
            lambda q, k: factorize(np.stack([q] * 4), np.stack([k] * 4), rank=2).apply(np.stack([k] * 3)),
            ValueError,
            "the number of heads must be a multiple of that of v (axis -3), got 4 and 3",
        ),
    ],
)
def test_errors(call, error, message, rng):
    q, k = rng.standard_normal((9, 3)), rng.standard_normal((8, 3))
    with pytest.raises(error) as caught:
        call(q, k)
    assert message in str(caught.value)
