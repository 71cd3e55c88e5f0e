"""From the front page to a correct result on one's own .npy files in five minutes, by the commands that it prints.

Two of the five minutes are for installing, which is not measured here but by `.ci/run`, whose step "install" says how
long it took: it installs more than a user does (`.[dev]`). Three are left for what this test runs in fresh processes
with an empty cache of kernels, as it is for a new user. Most of it is compiling.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import naive
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/index.rst", "docs/quickstart.rst")  # where a reader begins
SECONDS = 3 * 60
TOKENS = 8192

pytestmark = pytest.mark.slow


def printed(page):
    """The commands and the programs on a page that are for one's own files."""
    text = (ROOT / page).read_text()
    commands = re.findall(r"^ +(?:\$ )?(pda-numba run .+)$", text, re.MULTILINE)
    blocks = re.findall(r"```python\n(.+?)```", text, re.DOTALL)
    blocks += re.findall(r"code-block:: python\n\n((?:   .*\n|\n)+)", text)
    return commands, [textwrap.dedent(block).strip() for block in blocks if "np.load(" in block]


def own_arrays():
    """Two heads: one that low rank serves, and one for which everything is tried before it is computed exactly."""
    rng = np.random.default_rng(0)
    t = np.linspace(0, 60, TOKENS)[:, None]
    q, k = (wave(t + rng.uniform(0, 6, 64)) for wave in (np.sin, np.cos))
    q, k = (np.stack([x, rng.standard_normal(x.shape)]).astype(np.float32) for x in (q, k))
    return q, k, rng.standard_normal(k.shape, np.float32)


def column(text, name):
    """A column of the table that `info` prints, a line for every head."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    header = next(i for i, cells in enumerate(lines) if cells[0] == "head")
    return [line[lines[header].index(name)] for line in lines[header + 1 : header + 3]]


def seconds(start):
    """Since `start`, a call of `os.times`: by the clock or of the processor, whichever is less.

    The processor's count is what an otherwise idle machine needs at most; the clock counts other programs' work too.
    """
    now = os.times()
    processor = now.children_user + now.children_system - start.children_user - start.children_system
    return min(now.elapsed - start.elapsed, processor)


def error(head, q, k, v, out):
    """Of one head, against float64, a thousand rows at a time."""
    rows = range(0, TOKENS, 1024)
    exact = np.concatenate([naive.attention(q[head, i : i + 1024], k[head], v[head]) for i in rows])
    return naive.relative(out[head], exact)


def test_own_files_in_five_minutes(tmp_path):
    pages = [printed(page) for page in PAGES]
    assert all(commands and programs for commands, programs in pages)  # each page has both ways
    calls = dict.fromkeys(command for commands, _ in pages for command in commands)
    programs = dict.fromkeys(program for _, programs in pages for program in programs)

    q, k, v = own_arrays()
    for name, x in zip("QKV", (q, k, v), strict=True):
        np.save(tmp_path / f"{name}.npy", x)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # where pip puts commands

    took, outputs = 0, []
    for call in [*calls, *([sys.executable, "-c", program] for program in programs)]:
        start = os.times()
        done = subprocess.run(
            call, shell=isinstance(call, str), cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        took += seconds(start)
        assert done.returncode == 0, done.stderr
        assert column(done.stdout, "method") == ["pda", "exact"]
        limits = [float(x) for x in column(done.stdout, "95 % limit")]
        assert max(limits) <= 1e-2
        outputs.append(np.load(tmp_path / "O.npy"))
        (tmp_path / "O.npy").unlink()
    assert took < SECONDS
    assert all(error(head, q, k, v, outputs[0]) <= limit for head, limit in enumerate(limits))
    assert all((out == outputs[0]).all() for out in outputs)
