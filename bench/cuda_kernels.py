"""The CUDA drivers as machine code, without a GPU: checks, resources, and what the instructions allow.

    python bench/cuda_kernels.py               # checks all drivers for all capabilities; prints what they need
    python bench/cuda_kernels.py --roofline    # prints the time that the instructions of the tile drivers allow
    python bench/cuda_kernels.py --only rows --listing 9.0    # the loops of some drivers, by opcode

Tiny calls on Numba's simulator say which drivers run, and with which types. Needs `pip install ".[compile]"`.
"""

import argparse
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

from codegen import build, checks, launches, roofline, sass
from codegen.cards import MULTIPROCESSORS
from common import print_table


def print_compilers():
    with_release = build.tool("ptxas"), "--version"
    release = re.search(r"V([\d.]+)", build.run(*with_release).stdout)
    print(f"pda_numba {version('pda_numba')}, numba-cuda {version('numba-cuda')}, ptxas {release[1]}", flush=True)


def resources(codes):
    """One line for every launch: what its code takes on each capability, and how many warps that lets in."""
    groups = {}
    for code in codes:
        groups.setdefault(code.launch, []).append(code)
    rows = []
    for launch, group in groups.items():
        fits = [MULTIPROCESSORS[c.capability].occupancy(c.threads, c.registers, c.shared) for c in group]
        first = group[0]
        rows.append(
            (
                launch.kernel.removeprefix("pda_numba."),
                " ".join(launch.numbers) or "-",
                first.threads,
                first.shared,
                _joined(c.registers for c in group),
                _joined(len(c.program.instructions) for c in group),
                _joined(warps for _, warps, _ in fits),
                _joined(dict.fromkeys(limit for _, _, limit in fits)),
            )
        )
    capabilities = _joined(".".join(map(str, code.capability)) for code in next(iter(groups.values())))
    header = ["driver", "numbers", "threads", "shared, B", "registers", "instructions", "warps of 64", "limited by"]
    print_table(f"Registers, instructions and warps per multiprocessor on {capabilities}", header, rows)


def _joined(values):
    return " / ".join(map(str, values))


def listing(codes, capability):
    """The loops of each driver, with what is in them but not in a loop further inside."""
    for code in codes:
        if code.capability == capability and not code.error:
            print(f"\n{code.launch.kernel} {code.launch.signature}")
            _list_loops(code.program.inner, 1)


def _list_loops(loops, level):
    for loop in loops:
        counts = ", ".join(f"{name} {n}" for name, n in sass.opcodes(loop.own).most_common(10))
        share = sass.multiply_add_share(loop.own)
        print(f"{'    ' * level}{loop.first}-{loop.last}: {len(loop.own)}, {share:.0%} multiply-adds: {counts}")
        _list_loops(loop.inner, level + 1)


def check(codes, recorded, whole):
    """Everything that is wrong, in lines."""
    wrong = [f"{code}: {text}" for code in codes for text in checks.complaints(code)]
    if whole:
        wrong += [f"{name} is never launched" for name in checks.never_launched(launches.drivers(), recorded)]
        wrong += checks.stale(codes)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roofline", action="store_true", help="time that the instructions allow, instead")
    parser.add_argument("--only", default="", metavar="TEXT", help="drivers whose name contains this")
    parser.add_argument("--listing", metavar="CC", help="print the loops on this capability, as 9.0")
    parser.add_argument("--launches", type=Path, metavar="FILE", help="launches, as codegen.launches prints them")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if reason := build.missing():
        parser.exit(1, f"cannot compile: {reason}\n")
    recorded = launches.read(json.loads(options.launches.read_text())) if options.launches else launches.record()
    chosen = [launch for launch in recorded if options.only in launch.kernel]
    print_compilers()
    if options.roofline:
        roofline.report(chosen)
        return
    codes = build.compile_all(chosen, processes=options.processes)
    if options.listing:
        listing(codes, tuple(map(int, options.listing.split("."))))
    else:
        resources([code for code in codes if not code.error])
    if wrong := check(codes, recorded, whole=not options.only and not options.launches):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
