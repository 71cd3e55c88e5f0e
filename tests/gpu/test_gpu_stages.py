"""Every stage on a real card against its CPU driver, at real sizes and on the same inputs.

The stages run in their order on the CPU; each is run again on the card with what the CPU's stages before it gave. So a
difference is that stage's own: rounding, in sums of another order.
"""

import dataclasses

import numpy as np
import problems
import pytest

from pda_numba import certify, draw, holdout, landmarks, near, project, scan
from pda_numba.apply import apply
from pda_numba.core import LEVERAGE_COLUMNS, fit
from pda_numba.device import Cuda
from pda_numba.kernels.simd import padded
from pda_numba.plan import PANEL
from pda_numba.products import features, nearest
from pda_numba.reach import reach
from pda_numba.rows import rows

pytestmark = pytest.mark.gpu

RANK, WINDOW = 64, 32


class Both:
    """A problem on both devices; `both(stage, *inputs)` gives the results of CPU and card, as NumPy arrays."""

    def __init__(self, cpu):
        device = Cuda()
        arrays = {name: device.cuda.to_device(getattr(cpu, name)) for name in "qkv"}
        self.cpu, self.gpu = cpu, dataclasses.replace(cpu, device=device, **arrays)
        self.heads = problems.heads(cpu)

    def __call__(self, stage, *inputs, **options):
        expected = flat(stage(self.cpu, self.heads, *inputs, **options))
        device = self.gpu.device
        inputs = [self.there(x) for x in inputs]
        options = {name: self.there(x) for name, x in options.items()}
        found = flat(stage(self.gpu, self.heads, *inputs, **options))
        found = [x if isinstance(x, np.ndarray) else device.download(x) for x in found]
        device.recycle()
        return expected, found

    def there(self, x):
        if isinstance(x, tuple):
            return tuple(self.there(y) for y in x)
        return self.gpu.device.upload(x) if isinstance(x, np.ndarray) else x


def flat(results):
    """The arrays of a tuple or dataclass."""
    if dataclasses.is_dataclass(results):
        results = [getattr(results, field.name) for field in dataclasses.fields(results)]
    results = results if isinstance(results, tuple | list) else [results]
    return [x for x in results if hasattr(x, "shape") and hasattr(x, "dtype")]


def agree(expected, found, tolerance):
    """Integers are equal; floats differ by so much of the array's size, which sums in another order may cost."""
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        assert a.shape == b.shape
        if a.dtype.kind in "iu":
            np.testing.assert_array_equal(b, a)
        else:
            np.testing.assert_array_equal(np.isfinite(b), np.isfinite(a))
            known = np.isfinite(a)
            size = np.abs(a[known]).max(initial=0.0)
            np.testing.assert_allclose(b[known], a[known], rtol=tolerance, atol=tolerance * size)


SHAPES = [(4096, 4096, 64, 64), (3001, 5003, 59, 31), (1025, 1025, 111, 256)]


@pytest.fixture(params=[(s, d) for s in SHAPES for d in ("float32", "float64")], ids=str)
def both(request):
    (n, m, d, e), dtype = request.param
    arrays = [problems.make("decaying", n, m, d=d, e=e, seed=seed, dtype=np.dtype(dtype)) for seed in range(3)]
    return Both(problems.flat(*(np.stack(x) for x in zip(*arrays, strict=True)), seed=5))


@pytest.fixture
def rounding(both):
    return 1e-4 if both.cpu.element == np.float32 else 1e-11


@dataclasses.dataclass
class Begun:
    """What the first stages give, on the CPU."""

    which: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    masses: np.ndarray


@pytest.fixture
def begun(both):
    which = draw.uniform_rows(both.cpu, both.heads, 2 * RANK)
    return Begun(which, *rows(both.cpu, both.heads, which, masses=True))


def model(both, begun):
    """Landmarks and a fit on the CPU: (tiles, found, fit, target, columns)."""
    cpu, heads = both.cpu, both.heads
    pool, size = landmarks.draw_pool(cpu, heads, begun.which, begun.lse, begun.masses, 2 * RANK)
    none = np.empty((len(heads), 0, cpu.shape[2]), cpu.element)
    columns = features(cpu, heads, begun.which, begun.lse, landmarks.gather(cpu, heads, pool, size), size, none)
    keys, found = landmarks.choose(cpu, heads, columns, pool, size, RANK)
    tiles = landmarks.gather(cpu, heads, keys, found)
    windows = np.full((len(heads), 1), WINDOW if cpu.shape[0] == cpu.shape[1] else -1)
    target = near.targets(cpu, heads, begun.which, begun.out, begun.lse, windows)
    columns = features(cpu, heads, begun.which, begun.lse, tiles, found, none)
    fitted = fit(cpu, heads, columns, target, begun.out, np.ones(begun.which.shape), found)
    return tiles, found, keys, fitted, target, columns, windows[:, 0], none


def test_ranges(both, rounding):
    expected, found = (
        flat(scan.find_ranges(problem, np.dtype(np.float32), check_finite=True)) for problem in (both.cpu, both.gpu)
    )
    device = both.gpu.device
    agree(expected, [x if isinstance(x, np.ndarray) else device.download(x) for x in found], rounding)


def test_draws(both):
    agree(*both(draw.uniform_rows, 300), 0.0)
    weight = np.random.default_rng(3).exponential(size=(len(both.heads), 2000)) ** 3
    (rows_a, pi_a, scale_a), (rows_b, pi_b, scale_b) = both(draw.weighted_rows, weight, 100, stage=draw.LEVERAGE)
    assert np.mean(rows_a == rows_b) > 0.99  # sums in another order may move a boundary
    np.testing.assert_allclose(scale_b, scale_a, rtol=1e-9)
    np.testing.assert_allclose(np.sort(pi_b), np.sort(pi_a), rtol=1e-6, atol=1e-9)


def test_rows(both, begun, rounding):
    agree(*both(rows, begun.which, masses=True), rounding)
    agree(*both(lambda problem, heads: rows(problem, heads)[:2]), rounding)


def test_near_field(both, begun, rounding):
    windows = np.tile([-1, 0, 7, 130], (len(both.heads), 1))
    agree(*both(near.targets, begun.which, begun.out, begun.lse, windows), rounding)


def test_pool_and_gather(both, begun):
    (pool, size), (pool_b, size_b) = both(landmarks.draw_pool, begun.which, begun.lse, begun.masses, 2 * RANK)
    for h in range(len(both.heads)):  # exponentials in another order may move a boundary between two keys
        common = np.intersect1d(pool[h, : size[h]], pool_b[h, : size_b[h]])
        assert len(common) > 0.98 * size[h]
    agree(*both(landmarks.gather, pool, size), 0.0)


def test_landmarks(both, begun, rounding):
    tiles, found, keys, _, _, _, _, none = model(both, begun)
    agree(*both(features, begun.which, begun.lse, tiles, found, none), 10 * rounding)
    (near_a,), (near_b,) = both(nearest, begun.which % both.cpu.shape[1], tiles, found)
    assert np.mean(near_a == near_b) > 0.99  # ties
    (centres, mean), got = both(landmarks.refine, keys, found, 8 * RANK)
    np.testing.assert_allclose(got[1], mean, rtol=0, atol=rounding * np.abs(mean).max())
    moved = np.abs(got[0] - centres) > rounding * np.abs(centres).max()
    assert np.mean(moved) < 0.02  # a key at a tie moves two centres
    agree(*both(landmarks.shrink, centres, mean, (1.0, 0.45)), rounding)


def test_choice_of_landmarks(both, begun):
    columns = model(both, begun)[5]
    pool, size = np.tile(np.arange(columns.shape[1]), (len(both.heads), 1)), np.full(len(both.heads), RANK)

    def choose(problem, heads, columns, *rest):
        return landmarks.choose(problem, heads, copied(problem, columns), *rest)

    (keys, count), (keys_b, count_b) = both(choose, columns, pool, size, RANK)
    assert np.abs(count - count_b).max() <= 2  # where rounding ends it
    assert np.mean(keys[:, :16] == keys_b[:, :16]) > 0.9


def copied(problem, array):
    """The stage overwrites it; uploads are kept."""
    return problem.device.concatenate([array])


def test_fit(both, begun):
    _, found, _, fitted, target, columns, _, _ = model(both, begun)
    weight = np.random.default_rng(4).uniform(0.5, 2.0, begun.which.shape)
    expected, got = both(fit, columns, target, begun.out, weight, found)
    loo = [x for x in expected if x.shape == fitted.loo.shape]
    loo_b = [x for x in got if x.shape == fitted.loo.shape]
    for a, b in zip(loo, loo_b, strict=True):  # ridge and leave-one-out error: float64 inside
        np.testing.assert_allclose(b, a, rtol=1e-3)


def test_apply(both, begun, rounding):
    tiles, found, _, fitted, _, _, window, none = model(both, begun)
    n, _, _, e = both.cpu.shape
    starts = np.tile(np.arange(0, n, PANEL), (len(both.heads), 1))
    table = fitted.table[:, 0]
    assert table.shape[2] == padded(e + 1 + LEVERAGE_COLUMNS)
    low, high = both.cpu.v.min(axis=1), both.cpu.v.max(axis=1)

    def run(problem, heads, *inputs):
        out = problem.device.zeros((len(heads), n, e), problem.element)
        leverage, norm = apply(problem, heads, *inputs, out=out)
        return out, leverage, norm

    task = starts, tiles, table, found, window, none, (low, high)
    (out, leverage, norm), (out_b, leverage_b, norm_b) = both(run, *task)
    # Coefficients of both signs, much larger than their sum: some hundred roundings.
    np.testing.assert_allclose(out_b, out, rtol=0, atol=100 * rounding * np.abs(out).max())
    np.testing.assert_allclose(norm_b[:, :n], norm[:, :n], rtol=0, atol=100 * rounding * norm.max())
    known = np.isfinite(leverage[:, :n]) & np.isfinite(leverage_b[:, :n])
    assert known.mean() > 0.99
    np.testing.assert_allclose(leverage_b[:, :n][known], leverage[:, :n][known], rtol=0.05, atol=1e-3)


def test_reach_and_held_out_rows(both, begun):
    (far,), (far_b,) = both(reach)
    np.testing.assert_allclose(far_b, far, rtol=2e-2, atol=1e-3 * far.max())
    state = np.zeros((len(both.heads), both.cpu.shape[0]), np.int32)
    np.put_along_axis(state, begun.which, holdout.EXACT, axis=1)
    leverage = np.random.default_rng(6).exponential(size=state.shape).astype(both.cpu.element)
    edges, live = np.full(len(both.heads), holdout.EDGE), np.ones(len(both.heads), np.int64)

    def hold_out(problem, heads, first, *inputs):
        state, *rest = inputs
        work = problem.device.empty(state.shape, np.float64)
        return holdout.hold_out(problem, heads, first, copied(problem, state), *rest, work)

    expected, got = both(hold_out, begun.which.shape[1], state, leverage, far, edges, live)
    count = min(len(expected), len(got))
    for a, b in zip(expected[:count], got[:count], strict=True):
        assert a.shape == b.shape
    drawn, drawn_b = expected[0], got[0]
    for h in range(len(both.heads)):
        assert len(np.intersect1d(drawn[h], drawn_b[h])) > 0.95 * len(np.unique(drawn[h]))


def test_norms(both, begun, rounding):
    (expected,), (found,) = both(certify.sum_squares, begun.out)
    np.testing.assert_allclose(found, expected, rtol=rounding)


@pytest.mark.parametrize("kind", ["pca", "srht", "gaussian", "orthogonal"])
def test_projections(kind, both, begun, rounding):
    (basis, *_), (basis_b, *_) = both(lambda p, h: project.head_bases(p, h, 8, kind)[0])
    if kind == "pca":  # signs of singular vectors are free
        np.testing.assert_allclose(np.abs(basis_b), np.abs(basis), rtol=0, atol=1e-2 * np.abs(basis).max())
    else:
        agree([basis], [basis_b], rounding)
