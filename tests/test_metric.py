"""How far apart keys are for the queries, against the formula in float64."""

import dataclasses

import numpy as np
import pytest
from problems import flat, heads

from pda_numba import draw, metric
from pda_numba.device import CPU


def expected(q, groups, of_row):
    """M of the queries `q`, whose heads are `of_row`."""
    dim = q.shape[1]
    total, spread = np.zeros((dim, dim)), np.zeros((len(q), dim))
    for g in range(groups):
        own = of_row == g
        mean = q[own].mean(axis=0) if own.any() else np.zeros(dim)
        s = np.sqrt(np.mean((q[own] - mean) ** 2)) if own.any() else 0.0
        if s > 0:
            spread[own] = (q[own] - mean) / s
            total += min(1, s / np.linalg.norm(mean)) * np.outer(mean, mean) / s**2 / groups
    return total + spread.T @ spread / len(q) + 0.2 * np.eye(dim)


@pytest.mark.parametrize(("n", "d", "groups"), [(1, 1, 1), (97, 59, 1), (900, 64, 4), (1025, 111, 2)])
@pytest.mark.parametrize("far", [0.0, 8.0])
def test_metric(n, d, groups, far):
    rng = np.random.default_rng(0)
    size = groups * n
    q = rng.normal(size=(2, size, d)) + far
    q *= (1 + np.arange(size) // n)[:, None]  # heads of different lengths count alike
    problem = dataclasses.replace(flat(q, q, q), group=groups)
    every = heads(problem)
    which = draw.uniform_rows(problem, every, min(512, size), stage=draw.METRIC)
    found = metric.metric_of(problem, every)
    for h in range(2):
        true = expected(q[h, which[h]], groups, which[h] // n)
        # sums of 512 products, of numbers about as large as the largest entry
        np.testing.assert_allclose(found[h], true, rtol=0, atol=1e-13 * np.abs(true).max())


def test_queries_that_are_all_alike_see_every_direction():
    q = np.full((1, 40, 8), 3.0)
    problem = flat(q, q, q)
    np.testing.assert_array_equal(metric.metric_of(problem, heads(problem))[0], 0.2 * np.eye(8))


@pytest.mark.parametrize("element", [np.float32, np.float64])
def test_the_nearest_centre(element):
    rng = np.random.default_rng(0)
    root = rng.normal(size=(2, 30, 30))
    m = (root @ root.transpose(0, 2, 1)).astype(element)
    keys, centres = (rng.normal(size=(2, size, 30)).astype(element) for size in (200, 16))
    seen, bias = np.full_like(centres, np.nan), np.full((2, 16), np.nan, element)
    metric.see(CPU, m, centres, seen, bias)
    for h in range(2):
        apart = keys[h, :, None].astype(float) - centres[h]
        square = np.einsum("kcd,de,kce->kc", apart, m[h].astype(float), apart)
        own = np.einsum("kd,de,ke->k", keys[h].astype(float), m[h].astype(float), keys[h].astype(float))
        found = own[:, None] - 2 * (keys[h].astype(float) @ seen[h].T.astype(float) + bias[h])
        # sums of 30 x 30 products
        np.testing.assert_allclose(found, square, rtol=0, atol=900 * np.finfo(element).eps * own.max())
