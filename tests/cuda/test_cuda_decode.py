"""Decoding on the device: the same answers as on the CPU, within rounding, and the same decisions."""

import naive
import numpy as np
import problems
import pytest
import simulator
from common import host, on_cuda

from pda_numba import AttentionCache, _cache, fitting, recall, steps

pytestmark = pytest.mark.cudasim


def rows_of(problem, count):
    heads = len(problem.query_head)
    queries = np.repeat(np.arange(heads), count), np.tile(np.arange(count), heads)
    return steps.Queries(*(problem.device.upload(x) for x in queries))


def model_of(rng, problem, rank, heavy):
    """Random landmarks and heavy keys; the second head has none."""
    _, _, dim, values = problem.shape
    shapes = (2, 8, dim), (2, 8, 24), (2, 8, dim), (2, 8, values)
    tiles, table, heavy_k, heavy_v = (rng.standard_normal(s).astype(problem.element) for s in shapes)
    counts = np.array([rank, 0]), np.array([heavy, 0])
    return [problem.device.upload(x) for x in (tiles, np.abs(table), counts[0], heavy_k, heavy_v, counts[1])]


def one_step(problem, model, start, stop):
    """Everything that a step is made of, on the problem's device."""
    upload, rows = problem.device.upload, rows_of(problem, 2)
    past_keys = steps.over_keys(problem, rows, upload(np.zeros_like(start)), upload(start), int(start.max()))
    near = steps.over_keys(problem, rows, upload(start), upload(stop), int((stop - start).max()))
    whole = steps.blend(problem, near, past_keys)
    guess = recall.with_model(problem, near, recall.over_model(problem, rows, recall.Model(*model)))
    return [host(x) for x in (*near, *whole, *guess)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_step_matches_the_cpu(rng, dtype):
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in ((2, 2, 7), (1, 1300, 7), (1, 1300, 5)))
    problem = problems.flat(q, k, v)
    device = on_cuda(problem)
    model = model_of(rng, problem, 6, 3)
    start, stop = np.array([0, 3, 1200, 1200]), np.array([1299, 1300, 1299, 1300])
    there = [device.device.upload(x) for x in model]
    expected = one_step(problem, model, start, stop)
    found = one_step(device, there, start, stop)
    tolerance = 1e-12 if dtype == np.float64 else 3e-5
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_every_barrier_is_needed(rng):
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((2, 2, 3), (1, 150, 3), (1, 150, 4)))
    device = on_cuda(problems.flat(q, k, v))
    device.device.pieces = 1  # one team for everything, one after the other
    model = model_of(rng, device, 6, 3)
    start, stop = np.array([20, 10, 140, 0]), np.array([149, 150, 149, 150])
    left = simulator.barriers_without_effect(lambda: one_step(device, model, start, stop), "steps.py", "recall.py")
    assert not left


def test_decoding_on_the_device(monkeypatch):
    """A model of a short past, and audits; the answers are those of the CPU, and near exact attention."""
    monkeypatch.setattr(fitting, "_WORTH", 0.0)
    q, k, v = (x[None] for x in problems.make("decaying", 420, d=8, e=4, seed=3))
    answers = {}
    for device in ("cpu", "cuda"):
        cache = AttentionCache(
            q[:, :400], k[:, :400], v[:, :400], recent=128, rank=8, tol=None, device=device, check_finite=False
        )
        assert (cache.rank > 0).all()
        outs = []
        for i in range(400, 420, 4):
            now = slice(i, i + 4)
            cache.append(k[:, now], v[:, now])
            out, info = cache.attend(q[:, now], return_info=True)
            outs.append(out)
        assert info.refreshes[0] == 1
        answers[device] = np.concatenate(outs, axis=1), info
        assert device in str(cache)
    (cpu, told), (cuda, told_there) = answers["cpu"], answers["cuda"]
    np.testing.assert_allclose(cuda, cpu, rtol=0, atol=2e-3)  # features and fits are summed in another order
    assert told.audits == told_there.audits
    exact = np.stack([naive.attention(q[0, i : i + 1], k[0, : i + 1], v[0, : i + 1])[0] for i in range(400, 420)])
    assert naive.relative(cuda[0], exact) < 0.3


def test_storage_grows_on_the_device(rng, monkeypatch):
    monkeypatch.setattr(_cache, "_ROOM", 5)
    q, k, v = (rng.standard_normal((2, 40, 6)) for _ in range(3))
    cache = AttentionCache(q[:, :10], k[:, :10], v[:, :10], device="cuda")
    for i in range(10, 40, 10):
        cache.append(k[:, i : i + 10], v[:, i : i + 10])
    assert cache._storage.k.shape[1] > 15
    out = cache.attend(q[:, -2:])
    for h in range(2):
        for t in range(2):
            stop = 39 + t
            expected = naive.attention(q[h, 38 + t : 39 + t], k[h, :stop], v[h, :stop])[0]
            np.testing.assert_allclose(out[h, t], expected, rtol=1e-12)
