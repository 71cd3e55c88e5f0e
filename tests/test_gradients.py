"""The gradients: of exact attention against plain ones, of low rank against automatic differentiation of the same
algorithm with its choices held fixed (`frozen`), and what users meet: dtypes, layouts, shared heads, bad input."""

import frozen
import naive
import numpy as np
import pytest
from autograd import grad
from problems import make

import pda_numba
from pda_numba import NearField, attention_backward, attention_forward, attention_vjp
from pda_numba.residuals import Exact, LowRank

PDA = {"method": "pda", "tol": None}


def cotangent(out, seed=9):
    return np.random.default_rng(seed).standard_normal(out.shape).astype(out.dtype)


def stacked(kind, n, count, **sizes):
    return [np.stack(x) for x in zip(*(make(kind, n, seed=s, **sizes) for s in range(count)), strict=True)]


def worst(own, true, least=1e-300):
    """Largest difference, relative to the largest entry, or to `least` if that is more."""
    return np.abs(own - true).max() / max(np.abs(true).max(), least)


# --- exact attention ---


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 63), (63, 2), (97, 500), (500, 97), (1025, 1025)])
@pytest.mark.parametrize(("d", "e"), [(1, 5), (59, 1), (64, 64), (111, 7)])
def test_exact_gradients_agree_with_plain_ones(n, m, d, e):
    q, k, v = make("gaussian", n, m, d, e, seed=n + d, dtype=np.float64)
    out, residuals = attention_forward(q, k, v, method="exact")
    dout = cotangent(out)
    for own, true in zip(attention_backward(residuals, dout), naive.gradients(q, k, v, dout), strict=True):
        # float64 rounds at 1e-16; sums of up to a thousand terms. One key alone has no gradient, but for rounding.
        assert worst(own, true, least=0.01) < 1e-13


@pytest.mark.parametrize(("n", "m", "d", "e"), [(97, 500, 256, 64), (1025, 1025, 64, 64), (500, 2, 59, 5)])
def test_float32_gradients_are_as_good_as_plain_ones(n, m, d, e):
    q, k, v = make("gaussian", n, m, d, e, seed=d)
    out, residuals = attention_forward(q, k, v, method="exact")
    dout = cotangent(out)
    true = naive.gradients(*(x.astype(np.float64) for x in (q, k, v, dout)))
    plain = naive.gradients(q, k, v, dout)
    for own, rough, exact in zip(attention_backward(residuals, dout), plain, true, strict=True):
        assert own.dtype == rough.dtype == np.float32
        assert naive.relative(own, exact) <= 3 * naive.relative(rough, exact)


# --- low rank, against the frozen algorithm ---

CASES = {
    "one head": (make("decaying", 700, d=7, e=5, seed=1, dtype=np.float64), {"rank": 16, "window": 0}),
    "window": (make("clustered", 500, d=7, e=5, seed=1, dtype=np.float64), {"rank": 12, "window": 9}),
    "content": (
        make("clustered", 700, d=7, e=5, seed=1, dtype=np.float64),
        {"rank": 12, "near": NearField(n_probes=3, bucket_size=16)},
    ),
    "content and window": (
        make("clustered", 600, d=7, e=5, seed=1, dtype=np.float64),
        {"rank": 12, "near": NearField(window=9, n_probes=2, bucket_size=16, n_heavy=5)},
    ),
    "content, more keys": (
        stacked("decaying", 450, 2, m=1025, d=9, e=3, dtype=np.float64),
        {"rank": 16, "near": NearField(n_probes=4, bucket_size=8)},
    ),
    "content, projected": (
        make("decaying", 700, d=12, e=5, seed=1, dtype=np.float64),
        {"rank": 16, "proj_dim": 4, "near": NearField(n_probes=2, bucket_size=16)},
    ),
    "wide window": (make("decaying", 500, d=3, e=1, seed=1, dtype=np.float64), {"rank": 12, "window": 300}),
    "projection": (
        make("decaying", 700, d=12, e=5, seed=1, dtype=np.float64),
        {"rank": 16, "window": 5, "proj_dim": 4},
    ),
    "random projection": (
        make("near_uniform", 500, 430, 12, 5, seed=1, dtype=np.float64),
        {"rank": 16, "proj_dim": 6, "projection": "srht", "scale": 0.7},
    ),
    "more keys": (make("decaying", 450, 1025, 59, 3, seed=1, dtype=np.float64), {"rank": 16}),
    "fewer keys": (make("decaying", 1025, 97, 5, 33, seed=1, dtype=np.float64), {"rank": 16}),
    "repeated keys": (make("duplicated", 600, d=7, e=5, seed=1, dtype=np.float64), {"rank": 48}),  # of 40 kinds
    "rank above the effective one": (make("near_uniform", 900, d=2, e=5, seed=1, dtype=np.float64), {"rank": 64}),
    "outliers": (make("outliers", 900, d=7, e=5, seed=1, dtype=np.float64), {"rank": 8}),
    "heads": (stacked("decaying", 600, 3, d=7, e=5, dtype=np.float64), {"rank": 8}),
}


class Frozen:
    """One head of a call with its choices held fixed: its arrays, its function, and what the output was clipped to."""

    def __init__(self, q, k, v, residuals, part, place, pca):
        problem, head = residuals.call.problem, part.heads[place]
        choice = frozen.choices(problem, part, place)
        m = part.projection.shape[1]
        if m and pca:
            choice["mean"] = part.basis[place][m]
        arrays = ((q, problem.query_head), (k, problem.key_head), (v, problem.key_head))
        self.inputs = [x.reshape(-1, *x.shape[-2:])[index[head]] for x, index in arrays]
        self.choice, self.penalty = choice, frozen.penalty(*self.inputs, choice)
        with np.errstate(invalid="ignore"):
            raw = frozen.fitted_rows(*self.inputs, choice, self.penalty)
        low, high = self.inputs[2].min(axis=0), self.inputs[2].max(axis=0)
        self.clipped = np.where(raw < low, low, np.where(raw > high, high, np.nan))

    def __call__(self, q, k, v):
        return frozen.forward(q, k, v, self.choice, self.penalty, self.clipped)


def frozen_heads(q, k, v, residuals, pca=True):
    """Every head of a call, in order."""
    heads = {}
    for part in residuals.parts:
        assert isinstance(part, LowRank)
        for place, head in enumerate(part.heads):
            heads[head] = Frozen(q, k, v, residuals, part, place, pca)
    return [heads[h] for h in sorted(heads)]


@pytest.fixture(params=CASES, scope="module")
def case(request):
    arrays, options = CASES[request.param]
    out, residuals = attention_forward(*arrays, **PDA, **options)
    heads = frozen_heads(*arrays, residuals, options.get("projection", "pca") == "pca")
    dout = cotangent(out)
    as_heads = [x.reshape(-1, *x.shape[-2:]) for x in (out, dout, *attention_backward(residuals, dout))]
    return heads, *as_heads


def rounding(head):
    """1e-10, or what the fit's condition makes of rounding: a ridge of 1e-16 sigma_1^2 leaves 1e8 of it."""
    return max(1e-10, 1e-15 * head.choice["level"] ** -0.5)


def test_the_frozen_algorithm_is_the_forward_pass(case):
    heads, out, *_ = case
    for head, own in zip(heads, out, strict=True):
        assert worst(head(*head.inputs), own) < rounding(head)


def test_gradients_agree_with_automatic_differentiation(case):
    heads, _, dout, *gradients = case
    for h, head in enumerate(heads):
        for i in range(3):
            true = grad(lambda *x: (head(*x) * dout[h]).sum(), i)(*head.inputs)  # noqa: B023
            assert worst(gradients[i][h], true) < rounding(head)


def test_gradients_agree_with_central_differences(case):
    """<J u, g> = <u, J^T g> for a random direction u of each input, which is the dot test as well."""
    heads, _, dout, *gradients = case
    rng = np.random.default_rng(3)
    step = 1e-5  # errors: 1e-10 of the differences' own, 1e-16 / 1e-5 of rounding
    for h, head in enumerate(heads):
        for i in range(3):
            direction = rng.standard_normal(head.inputs[i].shape)
            ends = []
            for sign in (1, -1):
                moved = list(head.inputs)
                moved[i] = moved[i] + sign * step * direction
                ends.append((head(*moved) * dout[h]).sum())
            true, own = (ends[0] - ends[1]) / (2 * step), (gradients[i][h] * direction).sum()
            size = np.linalg.norm(gradients[i][h]) * np.linalg.norm(direction) / direction.size**0.5
            assert abs(own - true) < 1e-6 * size


def test_the_papers_variant_agrees_with_differences_of_the_projected_problem():
    """calibrate=False: with P fixed, the gradient is that of the low-rank problem on q P_Q and k P_K."""
    q, k, v = make("decaying", 600, d=12, e=5, seed=1, dtype=np.float64)
    out, residuals = attention_forward(q, k, v, rank=16, proj_dim=6, projection="orthogonal", calibrate=False, **PDA)
    dout = cotangent(out)
    p = pda_numba.projection_matrix(12, 6, kind="orthogonal", dtype=np.float64)
    inner_out, inner = attention_forward(q @ p, k @ p, v, rank=16, scale=12**-0.5, **PDA)
    np.testing.assert_allclose(out, inner_out, rtol=0, atol=1e-12)
    dq, dk, dv = attention_backward(inner, dout)
    for own, true in zip(attention_backward(residuals, dout), (dq @ p.T, dk @ p.T, dv), strict=True):
        assert worst(own, true) < 1e-10


def test_papers_variant_with_the_pair_from_the_data():
    q, k, v = make("decaying", 600, d=12, e=5, seed=1, dtype=np.float64)
    out, residuals = attention_forward(q, k, v, rank=16, proj_dim=6, calibrate=False, **PDA)
    from pda_numba.pair import balanced_pairs

    p_q, p_k, mean = (x[0] for x in balanced_pairs(residuals.call.problem, np.arange(1), 6))
    inner_out, inner = attention_forward(q @ p_q.T, (k - mean) @ p_k.T, v, rank=16, scale=12**-0.5, **PDA)
    np.testing.assert_allclose(out, inner_out, rtol=0, atol=1e-10)
    dout = cotangent(out)
    dq, dk, dv = attention_backward(inner, dout)
    for own, true in zip(attention_backward(residuals, dout), (dq @ p_q, dk @ p_k, dv), strict=True):
        assert worst(own, true) < 1e-9  # the two problems differ by rounding, which the fit amplifies


@pytest.mark.parametrize("near", ["none", "window", "content"])
def test_float32_low_rank_gradients_are_as_good_as_plain_ones(near):
    """At most 3x the error of the frozen algorithm done in plain float32 arithmetic, with the fit itself in float64.

    The median of five problems: most of either error is that of the few rows that the fit rests on, so that their ratio
    varies by a factor of three from one problem to the next (measured: medians 1.3 to 2.3, from 0.9 to 4.9).
    """
    ratios = []
    for seed in range(1, 6):
        arrays = make("clustered", 700, d=16, e=8, seed=seed)
        out, residuals = attention_forward(*arrays, rank=16, near=near, **PDA)
        dout = cotangent(out)
        double = [x.astype(np.float64) for x in arrays]
        head = frozen_heads(*double, residuals)[0]
        rough = frozen_heads(*arrays, residuals)[0]
        rough.choice["round"] = np.float32
        own = []
        for i, mine in enumerate(attention_backward(residuals, dout)):
            true = grad(lambda *x: (head(*x) * dout.astype(np.float64)).sum(), i)(*double)  # noqa: B023
            plain = grad(lambda *x: (rough(*x) * dout).sum(), i)(*rough.inputs)  # noqa: B023
            own.append(naive.relative(mine, true) / naive.relative(plain, true))
        ratios.append(own)
    assert (np.median(ratios, axis=0) <= 3).all()


# --- what must not be NaN ---


def hostile():
    rng = np.random.default_rng(0)
    q, k, v = make("decaying", 900, d=8, e=4, seed=3)
    yield "one-hot", (1e3 * q, 1e3 * k, v)
    yield "equal keys", (q, np.ones_like(k), v)
    yield "zero values", (q, k, np.zeros_like(v))
    yield "equal values", (q, k, np.ones_like(v))
    yield "clipped", (q, k, np.sign(v))
    yield "logits of 1e4", (1e4 * 8**0.5 * np.sign(q), np.sign(k) / 8, v)
    yield "zeros", (0 * q, 0 * k, v)
    yield "lost rows", (q * np.where(rng.random((900, 1)) < 0.5, 300, 1).astype(np.float32), k, v)


@pytest.mark.parametrize("options", [{"method": "exact"}, {"rank": 8}, {"rank": 8, "window": 16}, {"rank": 300}])
@pytest.mark.parametrize(("name", "arrays"), list(hostile()))
def test_gradients_are_finite(name, arrays, options):
    out, residuals = attention_forward(*arrays, **{**PDA, **options})
    for x in attention_backward(residuals, cotangent(out)):
        assert np.isfinite(x).all()


def test_clipped_outputs_pass_nothing_on():
    """Where the output is clipped it does not move with the inputs."""
    q, k, v = make("peaked", 900, d=8, e=4, seed=1, dtype=np.float64)
    v = np.sign(v)
    _, residuals = attention_forward(q, k, v, rank=4, near="none", **PDA)
    head = frozen_heads(q, k, v, residuals)[0]
    own = ~np.isnan(head.clipped) & (head.choice["slot"] == 0)[:, None]
    assert own.sum() > 10
    for x in attention_backward(residuals, np.where(own, 1.0, 0.0)):
        assert np.abs(x).max() == 0


def test_fallback_rows_agree_with_automatic_differentiation():
    """Rows that became the softmax over the landmarks."""
    q, k, v = make("clustered", 900, d=7, e=5, seed=0, dtype=np.float64)
    q *= 3
    out, residuals = attention_forward(q, k, v, rank=4, window=0, **PDA)
    assert residuals.info.fallback_rows > 0
    head = frozen_heads(q, k, v, residuals)[0]
    dout = cotangent(out)
    true = [grad(lambda *x: (head(*x) * dout).sum(), i)(*head.inputs) for i in range(3)]
    for own, expected in zip(attention_backward(residuals, dout), true, strict=True):
        assert worst(own, expected) < 1e-8


# --- what users meet ---


def test_the_output_is_that_of_attention():
    arrays = stacked("decaying", 1100, 2)
    for options in ({"rank": 32, **PDA}, {"method": "exact"}, {"tol": 0.05}):
        out, _ = attention_forward(*arrays, **options)
        np.testing.assert_array_equal(out, pda_numba.attention(*arrays, **options))


def test_heads_that_share_keys_add_up():
    """Grouped queries and broadcast batches: the gradient is the sum over the heads that share an input."""
    q, k, v = (x.reshape(2, 2, *x.shape[1:]) for x in stacked("decaying", 600, 4, dtype=np.float64))
    k, v = k[:1, :1], v[:1, :1]
    for options in ({"rank": 8, **PDA}, {"method": "exact"}):
        out, residuals = attention_forward(q, k, v, **options)
        dout = cotangent(out)
        dq, dk, dv = attention_backward(residuals, dout)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
        wide = [np.broadcast_to(x, (2, 2, *x.shape[2:])) for x in (k, v)]
        _, apart = attention_forward(q, *wide, **options)
        wide_q, wide_k, wide_v = attention_backward(apart, dout)
        np.testing.assert_allclose(dq, wide_q, rtol=0, atol=1e-12)
        np.testing.assert_allclose(dk[0, 0], wide_k.sum(axis=(0, 1)), rtol=0, atol=1e-11)
        np.testing.assert_allclose(dv[0, 0], wide_v.sum(axis=(0, 1)), rtol=0, atol=1e-11)


def test_half_precision_inputs_get_gradients_of_their_kind():
    """Summed in float32, and rounded once. (bfloat16 is among the adapters' tests.)"""
    rough = [x.astype(np.float16) for x in make("decaying", 900, seed=2)]
    out, residuals = attention_forward(*rough, rank=16, **PDA)
    dout = cotangent(out.astype(np.float32)).astype(np.float16)
    _, same = attention_forward(*(x.astype(np.float32) for x in rough), rank=16, **PDA)
    for own, true in zip(
        attention_backward(residuals, dout), attention_backward(same, dout.astype(np.float32)), strict=True
    ):
        assert own.dtype == np.float16
        np.testing.assert_array_equal(own, true.astype(np.float16))


def test_any_strides_and_nothing_changes():
    q, k, v = make("decaying", 900, seed=2)
    kept = [x.copy() for x in (q, k, v)]
    out, residuals = attention_forward(q, k, v, rank=16, **PDA)
    dout = cotangent(out)
    expected = attention_backward(residuals, dout)
    odd = [np.asfortranarray(q), np.repeat(k, 2, axis=0)[::2], np.repeat(v, 2, axis=1)[:, ::2]]
    _, residuals = attention_forward(*odd, rank=16, **PDA)
    for own, true in zip(attention_backward(residuals, np.asfortranarray(dout)), expected, strict=True):
        assert worst(own, true) < 1e-3  # other code may add in another order, which the fit's condition magnifies
    for before, after in zip(kept, (q, k, v), strict=True):
        np.testing.assert_array_equal(before, after)


def test_residuals_can_be_used_again_and_gradients_are_linear():
    arrays = make("decaying", 900, seed=2, dtype=np.float64)
    out, pullback = attention_vjp(*arrays, rank=16, **PDA)
    dout = cotangent(out)
    first, again, double = pullback(dout), pullback(dout), pullback(2 * dout)
    for a, b, c in zip(first, again, double, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(2 * a, c)  # doubling is exact in binary


def test_residuals_are_small():
    """At most (n + R)(D + E) numbers per head and three per query, n being the exact rows."""
    n, d, e, rank = 6000, 64, 64, 64
    _, residuals = attention_forward(*make("decaying", n, d=d, e=e, seed=2), rank=rank, **PDA)
    rows = residuals.parts[0].rows.shape[1]
    assert residuals.nbytes <= 4 * ((rows + rank) * (d + e) + 3 * n)
    assert rows < 700


def test_no_queries_and_no_values():
    for n, e in ((0, 3), (5, 0)):
        q, k, v = np.ones((n, 4)), np.ones((7, 4)), np.ones((7, e))
        out, residuals = attention_forward(q, k, v)
        for x, y in zip(attention_backward(residuals, out), (q, k, v), strict=True):
            assert x.shape == y.shape
            assert not x.any()


def test_bad_cotangents_are_named():
    arrays = make("decaying", 300, seed=2)
    out, residuals = attention_forward(*arrays)
    with pytest.raises(TypeError, match=r"^residuals must be what attention_forward returned, got ndarray"):
        attention_backward(out, out)
    with pytest.raises(ValueError, match=r"^dout must have the shape of the output, \(300, 8\), got \(300, 7\)"):
        attention_backward(residuals, out[:, :7])
    with pytest.raises(TypeError, match=r"^dout must have the dtype of the output, float32, got float64"):
        attention_backward(residuals, out.astype(np.float64))
    with pytest.raises(TypeError, match=r"^dout must be a NumPy array, got list"):
        attention_backward(residuals, out.tolist())
    with pytest.raises(ValueError, match=r"^dout must be finite"):
        attention_backward(residuals, np.full_like(out, np.nan))
    with pytest.raises(TypeError, match=r"^return_info must be True or False"):
        attention_backward(residuals, out, return_info=1)
    with pytest.raises(TypeError, match="colour"):
        attention_vjp(*arrays, colour="red")


# --- the gradient's error ---


def test_the_gradients_error_is_estimated(text_heads):
    """Against the exact gradient: within a factor of 1.5 for every head but one of the real encoder's six."""
    q, k, v, scale = text_heads
    out, residuals = attention_forward(q, k, v, rank=64, scale=scale, **PDA)
    dout = cotangent(out)
    dq, *_, info = attention_backward(residuals, dout, return_info=True)
    _, exact = attention_forward(q, k, v, scale=scale, method="exact")
    true = attention_backward(exact, dout)[0]
    ratio = info.gradient_error / [naive.relative(a, b) for a, b in zip(dq, true, strict=True)]
    assert info.gradient_error.shape == (6,)
    assert np.sort(np.abs(np.log(ratio)))[-2] < np.log(1.5), ratio


def test_asking_for_the_error_does_not_change_the_gradient():
    arrays = make("clustered", 900, seed=2, dtype=np.float64)
    out, residuals = attention_forward(*arrays, rank=16, **PDA)
    dout = cotangent(out)
    for a, b in zip(
        attention_backward(residuals, dout), attention_backward(residuals, dout, return_info=True), strict=False
    ):
        assert worst(a, b) < 1e-12  # the same sums in another order


def test_exact_heads_have_no_gradient_error():
    arrays = make("decaying", 300, seed=2)
    out, residuals = attention_forward(*arrays)
    assert isinstance(residuals.parts[0], Exact)
    *_, info = attention_backward(residuals, out, return_info=True)
    assert info.gradient_error == 0
