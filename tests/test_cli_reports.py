"""The commands that report: check, spectrum, plan, info and demo."""

import dataclasses
import importlib.util

import numpy as np
import pytest
from command import D, E, M, N, assert_fails, call, left_over, load, run, write_arrays

import pda_numba
from pda_numba.cli import check as check_room
from pda_numba.cli import demo as demo_room
from pda_numba.cli import reference


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A directory with the inputs, made the working directory."""
    monkeypatch.chdir(tmp_path)
    write_arrays()
    return tmp_path


# --- check ---


def test_check_holds(files):
    result = call("check", "q.npy", "k.npy", "v.npy")
    assert result.exit_code == 0, result.output
    assert "The claim holds for 2 heads." in result.output
    assert "all rows" in result.output


def test_check_of_an_existing_output(files):
    assert run("-o", "o.npy").exit_code == 0
    result = call("check", "q.npy", "k.npy", "v.npy", "-o", "o.npy", "--rows", 50)
    assert result.exit_code == 0, result.output
    assert f"50 of {N} rows" in result.output
    np.save("o.npy", np.zeros((2, N, E + 1), np.float32))
    assert_fails(call("check", "q.npy", "k.npy", "v.npy", "-o", "o.npy"), 2, "has shape", str((2, N, E)))
    np.save("q.npy", np.ones((2, 0, D), np.float32))
    assert_fails(call("check", "q.npy", "k.npy", "v.npy"), 2, "no queries")


def test_check_tells_a_broken_claim(files, monkeypatch):
    def attention(q, k, v, **options):
        out, info = honest(q, k, v, **options)
        return 1.1 * out, dataclasses.replace(info, error_limit=np.full((2,), 0.05))

    honest = pda_numba.attention
    monkeypatch.setattr(pda_numba, "attention", attention)
    result = call("check", "q.npy", "k.npy", "v.npy")
    assert result.exit_code == 1
    assert "The claim is violated for 2 of 2 heads." in result.output


def test_check_takes_a_sample_where_all_rows_are_too_many():
    assert len(check_room.rows_to_check(4, 1000, 1000, None, 0)) == 1000
    rows = check_room.rows_to_check(1, 1_000_000, 1_000_000, None, 0)
    assert 256 <= len(rows) < 10_000
    assert len(np.unique(rows)) == len(rows)


def test_reference_is_softmax_attention(monkeypatch):
    monkeypatch.setattr(reference, "_KEYS", 7)
    monkeypatch.setattr(reference, "_ROWS", 5)
    rng = np.random.default_rng(4)
    q, k, v = (30 * rng.standard_normal(s) for s in [(2, 4, 11, 3), (1, 2, 17, 3), (1, 2, 17, 6)])
    for (b, h), q_h, k_h, v_h in reference.heads(q, k, v):
        np.testing.assert_array_equal(k_h, k[0, h // 2])
        scores = 0.7 * q[b, h] @ k[0, h // 2].T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = weights @ v[0, h // 2] / weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(reference.exact_rows(q_h, k_h, v_h, np.arange(11), 0.7), expected, rtol=1e-12)


# --- plan, info, demo ---


def test_plan(files):
    long = call("plan", "--shape", 100000, 100000, 64, 64, "--heads", 3)
    assert long.exit_code == 0
    assert long.output.strip() == str(pda_numba.plan((3, 100000, 64), (3, 100000, 64), (3, 100000, 64))).strip()
    assert "exact" in call("plan", "q.npy", "k.npy", "v.npy").output
    assert_fails(call("plan"), 2, "--shape")
    assert_fails(call("plan", "q.npy", "--shape", 1, 1, 1, 1), 2, "--shape")
    assert_fails(call("plan", "q.npy"), 2, "three files")
    assert_fails(call("plan", "--shape", 10, 0, 4, 4), 2, "at least one key")


def test_info():
    result = call("info")
    assert result.exit_code == 0
    for word in (pda_numba.__version__, np.__version__, "llvmlite", "threading layer", "kernel cache", "devices"):
        assert word in result.output


# --- spectrum ---


def test_spectrum(files):
    result = call("spectrum", "q.npy", "k.npy", "--rank", 5)
    assert result.exit_code == 0, result.output
    q, k, _ = load()
    found = pda_numba.spectrum(q, k, rank=5)
    lines = result.output.splitlines()
    for h in (0, 1):
        line = next(x.split() for x in lines if x.startswith(f"{h} ") or x.strip().startswith(f"{h} "))
        assert line[1:3] == [f"{x:.3g}" for x in found.singular_values[h, [0, -1]]]
        assert line[3:5] == [f"{x:.4g}" for x in (found.nuclear_norm[h], found.frobenius_norm[h])]
        assert result.output.count("> 5") >= 2  # the rank that an error of 3 % takes
    assert f"{N} queries, {M} keys, 2 power iterations" in result.output
    assert max(map(len, lines[:6])) <= 80


def test_spectrum_passes_every_choice_on(files, monkeypatch):
    seen = {}
    real = pda_numba.spectrum

    def spectrum(q, k, **options):
        seen.update(options)
        return real(q, k, rank=2)

    monkeypatch.setattr(pda_numba, "spectrum", spectrum)
    choices = "--rank 3 --n-iter 1 --causal --scale 2 --device cpu --seed 7 --no-check-finite"
    result = call("spectrum", "q.npy", "k.npy", *choices.split())
    assert result.exit_code == 0, result.output
    expected = {"rank": 3, "n_iter": 1, "causal": True, "scale": 2.0, "device": "cpu", "seed": 7, "check_finite": False}
    assert seen == expected
    call("spectrum", "q.npy", "k.npy")
    assert seen["rank"] == 64


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_spectrum_picture(files, kind):
    pytest.importorskip("matplotlib")
    (files / f"picture.{kind}").write_text("of before")
    result = call("spectrum", "q.npy", "k.npy", "--rank", 4, "--plot", f"picture.{kind}")
    assert result.exit_code == 0, result.output
    assert f"Picture: picture.{kind}" in result.output
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind]
    assert (files / f"picture.{kind}").read_bytes().startswith(start)
    assert left_over(files) == []


def test_spectrum_of_bad_input(files, monkeypatch):
    assert_fails(call("spectrum", "q.npy", "none.npy"), 2, "K file 'none.npy' cannot be read")
    assert_fails(call("spectrum", "q.npy", "v.npy"), 2, "q and k must have the same last axis")
    assert_fails(call("spectrum", "q.npy", "k.npy", "--rank", 1000), 2, "rank must be between 1 and the smaller of")
    assert_fails(call("spectrum", "q.npy", "k.npy", "--plot", "x.gif"), 2, "--plot must end in .png, .svg, .pdf")
    pytest.importorskip("matplotlib")
    assert_fails(call("spectrum", "q.npy", "k.npy", "--plot", "nowhere/x.png"), 2, "--plot")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else real(name, *a))
    assert_fails(call("spectrum", "q.npy", "k.npy", "--plot", "x.png"), 2, "pip install matplotlib")


@pytest.mark.slow
def test_demo(files):
    pytest.importorskip("matplotlib")
    result = call("demo", "--max-tokens", 4096, "--out", "picture.png")
    assert result.exit_code == 0, result.output
    assert "text" in result.output
    assert "speech" in result.output
    assert (files / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert left_over(files) == []


@pytest.mark.slow
def test_demo_without_matplotlib(files, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else real(name, *a))
    result = call("demo", "--max-tokens", 4096)
    assert result.exit_code == 0, result.output
    assert "pip install matplotlib" in result.output
    assert not (files / "pda_numba_demo.png").exists()


def test_demo_data():
    assert [(x.shape, x.dtype) for x in demo_room.smooth_head(100, 3)] == [((100, demo_room.DIM), np.float32)] * 3
    for name in demo_room.SETS:
        *arrays, scale = demo_room._load(name)
        assert scale > 0
        assert {x.dtype for x in arrays} == {np.dtype(np.float32)}


def test_demo_checks_its_output_first(files):
    pytest.importorskip("matplotlib")
    assert_fails(call("demo", "--out", "picture.gif"), 2, ".png")
    assert_fails(call("demo", "--out", "nowhere/picture.png"), 2, "--out")
    assert_fails(call("demo", "--max-tokens", 10), 2, "--max-tokens")
