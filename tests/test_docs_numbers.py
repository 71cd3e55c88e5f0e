"""Every number in the documentation is made by a script of the repository, as far as can be told without running it.

Tables: every file of docs/measured is shown by a page, below a command that makes it; the script is there, its options
too, and the titles, headers and verdicts of the file are the script's. Prose: what looks like a measurement is in a
table that the page shows or that its paragraph links to, or is listed here with the reason why not. The match of a
rounded number can be chance, and numbers written as words are not seen.
"""

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FILES = sorted(path.name for path in (DOCS / "measured").iterdir())
# docs/tried.rst is a log of prototypes that are gone, and says so.
PAGES = sorted(path.stem for path in DOCS.glob("*.rst") if path.stem != "tried")

# Reports that examples write into a folder, put together from several runs with notes of when and how these were made.
# Only the headers of their tables are compared with the scripts.
REPORTS = ("language_model.md", "sentence_encoder.md", "training.md")

# (page, number and unit): why no script makes it.
EXEMPT = {
    ("*", "95 %"): "the promised confidence",
    ("choosing", "0.3"): "a setting of pda_numba.plan",
    ("choosing", "1.1"): "a setting of pda_numba.trial",
    ("command_line", "0.3"): "a setting of pda_numba.plan",
    ("device_arrays", "32 MiB"): "a setting of pda_numba._streamed",
    ("error_statement", "97.7 %"): "0.05^(1/128), the definition of the share",
    ("errors", "7.0"): "a compute capability",
    ("mathematics", "3.3"): "a section of the paper",
    ("devices", "7.0"): "a compute capability",
    ("errors", "0.01"): "the default of tol",
    ("errors", "48 MiB"): "a setting of pda_numba.plan",
    ("gallery", "80 %"): "asserted by tests/test_gallery.py",
    ("gallery", "28 %"): "asserted by tests/test_gallery.py",
    ("gallery", "69 %"): "asserted by tests/test_gallery.py",
    ("gallery", "14 %"): "asserted by tests/test_gallery.py",
    ("limits", "0.01"): "a value of tol",
    ("limits", "90 %"): "from the log, docs/tried.rst, to which the paragraph links",
    ("mathematics", "1.5 times"): "a setting of pda_numba.buckets",
    ("mathematics", "1.1"): "a setting of pda_numba.trial",
    ("mathematics", "0.1 %"): "a setting of pda_numba.trial",
    ("mathematics", "0.3"): "a setting of pda_numba.plan",
    ("mathematics", "6.1"): "a section of the paper",
    ("mathematics", "6.2"): "a section of the paper",
    ("quickstart", "3.10"): "a version of Python",
    ("quickstart", "3.13"): "a version of Python",
    ("spectrum", "30 times"): "the definition of a problem",
    ("theory", "2.1"): "a lemma of the paper",
    ("theory", "3.3"): "a section of the paper",
    ("theory", "6.1"): "a section of the paper",
    ("theory", "6.2"): "a section of the paper",
    ("theory", "6.3 GB"): "the paper's claim",
    ("theory", "8.6 GB"): "what pda_numba.theory.cost counts",
}

# --- tables ---


@functools.cache
def page(name):
    return (DOCS / f"{name}.rst").read_text()


def shown(name):
    """The files of docs/measured that a page includes."""
    return re.findall(r"literalinclude:: measured/(\S+)", page(name))


def commands(file):
    """The words, [script, ...], of the commands on pages above where they show a file, or in the file itself."""
    texts = [(DOCS / "measured" / file).read_text()]
    for name in PAGES:
        texts += re.findall(rf"(?s)\A(.*)\.\. literalinclude:: measured/{re.escape(file)}", page(name))
    lines = re.findall(r"^ +(?:\$ )?(?:.*&& )?python ((?:bench|experiments|examples)/.*)$", "\n".join(texts), re.M)
    return [shlex.split(line) for line in lines]


def makes(file):
    """Those of `commands` that make this file: by writing into it, or an example that leaves a report."""
    found = [c for c in commands(file) if c[-2:] == [">", f"docs/measured/{file}"]]
    return found or [c for c in commands(file) if file in REPORTS and c[0].startswith("examples/")]


@functools.cache
def sources(folder):
    """The syntax trees of the scripts of a folder, and of what prints tables for them."""
    paths = [*(ROOT / folder).rglob("*.py"), ROOT / "pda_numba" / "info.py"]
    return [ast.parse(path.read_text()) for path in paths]


@functools.cache
def texts(folder):
    """All strings of the scripts as patterns, with anything for what is formatted into them."""
    found = set()
    for tree in sources(folder):
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                # headers may be written in one
                found.update(re.escape(part) for part in (node.value, *node.value.split("|")))
                continue
            else:
                continue
            fixed = "".join("" if part is None else part for part in parts)
            if len(re.sub(r"\s", "", fixed)) >= 2:  # else it would be anything
                found.add("".join(".+" if part is None else re.escape(part) for part in parts))
    return [re.compile(text) for text in found]


def is_from(folder, said):
    return any(text.fullmatch(said) for text in texts(folder))


def blocks(file):
    """Runs of lines without an empty one."""
    return [part.splitlines() for part in re.split(r"\n\s*\n", (DOCS / "measured" / file).read_text()) if part.strip()]


def cells(line):
    """Of a line of a table, in Markdown or in columns two blanks apart."""
    return [x.strip() for x in (line.strip("| ").split(" | ") if line.startswith("|") else re.split(r"\s{2,}", line))]


def tables(file):
    """Title and header of every table."""
    before = None
    for block in blocks(file):
        if len(block) >= 2 and (block[0].startswith("|") or len(cells(block[0])) >= 3):
            yield before[0], [x for x in cells(block[0]) if x]
        before = block


def statements(file):
    """The statements of the verdicts; what was measured comes after them."""
    text = " ".join((DOCS / "measured" / file).read_text().split())
    return re.findall(r"(?:CONFIRMED|CORRECTED|REFUTED): (.+?)\. [A-Z1-9]", text)


@pytest.mark.parametrize("file", FILES)
def test_every_table_has_its_command(file):
    assert any(file in shown(name) for name in PAGES)
    assert makes(file)
    for script, *arguments in makes(file):
        strings = {node.value for tree in sources(script.split("/")[0]) for node in ast.walk(tree) if is_text(node)}
        assert (ROOT / script).is_file()
        assert {word.split("=")[0] for word in arguments if word.startswith("--")} <= strings


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize("file", FILES)
def test_every_table_is_its_script_s(file):
    folder = makes(file)[0][0].split("/")[0]
    found = list(tables(file))
    assert found
    for title, header in found:
        if file not in REPORTS:
            assert is_from(folder, title), title
        for cell in header:
            assert is_from(folder, cell), cell
    for statement in statements(file):
        assert is_from(folder, statement), statement
    for block in blocks(file):  # columns that were edited are seldom as wide as they were
        if block[0].startswith("|"):
            assert len({len(line) for line in block}) == 1, block[0]
    if folder == "bench" and file not in ("roofline.md", "cuda_kernels.md"):
        assert re.fullmatch(r"pda_numba .+; CPU \S+, \d+ threads", blocks(file)[0][0])


# --- prose ---

NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
UNIT = r"s|ms|minutes?|seconds?|hours?|MB|MiB|GB|GiB|%|percent|times|x"
LIKE = re.compile(rf"(?<![\w.,\[-])({NUMBER})(?:\s+(?:to|and|or)\s+({NUMBER}))?(?:\s*({UNIT})(?![\w-]))?")
NO_PROSE = r"\s*\.\. (code-block|math|literalinclude|image|toctree|auto\w+|\[\d+\])"


def paragraphs(text):
    """The paragraphs of a page, without code, formulas, examples and sources."""
    indent = None
    kept = []
    for line in text.splitlines():
        own = len(line) - len(line.lstrip())
        if indent is not None and (not line.strip() or own > indent):
            kept.append("")
            continue
        indent = own if re.match(NO_PROSE, line) else None
        kept.append("" if indent is not None else line)
    for paragraph in re.split(r"\n\s*\n", "\n".join(kept)):
        if not paragraph.lstrip().startswith((">>>", "...")):
            yield paragraph


def claims(paragraph):
    """What looks like a measurement: numbers with a unit, with decimals, or in powers of ten; with their units."""
    plain = re.sub(r"``[^`]*``|`[^`]*`", " _ ", re.sub(r":math:`[^`]*`", " ", paragraph))
    for match in LIKE.finditer(plain):
        first, second, unit = match.groups()
        for number in filter(None, (first, second)):
            if unit or "." in number or "e" in number:
                yield number.rstrip(","), unit


@functools.cache
def numbers(file):
    found = re.findall(rf"(?<![\w.])({NUMBER})", (DOCS / "measured" / file).read_text())
    return [float(x.replace(",", "")) for x in found]


def occurs(number, unit, values):
    """Is it one of these, rounded as it is? Percentages and milliseconds may be fractions and seconds there."""
    plain = number.replace(",", "")
    if "e" in plain:
        digits = len(plain.split("e")[0].replace(".", "")) - 1
        return any(float(f"{x:.{digits}e}") == float(plain) for x in values)
    factors = {"%": (1, 100), "percent": (1, 100), "ms": (1, 1000)}.get(unit, (1,))
    half = 0.5 * 10.0 ** -len(plain.partition(".")[2]) + 1e-9
    return any(abs(x * f - float(plain)) <= half for x in values for f in factors)


def said(name):
    """The measurements in the prose of a page."""
    return {f"{number} {unit}" if unit else number for text in paragraphs(page(name)) for number, unit in claims(text)}


def unknown(name):
    """Those that no table has."""
    for paragraph in paragraphs(page(name)):
        linked = [x for x in re.findall(r":doc:`(?:[^`<]*<)?(\w+)>?`", paragraph) if x in PAGES]
        values = [x for other in {name, *linked} for file in shown(other) for x in numbers(file)]
        for number, unit in claims(paragraph):
            if not occurs(number, unit, values):
                yield f"{number} {unit}" if unit else number


@pytest.mark.parametrize("name", PAGES)
def test_prose_has_its_numbers_from_tables(name):
    exempt = {number for where, number in EXEMPT if where in (name, "*")}
    assert set(unknown(name)) - exempt == set()
    needed = {number for where, number in EXEMPT if where == name}
    assert needed <= said(name)  # the list has nothing that is not there


def test_made_up_numbers_are_found():
    found = list(
        claims("It took 1.25 s, 12 to 14 times less, and was 0.035 or 3e-5 off, in 100,000 tokens and 3 runs.")
    )
    assert found == [("1.25", "s"), ("12", "times"), ("14", "times"), ("0.035", None), ("3e-5", None)]
    assert occurs("1.25", "s", [1.254])
    assert occurs("3", "%", [0.0312])
    assert occurs("3e-5", None, [2.96e-5])
    assert not occurs("1.25", "s", [1.26, 125.0])
