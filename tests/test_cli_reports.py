"""The commands that report: check, plan, info and demo."""

import dataclasses
import importlib.util

import numpy as np
import pytest
from command import D, E, N, assert_fails, call, left_over, run, write_arrays

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
