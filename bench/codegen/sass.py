"""Disassembled machine code: instructions, their loops, and what these are made of.

A loop is a backward branch and everything between its target and itself; the compilers lay loops out in one piece.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

_LABEL = re.compile(r"^(\.L_\w+):")
_LINE = re.compile(r'^//## File "(.+)", line (\d+)')
_INSTRUCTION = re.compile(r"^/\*[0-9a-f]+\*/\s+(@!?\w+\s+)?([^;]+?)\s*;")
_TARGET = re.compile(r"\.L_\w+")
_BARRIER = re.compile(r"\bB\d+")

MULTIPLY_ADD = {"FFMA": 1, "FFMA2": 2, "DFMA": 1}  # multiply-adds per thread of an instruction


@dataclass(frozen=True)
class Instruction:
    name: str  # with all its modifiers: "LDS.128"
    operands: str = ""
    line: int = 0
    conditional: bool = False

    @property
    def opcode(self):
        return self.name.split(".")[0]

    @property
    def width(self):
        """Bytes that each thread loads or stores."""
        if found := re.search(r"\.(128|64)\b", self.name):
            return int(found[1]) // 8
        found = re.search(r"\.[US](8|16)\b", self.name)
        return int(found[1]) // 8 if found else 4


@dataclass
class Loop:
    """Instructions first .. last; `own` are those that are in none of the `inner` loops."""

    first: int
    last: int
    inner: list = field(default_factory=list)
    own: list = field(default_factory=list)

    def walk(self):
        yield self
        for loop in self.inner:
            yield from loop.walk()


@dataclass
class Program(Loop):
    first: int = 0
    last: int = -1
    instructions: list = field(default_factory=list)
    jumps: dict = field(default_factory=dict)  # instruction -> where it may go instead of to the next

    def loops(self):
        """Every loop, the outer before the inner."""
        return [loop for outer in self.inner for loop in outer.walk()]


def parse(listing):
    """The Program that `nvdisasm -c` (or `-c -g`, with lines) has listed."""
    labels, instructions, line = {}, [], 0
    for text in map(str.strip, listing.splitlines()):
        if found := _LABEL.match(text):
            labels[found[1]] = len(instructions)
        elif found := _LINE.match(text):
            line = int(found[2])
        elif found := _INSTRUCTION.match(text):
            name, _, operands = found[2].partition(" ")
            instructions.append(Instruction(name, operands, line, bool(found[1])))
    program = Program(0, len(instructions) - 1, instructions=instructions, jumps=_jumps(instructions, labels))
    for first, last in _backward(program.jumps):
        _insert(program, Loop(first, last))
    for loop in (program, *program.loops()):
        loop.own = [instructions[i] for i in _own(loop)]
    return program


def _jumps(instructions, labels):
    jumps, meeting = {}, {}
    for i, instruction in enumerate(instructions):
        target = _TARGET.search(instruction.operands)
        barrier = _BARRIER.search(instruction.operands)
        if instruction.opcode == "BSSY":  # threads that part meet again at this label, by the BSYNC of the same barrier
            meeting[barrier[0]] = labels[target[0]]
        elif instruction.opcode == "BSYNC":
            jumps[i] = meeting.get(barrier[0], i + 1)
        elif instruction.opcode in ("BRA", "UBRA") and target:
            jumps[i] = labels[target[0]]
    return jumps


def _backward(jumps):
    """(target, branch) of every loop, the longest first; branches to one target are one loop."""
    ends = {}
    for i, target in sorted(jumps.items()):
        if target < i:  # the last instruction of a program is a branch to itself, never reached
            ends[target] = i
    return sorted(ends.items(), key=lambda loop: loop[0] - loop[1])


def _insert(outer, loop):
    for other in outer.inner:
        if other.first <= loop.first and loop.last <= other.last:
            return _insert(other, loop)
    outer.inner.append(loop)
    outer.inner.sort(key=lambda x: x.first)
    return None


def _own(loop):
    covered = {i for inner in loop.inner for i in range(inner.first, inner.last + 1)}
    return [i for i in range(loop.first, loop.last + 1) if i not in covered]


def executed(program, loop, chosen, avoided):
    """The loop's own instructions in a turn that goes the fast way: past all `chosen`, past no `avoided` instruction.

    Both take an Instruction. A block is on the way if it can come before or after every chosen one in one turn.
    """
    blocks = _blocks(program, loop)
    starts = {start: n for n, (start, _) in enumerate(blocks)}
    inside = [program.instructions[start : stop + 1] for start, stop in blocks]
    slow = {n for n, block in enumerate(inside) if any(map(avoided, block)) and not any(map(chosen, block))}
    after = _reachable(program, blocks, starts, slow)
    if len(blocks) - 1 not in after[0] | {0}:  # there is no way around
        after = _reachable(program, blocks, starts, set())
    kept = [n for n in sorted(after[0] | {0}) if n == len(blocks) - 1 or len(blocks) - 1 in after[n]]
    for n in [n for n in kept if any(map(chosen, inside[n]))]:
        kept = [m for m in kept if m == n or m in after[n] or n in after[m]]
    own = set(_own(loop))
    return [program.instructions[i] for n in kept for i in range(blocks[n][0], blocks[n][1] + 1) if i in own]


def _blocks(program, loop):
    """(first, last) of the stretches of a loop that are entered at the top and left at the end only."""
    heads = {loop.first} | {target for target in program.jumps.values() if loop.first <= target <= loop.last}
    heads |= {i + 1 for i in program.jumps if loop.first <= i < loop.last}
    heads = sorted(heads)
    return list(zip(heads, [head - 1 for head in heads[1:]] + [loop.last], strict=True))


def _reachable(program, blocks, starts, slow):
    """For every block those that may follow it before the loop begins anew, without the slow ones."""
    after = {}
    for n in reversed(range(len(blocks))):
        last = blocks[n][1]
        instruction, target = program.instructions[last], program.jumps.get(last)
        goes_on = instruction.conditional or (target is None and instruction.opcode not in ("EXIT", "RET"))
        following = {n + 1} if goes_on else set()
        following |= {starts[target]} if target in starts else set()
        following = {m for m in following if n < m < len(blocks)} - slow
        after[n] = following.union(*(after[m] for m in following))
    return after


def opcodes(instructions):
    """How often each opcode occurs."""
    return Counter(instruction.opcode for instruction in instructions)


def multiply_adds(instructions):
    return sum(MULTIPLY_ADD.get(instruction.opcode, 0) for instruction in instructions)


def multiply_add_share(instructions):
    """The share of the issue slots that multiply-adds take."""
    return sum(i.opcode in MULTIPLY_ADD for i in instructions) / max(len(instructions), 1)
