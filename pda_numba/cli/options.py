"""Options that several commands share, and what they mean to `attention`."""

import functools

import click

DTYPES = ("float16", "float32", "float64")


class NumberOr(click.ParamType):
    """A number, or one word that stands for something else."""

    def __init__(self, kind, word, meaning):
        self.kind, self.word, self.meaning = kind, word, meaning
        self.name = word

    def convert(self, value, param, ctx):
        if value == self.word:
            return value
        try:
            return self.kind(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor '{self.word}'", param, ctx)

    def resolve(self, value):
        """The value for the library: the word replaced by its meaning."""
        return self.meaning if value == self.word else value


TOLERANCE = NumberOr(float, "none", None)
WINDOW = NumberOr(int, "auto", "auto")


def _debug(ctx, _param, value):
    if value:
        ctx.obj.debug = True


debug = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_debug,
    help="Show the traceback of an error (or set PDA_NUMBA_DEBUG=1).",
)

device = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to compute; auto takes a GPU where that is faster.",
)

_PLANNED = [
    click.option("--rank", type=int, metavar="R", help="Fixed rank; without it the smallest that meets --tol."),
    click.option(
        "--tol",
        type=TOLERANCE,
        metavar="X|none",
        default="0.01",
        show_default=True,
        help="Target for the relative error.",
    ),
    click.option(
        "--window",
        type=WINDOW,
        metavar="W|auto",
        default="auto",
        show_default=True,
        help="Keys on each side that are exact; 0 for none.",
    ),
    click.option(
        "--near",
        type=click.Choice(["auto", "none", "window", "content", "both"]),
        default="auto",
        show_default=True,
        help="What is exact beside the low-rank part: a window, similar keys wherever they are, or both.",
    ),
    click.option("--proj-dim", type=int, metavar="m", help="Project queries and keys to this many columns first."),
    click.option("--method", type=click.Choice(["auto", "pda", "exact"]), default="auto", show_default=True),
]

_RUN_ONLY = [
    click.option(
        "--projection",
        type=click.Choice(["pca", "srht", "gaussian", "orthogonal"]),
        default="pca",
        show_default=True,
        help="Kind of the projection, with --proj-dim.",
    ),
]

_ON_MATRIX = [
    click.option("--scale", type=float, metavar="X", help="Factor on the logits.  [default: 1/sqrt(D)]"),
    device,
    click.option(
        "--seed", type=int, metavar="S", default=0, show_default=True, help="Every random draw follows from it."
    ),
    click.option("--no-check-finite", is_flag=True, help="Do not look for NaN and infinity in the inputs."),
]


def _with(options):
    def decorate(command):
        return functools.reduce(lambda inner, option: option(inner), reversed(options), command)

    return decorate


planned = _with(_PLANNED)
full = _with(_PLANNED + _RUN_ONLY + _ON_MATRIX)
on_matrix = _with(_ON_MATRIX)


def for_attention(rank, tol, window, near, proj_dim, method, projection, scale, device, seed, no_check_finite):
    """Keyword arguments of `attention`."""
    return {
        **for_plan(rank, tol, window, near, proj_dim, method),
        "projection": projection,
        "scale": scale,
        "device": device,
        "seed": seed,
        "check_finite": not no_check_finite,
    }


def for_plan(rank, tol, window, near, proj_dim, method):
    """Keyword arguments of `plan`."""
    return {
        "rank": rank,
        "tol": TOLERANCE.resolve(tol),
        "window": WINDOW.resolve(window),
        "near": near,
        "proj_dim": proj_dim,
        "method": method,
    }
