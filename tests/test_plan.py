"""The plan: what it decides, what it counts, and that shapes are all it needs."""

import itertools
import math

import numpy as np
import pytest

from pda_numba import plan


def square(n, d=64, lead=()):
    return ((*lead, n, d),) * 3


def test_short_sequences_are_exact_and_long_ones_are_not():
    methods = [plan(*square(2**p)).method for p in range(6, 21)]
    assert methods[0] == "exact"
    assert methods[-1] == "pda"
    assert sorted(methods) == methods  # once low rank is worth it, it stays so


def test_exact_operations():
    assert plan((3, 100, 8), (3, 50, 8), (3, 50, 6), method="exact").flops_exact == 3 * 2 * 100 * 50 * (8 + 6)


def test_growth_with_the_sequence():
    """Exact attention grows with the square of the length, low rank in proportion to it."""
    short, long = (plan(*square(n), rank=128, method="pda") for n in (2**18, 2**20))
    assert long.flops_exact / short.flops_exact == pytest.approx(16, rel=1e-12)
    assert 3.5 < long.flops_pda / short.flops_pda < 4.05
    assert long.workspace_bytes < 4.05 * short.workspace_bytes


def test_memory_of_the_longest_sequence_promised():
    """96 MB beyond inputs and output at a million tokens, rank 128, 64 columns."""
    assert plan(*square(2**20), rank=128, method="pda").workspace_bytes <= 96e6


def test_heads_multiply_the_work_and_not_the_decision():
    one, many = plan(*square(20_000)), plan(*square(20_000, lead=(2, 8)))
    assert many.method == one.method
    assert many.rows == one.rows
    assert many.flops_pda == pytest.approx(16 * one.flops_pda, rel=1e-12)
    assert many.flops_exact == pytest.approx(16 * one.flops_exact, rel=1e-12)


def test_double_precision_needs_more_memory():
    narrow, wide = (plan(*square(50_000), t, rank=64, method="pda").workspace_bytes for t in ("float32", np.float64))
    assert narrow < wide <= 2 * narrow


def test_choices_are_respected():
    assert plan(*square(100_000), method="exact").method == "exact"
    given = plan(*square(100_000), rank=77, method="pda")
    assert given.method == "pda"
    assert given.rank == 77
    assert given.ranks == (77,)
    assert 4 * 77 < given.rows < 6 * 77 + 400


def test_a_rank_that_would_compute_every_row_is_exact():
    few = plan(*square(500), rank=128, method="pda")
    assert few.method == "exact"
    assert few.rows == 500
    assert "500" in few.reason


def test_near_field_costs():
    none, wide = (plan(*square(100_000), rank=64, window=w, method="pda").flops_pda for w in (0, 500))
    extra = 2 * 100_000 * 2 * 500 * 128  # every query against twice the window's keys
    assert none + extra <= wide <= none + 1.2 * extra


def test_a_stricter_loop_never_tries_fewer_ranks_on_longer_sequences():
    ranks = [plan(*square(2**p)).ranks for p in range(12, 21)]
    assert all(set(a) <= set(b) for a, b in itertools.pairwise(ranks))


def test_everything_is_printed():
    text = str(plan(*square(100_000)))
    for word in ("method", "reason", "ranks", "exact rows", "operations", "workspace"):
        assert word in text


def test_numbers_are_finite_for_every_shape():
    for n in (0, 1, 100, 10_000):
        for m in (1, 100, 10_000):
            made = plan((n, 8), (m, 8), (m, 5))
            assert all(math.isfinite(x) and x >= 0 for x in (made.flops_pda, made.flops_exact, made.workspace_bytes))
            assert made.rows <= n
