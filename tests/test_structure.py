"""The package's structure: who imports whom, read from the source."""

import ast
import graphlib
from pathlib import Path

import pytest

import pda_numba

ROOT = Path(pda_numba.__file__).parent
LONGEST = 400  # lines of a module: what is longer is cut where its parts meet


def modules():
    """{dotted name: its file}."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree, name, package, known):
    """The modules of the package that are imported when `name` is: at its top level, functions left out."""
    found = set()
    statements = list(tree.body)
    while statements:
        statement = statements.pop()
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - statement.level] if statement.level else []
            source = ".".join([*base, *([statement.module] if statement.module else [])])
            found |= {f"{source}.{a.name}" if f"{source}.{a.name}" in known else source for a in statement.names}
        elif not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            statements += [x for x in ast.iter_child_nodes(statement) if isinstance(x, ast.stmt)]
    return {x for x in found if x in known} - {name}


def graph(files):
    found = {}
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found[name] = imports(ast.parse(path.read_text()), name, package, files)
    return found


def order(found):
    """Every module behind those that it imports; a `graphlib.CycleError` names a cycle."""
    return list(graphlib.TopologicalSorter(found).static_order())


def test_imports_have_no_cycle():
    found = graph(modules())
    assert found["pda_numba.solve"] >= {"pda_numba.core", "pda_numba.trial"}  # relative, and `from . import`
    assert found["pda_numba.cli.explain"] >= {"pda_numba", "pda_numba.options", "pda_numba.cli.files"}
    ranks = {name: i for i, name in enumerate(order(found))}
    assert ranks["pda_numba.kernels.scalar"] < ranks["pda_numba.rows"] < ranks["pda_numba.api"] < ranks["pda_numba"]


def test_a_cycle_is_found(tmp_path):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("from . import two\n")
    two.write_text("def f():\n    from . import one\n")
    files = {"p.one": one, "p.two": two}
    assert graph(files) == {"p.one": {"p.two"}, "p.two": set()}  # inside of a function it is no cycle
    two.write_text("try:\n    from .one import x\nexcept ImportError:\n    x = None\n")
    with pytest.raises(graphlib.CycleError):
        order(graph(files))


def test_the_package_does_not_import_the_command_line():
    for name, used in graph(modules()).items():
        if not name.startswith(("pda_numba.cli", "pda_numba.__main__")):
            assert not [x for x in used if x.startswith("pda_numba.cli")], name


def test_no_module_is_long():
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}
