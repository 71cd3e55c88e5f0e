"""`pda-numba spectrum`: the singular values of exact attention, as a table and as a picture."""

import os

import click
import numpy as np

import pda_numba

from . import files, text, waiting
from .errors import bad_input

TOLERANCES = (0.3, 0.1, 0.03)  # for which the table has the rank that is needed
RANK = 64


def run(q, k, plot, rank, **choices):
    """Compute, print, and draw if `plot` is a path."""
    if rank is None:
        rank = max(1, min(RANK, q.shape[-2], k.shape[-2]))
    with files.picture(plot, "--plot") as target:
        with bad_input(), waiting.Steps() as steps:
            steps.next(f"singular values: {'x'.join(map(str, q.shape))} queries, {k.shape[-2]:,} keys")
            found = waiting.call(pda_numba.spectrum, q, k, rank=rank, **choices)
        text.show(table(found), "")
        click.echo("nuclear: a lower limit. ranks: what an approximation with that error takes at least.")
        click.echo("\n".join(str(found).splitlines()[-2:]))
        if target is not None:
            from . import figure

            figure.draw_spectrum(found, target.temporary, os.path.splitext(plot)[1].lower()[1:])
            target.finish()
            click.echo(f"Picture: {plot}")


def table(found):
    """One line for each head."""
    columns = ["head", "largest", f"value {found.rank}", "nuclear", "Frobenius", f"error at {found.rank}"]
    ranks = [found.rank_for(tol) for tol in TOLERANCES]
    rows = []
    for head in np.ndindex(found.error.shape):
        values = found.singular_values[head]
        numbers = f"{values[0]:.3g}", f"{values[-1]:.3g}", found.nuclear_norm[head], found.frobenius_norm[head]
        needed = [int(np.asarray(rank)[head]) for rank in ranks]
        rows.append(
            (
                text.head(head),
                *numbers[:2],
                *(f"{x:.4g}" for x in numbers[2:]),
                text.error(float(found.error[head])),
                *(f"> {found.rank}" if rank < 0 else str(rank) for rank in needed),
            )
        )
    columns += [f"rank {100 * tol:g} %" for tol in TOLERANCES]
    return text.table("Singular values of exact attention", columns, rows)
