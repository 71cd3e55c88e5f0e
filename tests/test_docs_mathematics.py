"""The pages that give formulas or statements say which function or test has each, and that is there."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
NAME = re.compile(r"(?<![`:~])`(pda_numba(?:\.\w+)+|_?[a-z]\w+|[A-Z_]+)`(?!`)")


def resolve(name):
    """The module or the thing that a dotted name stands for; ImportError or AttributeError if it is nothing."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        if cut < len(parts) and inspect.ismodule(found):
            for part in parts[cut:]:
                found = getattr(found, part)
        return found
    raise ImportError(name)


def sections(page):
    """{title: text} of a page's sections."""
    text = (DOCS / f"{page}.rst").read_text()
    parts = re.split(r"^(.+)\n(?:-+|=+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def claims(text):
    """Every name behind "In the code", in full: one without a module is of the module before it."""
    found = []
    for paragraph in re.findall(r"\*In the code:\*(.*?)(?=\n\s*\n|\n- |\Z)", text, flags=re.DOTALL):
        module = None
        for name in NAME.findall(paragraph):
            if name.startswith("pda_numba."):
                module = name if inspect.ismodule(resolve(name)) else name.rpartition(".")[0]
                found.append(name)
            else:
                found.append(f"{module}.{name}")
    return found


@pytest.mark.parametrize("title", [t for t, text in sections("mathematics").items() if ".. math::" in text])
def test_every_section_with_a_formula_names_its_code(title):
    if title == "The mathematics of what is built":
        title = "Apply"  # the target and its approximation: the last stage writes them down
    assert claims(sections("mathematics")[title]), title


def test_every_name_of_the_mathematics_exists():
    names = [name for text in sections("mathematics").values() for name in claims(text)]
    assert len(names) > 30
    for name in names:
        assert resolve(name) is not None
    with pytest.raises(AttributeError):
        resolve("pda_numba.rows.no_such_function")


def test_every_adjoint_names_its_code():
    """The formulas of the backward pass begin in bold, with the function in parentheses."""
    text = sections("gradients")["The formulas"]
    parts = re.findall(r"^\*\*(.+?)\*\*([^\n]*(?:\n[^\n]+)*)", text, flags=re.MULTILINE)
    assert len(parts) == len(re.findall(r"^\*\*", text, flags=re.MULTILINE)) >= 6
    for title, rest in parts:
        names = [name for name in NAME.findall(rest) if name.startswith("pda_numba.")]
        assert names, title
        assert all(callable(resolve(name)) for name in names), title


def test_every_test_that_the_theory_names_exists():
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "theory.rst").read_text()))
    there = re.findall(r"^def (test_\w+)", (Path(__file__).parent / "test_theory.py").read_text(), flags=re.MULTILINE)
    assert len(named) > 20
    assert named <= set(there)


@pytest.mark.parametrize("page", sorted(path.stem for path in DOCS.glob("*.rst")))
def test_every_name_in_full_exists(page):
    """On any page: `pda_numba.something` is something."""
    text = (DOCS / f"{page}.rst").read_text()
    for name in re.findall(r"`~?(pda_numba(?:\.\w+)+)", text):
        if not name.endswith((".py", ".autograd", ".jax", ".torch")) and ".interop." not in name:
            resolve(name)
