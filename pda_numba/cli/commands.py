"""The commands and their options; what they do is in the other files of this room."""

import click
import numpy as np

import pda_numba

from ..gpu import resolve_device
from . import files, options
from .errors import Commands, bad_input

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_FORCE = click.option("--force", is_flag=True, help="Replace the output file if it exists.")


@click.group(cls=Commands, context_settings=_CONTEXT, no_args_is_help=False)
@click.version_option(pda_numba.__version__, prog_name="pda-numba", message="%(prog)s %(version)s")
@options.debug
def main():
    """Attention over long sequences in linear time, with a measured error.

    Arrays are .npy files: q (..., Hq, N, D), k (..., Hkv, M, D), v (..., Hkv, M, E); two axes are one head.
    """


# --- demo ---


@main.command()
@click.option(
    "--out",
    default="pda_numba_demo.png",
    show_default=True,
    metavar="PICTURE",
    help="Picture to write or replace (png, svg, pdf).",
)
@click.option(
    "--max-tokens", type=click.IntRange(min=4096), default=262144, show_default=True, help="Longest sequence."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--tol", type=click.FloatRange(min=0, min_open=True), default=0.1, show_default=True, help="Target error."
)
@options.device
@options.debug
def demo(out, max_tokens, seed, tol, device):
    """Show accuracy on real attention heads and time up to 256k tokens."""
    from . import demo as work

    _check_device(device)
    work.run(out, max_tokens, seed, tol, device)


# --- run ---


def _three_files(command):
    for name in ("v_file", "k_file", "q_file"):
        command = click.argument(name, metavar=name[0].upper() + ".npy")(command)
    return command


@main.command()
@_three_files
@click.option("-o", "--output", required=True, metavar="O.npy", help="Where the result goes.")
@options.full
@click.option("--causal", is_flag=True, help="Query i sees the keys up to i + M - N alone.")
@_FORCE
@click.option("--info", is_flag=True, help="Print how each head was computed and how wrong it may be.")
@options.debug
def run(q_file, k_file, v_file, output, causal, force, info, **choices):
    """Attention of the arrays in Q.npy, K.npy and V.npy, written to O.npy.

    The inputs are memory-mapped; the output appears complete or not at all.
    """
    q, k, v = _read(q_file, k_file, v_file, choices)
    with files.Output(output, force) as target:
        array = target.array(_output_shape(q, k, v), q.dtype)
        told = _attention(q, k, v, choices, out=array, causal=causal)[1]
        target.finish()
    if info:
        click.echo(str(told))


def _read(q_file, k_file, v_file, choices):
    """The three arrays, with everything checked that can be checked without computing."""
    q, k, v = files.read(q_file, "Q"), files.read(k_file, "K"), files.read(v_file, "V")
    if not q.dtype == k.dtype == v.dtype:
        raise files.BadInput(f"Q, K and V must hold the same dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    planned = {name: choices[name] for name in ("rank", "tol", "window", "near", "proj_dim", "method")}
    with bad_input():
        pda_numba.plan(q.shape, k.shape, v.shape, q.dtype, **options.for_plan(**planned))
    _check_device(choices.get("device", "auto"))
    return q, k, v


def _check_device(device):
    try:
        resolve_device(device)
    except RuntimeError as error:
        raise files.BadInput(str(error)) from error


def _output_shape(q, k, v):
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3]) if q.ndim > 2 else ()
    return (*batch, *q.shape[-3:-1], v.shape[-1])


def _attention(q, k, v, choices, **more):
    """(output, info), with progress on a terminal."""
    from . import waiting

    arguments = options.for_attention(**choices)
    with bad_input(), waiting.Steps() as steps:
        steps.next(f"attention: {'x'.join(map(str, q.shape))} queries, {k.shape[-2]:,} keys")
        return waiting.call(pda_numba.attention, q, k, v, return_info=True, **arguments, **more)


# --- check ---


@main.command()
@_three_files
@click.option(
    "-o", "--output", metavar="O.npy", help="An existing output to check, from any program; else compute one."
)
@options.full
@click.option(
    "--rows", type=click.IntRange(min=1), help="Check this many rows, drawn at random.  [default: all, if affordable]"
)
@options.debug
def check(q_file, k_file, v_file, output, rows, **choices):
    """Compare the claimed error with the true one, computed by plain NumPy in float64.

    Ends with exit code 1 if the true error exceeds the claimed 95 % limit on any head.
    """
    from . import check as work
    from . import text

    q, k, v = _read(q_file, k_file, v_file, choices)
    if not q.shape[-2]:
        raise files.BadInput(f"Q file '{q_file}' holds no queries: there is nothing to check")
    out, claims, methods = _claims(q, k, v, output, choices)
    looked_at = work.rows_to_check(methods.size, q.shape[-2], k.shape[-2], rows, choices["seed"])
    found = _verdicts(out, q, k, v, claims, methods, looked_at, choices["scale"])
    text.show(_check_table(found), "")
    n = q.shape[-2]
    sample = "all rows" if len(looked_at) == n else f"{len(looked_at):,} of {n:,} rows per head, drawn uniformly"
    click.echo(
        f"true: plain NumPy, float64, {sample}. limit: claimed at 95 % confidence.\n"
        "rows within: rows off by at most the row limit, true share / claimed share."
    )
    click.echo(work.summary(found, len(looked_at) == n))
    return 0 if all(verdict.holds for verdict in found) else 1


def _claims(q, k, v, output, choices):
    """(output, claimed errors, method per head), of an existing output or of one computed now."""
    from . import waiting

    if output is None:
        out, info = _attention(q, k, v, choices)
        return out, info, info.method
    out, expected = files.read(output, "output"), _output_shape(q, k, v)
    if out.shape != expected:
        raise files.BadInput(f"output file '{output}' has shape {out.shape}; for these inputs it must be {expected}")
    arguments = options.for_attention(**choices)
    known = {name: arguments[name] for name in ("scale", "seed", "device", "check_finite")}
    with bad_input(), waiting.Steps() as steps:
        steps.next("estimating the error")
        claims = waiting.call(pda_numba.estimate_error, out, q, k, v, **known)
    return out, claims, np.full(claims.error.shape, "given")


def _verdicts(out, q, k, v, claims, methods, rows, scale):
    from . import check as work
    from . import reference, waiting

    total, done = methods.size * len(rows), 0
    with waiting.Steps(total) as steps:
        steps.next("true error, float64")

        def tick(count):
            nonlocal done
            done += count
            steps.at(done, total)

        scale = reference.default_scale(q) if scale is None else scale
        return waiting.call(work.verdicts, out, q, k, v, claims, methods, rows, scale, tick)


def _check_table(found):
    from . import text

    columns = ["head", "method<", "claimed", "limit", "true", "row limit", "rows within", "claim<"]
    rows = [
        (
            text.head(one.head),
            one.method,
            text.error(one.claimed),
            text.error(one.limit),
            text.error(one.true),
            text.error(one.row_error),
            f"{100 * one.true_share:.1f} / {100 * one.row_share:.1f} %",
            "holds" if one.holds else "VIOLATED",
        )
        for one in found
    ]
    return text.table("Claimed and true error", columns, rows)


# --- explain, spectrum ---


@main.command()
@_three_files
@options.full
@click.option("--causal", is_flag=True, help="Query i sees the keys up to i + M - N alone.")
@click.option(
    "--values",
    type=click.IntRange(min=0),
    metavar="R",
    default=64,
    show_default=True,
    help="How many singular values, in quadratic time; 0 for none.",
)
@click.option("--plot", metavar="PICTURE", help="Picture to write or replace (png, svg, pdf).")
@options.debug
def explain(q_file, k_file, v_file, values, plot, causal, **choices):
    """What each head's attention is like, what `run` would choose for it, and why.

    Singular values, where the attention goes, and the method with its error and cost beside low rank.
    """
    from . import explain as work

    q, k, v = _read(q_file, k_file, v_file, choices)
    if 0 in _output_shape(q, k, v)[:-1]:
        raise files.BadInput(f"Q file '{q_file}' holds no queries: there is nothing to explain")
    work.run(q, k, v, plot, values, causal, **choices)


@main.command()
@click.argument("q_file", metavar="Q.npy")
@click.argument("k_file", metavar="K.npy")
@click.option("--rank", type=int, metavar="R", help="How many singular values.  [default: 64, or fewer tokens]")
@click.option("--n-iter", type=int, metavar="I", default=2, show_default=True, help="Power iterations.")
@click.option("--causal", is_flag=True, help="Query i sees the keys up to i + M - N alone.")
@options.on_matrix
@click.option("--plot", metavar="PICTURE", help="Picture to write or replace (png, svg, pdf).")
@options.debug
def spectrum(q_file, k_file, plot, no_check_finite, device, **choices):
    """Singular values of exact attention: how low the rank of each head is.

    In quadratic time, from the queries in Q.npy and the keys in K.npy.
    """
    from . import spectrum as work

    q, k = files.read(q_file, "Q"), files.read(k_file, "K")
    _check_device(device)
    work.run(q, k, plot, device=device, check_finite=not no_check_finite, **choices)


# --- plan ---


@main.command()
@click.argument("arrays", nargs=-1, metavar="[Q.npy K.npy V.npy]")
@click.option(
    "--shape",
    type=click.IntRange(min=0),
    nargs=4,
    metavar="N M D E",
    help="Tokens, keys, their columns, value columns.",
)
@click.option("--heads", type=click.IntRange(min=1), default=1, show_default=True, help="Query heads, with --shape.")
@click.option("--dtype", type=click.Choice(options.DTYPES), default="float32", show_default=True, help="With --shape.")
@options.planned
@options.debug
def plan(arrays, shape, heads, dtype, **choices):
    """Cost, memory and the method that would be chosen, without running.

    From three files, of which only the headers are read, or from --shape.
    """
    if bool(arrays) == bool(shape):
        raise click.UsageError("give either Q.npy K.npy V.npy or --shape N M D E")
    if arrays and len(arrays) != 3:
        raise click.UsageError(f"give three files, Q.npy K.npy V.npy; got {len(arrays)}")
    if arrays:
        q_file, k_file, v_file = arrays
        q, k, v = _read(q_file, k_file, v_file, choices)
        shapes, dtype = (q.shape, k.shape, v.shape), q.dtype
    else:
        n, m, d, e = shape
        shapes = (heads, n, d), (heads, m, d), (heads, m, e)
    with bad_input():
        click.echo(str(pda_numba.plan(*shapes, dtype, **options.for_plan(**choices))))


# --- info ---


@main.command()
@options.debug
def info():
    """Versions, devices, threads and the kernel cache."""
    from . import system

    facts = system.facts()
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"{name:<{width}}  {value}")
