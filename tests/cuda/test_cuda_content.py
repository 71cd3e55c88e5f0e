"""Buckets, probes and the content near field on the device: the same choices as on the CPU, sums within rounding."""

import dataclasses

import numpy as np
import problems
import pytest
import simulator
from common import host, on_cuda

from pda_numba import buckets, content, grouping, metric, tree
from pda_numba.backward import Gradients
from pda_numba.content_adjoint import content_adjoint
from pda_numba.device import CPU, Cuda
from pda_numba.options import Fields

pytestmark = pytest.mark.cudasim

FEW = Fields((0,), (0, 3), False, size=8, heavy=3)


@pytest.mark.parametrize(("n", "groups", "unit"), [(1, 1, 64), (150, 4, 64), (150, 4, 1), (97, 200, 64)])
def test_lists(n, groups, unit, rng, monkeypatch):
    monkeypatch.setattr(grouping, "_PIECE", 20)
    group = rng.integers(-1, groups, (2, n, 2)).astype(np.int32)
    device = Cuda()
    found = [grouping.list_groups(d, d.upload(group), 1, groups, unit) for d in (CPU, device)]
    cpu, gpu = ([host(x) for x in lists] for lists in found)
    for expected, got in zip(cpu, gpu, strict=True):
        short = expected.shape[1]
        np.testing.assert_array_equal(got[:, :short], expected)
        assert (got[:, short:] == (-1 if got is gpu[0] else 0)).all()
    for h in range(2):
        for g in range(groups):
            own = cpu[0][h, cpu[1][h, g] : cpu[1][h, g] + cpu[2][h, g]]
            np.testing.assert_array_equal(own, np.flatnonzero(group[h, :, 1] == g))


def known(problem):
    """The keys by bucket, on the pool of all keys and twenty pilot rows."""
    device, heads = problem.device, problems.heads(problem)
    m = problem.shape[1]
    columns = np.abs(np.random.default_rng(5).standard_normal((len(heads), m, 20))).astype(problem.element)
    pool = np.tile(np.arange(m), (len(heads), 1))
    task = device.upload(columns), device.upload(pool), device.upload(np.full(len(heads), m))
    return content.by_bucket(problem, heads, task, FEW)


def clustered(n, count=2):
    heads = (problems.make("clustered", n, d=5, e=6, seed=s, dtype=np.float64) for s in range(count))
    q, k, v = (np.stack(x) for x in zip(*heads, strict=True))
    k[0, 7] += 40  # far from everything
    return problems.flat(q, k, v)


@pytest.fixture(params=["one level", "three levels"])
def both(request, monkeypatch):
    monkeypatch.setattr(buckets, "_SINGLE_SHARE", 8)  # of so few keys more than one may be alone
    if request.param == "three levels":
        for name in ("_FLAT", "_TWO"):
            monkeypatch.setattr(tree, name, 2)
    problem = clustered(70)
    done = []
    for p in (problem, on_cuda(problem)):
        keys = known(p)
        counts = p.device.upload(np.array([3, 2]))
        near = content.near(p, problems.heads(p), keys, counts, 3)
        done.append((p, keys, near))
    return done


def test_buckets_and_near_field(both):
    (_, keys, near), (_, gpu_keys, gpu_near) = both
    for name in ("bucket", "keys", "start"):
        expected, got = (host(getattr(x, name)) for x in (keys, gpu_keys))
        np.testing.assert_array_equal(got, expected, err_msg=name)
    np.testing.assert_array_equal(host(gpu_near.probes), near.probes)
    single = near.bucket[0, 7, 0]  # far from everything: alone
    assert (near.bucket[0] == single).sum() == 1
    for expected, got in ((near.out, gpu_near.out), (near.lse, gpu_near.lse)):
        np.testing.assert_allclose(host(got), expected, rtol=1e-12, atol=1e-12)  # sums in another order


def test_adjoint(both, rng):
    if len(both[0][1].levels) > 1:
        pytest.skip("the levels do not matter here")
    results = []
    shape = both[0][0].q.shape
    lse, offset = both[0][2].lse + 1, rng.standard_normal(shape[:2])
    lse[0, 4] = np.inf
    cotangent = rng.standard_normal((*shape[:2], 6))
    for p, keys, near in both:
        device, place = p.device, p.query_heads(np.arange(2))
        total = Gradients(*(device.zeros(x.shape, p.element) for x in (p.q, p.k, p.v)))
        task = p.q, place, keys, near, *(device.upload(x) for x in (lse, offset, cotangent))
        content_adjoint(p, problems.heads(p), *task, place, total.q, total[1:])
        results.append([host(x) for x in total])
    for expected, got in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_every_barrier_is_needed():
    p = on_cuda(clustered(34, count=1))
    keys, counts = known(p), p.device.upload(np.array([2]))

    def run_near():
        found = content.near(p, problems.heads(p), keys, counts, 2)
        return [host(x) for x in (found.out, found.lse)]

    assert not simulator.barriers_without_effect(run_near, "content.py")


@pytest.mark.parametrize("group", [1, 3])
def test_metric(group, rng):
    q = rng.normal(size=(2, 15 * group, 6)) + 2
    problem = dataclasses.replace(problems.flat(q, q, q), group=group)
    found = [metric.metric_of(p, problems.heads(p)) for p in (problem, on_cuda(problem))]
    np.testing.assert_allclose(host(found[1]), found[0], rtol=1e-12, atol=1e-12)  # sums in another order
