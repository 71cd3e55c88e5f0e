"""Numbers and tables for people. Plain ASCII, at most 80 columns, so that logs and pipes read like the terminal."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table


def show(*drawn):
    """Print tables and prose; prose is not wrapped, so that a line stays a line in a pipe."""
    console = Console(file=sys.stdout, highlight=False)
    for one in drawn:
        console.print(one, soft_wrap=isinstance(one, str), markup=False)


def error(value):
    """An error: two or three digits, in powers of ten where it is tiny."""
    return f"{value:.0e}" if value < 1e-3 else f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def seconds(value):
    """A time in the unit that fits."""
    if value < 1:
        return f"{1e3 * value:.1f} ms" if value < 0.01 else f"{1e3 * value:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def size(value):
    """Bytes in the unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def factor(value):
    """How many times faster."""
    return f"{value:,.0f}x" if value >= 10 else f"{value:.1f}x"


def head(index):
    """A head's place among the leading axes."""
    return " ".join(map(str, index)) or "-"


def table(title, columns, rows, sections=()):
    """Right-aligned columns (a name ending in "<" is left-aligned); `sections` are rows after which a rule is drawn."""
    drawn = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    for name in columns:
        drawn.add_column(name.rstrip("<"), justify="left" if name.endswith("<") else "right", no_wrap=True)
    for number, row in enumerate(rows):
        drawn.add_row(*map(str, row), end_section=number in sections)
    return drawn
