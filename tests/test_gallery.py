"""The gallery: its scripts run, its pictures are there and small, and the page shows all of them."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

import pictures

DOCS = pictures.HERE
LARGEST = 80_000  # bytes: a page of five stays below half a megabyte


def test_the_page_shows_every_picture_with_its_code():
    page = (DOCS / "gallery.rst").read_text()
    assert len(pictures.SCRIPTS) >= 5
    for script in pictures.SCRIPTS:
        assert f".. image:: _static/gallery/{script.stem}.png" in page
        assert f".. literalinclude:: gallery/{script.name}" in page
        assert (DOCS / "_static" / "gallery" / f"{script.stem}.png").stat().st_size <= LARGEST
    assert len(list((DOCS / "_static" / "gallery").iterdir())) == len(pictures.SCRIPTS)


@pytest.mark.slow
@pytest.mark.parametrize("script", pictures.SCRIPTS, ids=lambda script: script.stem)
def test_scripts_run(script, tmp_path):
    names = pictures.make(script, tmp_path)
    picture = tmp_path / f"{script.stem}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size <= LARGEST
    if script.stem == "near_and_far":
        check_near_and_far(names["exact"], names["whole"], names["near"])


def check_near_and_far(exact, whole, near):
    """The numbers of the text, to the percent that is said."""
    size, values = np.linalg.norm(exact), np.linalg.svd(exact, compute_uv=False)
    errors = np.linalg.norm(exact - near), np.linalg.norm(values[32:]), np.linalg.norm(whole - exact)
    assert near.sum() / len(near) == pytest.approx(0.80, abs=0.005)
    # the third depends on which rows are drawn, where another processor's rounding may decide
    assert (abs(np.divide(errors, size) - [0.28, 0.69, 0.14]) <= [0.005, 0.005, 0.03]).all()
