"""The near field by content: buckets, probes, attention to what is near; what it is for: single keys that matter."""

import itertools

import naive
import numpy as np
import pytest
from problems import flat, heads, make

import pda_numba
from pda_numba import NearField, attention, content, probe, tree
from pda_numba.data import real_heads
from pda_numba.device import CPU
from pda_numba.options import Fields


def by_bucket(problem, size=8, heavy=3, probes=3, seed=0):
    """Keys by bucket on a pool of all keys, and the near field of all queries."""
    every, m = heads(problem), problem.shape[1]
    columns = np.random.default_rng(seed).random((len(every), m, 4)).astype(problem.element)
    pool = columns, np.tile(np.arange(m), (len(every), 1)), np.full(len(every), m)
    keys = content.by_bucket(problem, every, pool, Fields((0,), (0, probes), False, size, heavy))
    counts = np.full(len(every), probes)
    return columns, keys, content.near(problem, every, keys, counts, probes)


def near_keys(keys, near, h):
    """Which keys are near to which queries."""
    found = (near.probes[h][:, :, None] == near.bucket[h][:, 0]).any(axis=1)
    return found | (near.bucket[h][:, 0] == keys.heavy)


def sizes():
    for n, m in ((1, 200), (2, 63), (97, 500), (500, 97), (1025, 1025)):
        yield n, m, 16, 8
    yield 63, 300, 1, 1
    yield 97, 400, 59, 5
    yield 70, 200, 111, 64


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "m", "d", "e"), list(sizes()))
def test_attention_to_the_near_keys(n, m, d, e, dtype):
    q, k, v = make("clustered", n, m, d, e, seed=1, dtype=dtype)
    problem = flat(q, k, v)
    _, keys, near = by_bucket(problem)
    scores = np.where(near_keys(keys, near, 0), naive.logits(q, k), -np.inf)
    # No more than a plain implementation in that precision, and a few units where that happens to be exact.
    plain = np.where(np.isinf(scores), -np.inf, (q @ k.T) * dtype(1 / np.sqrt(d)))
    yardstick = np.abs(naive.softmax(plain.astype(dtype)) @ v - naive.softmax(scores) @ v.astype(float)).max()
    unit = np.finfo(dtype).eps * np.abs(v).max()
    assert np.abs(near.out[0] - naive.softmax(scores) @ v.astype(float)).max() <= 2 * yardstick + 8 * unit
    true = naive.log_sum_exp(scores) / np.log(2)
    assert np.abs(near.lse[0] - true).max() <= 32 * np.finfo(dtype).eps * np.abs(scores[np.isfinite(scores)]).max()


@pytest.mark.parametrize("levels", [1, 3])
def test_every_key_is_in_one_bucket(levels, monkeypatch):
    if levels == 3:
        monkeypatch.setattr(tree, "_FLAT", 2)
        monkeypatch.setattr(tree, "_TWO", 4)
    for kind in ("clustered", "duplicated", "gaussian"):
        problem = flat(*make(kind, 900, seed=2))
        columns, found, near = by_bucket(problem, size=16, heavy=5)
        assert len(found.levels) == levels
        order, start, bucket = found.keys[0], found.start[0], found.bucket[0, :, 0]
        np.testing.assert_array_equal(np.sort(order), np.arange(900))
        np.testing.assert_array_equal(bucket[order], np.repeat(np.arange(len(start) - 1), np.diff(start)))
        assert np.diff(start)[:-1].max() <= 24  # one and a half times the size, as `NearField` says
        heaviest = np.argsort(-columns[0].astype(float).sum(axis=1))[:5]
        np.testing.assert_array_equal(np.sort(np.flatnonzero(bucket == found.heavy)), np.sort(heaviest))
        for p in near.probes[0]:
            assert len(set(p)) == len(p)
            assert (np.diff(start)[p] > 0).all()


def test_probes_are_the_best_buckets():
    """Of the score of the mean key times the number of keys; under one level of centres all buckets are looked at."""
    q, k, v = make("clustered", 400, d=12, seed=3)
    problem = flat(q, k, v)
    _, keys, near = by_bucket(problem, size=16)
    start, order = keys.start[0], keys.keys[0]
    own = [order[a:b] for a, b in itertools.pairwise(start[:-1])]
    means = np.stack([k[i].astype(float).mean(axis=0) if len(i) else np.zeros(12) for i in own])
    score = naive.logits(q, means) + np.log(np.maximum([len(i) for i in own], 1e-30))
    best = -np.sort(-score, axis=1)[:, :3]
    found = np.take_along_axis(score, near.probes[0].astype(int), axis=1)
    np.testing.assert_allclose(found, best, rtol=0, atol=1e-5)  # ties and scores in float32


def far_key(n=2000):
    q, k, v = make("decaying", n, seed=4)
    k[1234] += 9.0
    return q, k, v


def test_rows_with_the_same_beam_are_neighbours():
    rng = np.random.default_rng(0)
    kinds = np.array([rng.choice(40, 5, replace=False) for _ in range(30)])
    kinds[:, 4] = np.where(np.arange(30) % 3, kinds[:, 4], -1)  # a beam need not be full
    kinds[29] = -1
    which = rng.integers(30, size=(2, 6000))
    beam = rng.permuted(kinds[which], axis=2).astype(np.int32)
    order = probe.by_neighbourhood(CPU, beam, 40)
    for h in range(2):
        rows = order[h][order[h] >= 0]
        assert sorted(rows) == list(np.flatnonzero(which[h] != 29))  # who looks at nothing is in no list
        # 28 for 29 kinds; two kinds in one group, which a hash cannot exclude, take turns some two hundred times
        assert np.count_nonzero(np.diff(which[h][rows])) <= 28 + 2 * 200


def test_a_key_that_is_far_from_all_others_is_a_bucket_of_its_own():
    q, k, v = far_key()
    _, keys, _ = by_bucket(flat(q, k, v), size=32, heavy=0)
    bucket = keys.bucket[0, :, 0]
    assert (bucket == bucket[1234]).sum() == 1


# --- in a call ---

CONTENT = NearField(n_probes=3, bucket_size=16, n_heavy=4)


@pytest.mark.parametrize("near", [CONTENT, NearField(window=9, n_probes=2, bucket_size=8), "content", "both", "auto"])
def test_half_precision_strides_and_sharing(near):
    """The same answer for any layout, and for 16-bit floats that of their values."""
    q, k, v = (x.astype(np.float16) for x in make("clustered", 900, seed=5))
    options = {"rank": 16, "tol": None, "method": "pda", "near": near}
    whole, info = attention(*(x.astype(np.float32) for x in (q, k, v)), return_info=True, **options)
    half = attention(q, k, v, **options)
    np.testing.assert_array_equal(half, whole.astype(np.float16))
    turned = attention(*(np.asfortranarray(x.astype(np.float32)) for x in (q, k, v)), **options)
    np.testing.assert_array_equal(turned, whole)
    assert naive.relative(whole, naive.attention(q, k, v)) <= 1.5 * float(info.error_limit)


@pytest.mark.parametrize("kind", ["zeros", "equal keys", "huge logits", "one key far"])
def test_hostile_inputs(kind):
    q, k, v = make("gaussian", 700, seed=6)
    if kind == "zeros":
        q, k = np.zeros_like(q), np.zeros_like(k)
    elif kind == "equal keys":
        k[:] = k[0]
    elif kind == "huge logits":
        q *= 300
    else:
        k[3] *= 1e6
    out, info = attention(q, k, v, rank=8, tol=None, method="pda", near=CONTENT, return_info=True)
    assert np.isfinite(out).all()
    assert naive.relative(out, naive.attention(q, k, v)) <= max(1.5 * float(info.error_limit), 1e-5)


@pytest.mark.parametrize(
    ("near", "window", "error", "message"),
    [
        ("bucket", "auto", ValueError, "near must be one of 'auto', 'none', 'window', 'content', 'both', got 'bucket'"),
        (3, "auto", TypeError, "near must be a word or a NearField, got 3 of type int"),
        (NearField(n_probes=17), "auto", ValueError, "near.n_probes must be between 0 and 16, got 17"),
        (NearField(bucket_size=4), "auto", ValueError, "near.bucket_size must be between 8 and 1024, got 4"),
        (NearField(n_heavy=-1), "auto", ValueError, "near.n_heavy must be between 0 and 256, got -1"),
        (NearField(window=300), "auto", ValueError, "near.window must be between 0 and the sequence length less one"),
        (NearField(), 32, ValueError, "window must be 'auto' beside near="),
        ("content", 32, ValueError, "window must be 'auto' beside near='content', got 32"),
    ],
)
def test_bad_choices_are_named(near, window, error, message):
    q = np.ones((300, 4), np.float32)
    with pytest.raises(error) as caught:
        attention(q, q, q, near=near, window=window)
    assert message in str(caught.value)


def test_what_each_head_got():
    options = {"rank": 16, "tol": None, "method": "pda", "return_info": True}
    arrays = make("clustered", 900, seed=7)
    for near, words in (("none", {"none"}), ("window", {"window"}), ("content", {"content"}), ("both", {"both"})):
        info = attention(*arrays, near=near, **options)[1]
        assert str(info.near) in words
        assert (info.probes > 0) == (near in ("content", "both"))
        assert (info.window > 0) == (near in ("window", "both"))
    info = attention(*arrays, near=CONTENT, **options)[1]
    assert (info.probes, info.window) == (3, 0)
    assert "probes" in str(info)


def test_real_heads():
    """At rank 64: medians of 0.07 and 0.06 at most and no head above 0.13; at rank 128 no head above 0.10."""
    for name, median in (("text", 0.07), ("speech", 0.06)):
        q, k, v, scale = real_heads(name)
        exact = [naive.attention(*x, scale) for x in zip(q, k, v, strict=True)]
        for rank, worst in ((64, 0.13), (128, 0.10)):
            out, info = attention(q, k, v, scale=scale, rank=rank, tol=None, method="pda", return_info=True)
            errors = [naive.relative(a, b) for a, b in zip(out, exact, strict=True)]
            assert np.median(errors) <= (median if rank == 64 else np.inf)
            assert max(errors) <= worst
            assert np.mean(errors <= info.error_limit) >= 0.8  # each with probability 0.95: 5 of 6 or less in 0.27


@pytest.mark.parametrize("gap", [8, 12])
def test_needles_are_found(gap):
    """At least 98 % of the queries with a key of their own are within 5 % of exact attention."""
    q, k, v, which = needles(16384, gap)
    out, info = attention(q, k, v, rank=64, tol=None, return_info=True)
    assert "content" in str(info.near) or str(info.near) == "both"
    exact = naive.attention(q[which], k, v)
    errors = np.linalg.norm(out[which] - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert np.mean(errors <= 0.05) >= 0.98
    without = attention(q, k, v, rank=64, tol=None, near="none")
    errors = np.linalg.norm(without[which] - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert np.mean(errors <= 0.05) < 0.8  # those that were computed exactly


def test_tol_is_kept_with_needles_and_low_rank_does_it():
    q, k, v, _ = needles(16384, 8)
    rows = np.random.default_rng(1).choice(16384, 1500, replace=False)
    exact = naive.attention(q[rows], k, v)
    for near, method in (("auto", "pda"), ("window", "exact")):
        out, info = attention(q, k, v, tol=0.05, near=near, return_info=True)
        assert info.method == method
        assert naive.relative(out[rows], exact) <= 0.05


def needles(n, gap, share=0.01, seed=0):
    """Smooth attention in eight directions; a share of the queries has one key of its own anywhere, whose logit lies
    `gap` above the logarithm of the sum over all others. Also returns which queries these are.
    """
    rng = np.random.default_rng(seed)
    d, count, frequency = 64, int(share * n), np.repeat(np.arange(1, 5), 2)
    basis = np.linalg.qr(rng.standard_normal((d, 8)))[0].T

    def smooth(x):
        angle = 2 * np.pi * x[:, None] * frequency
        return np.where(np.arange(8) % 2, np.sin(angle), np.cos(angle)) / frequency

    q, k = (3 * smooth(rng.random(n)) @ basis for _ in range(2))
    v = 0.5 * rng.standard_normal((n, d)) + smooth(rng.random(n)) @ rng.standard_normal((8, d))
    which, own = (rng.choice(n, count, replace=False) for _ in range(2))
    direction = rng.standard_normal((count, d))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    wanted = naive.log_sum_exp(naive.logits(q[which], k)) + gap - (q[which] * k[own]).sum(axis=1) / 8
    length = np.sqrt(8 * wanted)[:, None]
    q[which] += length * direction
    k[own] += length * direction
    return (*(x.astype(np.float32) for x in (q, k, v)), which)


def test_the_plan_knows_it():
    shape = (100_000, 64)
    assert pda_numba.plan(shape, shape, shape, rank=64, near="content").method == "pda"
