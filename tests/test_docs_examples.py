"""The examples in the docstrings run and print what they say; every public name has a docstring."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import pda_numba

MODULES = [m.name for m in pkgutil.walk_packages(pda_numba.__path__, "pda_numba.") if not m.name.endswith("__main__")]


def test_public_examples():
    module = importlib.import_module("pda_numba.api")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.attempted >= 5  # `attention` has an example
    assert result.failed == 0


@pytest.mark.parametrize("name", [m for m in MODULES if m != "pda_numba.api"])
def test_other_examples(name):
    if name.startswith("pda_numba.interop."):
        pytest.importorskip(name.split(".")[-1])
    module = importlib.import_module(name)
    assert module.__doc__, name
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("page", ["spectrum", "long_runs"])
def test_pages(page, tmp_path, monkeypatch):
    if page == "long_runs":
        pytest.importorskip("dask")
    monkeypatch.chdir(tmp_path)
    path = Path(__file__).parent.parent / "docs" / f"{page}.rst"
    result = doctest.testfile(str(path), module_relative=False)
    assert result.attempted >= 10
    assert result.failed == 0


@pytest.mark.parametrize("name", pda_numba.__all__)
def test_public_names_are_documented(name):
    text = getattr(pda_numba, name).__doc__
    assert text
    assert not text.startswith(name + "(")  # not the line a dataclass makes up for itself
