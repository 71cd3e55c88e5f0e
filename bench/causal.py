"""Causal attention and padded batches: accuracy on real heads, speed beside torch, in one run, in float32.

    python bench/causal.py                      # torch is measured up to 32,768 tokens, its square law gives the rest
    python bench/causal.py speed slope          # only some sections: heads, limits, speed, slope, padded, passes
    python bench/causal.py heads --file F.npz   # other heads: arrays q, k, v (..., heads, N, D) and scale

Calls are alternated and medians compared. Every call includes its certificate, and its last 64 rows exactly.
"""

import argparse
import warnings

import numpy as np
import torch
from common import alternate, print_table, print_versions

import pda_numba
from pda_numba import attention, attention_backward, attention_forward
from pda_numba.data import real_heads, smooth_heads

TOKENS = (32_768, 131_072, 1_048_576)
MEASURED = (16_384, 32_768)
SLOPE = tuple(2**p for p in range(17, 21))
FIXED = {"causal": True, "rank": 64, "tol": None}


def torch_causal(q, k, v):
    tensors = [torch.from_numpy(x)[None] for x in (q, k, v)]
    return lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)


def _exact(q, k, v, scale):
    """Head by head, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    return attention(q, k, v, causal=True, scale=scale, method="exact")


def _errors(out, true):
    """Relative, of every head."""
    return np.linalg.norm(out - true, axis=(-2, -1)) / np.linalg.norm(true, axis=(-2, -1))


def _heads(arguments):
    """(name, q, k, v, scale) of every set."""
    for name in ("text", "speech"):
        yield name, *real_heads(name)
    for path in arguments.file or ():
        with np.load(path) as z:
            yield path.split("/")[-1], *(z[name].astype(np.float32) for name in "qkv"), float(z["scale"])


def heads(arguments):
    """Relative error of every head at two ranks, and its limit; heads that share keys together and alone."""
    for name, q, k, v, scale in _heads(arguments):
        true = _exact(q, k, v, scale)
        group = q.shape[-3] // k.shape[-3]
        alone = (
            q.reshape(-1, *q.shape[-2:]),
            *(np.repeat(x, group, axis=-3).reshape(-1, *x.shape[-2:]) for x in (k, v)),
        )
        ways = {"alone": alone} | ({"grouped": (q, k, v)} if group > 1 else {})
        for rank in (64, 128):
            rows = []
            for way, arrays in ways.items():
                options = {**FIXED, "rank": rank, "method": "pda", "scale": scale, "return_info": True}
                out, info = attention(*arrays, **options)
                errors = _errors(out.reshape(true.shape), true).reshape(-1)
                held = float(np.mean(errors <= info.error_limit.reshape(-1) + 1e-12))
                shown = " ".join(f"{e:.4f}" for e in errors)
                low = int((info.rectangles > 0).sum())
                rows.append((way, shown, float(np.median(errors)), float(errors.max()), f"{held:.2f}", low))
            header = ["heads", "errors", "median", "worst", "limit held", "with low rank"]
            print_table(f"{name}, N = {q.shape[-2]:,}, rank {rank}", header, rows)


def limits(arguments):
    """How often the limit holds: six seeds of three ranks, the heads that low rank is used for."""
    rows, every = [], []
    for name, q, k, v, scale in _heads(arguments):
        true = _exact(q, k, v, scale)
        for rank in (32, 64, 128):
            held = []
            for seed in range(6):
                options = {**FIXED, "rank": rank, "seed": seed, "method": "pda", "scale": scale, "return_info": True}
                out, info = attention(q, k, v, **options)
                held += list((_errors(out, true) <= info.error_limit)[info.rectangles > 0])
            every += held
            if held:
                rows.append((name, rank, f"{sum(held)} of {len(held)}"))
    rows.append(("all", "", f"{sum(every)} of {len(every)}"))
    print_table("Runs in which the limit held", ["heads", "rank", "held"], rows)


def speed(arguments):
    """One head, D = E = 64, rank 64, beside torch."""
    law, rows = [], []
    for n in sorted({*TOKENS, *MEASURED}):
        arrays = smooth_heads((1, n, 64))
        calls = {"pda": lambda a=arrays: attention(*a, **FIXED)}
        if n in MEASURED:
            calls["torch"] = torch_causal(*arrays)
        seconds = alternate(calls, arguments.repeats if n < 2**20 else min(arguments.repeats, 3))
        if n in MEASURED:
            law.append(seconds["torch"] / n**2)
        reference = seconds.get("torch", float(np.exp(np.mean(np.log(law)))) * n**2)
        source = "measured" if "torch" in seconds else "quadratic law"
        rows.append((f"{n:,}", seconds["pda"], reference, source, f"{reference / seconds['pda']:.1f}x"))
    print_table("Causal, one head, D = E = 64, rank 64", ["N", "PDA, s", "torch, s", "torch's time is", "ratio"], rows)


def slope(arguments):
    """How the time grows from 131k to 1M tokens."""
    seconds = []
    for n in SLOPE:
        arrays = smooth_heads((1, n, 64))
        seconds.append(alternate({"pda": lambda a=arrays: attention(*a, **FIXED)}, min(arguments.repeats, 3))["pda"])
    exponent = np.polyfit(np.log(SLOPE), np.log(seconds), 1)[0]
    print_table(
        "Growth, causal, rank 64", ["N", "seconds"], [(f"{n:,}", s) for n, s in zip(SLOPE, seconds, strict=True)]
    )
    print(f"\nLog-log slope: {exponent:.3f}")


def padded(arguments):
    """A batch of sequences of different lengths beside the same without padding: time per real token."""
    rows = []
    exact, fitted = {"method": "exact"}, {"rank": 64, "tol": None}
    for name, options, n in (("exact", exact, 8192), ("rank 64", fitted, 32_768), ("rank 64", fitted, 131_072)):
        for causal in (False, True):
            lengths = (np.array([1.0, 0.25, 0.5, 0.75]) * n).astype(int)
            q, k, v = (x.reshape(4, 1, n, 64) for x in smooth_heads((4, n, 64)))
            every = {**options, "causal": causal}
            packed = np.concatenate([[0], np.cumsum(lengths)])
            own = [np.concatenate([x[b, :, :t] for b, t in enumerate(lengths)], axis=1) for x in (q, k, v)]
            calls = {
                "full": lambda a=(q, k, v), o=every: attention(*a, **o),
                "padded": lambda a=(q, k, v), o=every, t=lengths: attention(*a, query_lengths=t, key_lengths=t, **o),
                "packed": lambda a=own, o=every, t=packed: attention(*a, cu_seqlens=t, **o),
            }
            s = alternate(calls, arguments.repeats)
            work = float((lengths / n) ** (2 if name == "exact" else 1) @ np.full(4, 0.25))
            shares = [float(s[way] / s["full"]) for way in ("padded", "packed")]
            rows.append((name, "causal" if causal else "all", f"{n:,}", *s.values(), *shares, work))
    header = ["method", "mask", "N", "full, s", "padded, s", "packed, s", "padded/full", "packed/full", "real work"]
    print_table("Four sequences of 100, 25, 50 and 75 % of N", header, rows)


def passes(arguments):
    """Backward beside forward."""
    rows = []
    for n in (32_768, 131_072):
        arrays = smooth_heads((1, n, 64))
        dout, (_, residuals) = np.ones_like(arrays[2]), attention_forward(*arrays, **FIXED)
        calls = {
            "forward": lambda a=arrays: attention_forward(*a, **FIXED),
            "backward": lambda r=residuals, d=dout: attention_backward(r, d),
        }
        s = alternate(calls, arguments.repeats)
        rows.append((f"{n:,}", *s.values(), f"{s['backward'] / s['forward']:.2f}x", residuals.nbytes / 1e6))
    print_table("Causal, rank 64", ["N", "forward, s", "backward, s", "ratio", "kept, MB"], rows)


if __name__ == "__main__":
    sections = {"heads": heads, "limits": limits, "speed": speed, "slope": slope, "padded": padded, "passes": passes}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*sections, []], default=list(sections))
    parser.add_argument("--file", action="append", help="more heads, as an npz file")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)
    print_versions("numba", "torch")
    for section in options.sections:
        sections[section](options)
