"""Every CUDA driver compiles for every capability, without a GPU, to the code that it is meant to be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))

from codegen import build, checks, launches  # noqa: E402 - found in bench/


@pytest.fixture(scope="module")
def recorded():
    if reason := build.missing():
        pytest.skip(f"cannot compile for CUDA: {reason}")
    return launches.record()


@pytest.fixture(scope="module")
def codes(recorded):
    return build.compile_all(recorded)


@pytest.mark.slow
def test_every_driver_is_launched_by_some_call(recorded):
    assert not checks.never_launched(launches.drivers(), recorded)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # the first that asks for the code waits for all of it
def test_every_driver_compiles(codes):
    assert not [f"{code}: {code.error}" for code in codes if code.error]


@pytest.mark.slow
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_code_has(check, codes):
    assert not [f"{code}: {text}" for code in codes if not code.error for text in check(code)]


@pytest.mark.slow
def test_no_exception_is_left_over(codes):
    assert not checks.stale(codes)


def test_the_benchmark_says_that_there_is_no_gpu():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "NUMBA_ENABLE_CUDASIM": "0"}
    done = subprocess.run(
        [sys.executable, BENCH / "gpu.py", "--quick"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("bench/gpu.py needs an NVIDIA GPU: ")
    assert not done.stdout
