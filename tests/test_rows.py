"""Exact attention rows, against float64 and against what a plain NumPy implementation loses in the same precision."""

import math

import naive
import numpy as np
import pytest
from problems import flat, heads

from pda_numba.kernels.panel import TILE
from pda_numba.kernels.scalar import LOG2_E
from pda_numba.rows import _splits, rows

LENGTHS = (1, 2, 63, 97, 500, 1025)


def make(rng, n, m, d, e, dtype=np.float32, lead=()):
    return tuple(rng.standard_normal((*lead, *s)).astype(dtype) for s in ((n, d), (m, d), (m, e)))


def exact_rows(q, k, v, which, **options):
    problem = flat(q, k, v)
    which = np.broadcast_to(which, (len(problem.query_head), len(which)))
    return rows(problem, heads(problem), which, **options)


def check(q, k, v, dtype):
    """At most twice the error of NumPy in the same precision, or eight roundings where NumPy is lucky."""
    out = exact_rows(q, k, v, np.arange(len(q)))[0][0]
    exact = naive.attention(q, k, v)
    yardstick = naive.relative(naive.attention_in(dtype, q, k, v), exact)
    assert naive.relative(out, exact) <= max(2 * yardstick, 8 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("d", [1, 59, 64, 111, 256])
def test_head_dimensions_and_lengths(dtype, d, rng):
    for n, m, e in ((1, 97, d), (63, 500, 64), (97, 1025, 7), (500, 2, 1), (1025, 63, d + 1), (2, 1, 59)):
        check(*make(rng, n, m, d, e, dtype), dtype)


def test_every_pair_of_lengths(rng):
    for n in LENGTHS:
        for m in LENGTHS:
            check(*make(rng, n, m, 16, 5), np.float32)


def test_large_logits(rng):
    """Logits of some hundreds: one key takes all, and nothing overflows."""
    q, k, v = make(rng, 97, 500, 64, 9)
    check(30 * q, k, v, np.float32)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_sixteen_bit_inputs_are_widened_exactly(name, rng):
    """The result is that of the same numbers in float32, up to the order in which the compiled code adds."""
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if name == "bfloat16" else np.dtype(name)
    q, k, v = make(rng, 63, 300, 24, 10, dtype)
    narrow = exact_rows(q, k, v, np.arange(63))
    wide = exact_rows(*(x.astype(np.float32) for x in (q, k, v)), np.arange(63))
    # Values of size 1 and scores of size 10, four roundings; one of the input's own roundings would be 1e-3.
    np.testing.assert_allclose(narrow[0], wide[0], rtol=0, atol=5e-7)
    np.testing.assert_allclose(narrow[1], wide[1], rtol=0, atol=5e-6)


def test_any_strides(rng):
    """Slices with steps, Fortran order and negative strides: the results of contiguous copies."""
    q, k, v = make(rng, 2 * 97, 3 * 100, 2 * 20, 2 * 9)
    views = {
        "steps": (q[::2, ::2], k[::3, ::2], v[::3, 1::2]),
        "Fortran": tuple(np.asfortranarray(x) for x in (q[:97, :20], k[:100, :20], v[:100, :9])),
        "negative": (q[:97, :20][::-1, ::-1], k[:100, :20][::-1, ::-1], v[:100, :9][::-1]),
        "transposed": (q.T[:20, :97], k.T[:20, :97], v.T[:17, 5:100].T[:20]),
    }
    for name, (a, b, c) in views.items():
        which = np.arange(len(a))
        strided = exact_rows(a, b, c, which)[0]
        plain = exact_rows(*(np.ascontiguousarray(x) for x in (a, b, c)), which)[0]
        # four roundings of size 1: the compiled code may add in another order
        np.testing.assert_allclose(strided, plain, rtol=0, atol=5e-7, err_msg=name)


def test_chosen_rows_are_the_same_rows(rng):
    """A row's result does not depend on which other rows are asked for, as long as the keys are cut alike."""
    q, k, v = make(rng, 200, 900, 16, 8)  # below 2 x 1024 keys there is one range
    all_rows = exact_rows(q, k, v, np.arange(200))
    which = np.array([199, 0, 7, 7, 64, 130])
    some = exact_rows(q, k, v, which)
    assert some[0].tobytes() == all_rows[0][:, which].tobytes()
    assert some[1].tobytes() == all_rows[1][:, which].tobytes()


def test_no_rows(rng):
    out, lse, mass = exact_rows(*make(rng, 5, 7, 4, 3), np.arange(0), masses=True)
    assert out.shape == (1, 0, 3)
    assert lse.shape == (1, 0)
    assert mass.shape == (1, 0, 1)


@pytest.mark.parametrize("keys", [1, 97, 128, 129, 3000])
def test_masses_and_normalisers(keys, rng):
    q, k, v = make(rng, 40, keys, 12, 3)
    _, lse, mass = exact_rows(q, k, v, np.arange(40), masses=True)
    scores = naive.logits(q, k)
    tiles = [naive.log_sum_exp(scores[:, j : j + TILE]) for j in range(0, keys, TILE)]
    assert mass.shape == (1, 40, len(tiles))
    # in units of log 2, of size 10: some ten roundings of float32
    np.testing.assert_allclose(mass[0] / LOG2_E, np.stack(tiles, axis=1), rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse[0] / LOG2_E, naive.log_sum_exp(scores), rtol=0, atol=1e-5)


@pytest.mark.parametrize("keys", [2048, 5000, 40_000])
def test_split_keys(keys, rng):
    """Few rows over many keys: the ranges of keys are merged, also where one range outweighs the others by e^90."""
    q, k, v = make(rng, 6, keys, 8, 4)
    k[: keys // 2] += 4 * q[:1]
    splits, split = _splits(flat(q, k, v), 1, keys)
    assert splits > 1
    assert split % TILE == 0
    assert (splits - 1) * split < keys <= splits * split
    check(q, k, v, np.float32)


def test_many_heads_at_once(rng):
    q, k, v = make(rng, 33, 50, 8, 4, lead=(37,))
    out = exact_rows(q, k, v, np.arange(33))[0]
    np.testing.assert_allclose(out, naive.attention_heads(q, k, v), rtol=0, atol=2e-6)  # ten roundings of size 1


def test_grouped_and_broadcast_heads(rng):
    q = rng.standard_normal((2, 1, 6, 20, 8)).astype(np.float32)
    k = rng.standard_normal((1, 3, 2, 30, 8)).astype(np.float32)
    v = rng.standard_normal((1, 3, 2, 30, 5)).astype(np.float32)
    out = exact_rows(q, k, v, np.arange(20))[0]
    exact = naive.attention_heads(q, k, v)
    np.testing.assert_allclose(out.reshape(exact.shape), exact, rtol=0, atol=2e-6)  # ten roundings of size 1


def test_scale(rng):
    q, k, v = make(rng, 20, 30, 8, 4, np.float64)
    problem = flat(q, k, v, scale=1.7)
    out = rows(problem, heads(problem), np.arange(20)[None])[0][0]
    np.testing.assert_allclose(out, naive.attention(q, k, v, 1.7), rtol=0, atol=1e-14)  # 50 eps, size 1
    assert problem.factor == pytest.approx(1.7 / math.log(2), rel=1e-15)


def test_given_output_is_filled(rng):
    q, k, v = make(rng, 20, 30, 8, 4)
    problem = flat(q, k, v)
    into = np.full((1, 20, 4), np.nan, np.float32)
    out, _, _ = rows(problem, heads(problem), np.arange(20)[None], out=into)
    assert out is into
    assert naive.relative(into[0], naive.attention(q, k, v)) < 1e-6  # eight roundings
