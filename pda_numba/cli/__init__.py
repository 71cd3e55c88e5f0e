"""The command line `pda-numba` (also `python -m pda_numba`). The package itself never imports this room."""

from .commands import main

__all__ = ["main"]
