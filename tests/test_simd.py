"""The register-blocked product, against dense float64: both strides, both ways of accumulating, awkward depths."""

import numba
import numpy as np
import pytest

from pda_numba.kernels.fold import largest_of_rows, sum_of_rows
from pda_numba.kernels.simd import (
    NARROW_ROWS,
    ROW_PADDING,
    ROWS,
    VECTOR_BYTES,
    dot,
    lane_count,
    lanes,
    multiply_block,
    padded,
)


@numba.njit
def _by_rows(c, a, b, depth, accumulate):
    for r in range(0, c.shape[0], ROWS):
        multiply_block(c, r, a, r * a.shape[1], a.shape[1], 1, b, depth, accumulate)


@numba.njit
def _by_columns(c, a, b, depth, accumulate):
    for r in range(0, c.shape[0], ROWS):
        multiply_block(c, r, a, r, 1, a.shape[1], b, depth, accumulate)


@numba.njit
def _lanes_inside(panel):
    return lane_count(panel)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lanes(dtype):
    width = lanes(dtype)
    assert width * np.dtype(dtype).itemsize == 2 * VECTOR_BYTES
    panel = np.zeros((3, width), dtype)
    assert _lanes_inside(panel) == lane_count(panel) == width


def test_padded():
    assert [padded(x) for x in (0, 1, 7, 8, 9, 64)] == [0, 8, 8, 8, 16, 64]
    assert ROW_PADDING % ROWS == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("accumulate", [False, True])
def test_product(dtype, accumulate, rng):
    width = lanes(dtype)
    for depth in (0, 1, 2, 7, 63, 64, 65, 200):
        a = rng.standard_normal((16, max(depth, 1))).astype(dtype)
        b = rng.standard_normal((max(depth, 1), width)).astype(dtype)
        start = rng.standard_normal((16, width)).astype(dtype)
        true = a[:, :depth].astype(float) @ b[:depth].astype(float) + (start if accumulate else 0)
        # one rounding for each of the depth + 1 steps, each at most half an ulp of the sum of absolute values
        size = np.abs(a[:, :depth]).astype(float) @ np.abs(b[:depth]).astype(float) + np.abs(start)
        bound = (depth + 1) * np.finfo(dtype).eps * size
        for product, left in ((_by_rows, a), (_by_columns, np.ascontiguousarray(a.T))):
            c = start.copy()
            product(c, left, b, depth, accumulate)
            assert (np.abs(c - true) <= bound).all()


def test_product_does_not_touch_other_rows(rng):
    width = lanes(np.float32)
    a, b = rng.standard_normal((ROWS, 5)).astype(np.float32), rng.standard_normal((5, width)).astype(np.float32)
    guarded = np.full((3 * ROWS, width), 7, np.float32)

    @numba.njit
    def middle(c, a, b):
        multiply_block(c, ROWS, a, 0, 5, 1, b, 5, False)

    middle(guarded, a, b)
    assert (guarded[:ROWS] == 7).all()
    assert (guarded[2 * ROWS :] == 7).all()
    np.testing.assert_allclose(guarded[ROWS : 2 * ROWS], a @ b, rtol=0, atol=5e-6)  # six roundings of sums below 10


@numba.njit
def _dot_rows(a, i, b, j, count):
    return dot(a, i, b, j, count)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dot(dtype, rng):
    a, b = rng.standard_normal((5, 301)).astype(dtype), rng.standard_normal((4, 301)).astype(dtype)
    for count in (0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 301):
        found = _dot_rows(a, 4, b, 2, count)
        x, y = a[4, :count].astype(float), b[2, :count].astype(float)
        # one rounding a step, of partial sums no larger than the sum of absolute values
        assert abs(found - x @ y) <= (count + 1) * np.finfo(dtype).eps * (np.abs(x) @ np.abs(y))
    assert _dot_rows(a, 1, a, 1, 301) > 0
    x, ones = np.arange(1.0, 302.0, dtype=dtype)[None], np.ones((1, 301), dtype)
    assert _dot_rows(x, 0, ones, 0, 301) == 301 * 302 / 2  # whole numbers: every column counts once, exactly


def test_nan_and_infinity_pass_through():
    width = lanes(np.float32)
    a, b = np.ones((ROWS, 2), np.float32), np.ones((2, width), np.float32)
    b[0, 0], b[1, 1] = np.nan, np.inf
    c = np.zeros((ROWS, width), np.float32)
    _by_rows(c, a, b, 2, False)
    assert np.isnan(c[:, 0]).all()
    assert np.isposinf(c[:, 1]).all()
    assert (c[:, 2:] == 2).all()


@numba.njit
def _folded(panel, columns, largest, totals):
    largest_of_rows(panel, columns, largest)
    sum_of_rows(panel, columns, totals)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_folded(dtype):
    rng = np.random.default_rng(0)
    width = lanes(dtype) // 2
    panel = rng.normal(size=(NARROW_ROWS, 5 * width)).astype(dtype)
    largest, totals = np.full(NARROW_ROWS + 1, 7, dtype), np.full(NARROW_ROWS + 1, 7, dtype)
    for columns in (width, 2 * width, 3 * width, 5 * width):
        some = panel[:, :columns]
        _folded(panel, columns, largest, totals)
        assert (largest[:-1] == some.max(1)).all()
        # each number takes part in at most so many additions
        allowed = 2 * width * np.finfo(dtype).eps * np.abs(some).sum(1)
        assert (np.abs(totals[:-1] - some.sum(1, dtype=np.float64)) <= allowed).all()
    panel[1, 3] = -np.inf
    _folded(panel, width, largest, totals)
    assert largest[1] == panel[1, :width].max()
    assert largest[-1] == totals[-1] == 7  # nothing is written behind the rows
