"""The paper's statements: what holds is tested on random data, what does not by a counter-example."""

import math

import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import pda_numba
from pda_numba import theory
from pda_numba.theory import projection

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=50, deadline=None, derandomize=True)
ROUNDING = 1e-12  # of sums of at most some thousand float64 numbers of size 1


def attention_matrix(seed, n, m, d, strength):
    rng = np.random.default_rng(seed)
    return naive.softmax(strength * naive.logits(rng.standard_normal((n, d)), rng.standard_normal((m, d))))


# --- Theorem 1 ---


@pytest.mark.parametrize("m", [1, 2, 16, 128, 1000])
@pytest.mark.parametrize("eps", [0.01, 0.2, 0.5, 1.0])
def test_tails_hold_where_they_are_worst(m, eps):
    """q = k, where the error of a normal projection is that of a chi-squared mean: its exact probability."""
    exact = stats.chi2.sf(m * (1 + eps), m) + stats.chi2.cdf(m * (1 - eps), m)
    for bound in ("sharp", "standard", "paper"):
        assert exact <= theory.projection_tail(eps, m, bound=bound)


@pytest.mark.parametrize("eps", [0.3, 0.8])
def test_the_sharp_exponent_is_the_best(eps):
    m = 4000
    rate = -math.log(stats.chi2.sf(m * (1 + eps), m)) / m
    # what is left is of the order of log(m)/m: 10 % of the rate at 0.3, where the paper's is 40 % off
    assert (eps - math.log1p(eps)) / 2 == pytest.approx(rate, abs=math.log(m) / m)
    assert eps**2 / 8 < rate - math.log(m) / m


@pytest.mark.parametrize("kind", ["gaussian", "orthogonal"])
@pytest.mark.parametrize("cosine", [0.0, 0.7, 1.0])
def test_tails_hold_for_drawn_projections(kind, cosine, rng):
    count, d, m, eps = 4000, 24, 8, 0.7
    q, k = np.eye(d)[0], cosine * np.eye(d)[0] + math.sqrt(1 - cosine**2) * np.eye(d)[1]
    p = rng.standard_normal((count, d, m)) / math.sqrt(m)
    if kind == "orthogonal":
        p = np.linalg.qr(p)[0] * math.sqrt(d / m)
    share = np.mean(np.abs(np.sum((q @ p) * (k @ p), axis=1) - cosine) >= eps)
    slack = 4 / math.sqrt(count)  # four standard deviations of a share, at most
    for bound in ("standard",) if kind == "orthogonal" else ("sharp", "standard", "paper"):
        assert share <= theory.projection_tail(eps, m, bound=bound) + slack


def test_the_papers_tail_is_false_for_large_errors():
    """Claimed for any eps > 0; the true tail of a chi-squared mean falls like exp(-m eps / 2) there."""
    assert stats.chi2.sf(1 + 8, 1) > 3 * theory.projection_tail(8, 1, bound="paper")


@given(seeds, st.integers(1, 12), st.integers(0, 12), st.floats(0.001, 2))
@quick
def test_theorem_1_as_stated_says_nothing(seed, m, more, share):
    """Rows of norm at most 1 and orthonormal columns: projected logits are within 1/sqrt(m) of the true ones with one
    matrix, within 2/sqrt(m) with two. For an error that can occur at all the bound is above 1.
    """
    assert theory.projection_tail(share / math.sqrt(m), m, bound="paper") == 1.0
    rng, d = np.random.default_rng(seed), m + more
    one, other = (np.linalg.qr(rng.standard_normal((d, m)))[0] for _ in range(2))
    for q, k in (rng.standard_normal((2, d)), (one[:, 0], one[:, 0]), (one[:, 0], -other[:, 0])):
        q, k = q / np.linalg.norm(q), k / np.linalg.norm(k)
        for p, limit in ((one, 1), (other, 2)):
            wrong = (q @ one) @ (k @ p) / math.sqrt(m) - q @ k / math.sqrt(d)
            assert abs(wrong) <= limit / math.sqrt(m) + ROUNDING


@pytest.mark.parametrize("bound", ["sharp", "standard", "paper"])
@given(eps=st.floats(0.05, 1), length=st.integers(1, 10**7), delta=st.floats(1e-6, 0.5), norm=st.floats(1, 20))
@quick
def test_projection_dim_is_the_least_that_keeps_delta(bound, eps, length, delta, norm):
    m = theory.projection_dim(eps, length, delta, norm=norm, bound=bound)

    def chance(m):
        front, rate = projection._tail(eps / norm, bound)
        return length**2 * front * math.exp(-m * rate)

    assert chance(m) <= delta * (1 + 1e-9)
    assert m == 1 or chance(m - 1) > delta * (1 - 1e-9)


def test_the_papers_dimension():
    eps, length, delta = 0.3, 5000, 0.01
    m = theory.projection_dim(eps, length, delta, bound="paper")
    assert m == math.ceil(8 / eps**2 * (2 * math.log(length) + math.log(2 / delta)))


def test_union_bound_over_all_logits_holds(rng):
    n, d, delta, eps = 40, 200, 0.5, 1.0
    q, k = rng.standard_normal((2, n, d)) / 3
    norm = np.linalg.norm(q, axis=1).max() * np.linalg.norm(k, axis=1).max() / math.sqrt(d)
    m = theory.projection_dim(eps, n, delta, norm=norm)
    failures = 0
    for _ in range(40):
        p = rng.standard_normal((d, m)) / math.sqrt(m)
        failures += np.abs(naive.logits(q @ p, k @ p, d**-0.5) - naive.logits(q, k)).max() >= eps
    assert failures <= 40 * delta  # expected far fewer: the union bound is loose


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_mean_of_projected_logits(shared, scaled, rng):
    """The paper's normaliser is biased, and independent matrices leave nothing."""
    count, d, m = 3000, 16, 4
    q = k = np.eye(d)[0] * 2.0
    p, other = (np.linalg.qr(rng.standard_normal((count, d, m)))[0] for _ in range(2))
    other *= rng.choice([-1, 1], (count, 1, m))  # LAPACK's own signs are not random
    logits = np.sum((q @ p) * (k @ (p if shared else other)), axis=1)
    logits *= (d / m) / math.sqrt(d) if scaled else 1 / math.sqrt(m)
    spread = 5 * logits.std() / math.sqrt(count)  # five standard errors
    expected = theory.projection_factor(d, m, shared=shared, scaled=scaled) * 4 / math.sqrt(d)
    assert logits.mean() == pytest.approx(expected, abs=spread)
    assert spread < 0.2 * 4 / math.sqrt(d)  # small enough to tell the four apart


# --- Theorem 2 ---


@given(seeds, st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.floats(0.1, 30))
@quick
def test_decomposition_bounds_hold(seed, n, m, rank, strength):
    weights = attention_matrix(seed, n, m, 4, strength)
    u, s, vt = np.linalg.svd(weights, full_matrices=False)
    error = np.linalg.norm(weights - (u[:, :rank] * s[:rank]) @ vt[:rank])
    assert theory.decomposition_error(s, rank) == pytest.approx(error, abs=ROUNDING)
    sharp, paper = (theory.decomposition_bound(s, rank, bound=bound) for bound in ("sharp", "paper"))
    assert error <= sharp + ROUNDING
    assert paper == pytest.approx(2 * sharp)


@pytest.mark.parametrize("rank", [1, 7, 64])
def test_the_sharp_constant_is_attained(rank):
    values = np.ones(2 * rank)
    assert theory.decomposition_error(values, rank) == pytest.approx(theory.decomposition_bound(values, rank))


def test_the_papers_argument_for_theorem_2_is_false():
    """Its middle step: the square sum of the left-out values is at most the square of their sum over the rank."""
    left_out, rank = np.array([1.0]), 2
    assert np.sum(left_out**2) > np.sum(left_out) ** 2 / rank


@given(seeds, st.floats(0.05, 2), st.floats(0.1, 30))
@quick
def test_rank_bounds_are_enough(seed, eps, strength):
    s = np.linalg.svd(attention_matrix(seed, 30, 25, 4, strength), compute_uv=False)
    sharp, paper = (theory.rank_bound(s.sum(), eps, bound=bound) for bound in ("sharp", "paper"))
    assert theory.decomposition_error(s, sharp) <= eps + ROUNDING
    assert sharp <= paper


# --- Lemma 2.1 ---


@given(seeds, st.integers(1, 30), st.integers(0, 30), st.floats(0.01, 10))
@quick
def test_the_decay_of_the_paper_fails_at_the_first_singular_value(seed, m, more, norm):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((m + more, 8)), rng.standard_normal((m, 8))
    q, k = (x * norm / np.linalg.norm(x, axis=1).max() for x in (q, k))
    largest = np.linalg.norm(naive.softmax(naive.logits(q, k)), 2)
    assert largest >= math.sqrt((m + more) / m) - ROUNDING
    assert theory.decay_hypothesis(1, 8, norm) < 1


def test_attention_like_a_permutation_does_not_decay():
    length = 200
    q, k = theory.permutation_attention(length, mass=0.9, seed=1)
    logits = naive.logits(q, k)
    weights = naive.softmax(logits)
    assert (weights.max(axis=1) >= 0.9).all()
    assert (np.sort(weights.argmax(axis=1)) == np.arange(length)).all()
    s = np.linalg.svd(weights, compute_uv=False)
    assert s.min() >= 0.8
    # the logits have rank 2: no factorisation of theirs is one of the softmax
    assert np.linalg.matrix_rank(logits) == 2
    assert theory.decomposition_error(s, length // 2) > 0.5 * np.linalg.norm(weights)
    # a flat spectrum cannot be below the falling one of the lemma: orthogonal tokens, whose norm grows like log L
    size = 64
    q = k = math.sqrt(math.log(size) * math.sqrt(size)) * np.eye(size)
    s = np.linalg.svd(naive.softmax(naive.logits(q, k)), compute_uv=False)
    lemma = theory.decay_hypothesis(np.arange(1, size + 1), size, np.linalg.norm(q[0]))
    assert s[-1] > 1e5 * lemma[-1]


# --- Theorem 3 ---


@given(seeds, st.floats(1e-3, 3), st.integers(1, 60), st.floats(0.1, 20))
@quick
def test_rows_move_no_more_than_their_logits_allow(seed, eps, m, strength):
    rng = np.random.default_rng(seed)
    logits, v = strength * rng.standard_normal((9, m)), 3 + rng.standard_normal((m, 5))
    moved = logits + eps * rng.choice([-1, 1], (9, m))
    a, b = naive.softmax(logits), naive.softmax(moved)
    error = np.linalg.norm((b - a) @ v, axis=1)
    radius = np.linalg.norm(v - v.mean(axis=0), axis=1).max()
    assert (error <= theory.logit_error_bound(eps, a @ np.linalg.norm(v, axis=1)) * (1 + ROUNDING)).all()
    assert (error <= theory.logit_spread_bound(eps, radius) * (1 + 1e-9) + ROUNDING).all()
    whole = theory.output_error_bound(eps, 9, 0.0, 1)
    assert np.linalg.norm((b - a) @ v) <= whole * np.linalg.norm(v, 2) * (1 + 1e-9)


@pytest.mark.parametrize("eps", [0.01, 0.5, 3.0])
def test_the_spread_bound_is_attained(eps):
    logits = np.array([[-eps / 2, eps / 2]])  # each moved by eps: the heavier key meets its mirror image
    change = naive.softmax(-logits) - naive.softmax(logits)
    assert np.abs(change).sum() == pytest.approx(theory.logit_spread_bound(eps), rel=1e-9)


@given(seeds, st.floats(0.01, 0.5), st.integers(1, 20))
@quick
def test_the_corrected_theorem_3_holds(seed, eps, rank):
    rng = np.random.default_rng(seed)
    n, v = 24, rng.standard_normal((24, 6))
    logits = 3 * rng.standard_normal((n, n))
    exact, projected = naive.softmax(logits), naive.softmax(logits + rng.uniform(-eps, eps, (n, n)))
    u, s, vt = np.linalg.svd(projected)
    error = np.linalg.norm(((u[:, :rank] * s[:rank]) @ vt[:rank] - exact) @ v)
    sharp, paper = (theory.output_error_bound(eps, n, s.sum(), rank, bound=bound) for bound in ("sharp", "paper"))
    assert error <= sharp * np.linalg.norm(v, 2) + ROUNDING
    assert sharp <= paper
    assert error <= paper * np.linalg.norm(v) + ROUNDING


def test_theorem_3_is_vacuous_for_long_sequences():
    """Matrices of L rows that sum to 1 differ by sqrt(2 L) at the most: a bound above that says nothing."""
    length = 10**6
    for eps in (math.sqrt(2 / length), 0.01, 0.1):
        assert theory.output_error_bound(eps, length, 0.0, 32, bound="paper") >= math.sqrt(2 * length) * (1 - 1e-12)
        assert theory.output_error_bound(eps, length, 0.0, 32) < math.sqrt(2 * length)


# --- Theorems 6 and 7 ---


@pytest.mark.parametrize("kind", ["gaussian", "orthogonal"])
@pytest.mark.parametrize(("d", "m"), [(12, 3), (12, 6), (12, 12)])
def test_the_variance_of_a_projected_gradient(kind, d, m, rng):
    k, draws = rng.standard_normal(d), 20000
    p = rng.standard_normal((draws, d, m)) / math.sqrt(m)
    if kind == "orthogonal":
        p = np.linalg.qr(p)[0] * math.sqrt(d / m)
    gradient = np.einsum("tdm,tm->td", p, np.einsum("tdm,d->tm", p, k))
    squares = np.square(gradient - k).sum(axis=1) / (k @ k)
    expected = theory.projection_gradient_variance(d, m, kind=kind)
    # five standard deviations of the means; with all coordinates an orthogonal P is exact, to rounding
    assert abs(squares.mean() - expected) <= 5 * squares.std() / math.sqrt(draws) + ROUNDING
    error = np.abs(gradient.mean(axis=0) - k)
    assert (error <= 5 * gradient.std(axis=0) / math.sqrt(draws) + ROUNDING).all()


def test_no_constant_serves_theorem_6(rng):
    """The bound is of eps, R and m alone; twice the values have four times the variance, and there is always more."""
    bound = theory.gradient_variance_hypothesis(0.1, 32, 16, constant=7.0)
    assert bound == pytest.approx(7 * (0.01 + 1 / 32 + 1 / 16))
    q, k, v = (rng.standard_normal((40, 4)) for _ in range(3))
    gradients = []
    for seed in range(20):
        p = pda_numba.projection_matrix(4, 2, kind="gaussian", seed=seed, dtype=np.float64)
        dq = naive.gradients(q @ p, k @ p, v, np.ones((40, 4)), scale=0.5)[0] @ p.T
        gradients.append(dq)
    variance = np.var(gradients, axis=0).sum()
    values = math.sqrt(2 * bound / variance)  # values so many times as large: dq is linear in them
    assert np.var([values * dq for dq in gradients], axis=0).sum() > bound


def descend(steps, step, smoothness, bias, deviation, rng):
    """Mean squared gradient of descent on L x^2 / 2 from 1, in many runs, with noise in every step."""
    x, total = np.ones(4000), 0.0
    for _ in range(steps):
        gradient = smoothness * x
        total += np.mean(np.square(gradient))
        x = x - step * (gradient + bias + deviation * rng.choice([-1.0, 1.0], x.shape))
    return total / steps


@pytest.mark.parametrize("bias", [0.0, 0.3])
@pytest.mark.parametrize("deviation", [0.0, 0.5])
@pytest.mark.parametrize("step", [0.05, 0.5])
def test_the_corrected_theorem_7_holds(step, deviation, bias, rng):
    smoothness = 2.0
    for steps in (1, 10, 500):
        found = descend(steps, step, smoothness, bias, deviation, rng)
        task = {"bias": bias, "variance": deviation**2}
        # 4,000 runs know the mean to a hundredth; without noise there is none
        assert found <= theory.training_bound(steps, smoothness / 2, step, smoothness, **task) * (
            1.01 if deviation else 1
        )


def test_the_floor_of_training_is_attained(rng):
    found = descend(20000, 0.5, 2.0, 0.3, 0.0, rng)
    assert found == pytest.approx(theory.training_bound(20000, 1.0, 0.5, 2.0, bias=0.3), rel=2e-3)  # 2 gap / (step T)


def test_theorem_7_needs_a_small_step(rng):
    """Nothing in it rules out a step above 2 / L, with which even exact gradients diverge."""
    assert descend(60, 1.1, 2.0, 0.0, 0.0, rng) > 1e6 * theory.training_hypothesis(60, 0.0, 10**9, 10**9)
    assert theory.training_hypothesis(4, 0.1, 16, 25, constants=(8, 2)) == pytest.approx(
        8 / 4 + 2 * (0.1 + 1 / 4 + 1 / 5)
    )


# --- 3.3 ---


def test_cost_of_a_million_tokens():
    """The paper's numbers, and what they leave out."""
    c = theory.cost(10**6, 10**6, 1024, 1024, 64, 32)
    published = c.published
    assert (published.projection, published.decomposition, published.application) == pytest.approx(
        (6.55e10, 2.05e9, 3.28e10), rel=1e-3
    )
    assert published.flops == pytest.approx(1.0e11, rel=0.01)
    assert (published.inputs, published.projected, published.factors) == pytest.approx((6.144e9, 256e6, 64e6), rel=1e-3)
    assert c.counted.projection == 4 * published.projection  # two projections, two operations per product
    assert c.counted.application == 4 * published.application  # v_r^T V, and the sum over r
    assert c.counted.flops == pytest.approx(4.06e11, rel=0.01)
    assert c.counted.bytes == pytest.approx(6.144e9 + 256e6 + 128e6 + 2.048e9)
    assert c.exact_flops == 4 * 10**12 * 1024
    assert "4.06e+11" in str(c)


# --- errors ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.projection_tail(0, 8), "eps must be a finite number above 0, got 0"),
        (lambda: theory.projection_tail(0.1, 8, bound="loose"), "bound must be one of 'sharp', 'standard', 'paper'"),
        (lambda: theory.projection_dim(0.1, 8, 1.5), "delta must be below 1, got 1.5"),
        (lambda: theory.projection_dim(2.0, 8, bound="standard"), "eps must be below 1.5 times norm"),
        (lambda: theory.projection_factor(8, 9), "proj_dim must be between 1 and head_dim 8, got 9"),
        (lambda: theory.decomposition_bound([1.0, -1.0], 1), "singular_values must be finite and at least 0"),
        (lambda: theory.rank_bound(1.0, 0.1, bound="standard"), "bound must be one of 'paper', 'sharp'"),
        (lambda: theory.permutation_attention(8, mass=1), "mass must be at least 0.5 and below 1, got 1.0"),
        (lambda: theory.gradient_variance_hypothesis(-1, 1, 1), "eps must be finite and at least 0, got -1"),
        (
            lambda: theory.projection_gradient_variance(4, 2, kind="srht"),
            "kind must be one of 'gaussian', 'orthogonal'",
        ),
        (lambda: theory.training_hypothesis(0, 0.1, 1, 1), "steps must be at least 1, got 0"),
        (lambda: theory.training_bound(5, 1.0, 0.6, 2.0), "step_size must be at most 1 / smoothness, 0.5, got 0.6"),
        (lambda: theory.cost(8, 8, 8, 8, 8, 0), "rank must be at least 1, got 0"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        call()


def test_the_module_is_public():
    assert pda_numba.theory is theory
