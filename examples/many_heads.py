"""Attention of many heads, a few at a time, on one machine or spread over a dask cluster.

    python examples/many_heads.py Q.npy K.npy V.npy -o O.npy
    python examples/many_heads.py Q.npy K.npy V.npy -o O.npy --tol 0.05 --scheduler tcp://head-node:8786

The arrays are (heads, tokens, dim), query heads a multiple of key heads. Every task reads its own heads from the files
and writes its part of O.npy, so that nothing but file names and error limits travels: the workers need the files under
the same names. Needs `pip install "pda_numba[dask]"`.
"""

import argparse

import dask
import numpy as np

import pda_numba


@dask.delayed(pure=False)
def attend_heads(files, output, first, last, choices):
    """The queries of the key heads first .. last; returns the 95 % limit of each head's error."""
    q, k, v = (np.load(file, mmap_mode="r") for file in files)
    group = len(q) // len(k)
    part = slice(first * group, last * group)
    out = np.load(output, mmap_mode="r+")
    info = pda_numba.attention(
        q[part], k[first:last], v[first:last], out=out[part], return_info=True, progress=False, **choices
    )[1]
    out.flush()
    return info.error_limit


def attend_files(files, output, at_once=1, **choices):
    """A task for every `at_once` key heads; their results in a row are the limits of all heads.

    `files` are those of q, k and v; `output` is made anew; `choices` go to `attention`.
    """
    q, k, v = (np.load(file, mmap_mode="r") for file in files)
    pda_numba.plan(q.shape, k.shape, v.shape, q.dtype)  # says now what is wrong with them
    np.lib.format.open_memmap(output, mode="w+", dtype=q.dtype, shape=(*q.shape[:-1], v.shape[-1])).flush()
    starts = range(0, len(k), at_once)
    return [attend_heads(files, output, first, min(first + at_once, len(k)), choices) for first in starts]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs=3, metavar=("Q.npy", "K.npy", "V.npy"))
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--tol", type=float, default=1e-2)
    parser.add_argument("--at-once", type=int, default=1, help="key heads of a task")
    parser.add_argument(
        "--scheduler", help="address of a cluster's scheduler; without it, one head after the other here"
    )
    given = parser.parse_args(arguments)
    tasks = attend_files(given.files, given.output, given.at_once, tol=given.tol)
    if given.scheduler:
        from dask.distributed import Client

        with Client(given.scheduler):
            limits = dask.compute(*tasks)
    else:
        limits = dask.compute(*tasks, scheduler="sync")
    for head, limit in enumerate(np.concatenate(limits)):
        print(f"head {head}: error at most {limit:.2g}")


if __name__ == "__main__":
    main()
