"""Speed of the backward pass beside the forward pass and beside torch, and how well the gradient's error is known.

    python bench/gradients.py                # torch is measured up to 32,768 tokens, its quadratic law gives the rest
    python bench/gradients.py --full         # up to 65,536 tokens: about a minute per call on two cores
    python bench/gradients.py exact error    # only some of the sections: passes, torch, exact, error

Calls are alternated and medians compared; float32, D = E = 64, rank 128 unless said otherwise.
"""

import argparse

import numpy as np
import torch
from common import alternate, print_table, print_versions

import pda_numba
from pda_numba import attention_backward, attention_forward
from pda_numba.data import real_heads, smooth_heads

PDA = {"method": "pda", "tol": None}
TOKENS = 131_072


def cotangent(x):
    return np.random.default_rng(1).standard_normal(x.shape, np.float32)


def torch_calls(q, k, v, dout):
    """Forward alone, and forward with backward, of torch's attention."""
    tensors = [torch.from_numpy(x)[None].requires_grad_() for x in (q, k, v)]
    given = torch.from_numpy(dout)[None]

    def both():
        out = torch.nn.functional.scaled_dot_product_attention(*tensors)
        return torch.autograd.grad(out, tensors, given)

    def forward():
        with torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(*tensors)

    return forward, both


def passes(arguments):
    """Backward beside forward, with and without a window."""
    rows = []
    for window in (0, 32, 128):
        arrays = smooth_heads((1, TOKENS, 64))
        options = {**PDA, "rank": 128, "window": window}
        dout, (_, residuals) = cotangent(arrays[2]), attention_forward(*arrays, **options)
        calls = {
            "attention": lambda a=arrays, o=options: pda_numba.attention(*a, **o),
            "forward": lambda a=arrays, o=options: attention_forward(*a, **o),
            "backward": lambda r=residuals, d=dout: attention_backward(r, d),
            "measured": lambda r=residuals, d=dout: attention_backward(r, d, return_info=True),
        }
        s = alternate(calls, arguments.repeats)
        rows.append((window, *s.values(), f"{s['backward'] / s['attention']:.2f}x", residuals.nbytes / 1e6))
    header = [
        "window",
        "attention, s",
        "forward, s",
        "backward, s",
        "with its error, s",
        "backward/attention",
        "kept, MB",
    ]
    print_table(f"One head, N = {TOKENS:,}", header, rows)


def beside_torch(arguments):
    """Forward and backward together, beside exact attention in torch."""
    law, rows = [], []
    for n in (16_384, 32_768, *((65_536,) if arguments.full else ())):
        arrays = smooth_heads((1, n, 64))
        _, both = torch_calls(*arrays, cotangent(arrays[2]))
        seconds = alternate({"torch": both}, 1 if n > 20_000 else 3)["torch"]
        law.append(seconds / n**2)
        rows.append((f"{n:,}", seconds, "measured", _pda_seconds(arrays, arguments)))
    arrays = smooth_heads((1, TOKENS, 64))
    rows.append((f"{TOKENS:,}", law[-1] * TOKENS**2, "quadratic law", _pda_seconds(arrays, arguments)))
    table = [(n, own, theirs, source, f"{theirs / own:.1f}x") for n, theirs, source, own in rows]
    print_table("Forward and backward, one head", ["N", "PDA, s", "torch, s", "torch's time is", "ratio"], table)


def _pda_seconds(arrays, arguments):
    dout = cotangent(arrays[2])

    def both():
        _, residuals = attention_forward(*arrays, rank=128, **PDA)
        attention_backward(residuals, dout)

    return alternate({"pda": both}, arguments.repeats)["pda"]


def exact(arguments):
    """The backward pass of exact attention beside torch's."""
    rows = []
    for heads, n in ((1, 8192), (4, 8192), (16, 2048)):
        arrays = smooth_heads((heads, n, 64))
        dout = cotangent(arrays[2])
        _, residuals = attention_forward(*arrays, method="exact")
        forward, both = torch_calls(*arrays, dout)
        calls = {"own": lambda r=residuals, d=dout: attention_backward(r, d), "forward": forward, "both": both}
        s = alternate(calls, arguments.repeats)
        theirs = s["both"] - s["forward"]
        rows.append((heads, f"{n:,}", s["own"], theirs, f"{theirs / s['own']:.2f}x"))
    header = ["heads", "N", "backward, s", "torch's, s", "torch/own"]
    print_table("Exact attention, backward alone (torch's: both passes less forward)", header, rows)


def error(_arguments):
    """`gradient_error` beside the true error of dq, and the error of the output, on the heads that are shipped."""
    rows = []
    for name in ("text", "speech"):
        q, k, v, scale = real_heads(name)
        dout = cotangent(v)
        _, residuals = attention_forward(q, k, v, scale=scale, rank=64, **PDA)
        *own, info = attention_backward(residuals, dout, return_info=True)
        _, truth = attention_forward(q, k, v, scale=scale, method="exact")
        true = attention_backward(truth, dout)
        for h in range(len(q)):
            errors = [np.linalg.norm(a[h] - b[h]) / np.linalg.norm(b[h]) for a, b in zip(own, true, strict=True)]
            rows.append((name, h, float(residuals.info.error[h]), float(info.gradient_error[h]), *map(float, errors)))
    header = ["set", "head", "error of out", "gradient_error", "true dq", "true dk", "true dv"]
    print_table("Errors at rank 64, relative, random cotangent", header, rows)


if __name__ == "__main__":
    sections = {"passes": passes, "torch": beside_torch, "exact": exact, "error": error}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*sections, []], default=list(sections))
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print_versions("numba", "torch")
    for name in arguments.sections:
        sections[name](arguments)
