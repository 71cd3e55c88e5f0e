"""The experiments run from start to end at a small size and write what they promise."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "experiments"


@pytest.mark.slow
def test_gradient_variance(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = "--tokens", "1100", "--seeds", "2", "--steps", "3"
    command = [sys.executable, FOLDER / "gradient_variance.py", "--out", tmp_path, *sizes]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert run.stdout.count("the theorem") == 5
    with open(tmp_path / "variance.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16
    assert all(float(row["variance"]) > 0 for row in rows)
    assert (tmp_path / "training.csv").stat().st_size > 100
    assert (tmp_path / "gradient_variance.png").stat().st_size > 10_000
