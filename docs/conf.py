"""Sphinx configuration; build with `sphinx-build -W --keep-going docs docs/_build/html`."""

import re
import sys
from pathlib import Path

import pda_numba

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "pda_numba"
copyright = "2026, The pda_numba developers"
release = version = pda_numba.__version__

extensions = ["mathml", "numpydoc", "sphinx.ext.autodoc"]
autodoc_mock_imports = ["autograd", "jax", "torch"]  # of the adapters: large, and not needed for their docstrings
exclude_patterns = ["_build"]
default_role = "code"

html_theme = "furo"
html_title = f"pda_numba {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_math_renderer = "mathml"
html_show_sphinx = False

numpydoc_show_class_members = False
numpydoc_xref_param_type = False


def _escape_bars(app, what, name, obj, options, lines):
    """Docstrings write |x| for absolute values and norms, which reStructuredText would take for a substitution."""
    lines[:] = [re.sub(r"(`+).+?\1|\|", lambda m: r"\|" if m[0] == "|" else m[0], line) for line in lines]


def setup(app):
    app.connect("autodoc-process-docstring", _escape_bars)
