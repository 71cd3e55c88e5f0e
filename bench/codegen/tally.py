"""What one block of a driver on tiles executes: its machine code, each instruction times how often its loop turns.

The trips follow from the shape of the tile (`pda_numba.kernels.tile`). A loop is known by the line of the driver that
it stands in (the compiler keeps the driver's lines for all that is inlined), and how far it was unrolled by what one
turn does. Where a loop has a fast way (four numbers to a load) and a slow one, the fast way is counted.
"""

import ast
import functools
import inspect
import re
import textwrap
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from . import sass
from .cards import SCHEDULERS, WARP, Card

_FLOAT = {"FFMA", "FADD", "FMUL", "FFMA2"}
_FLOAT_TWICE = {"IMAD"}
_SPECIAL = {"MUFU", "F2I", "F2F", "I2F", "FRND", "I2FP", "F2IP"}
_SHARED = {"LDS", "STS"}
_GLOBAL = {"LDG", "STG", "LD", "ST"}
# Moves and whatever steers the program: their units are never the dearest.
_OTHER = set("BRA BAR BSSY BSYNC CALL CS2R EXIT LDC LDCU MOV NOP RET S2R S2UR WARPSYNC".split())  # noqa: SIM905


@dataclass(frozen=True)
class Geometry:
    """Shape of a float32 tile, and the block's work: D columns, E values, and how many tiles of keys."""

    columns: int
    values: int
    tiles: int

    shape = property(lambda self: _tile().geometry(np.float32))
    keys = property(lambda self: self.shape.keys)
    products = property(lambda self: self.shape.block * self.columns)  # multiply-adds of a tile's scores, per thread
    sums = property(lambda self: self.shape.columns * self.keys)  # of a tile's values, per thread
    key_chunks = property(lambda self: -(-self.columns // _staging().CHUNK))
    value_chunks = property(lambda self: self.keys * 2 // self.shape.buffer_rows)
    depth_blocks = property(lambda self: -(-self.columns // self.shape.depth))


def _tile():
    from pda_numba.kernels import tile

    return tile


def _staging():
    from pda_numba.kernels import staging

    return staging


# --- how often a loop turns ---


def _count(loop, *names):
    return max(sum(sass.opcodes(loop.own)[name] for name in names), 1)


def _in_product(loop, total, chunks, blocks, staged):
    """Trips of a loop of `multiply_keys` or `add_values`: `total` multiply-adds, in chunks, in blocks of columns."""
    working = [inner for inner in loop.inner if _products_in(inner)]
    own, waits = sass.multiply_adds(loop.own), "BAR" in sass.opcodes(loop.own)
    if working:
        # One barrier a chunk: a loop around loops without is that of the chunks, else that of the blocks.
        of_chunks = not any("BAR" in sass.opcodes(inner.own) for inner in working)
        return chunks / blocks if of_chunks else blocks
    if own:
        return total / (blocks if waits else chunks) / own
    return staged / _count(loop, "STS")  # a query's columns into shared memory, once for all tiles


def _in_scores(loop, g):
    return _in_product(loop, g.products, g.key_chunks, g.depth_blocks, g.columns / g.tiles)


def _in_values(loop, g):
    return _in_product(loop, g.sums, g.value_chunks, 1, 0)


def _in_marks(loop, g):
    return _tile().MARKS / 4 if loop.inner else 4 * g.keys / max(sass.multiply_adds(loop.own), 1)


# By the call, or else the loop, that a line of a driver belongs to: trips of a loop in it per tile of keys.
_TRIPS = {
    "tile.score_tile": _in_scores,
    "tile.multiply_keys": _in_scores,
    "tile.stage_queries": lambda loop, g: g.columns / g.tiles / _count(loop, "STS"),
    "tile.add_values": _in_values,
    "tile.peak_of": lambda loop, g: g.keys / _count(loop, "LDS"),
    "tile.weigh": lambda loop, g: g.keys / _count(loop, "STS"),
    "tile.put_marks": lambda loop, g: g.keys * _tile().MARKS / _staging().THREADS / _count(loop, "STS"),
    "tile.add_marks": _in_marks,
    "tile.hide_scores": lambda loop, g: 0,  # the last tile alone
    "for c in": lambda loop, g: g.keys / _count(loop, "LDS", "STS"),
    "for first in": lambda loop, g: g.depth_blocks,
}


_STAGING = "tile.score_tile", "tile.stage_queries"

# --- counting ---


@dataclass
class Tally:
    """Instructions of one thread (so of one warp), by opcode, and the bytes that it moves."""

    opcodes: Counter = field(default_factory=Counter)
    shared: float = 0
    broadcast: float = 0  # of them, by loads that several lanes share
    device: float = 0
    inner_slots: float = 0  # in the innermost loops of products
    inner_products: float = 0

    def add(self, instructions, times):
        for instruction in instructions:
            name, size = instruction.opcode, times * instruction.width
            self.opcodes[name] += times
            self.shared += size * (name in _SHARED)
            self.broadcast += size * (name == "LDS" and instruction.width == 16)
            self.device += size * (name in _GLOBAL)

    @property
    def slots(self):
        return sum(self.opcodes.values())

    @property
    def products(self):
        return sum(n * sass.MULTIPLY_ADD.get(name, 0) for name, n in self.opcodes.items())

    def cycles(self, threads):
        """What each unit of a multiprocessor needs for one block of so many threads."""
        cost = Counter(issue=self.slots)
        for name, n in self.opcodes.items():
            unit, each = _unit(name)
            cost[unit] += n * each
        cycles = {unit: n * threads / WARP / SCHEDULERS for unit, n in cost.items() if unit}
        return cycles | {"shared": (self.shared - self.broadcast / 2) * threads / Card.shared_bytes}


def _unit(opcode):
    if opcode in _FLOAT:
        return "float", 1
    if opcode in _FLOAT_TWICE:
        return "float", 2
    if opcode in _SPECIAL:
        return "special", 8
    if opcode in _SHARED | _GLOBAL | _OTHER or opcode.startswith("U"):
        return "", 0
    return "integer", 2


def tally(code, function, key_loop, geometry):
    """The instructions of one block whose work is in `key_loop`, as the source writes it ("for j in range(0, ...")."""
    source = _Source(function)
    result = Tally()
    for loop in code.program.inner:
        if any(text.startswith(key_loop) for text in source.loops_around(loop)):
            _add(result, code.program, loop, geometry.tiles, geometry, source)
    if not result.slots:
        raise ValueError(f"{code.launch.kernel} has no loop {key_loop!r}")
    return result


def _add(result, program, loop, times, geometry, source):
    own = sass.executed(program, loop, _fast, _slow) if any(map(_fast, loop.own)) else loop.own
    result.add(own, times)
    if not loop.inner and sass.multiply_adds(loop.own) >= WARP:
        result.inner_slots += times * len(own)
        result.inner_products += times * sum(i.opcode in sass.MULTIPLY_ADD for i in own)
    for inner in _taken(loop.inner, source):
        if _over_probes(inner, source):
            continue
        _add(result, program, inner, times * _trips(inner, geometry, source), geometry, source)


def _over_probes(loop, source):
    """Is it over a query's probes? There are none beside a window alone."""
    return "covered(" in source.calls.get(source.line(loop), "")


def _taken(loops, source):
    """Without the loops that another one replaces: of several that stage the queries the fastest."""
    staging = [x for x in loops if source.call_of(x).startswith(_STAGING) and not _products_in(x)]
    fastest = min(staging, key=lambda x: (not any(map(_fast, x.own)), len(x.own)), default=None)
    return [x for x in loops if x is fastest or x not in staging]


def _products_in(loop):
    return sum(sass.multiply_adds(inner.own) for inner in loop.walk())


def _trips(loop, geometry, source):
    places = [source.call_of(loop), *source.loops_around(loop)]
    for place in places[:2]:
        for name, trips in _TRIPS.items():
            if place.startswith(name):
                return trips(loop, geometry)
    raise ValueError(f"how often does this loop turn? {places}")


def _fast(instruction):
    return instruction.opcode == "LDG" and instruction.width >= 8


def _slow(instruction):
    return instruction.opcode == "LDG" and instruction.width < 8


class _Source:
    """The statements of a driver by line: the compiler keeps the driver's lines for all that is inlined in it."""

    def __init__(self, function):
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        ast.increment_lineno(tree, first - 1)
        nodes = list(ast.walk(tree))
        self.loops = [(n.lineno, n.end_lineno, ast.unparse(n).splitlines()[0]) for n in nodes if isinstance(n, ast.For)]
        self.calls = {n.lineno: ast.unparse(n) for n in nodes if isinstance(n, ast.Expr | ast.Assign | ast.AugAssign)}

    @functools.cache  # noqa: B019 - as short-lived as the object
    def _line(self, first, lines):
        return Counter(lines).most_common(1)[0][0]

    def line(self, loop):
        """The line that most of a loop's instructions come from."""
        return self._line(loop.first, tuple(i.line for i in loop.own))

    def call_of(self, loop):
        """The innermost call that its line makes: of `x = tile.weigh(...)`, "tile.weigh(...)"."""
        found = re.search(r"\btile\.\w+\(.*", self.calls.get(self.line(loop), ""))
        return found[0] if found else ""

    def loops_around(self, loop):
        """Every `for` of the source around it, the innermost first."""
        around = [(first, text) for first, last, text in self.loops if first <= self.line(loop) <= last]
        return [text for _, text in sorted(around, reverse=True)]
