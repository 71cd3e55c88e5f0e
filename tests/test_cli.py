"""The command line: results, exit codes, one-line messages, and files that appear whole or not at all."""

import os
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from command import D, E, M, N, assert_fails, call, left_over, load, run, write_arrays

import pda_numba


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A directory with the inputs, made the working directory."""
    monkeypatch.chdir(tmp_path)
    write_arrays()
    return tmp_path


# --- the group ---


def test_help_and_version():
    for arguments in (
        ["--help"],
        ["-h"],
        *([name, "-h"] for name in ("demo", "run", "check", "spectrum", "plan", "info")),
    ):
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
        "--rank 8 --tol none --window 4 --near both --proj-dim 3 --projection srht --scale 2 --method pda --device cpu "
        "--seed 7"
    )
    result = run("-o", "o.npy", *choices.split(), "--causal", "--no-check-finite", "--info")
    assert (result.exit_code, result.output) == (0, "the report\n")
    assert seen == {
        "causal": True,
        "rank": 8,
        "tol": None,
        "window": 4,
        "near": "both",
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


def test_warning_is_one_line(files, monkeypatch):
    def attention(q, k, v, *, out, **options):
        warnings.warn("first line\nsecond line", pda_numba.AccuracyWarning, stacklevel=2)
        return out, None

    monkeypatch.setattr(pda_numba, "attention", attention)
    result = run("-o", "o.npy")
    assert result.exit_code == 0
    assert result.output == "warning: first line second line\n"


@pytest.mark.slow
def test_run_by_low_rank(files):
    rng = np.random.default_rng(2)
    for name in "qkv":
        np.save(f"{name}.npy", rng.standard_normal((2048, 16), dtype=np.float32))
    choices = {"rank": 16, "tol": None, "method": "pda", "window": 8}
    arguments = [a for name, value in choices.items() for a in (f"--{name}", str(value or "none"))]
    result = run("-o", "o.npy", "--info", *arguments)
    assert result.exit_code == 0, result.output
    assert "pda" in result.output
    np.testing.assert_allclose(np.load("o.npy"), pda_numba.attention(*load(), **choices), atol=1e-4)


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
