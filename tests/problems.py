"""Random attention problems of the kinds that are met, one head each, by kind, size and seed."""

import numpy as np

from pda_numba import _validate


def gaussian(rng, n, m, d, e):
    return rng.standard_normal((n, d)), rng.standard_normal((m, d)), rng.standard_normal((m, e))


def clustered(rng, n, m, d, e):
    """Tokens around a dozen centres; queries and keys of a cluster like each other."""
    centres = 1.5 * rng.standard_normal((12, d))
    key_centre = rng.integers(12, size=m)
    q = centres[rng.integers(12, size=n)] + 0.3 * rng.standard_normal((n, d))
    k = centres[key_centre] + 0.3 * rng.standard_normal((m, d))
    return q, k, rng.standard_normal((12, e))[key_centre] + 0.3 * rng.standard_normal((m, e))


def decaying(rng, n, m, d, e):
    """Column c of queries and keys has standard deviation 2.5 / (1 + c)."""
    deviation = 2.5 / (1 + np.arange(d))
    return rng.standard_normal((n, d)) * deviation, rng.standard_normal((m, d)) * deviation, rng.standard_normal((m, e))


def peaked(rng, n, m, d, e):
    """Logits of standard deviation about 9: most rows attend to a handful of keys. Smooth in few directions."""
    deviation = 9.0 / (1 + np.arange(d)) ** 2
    q, k = rng.standard_normal((n, d)) * deviation, rng.standard_normal((m, d))
    return q * d**0.5 / 1.1, k, rng.standard_normal((m, e))


def near_uniform(rng, n, m, d, e):
    """Logits of standard deviation 0.01, values with a mean: the output hardly depends on the query."""
    return 0.1 * rng.standard_normal((n, d)), 0.1 * rng.standard_normal((m, d)), 1 + rng.standard_normal((m, e))


def duplicated(rng, n, m, d, e):
    """Forty different keys, each many times, with values of their own."""
    kinds = rng.standard_normal((40, d)) * (2.0 / (1 + np.arange(d)) ** 0.5)
    return rng.standard_normal((n, d)), kinds[rng.integers(40, size=m)], rng.standard_normal((m, e))


def outliers(rng, n, m, d, e):
    """The decaying kind, but six query rows are 5 to 30 times as long."""
    q, k, v = decaying(rng, n, m, d, e)
    rows = rng.choice(n, 6, replace=False)
    q[rows] *= rng.uniform(5, 30, (6, 1))
    return q, k, v


KINDS = {f.__name__: f for f in (gaussian, clustered, decaying, peaked, near_uniform, duplicated, outliers)}


def make(kind, n, m=None, d=16, e=8, *, seed, dtype=np.float32):
    """q (n, d), k (m, d), v (m, e) of one kind."""
    rng = np.random.default_rng([seed, list(KINDS).index(kind), n])
    return tuple(np.ascontiguousarray(x, dtype) for x in KINDS[kind](rng, n, n if m is None else m, d, e))


def flat(q, k, v, scale=None, seed=0):
    """The flattened problem that the stages take."""
    return _validate.build_problem(q, k, v, scale, seed)[0]


def heads(problem):
    return np.arange(len(problem.query_head))
