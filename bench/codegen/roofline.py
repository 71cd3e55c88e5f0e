"""The time that the instructions of the tile drivers allow at best, on one card.

A multiprocessor is taken to be busy with the dearest of its units, without a single cycle lost:

    issue    one instruction of a warp per scheduler and cycle, whatever it is
    float    fused multiply-adds, sums and products in 1 cycle; integer multiply-adds in 2
    integer  comparisons, minima, additions, logic: 2 cycles
    special  conversions, roundings, reciprocals: 8 cycles
    shared   128 bytes a cycle for the whole multiprocessor; a load of 16 bytes a lane counts half, because in the
             products every 16 bytes are read by at least two lanes of each half warp

and the card with the largest of that, of what the blocks read from the second-level cache, and of what must come from
memory or go there: keys and values once for each wave of blocks if the cache does not hold them. The clock is the
boost clock. Latencies, bank conflicts and launches are not counted, so that measured times are longer.
"""

from dataclasses import dataclass

from . import sass
from .cards import MULTIPROCESSORS, Card
from .tally import Geometry, Tally, tally

LENGTHS = (131_072, 1_048_576)
RANK, DIM = 128, 64
EXACT = "pda_numba.rows:_ROWS_CUDA[float32]", "for j in range(first"
APPLY = "pda_numba.apply_tiles:_APPLY_CUDA[float32]", "for j in range(0, rank"
OTHERS = (
    ("pda_numba.apply_tiles:_APPLY_CUDA[float32]", "for j in range(first_near"),
    ("pda_numba.content:_ATTEND_CUDA[float32]", "for i in range(own"),
    *(
        (f"pda_numba.products:_{name}_CUDA[float32]", "for j in range(0, count")
        for name in ("WEIGHTS", "NEAREST", "SQUARES")
    ),
)


@dataclass
class Pass:
    """One launch over all its blocks."""

    name: str
    flops: float
    threads: int
    tally: Tally
    blocks: int
    cached: float  # bytes that the blocks read from the second-level cache
    moved: float  # bytes from and to memory

    def seconds(self, card):
        """What each resource needs by itself, in seconds."""
        turns = -(-self.blocks // card.multiprocessors)
        times = {unit: turns * n / card.clock for unit, n in self.tally.cycles(self.threads).items()}
        return times | {"cache": self.cached / card.l2, "memory": self.moved / card.memory}


def passes(codes, n, card, rank=RANK, dim=DIM):
    """Exact attention of one head (n, dim) in float32, and the two passes of low rank that grow with n."""
    from pda_numba.plan import apply_flops, plan, row_flops

    keys = Geometry(dim, dim, 1).keys
    row = 4 * 2 * dim  # bytes of a key and its value, or of a query and its output
    code, function = codes[EXACT[0]]
    threads, blocks = code.threads, -(-n // code.threads)
    work = tally(code, function, EXACT[1], Geometry(dim, dim, -(-n // keys)))
    # All blocks that run at once go over the keys together; the next ones find them gone from the cache.
    waves = -(-blocks // (_resident(code) * card.multiprocessors))
    streams = 1 if n * row <= card.l2_size else waves
    flops = row_flops(n, n, dim, dim)
    yield Pass("exact attention", flops, threads, work, blocks, blocks * n * row, (1 + streams) * n * row)

    rows = plan((n, dim), (n, dim), (n, dim), rank=rank, method="pda").rows
    splits, split = _splits(rows, threads, n)
    work = tally(code, function, EXACT[1], Geometry(dim, dim, -(-split // keys)))
    blocks = -(-rows // threads) * splits
    flops = row_flops(rows, n, dim, dim)
    yield Pass(f"PDA, {rows} exact rows", flops, threads, work, blocks, blocks * split * row, n * row)

    code, function = codes[APPLY[0]]
    work = tally(code, function, APPLY[1], Geometry(dim, dim, -(-rank // keys)))
    blocks, flops = -(-n // code.threads), apply_flops(n, dim, dim, rank, 0)
    yield Pass(f"PDA, apply at rank {rank}", flops, code.threads, work, blocks, blocks * rank * row, n * row)


def _resident(code):
    return MULTIPROCESSORS[code.capability].occupancy(code.threads, code.registers, code.shared)[0]


def _splits(rows, threads, keys):
    """Into how many ranges the keys are cut on the GPU, and how long these are."""
    from types import SimpleNamespace

    from pda_numba.device import Cuda
    from pda_numba.rows import _splits as split_keys

    problem = SimpleNamespace(device=SimpleNamespace(pieces=Cuda.pieces))
    return split_keys(problem, -(-rows // threads), keys)


def compile_tiles(launches, card):
    """The float32 drivers on tiles, with their lines: driver -> (Code, function)."""
    from . import build
    from .launches import drivers

    wanted = {name for name, _ in (EXACT, APPLY, *OTHERS)}
    chosen = [x for x in launches if x.kernel in wanted and not x.other_loads]
    codes = build.compile_all(chosen, (card.capability,), lines=True)
    return {code.launch.kernel: (code, drivers()[code.launch.kernel].function) for code in codes}


def report(launches, card=None):
    """Print both tables."""
    from common import print_table

    card = card or Card()
    codes = compile_tiles(launches, card)
    header = ["driver", "loop", "inner loops", "whole tile", "per shared byte", "per device byte", "busiest unit"]
    rows = [_shares(*codes[name], name, loop) for name, loop in (EXACT, APPLY, *OTHERS)]
    print_table("Share of multiply-adds among all instructions, and multiply-adds per byte, D = E = 64", header, rows)
    rows = []
    for n in LENGTHS:
        for work in passes(codes, n, card):
            seconds = work.seconds(card)
            unit = max(seconds, key=seconds.get)
            share = work.flops / seconds[unit] / card.flops
            rows.append((f"{n:,}", work.name, work.flops / 1e9, work.blocks, seconds[unit] * 1e3, unit, f"{share:.0%}"))
    header = ["N", "pass", "10^9 operations", "blocks", "ms at best", "bound by", "of peak"]
    print_table(f"{card.name}: one head, D = E = 64, float32; peak {card.flops / 1e12:.1f} TFLOP/s", header, rows)


def _shares(code, function, name, loop):
    work = tally(code, function, loop, Geometry(DIM, DIM, RANK // 32))
    cycles = work.cycles(code.threads)
    unit = max(cycles, key=cycles.get)
    return (
        name.removeprefix("pda_numba.").removesuffix("[float32]"),
        loop,
        f"{work.inner_products / work.inner_slots:.0%}",
        f"{sum(n for name, n in work.opcodes.items() if name in sass.MULTIPLY_ADD) / work.slots:.0%}",
        work.products / work.shared,
        work.products / work.device,
        f"{unit}; shared {cycles['shared'] / cycles[unit]:.0%}, integer {cycles['integer'] / cycles[unit]:.0%}",
    )
