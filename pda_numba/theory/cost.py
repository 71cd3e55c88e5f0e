"""Section 3.3: operations and memory."""

from dataclasses import dataclass

from .. import _validate
from ..plan import exact_flops, pda_flops


@dataclass(frozen=True)
class Count:
    """Operations and bytes of the paper's algorithm, by its stages.

    Attributes
    ----------
    projection, decomposition, application : float
        Operations of the three stages.
    inputs, projected, factors, output : float
        Bytes.
    flops, bytes : float
        The sums.
    """

    projection: float
    decomposition: float
    application: float
    inputs: float
    projected: float
    factors: float
    output: float

    @property
    def flops(self):
        return self.projection + self.decomposition + self.application

    @property
    def bytes(self):
        return self.inputs + self.projected + self.factors + self.output


@dataclass(frozen=True)
class Cost:
    """What projection, decomposition and application cost, as published and as counted.

    Attributes
    ----------
    published, counted : Count
    low_rank_flops : float
        What `attention` takes at this rank, which samples rows of the softmax instead: see `plan`.
    exact_flops : float
        Exact attention.
    """

    published: Count
    counted: Count
    low_rank_flops: float
    exact_flops: float

    def __str__(self):
        names = "projection", "decomposition", "application", "flops", "inputs", "projected", "factors", "output"
        lines = [f"{'':13}  {'published':>10}  {'counted':>10}"]
        for name in (*names, "bytes"):
            lines.append(f"{name:<13}  {getattr(self.published, name):10.3g}  {getattr(self.counted, name):10.3g}")
        lines += [f"low rank as built: {self.low_rank_flops:.3g} flops, exact attention: {self.exact_flops:.3g}"]
        return "\n".join(lines)


def cost(n_queries, n_keys, head_dim, value_dim, proj_dim, rank, *, itemsize=2):
    """What the paper's algorithm costs for one head: its own count beside the right one.

    The published count of section 3.3 has one projection of the two, one of the two products of the application and of
    the decomposition, no QR, one side of the factors, no output, and takes a multiplication and an addition for one
    operation. (What is counted here is the paper's algorithm: a factorisation of the projected logits, which is not
    one of the softmax.)

    Parameters
    ----------
    n_queries, n_keys, head_dim, value_dim, proj_dim, rank : int
        N, M, D, E, m and R. The published count is that of the longer sequence.
    itemsize : int
        Bytes of a number.

    Returns
    -------
    Cost

    Examples
    --------
    >>> c = cost(10**6, 10**6, 1024, 1024, 64, 32)
    >>> print(f"{c.published.flops:.3g} published, {c.counted.flops:.3g} counted")
    1e+11 published, 4.06e+11 counted
    """
    names = "n_queries", "n_keys", "head_dim", "value_dim", "proj_dim", "rank", "itemsize"
    given = n_queries, n_keys, head_dim, value_dim, proj_dim, rank, itemsize
    n, m, d, e, p, r, size = (_validate.whole(*pair, 1) for pair in zip(names, given, strict=True))
    length = float(max(n, m))
    published = Count(
        projection=length * d * p,
        decomposition=length * p * r,
        application=r * length * e,
        inputs=size * length * (2 * d + e),
        projected=size * 2 * length * p,
        factors=size * r * (length + p),
        output=0.0,
    )
    counted = Count(
        projection=2.0 * (n + m) * d * p,
        decomposition=2.0 * (n + m) * p * r + 4.0 * n * r**2,  # the sketch, K^T Q, and Q by Householder's QR
        application=2.0 * r * (n + m) * e,
        inputs=float(size * (n * d + m * (d + e))),
        projected=float(size * (n + m) * p),
        factors=float(size * r * (n + m)),
        output=float(size * n * e),
    )
    return Cost(published, counted, pda_flops(n, m, d, e, r), exact_flops(n, m, d, e))
