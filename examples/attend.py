"""Attention by a method's name, for models that leave the choice to the user; it remembers times and what was said."""

import ast
import time

import numpy as np

import pda_numba


class Attend:
    """`attend(q, k, v, scale)` by a method's name: one of the functions `own`, or options of `pda_numba.attention`.

    Names of the latter kind are those that `options_of` knows. `always` are options for all of them.
    """

    def __init__(self, method, own, /, **always):
        self.method, self.own, self.always = method, own.get(method), always
        self.seconds, self.cpu_seconds, self.infos = [], [], []

    def __call__(self, q, k, v, scale, **more):
        start, cpu = time.perf_counter(), time.process_time()
        if self.own is not None:
            out = self.own(q, k, v, scale, **more)
        else:
            options = {"scale": scale, "return_info": True, **self.always, **more, **options_of(self.method)}
            out, info = pda_numba.attention(q, k, v, **options)
            self.infos.append(info)
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu)
        return out

    def said(self):
        """Times of a call, medians; how many heads were of low rank; the median of the errors that those claim."""
        low_rank = np.concatenate([np.ravel(info.method) == "pda" for info in self.infos] or [[]]).astype(bool)
        errors = np.concatenate([np.ravel(info.error) for info in self.infos] or [[]])[low_rank]
        return {
            "layer_seconds": float(np.median(self.seconds)),
            "cpu_seconds": float(np.median(self.cpu_seconds)),
            "low_rank": f"{low_rank.sum()} of {len(low_rank)}" if len(low_rank) else "",
            "error": float(np.median(errors)) if len(errors) else None,
        }


def options_of(method):
    """The options of `pda_numba.attention` that a method's name stands for: "streamed", or "rank=64,seed=1", say."""
    if method == "streamed":
        return {"method": "exact"}
    return {name: ast.literal_eval(value) for name, value in (x.split("=") for x in method.split(","))}


def warm_up(dim, **always):
    """Compile and load the kernels before anything is timed."""
    few = np.random.default_rng(0).standard_normal((3, 1, 4096, dim), dtype=np.float32)
    for method in ("streamed", "rank=16,method='pda'"):
        Attend(method, {}, **always)(*few, dim**-0.5)


def took(line):
    """Cells of a table from what `said` returned."""
    error = "" if line["error"] is None else f"{100 * line['error']:.2g} %"
    return [f"{line['layer_seconds']:.3g}", f"{line['cpu_seconds']:.3g}", line["low_rank"], error]


TOOK = ["s per layer", "CPU s per layer", "low-rank heads", "error they claim"]
