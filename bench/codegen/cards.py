"""What NVIDIA's cards can do: how many threads a multiprocessor holds at once, and the rates of an H200.

The limits of each compute capability are those of the CUDA C++ Programming Guide (technical specifications) and of
NVIDIA's occupancy calculator.
"""

from dataclasses import dataclass

WARP = 32
SCHEDULERS = 4  # of a multiprocessor: each issues one instruction of one warp per cycle
LARGEST_STATIC_SHARED = 48 * 1024
MOST_REGISTERS = 255  # of one thread

_REGISTERS = 65536  # of a multiprocessor
_REGISTER_UNIT = 256  # given out to a warp in pieces of
_SHARED_UNIT = 128
_SHARED_RESERVED = 1024  # bytes of each block, kept by the system


@dataclass(frozen=True)
class Multiprocessor:
    warps: int
    blocks: int
    shared: int  # bytes

    def occupancy(self, threads, registers, shared):
        """(blocks, warps, what limits them) that fit at once."""
        per_block = -(-threads // WARP)
        per_warp = _rounded_up(registers * WARP, _REGISTER_UNIT)
        # Each scheduler has a quarter of the registers.
        register_warps = SCHEDULERS * (_REGISTERS // SCHEDULERS // per_warp)
        limits = {
            "warps": self.warps // per_block,
            "blocks": self.blocks,
            "registers": register_warps // per_block,
            "shared memory": self.shared // (_rounded_up(shared, _SHARED_UNIT) + _SHARED_RESERVED),
        }
        limit = min(limits, key=limits.get)
        return limits[limit], limits[limit] * per_block, limit


MULTIPROCESSORS = {
    (8, 0): Multiprocessor(warps=64, blocks=32, shared=164 * 1024),
    (9, 0): Multiprocessor(warps=64, blocks=32, shared=228 * 1024),
    (10, 0): Multiprocessor(warps=64, blocks=32, shared=228 * 1024),
}


@dataclass(frozen=True)
class Card:
    """Peak rates per multiprocessor and cycle, and of the memories. An H200 (SXM) by default."""

    name: str = "H200"
    capability: tuple = (9, 0)
    multiprocessors: int = 132
    clock: float = 1.98e9  # Hz, boost
    shared_bytes: int = 128  # per multiprocessor and cycle
    l2: float = 5.5e12  # bytes/s; as measured by others on an H100, not a number of NVIDIA's
    l2_size: int = 50 * 2**20  # bytes
    memory: float = 4.8e12  # bytes/s

    @property
    def flops(self):
        """float32 operations per second if every issue slot is a fused multiply-add."""
        return 2 * WARP * SCHEDULERS * self.multiprocessors * self.clock


def _rounded_up(n, unit):
    return -(-n // unit) * unit
