"""The command that explains: `pda-numba explain`."""

import naive
import numpy as np
import pytest
from command import D, E, M, N, assert_fails, call, left_over, write_arrays

import pda_numba
from pda_numba.cli import explain as room

FILES = ["q.npy", "k.npy", "v.npy"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A directory with the inputs, made the working directory."""
    monkeypatch.chdir(tmp_path)
    write_arrays()
    return tmp_path


@pytest.fixture
def smooth(tmp_path, monkeypatch):
    """Two heads that are long enough for low rank: one smooth, one whose queries look at their own position."""
    monkeypatch.chdir(tmp_path)
    q, k, v = pda_numba.data.smooth_heads((2, 1200, 8))
    k[1] = q[1] = 6 * np.random.default_rng(1).standard_normal((1200, 8), np.float32)
    for name, x in {"q": q, "k": k, "v": v}.items():
        np.save(f"{name}.npy", x)
    return q, k, v


def lines_of(output, word):
    return [line.split() for line in output.splitlines() if word in line]


def test_explain_says_what_the_calls_report(smooth):
    result = call("explain", *FILES, "--rank", 32, "--tol", "none", "--method", "auto")
    assert result.exit_code == 0, result.output
    low = pda_numba.attention(*smooth, rank=32, tol=None, method="pda", return_info=True)[1]
    chosen = pda_numba.attention(*smooth, rank=32, tol=None, return_info=True)[1]
    for h, line in enumerate(lines_of(result.output, "low rank 32 pda")):
        assert line[:5] == ["low", "rank", "32", "pda", "32"]
        assert line[5:7] == [str(x or "-") for x in (low.window[h], low.probes[h])]
        assert float(line[7]) == pytest.approx(low.error[h], rel=0.06, abs=1e-4)  # two digits are printed
    assert [line[:4] for line in lines_of(result.output, "as asked ")] == [[h, "as", "asked", "exact"] for h in "01"]
    assert f"exact: {chosen.reason[0]} (head 0, 1)" in result.output
    assert f"{chosen.flops:.2g} as asked, {low.flops:.2g} low rank 32, {2 * 2 * 1200**2 * 16:.2g} all" in result.output
    plan = pda_numba.plan((1200, 8), (1200, 8), (1200, 8), rank=32, tol=None, method="pda")
    assert f"rank 32 {plan.flops_pda / plan.flops_exact:.2g}" in result.output
    assert "rank 512" not in result.output  # 4 * 512 rows are more than there are
    assert max(map(len, result.output.splitlines())) <= 90
    values = pda_numba.spectrum(*smooth[:2], rank=64).singular_values
    assert next(x for x in lines_of(result.output, "") if x[:1] == ["0"])[1:3] == [
        f"{x:.3g}" for x in values[0, [0, -1]]
    ]


def test_explain_under_a_causal_mask(smooth):
    result = call("explain", *FILES, "--causal", "--values", 0)
    assert result.exit_code == 0, result.output
    assert "Singular values" not in result.output
    assert "expected" not in result.output  # the plan is of unmasked calls
    assert f"{2 * 2 * 1200 * 1201 / 2 * 16:.2g} all exact" in result.output


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(150, 150), (90, 140), (140, 90)])
def test_shares_are_those_of_the_softmax(causal, n, m, monkeypatch, rng):
    """Against the whole matrix: with no more rows than are sampled, all are looked at. In blocks of two rows."""
    monkeypatch.setattr(room, "_BLOCK", 2 * m)
    q, k = 2 * rng.standard_normal((2, 2, n, 6)), 2 * rng.standard_normal((1, 1, m, 6))
    found = room.mass_shares(q, k, 0.7, causal, 0)
    offset = np.arange(m) - np.arange(n)[:, None] - (m - n)
    for head in np.ndindex(2, 2):
        logits = (
            np.where(offset > 0, -np.inf, naive.logits(q[head], k[0, 0], 0.7))
            if causal
            else naive.logits(q[head], k[0, 0], 0.7)
        )
        a = naive.softmax(logits[max(n - m, 0) if causal else 0 :])
        near = np.abs(offset[n - len(a) :])
        expected = {f"band {w}": (a * (near <= w)).sum() for w in (32, 128) if causal or n == m}
        expected["heaviest 16"] = np.sort(a.sum(axis=0))[-16:].sum()
        expected["own 16"] = np.sort(a, axis=1)[:, -16:].sum()
        assert list(found) == list(expected)
        for name, total in expected.items():
            assert found[name].shape == (2, 2)
            assert found[name][head] == pytest.approx(total / len(a), rel=1e-12)


def test_shares_of_a_sample_are_close(smooth):
    q, k, _ = smooth
    found = room.mass_shares(q, k, 8**-0.5, False, 0)
    a = naive.softmax(naive.logits(q[1], k[1]))
    own = np.sort(a, axis=1)[:, -16:].sum(axis=1)
    # four standard deviations of a mean over the sample's rows
    assert found["own 16"][1] == pytest.approx(own.mean(), abs=4 * own.std() / room.SAMPLE**0.5)


def test_explain_passes_every_choice_on(files, monkeypatch):
    calls = []

    def remembering(name):
        real = getattr(pda_numba, name)
        monkeypatch.setattr(pda_numba, name, lambda *a, **options: calls.append(options) or real(*a, **options))

    remembering("attention")
    remembering("spectrum")
    choices = "--rank 3 --tol 0.2 --near none --proj-dim 4 --projection srht --method exact --scale 2 --device cpu"
    result = call("explain", *FILES, *choices.split(), "--seed", 7, "--no-check-finite", "--values", 5)
    assert result.exit_code == 0, result.output
    shared = {"scale": 2.0, "device": "cpu", "seed": 7, "check_finite": False, "causal": False}
    asked = {"rank": 3, "window": "auto", "near": "none", "proj_dim": 4, "projection": "srht", "return_info": True}
    assert calls[0] == {**shared, **asked, "tol": 0.2, "method": "exact"}
    assert calls[1] == {**shared, **asked, "tol": None, "method": "pda"}
    assert calls[2] == {**shared, "rank": 5}
    call("explain", *FILES, "--values", 1000)
    assert calls[-1]["rank"] == min(N, M)  # no more values than there are
    assert calls[-2]["rank"] == 64


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_explain_picture(files, kind):
    pytest.importorskip("matplotlib")
    for values in (4, 0):
        result = call("explain", *FILES, "--rank", 4, "--values", values, "--plot", f"picture.{kind}")
        assert result.exit_code == 0, result.output
        assert f"Picture: picture.{kind}" in result.output
        start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind]
        assert (files / f"picture.{kind}").read_bytes().startswith(start)
    assert left_over(files) == []


def test_explain_of_bad_input(files):
    assert_fails(call("explain", "none.npy", *FILES[1:]), 2, "Q file 'none.npy' cannot be read")
    assert_fails(call("explain", *FILES, "--plot", "x.gif"), 2, "--plot must end in .png, .svg, .pdf")
    assert_fails(call("explain", *FILES, "--values", -1), 2, "--values")
    assert_fails(call("explain", *FILES, "--causal", "--window", 3), 2, "window must be 'auto' or 0")
    np.save("q.npy", np.ones((2, 0, D), np.float32))
    assert_fails(call("explain", *FILES), 2, "no queries: there is nothing to explain")
    for name, shape in {"q": (0, N, D), "k": (0, M, D), "v": (0, M, E)}.items():
        np.save(f"{name}.npy", np.ones(shape, np.float32))
    assert_fails(call("explain", *FILES), 2, "no queries: there is nothing to explain")
    for name, shape in {"q": (N, D), "k": (M, D), "v": (M, E)}.items():
        np.save(f"{name}.npy", np.ones(shape, np.float32))
    assert call("explain", *FILES).exit_code == 0  # one head, of two axes
