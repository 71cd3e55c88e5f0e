"""What the tests of the command line share: small inputs in the working directory, calls, the look of a failure."""

import numpy as np
from click.testing import CliRunner

from pda_numba.cli import main

N, M, D, E = 96, 130, 8, 5


def write_arrays():
    """q.npy, k.npy and v.npy of two heads, in the working directory."""
    rng = np.random.default_rng(0)
    for name, shape in {"q": (2, N, D), "k": (2, M, D), "v": (2, M, E)}.items():
        np.save(f"{name}.npy", rng.standard_normal(shape, dtype=np.float32))


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
