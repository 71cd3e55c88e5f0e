"""The command line: results, exit codes, one-line messages, and files that appear whole or not at all."""

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner

import pda_numba
from pda_numba.cli import check as check_room
from pda_numba.cli import main, reference

N, M, D, E = 96, 130, 8, 5


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A directory with q.npy, k.npy and v.npy of two heads, made the working directory."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, shape in {"q": (2, N, D), "k": (2, M, D), "v": (2, M, E)}.items():
        np.save(f"{name}.npy", rng.standard_normal(shape, dtype=np.float32))
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments], prog_name="pda-numba")


def run(*arguments):
    return call("run", "q.npy", "k.npy", "v.npy", *arguments)


def load():
    return [np.load(f"{name}.npy") for name in "qkv"]


def left_over(directory):
    return sorted(p.name for p in directory.iterdir() if p.name.startswith("."))


def assert_fails(result, code, *words):
    """One line on the terminal, with these words in it, and this exit code."""
    assert result.exit_code == code, result.output
    assert result.output.count("\n") == 1, result.output
    assert all(word in result.output for word in words), result.output


# --- the group ---


def test_help_and_version():
    for arguments in (["--help"], ["-h"], *([name, "-h"] for name in ("demo", "run", "check", "plan", "info"))):
        result = call(*arguments)
        assert result.exit_code == 0
        assert "Usage:" in result.output
    assert call("--version").output == f"pda-numba {pda_numba.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["no-such"], ["run", "--no-such"], ["run", "q.npy"], ["demo", "--seed", "x"]]
)
def test_bad_usage(arguments):
    assert_fails(call(*arguments), 2, "pda-numba: error:", "--help")


def test_module_is_the_same_program():
    result = subprocess.run(
        [sys.executable, "-m", "pda_numba", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"pda-numba {pda_numba.__version__}\n"


def test_package_does_not_import_the_command_line():
    code = "import sys, pda_numba; print({'pda_numba.cli', 'click', 'rich', 'matplotlib'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


# --- run ---


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_run_writes_what_attention_returns(files, dtype):
    for name in "qkv":
        np.save(f"{name}.npy", np.load(f"{name}.npy").astype(dtype))
    result = run("-o", "o.npy", "--scale", "0.5")
    assert result.exit_code == 0, result.output
    assert result.output == ""
    expected = pda_numba.attention(*load(), scale=0.5)
    got = np.load("o.npy")
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)
    assert left_over(files) == []


def test_run_passes_every_choice_on(files, monkeypatch):
    seen = {}

    def attention(q, k, v, *, out, **options):
        seen.update(options)
        out[:] = 1
        return out, "the report"

    monkeypatch.setattr(pda_numba, "attention", attention)
    choices = (
        "--rank 8 --tol none --window 4 --proj-dim 3 --projection srht --scale 2 --method pda --device cpu --seed 7"
    )
    result = run("-o", "o.npy", *choices.split(), "--no-check-finite", "--info")
    assert (result.exit_code, result.output) == (0, "the report\n")
    assert seen == {
        "rank": 8,
        "tol": None,
        "window": 4,
        "proj_dim": 3,
        "projection": "srht",
        "scale": 2.0,
        "method": "pda",
        "device": "cpu",
        "seed": 7,
        "check_finite": False,
        "return_info": True,
    }


@pytest.mark.parametrize(
    ("q", "k", "v", "out"),
    [
        ((N, D), (M, D), (M, E), (N, E)),
        ((3, 4, N, D), (1, 2, M, D), (1, 2, M, E), (3, 4, N, E)),
        ((2, 0, D), (2, M, D), (2, M, E), (2, 0, E)),
    ],
)
def test_run_shapes(files, q, k, v, out):
    rng = np.random.default_rng(1)
    for name, shape in {"q": q, "k": k, "v": v}.items():
        np.save(f"{name}.npy", rng.standard_normal(shape, dtype=np.float32))
    result = run("-o", "o.npy", "--info")
    assert result.exit_code == 0, result.output
    assert "exact" in result.output or out[-2] == 0
    assert np.load("o.npy").shape == out


def test_run_reads_fortran_order(files):
    expected = pda_numba.attention(*load())
    np.save("k.npy", np.asfortranarray(np.load("k.npy")))
    assert run("-o", "o.npy").exit_code == 0
    np.testing.assert_array_equal(np.load("o.npy"), expected)


def test_existing_output_needs_force(files):
    (files / "o.npy").write_text("precious")
    os.chmod("o.npy", 0o640)
    assert_fails(run("-o", "o.npy"), 2, "o.npy", "--force")
    assert (files / "o.npy").read_text() == "precious"
    assert run("-o", "o.npy", "--force").exit_code == 0
    assert np.load("o.npy").shape == (2, N, E)
    assert (files / "o.npy").stat().st_mode & 0o777 == 0o640


def test_output_may_replace_an_input_or_a_links_target(files):
    expected = pda_numba.attention(*load())
    os.symlink("v.npy", "link.npy")
    assert run("-o", "link.npy", "--force").exit_code == 0
    assert os.path.islink("link.npy")
    np.testing.assert_array_equal(np.load("v.npy"), expected)


def _write_bad_files():
    with open("q.npy", "rb") as file:
        good = file.read()
    np.save("objects.npy", np.array([{}], dtype=object))
    np.save("integers.npy", np.ones((2, N, D), int))
    np.save("swapped.npy", np.ones((2, N, D), ">f4"))
    np.save("narrow.npy", np.ones((2, N, D - 1), np.float32))
    np.save("nan.npy", np.full((2, N, D), np.nan, np.float32))
    np.save("double.npy", np.ones((2, N, D)))
    np.savez("archive.npz", np.ones(3))
    os.mkdir("folder.npy")
    for name, content in {
        "text.npy": b"hello",
        "empty.npy": b"",
        "truncated.npy": good[:-100],
        "header.npy": good[:40],
        "magic.npy": good[:6],
    }.items():
        with open(name, "wb") as file:
            file.write(content)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing.npy", "cannot be read"),
        ("folder.npy", "cannot be read"),
        ("objects.npy", "Python objects"),
        ("integers.npy", "float16, float32 or float64"),
        ("swapped.npy", "native byte order"),
        ("double.npy", "same dtype"),
        ("narrow.npy", "same last axis"),
        ("nan.npy", "finite"),
        ("archive.npz", "np.save"),
        ("text.npy", "not a .npy file"),
        ("empty.npy", "not a .npy file"),
        ("truncated.npy", "truncated"),
        ("header.npy", "damaged header"),
        ("magic.npy", "damaged header"),
    ],
)
def test_bad_input_file(files, path, words):
    _write_bad_files()
    assert_fails(call("run", path, "k.npy", "v.npy", "-o", "o.npy"), 2, words)
    assert not os.path.exists("o.npy")
    assert left_over(files) == []


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (["--tol", "-1"], "tol must be"),
        (["--tol", "small"], "--tol"),
        (["--rank", "0"], "rank must be"),
        (["--window", "-2"], "window must be"),
        (["--window", "wide"], "--window"),
        (["--proj-dim", "99"], "proj_dim must be"),
        (["--method", "magic"], "--method"),
        (["--scale", "-1"], "scale must be"),
        (["--seed", "-1"], "seed must be"),
    ],
)
def test_bad_option(files, choice, words):
    assert_fails(run("-o", "o.npy", *choice), 2, words)
    assert left_over(files) == []


@pytest.mark.parametrize("path", ["nowhere/o.npy", "folder"])
def test_unwritable_output_is_found_out_before_any_work(files, monkeypatch, path):
    os.mkdir("folder")
    monkeypatch.setattr(pda_numba, "attention", lambda *_a, **_k: pytest.fail("work was begun"))
    assert_fails(run("-o", path, "--force"), 2, path)


def test_full_disk_is_one_line(files, monkeypatch):
    def no_space(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space, raising=False)
    assert_fails(run("-o", "o.npy"), 1, "No space left")
    assert left_over(files) == []


def test_failure_is_one_line_and_leaves_nothing(files, monkeypatch):
    def attention(*_arguments, **_options):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(pda_numba, "attention", attention)
    assert_fails(run("-o", "o.npy"), 1, "first line second line", "--debug")
    assert left_over(files) == []
    for arguments, environment in ((["--debug"], {}), ([], {"PDA_NUMBA_DEBUG": "1"})):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            result = run("-o", "o.npy", *arguments)
        assert result.exit_code == 1
        assert "Traceback" in result.output


def test_cuda_is_not_in_this_release(files):
    assert_fails(run("-o", "o.npy", "--device", "cuda"), 2, "device='cpu'")


def test_warning_is_one_line(files):
    rng = np.random.default_rng(2)
    for name in "qkv":
        np.save(f"{name}.npy", 4 * rng.standard_normal((2048, 16), dtype=np.float32))
    result = run("-o", "o.npy", "--rank", "16", "--method", "pda")
    assert result.exit_code == 0
    assert result.output.startswith("warning: ")
    assert result.output.count("\n") == 1


# --- interruption, in a process of its own ---

_SLOW = """
import sys, time, pda_numba
from pda_numba.cli import main
def attention(q, k, v, *, out, **options):
    out[:] = 1
    time.sleep(60)
pda_numba.attention = attention
main(sys.argv[1:])
"""


def _interrupt(program, arguments, directory, number, delay):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [*program, *arguments], cwd=directory, stderr=subprocess.PIPE, text=True, env=environment
    )
    end = time.monotonic() + 60
    while not left_over(directory) and time.monotonic() < end and process.poll() is None:
        time.sleep(0.02)
    assert left_over(directory), "no temporary file appeared"
    time.sleep(delay)
    begun = time.monotonic()
    process.send_signal(number)
    _, message = process.communicate(timeout=30)
    return process.returncode, message, time.monotonic() - begun


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("existing", [False, True])
def test_interrupted_run_leaves_no_half_file(files, name, code, existing):
    if existing:
        (files / "o.npy").write_text("precious")
    arguments = ["run", "q.npy", "k.npy", "v.npy", "-o", "o.npy", "--force"]
    returned, message, seconds = _interrupt([sys.executable, "-c", _SLOW], arguments, files, getattr(signal, name), 0.3)
    assert returned == code
    assert message.count("\n") == 1
    assert name in message
    assert seconds < 5
    assert left_over(files) == []
    assert (files / "o.npy").read_text() == "precious" if existing else not (files / "o.npy").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
def test_interruption_does_not_wait_for_a_kernel(files):
    rng = np.random.default_rng(3)
    for name in "qkv":
        np.save(f"{name}.npy", rng.standard_normal((200_000, 64), dtype=np.float32))
    arguments = ["run", "q.npy", "k.npy", "v.npy", "-o", "o.npy", "--method", "exact"]
    program = [sys.executable, "-m", "pda_numba"]
    returned, _, seconds = _interrupt(program, arguments, files, signal.SIGINT, 4.0)
    assert (returned, left_over(files)) == (130, [])
    assert seconds < 5


def test_closed_pipe_is_quiet():
    command = f"{sys.executable} -m pda_numba --help | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.stderr == ""


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


def test_demo_checks_its_output_first(files):
    pytest.importorskip("matplotlib")
    assert_fails(call("demo", "--out", "picture.gif"), 2, ".png")
    assert_fails(call("demo", "--out", "nowhere/picture.png"), 2, "--out")
    assert_fails(call("demo", "--max-tokens", 10), 2, "--max-tokens")
