"""Speed on a real card: time, operations and bytes per second, beside the roofline and torch's flash attention.

    python bench/gpu.py               # every section
    python bench/gpu.py exact pda     # only some of: exact, pda, passes, heads
    python bench/gpu.py --quick       # short sequences, few repeats
    python bench/gpu.py --sanitize    # a small workload under compute-sanitizer: racecheck, then memcheck

Inputs and outputs stay on the card; times are between CUDA events, medians after a warm-up. The roofline of
`bench/cuda_kernels.py` needs what `pip install ".[compile]"` brings; without it those columns are empty. torch is
measured if it is there and has CUDA.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import warnings

import numpy as np
from codegen import build, launches, roofline
from codegen.cards import Card
from common import print_table, print_versions

import pda_numba
from pda_numba.data import smooth_heads
from pda_numba.plan import exact_flops

LENGTHS, LONG = (16_384, 65_536, 131_072), (131_072, 1_048_576)
SHORT = (4_096, 16_384)


# --- measuring ---


def seconds(call, repeats, warm=2):
    """Median time of a call on the default stream."""
    from numba import cuda

    for _ in range(warm):
        call()
    times = []
    for _ in range(repeats):
        start, stop = cuda.event(), cuda.event()
        cuda.synchronize()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(cuda.event_elapsed_time(start, stop) / 1e3)
    return statistics.median(times)


def on_card(arrays, dtype=np.float32):
    from numba import cuda

    return [cuda.to_device(np.ascontiguousarray(x, dtype)) for x in arrays]


def attention(arrays, **options):
    return lambda: pda_numba.attention(*arrays, device="cuda", **options)


def flash(shape, dtype, backend):
    """torch's attention on random inputs by one of its backends, or None where it cannot."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    q, k, v = (torch.randn((1, *shape), device="cuda", dtype=getattr(torch, dtype)) for _ in range(3))

    def call():
        with sdpa_kernel(SDPBackend[backend]):
            torch.nn.functional.scaled_dot_product_attention(q, k, v)

    try:
        call()
    except RuntimeError:  # no such kernel for this card or dtype, or no memory
        return None
    return call


def timed(call, options):
    return None if call is None else seconds(call, options.repeats)


def shown(x, factor=1.0):
    return "-" if x is None else float(x * factor)


# --- the roofline of this card ---


def this_card():
    """The card's rates: multiprocessors and clocks as the driver says; an H200's for the memories of others."""
    from numba import cuda

    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    memory = 2e3 * device.MEMORY_CLOCK_RATE * device.GLOBAL_MEMORY_BUS_WIDTH / 8
    # The limits of a multiprocessor are known for these; the nearest below serves for others.
    known = [cc for cc in build.CAPABILITIES if cc <= tuple(device.compute_capability)]
    return Card(
        name=name,
        capability=max(known, default=build.CAPABILITIES[0]),
        multiprocessors=device.MULTIPROCESSOR_COUNT,
        clock=1e3 * device.CLOCK_RATE,
        memory=memory or Card.memory,
        l2_size=device.L2_CACHE_SIZE,
    )


@functools.cache
def compiled():
    """The drivers on tiles as machine code; None where they cannot be compiled."""
    return None if build.missing() else roofline.compile_tiles(launches.record(), this_card())


def predicted(n):
    """name -> seconds at best for the passes over n tokens."""
    if compiled() is None:
        return {}
    return {work.name: max(work.seconds(this_card()).values()) for work in roofline.passes(compiled(), n, this_card())}


# --- sections ---


def exact(options):
    """Exact attention of one head, D = E = 64."""
    rows = []
    for n in options.lengths:
        heads = smooth_heads((1, n, 64))
        flops = exact_flops(n, n, 64, 64)
        best = predicted(n).get("exact attention")
        calls = {
            "pda_numba float32": attention(on_card(heads), method="exact"),
            "pda_numba float16": attention(on_card(heads, np.float16), method="exact"),
            "torch float32, math": flash((1, n, 64), "float32", "MATH"),
            "torch float32, efficient": flash((1, n, 64), "float32", "EFFICIENT_ATTENTION"),
            "torch float16, flash": flash((1, n, 64), "float16", "FLASH_ATTENTION"),
        }
        for name, call in calls.items():
            time = timed(call, options)
            ratio = time / best if time and best and name == "pda_numba float32" else None
            rate = flops / time if time else None
            rows.append((f"{n:,}", name, shown(time, 1e3), shown(rate, 1e-12), shown(ratio)))
    header = ["N", "exact attention", "ms", "TFLOP/s", "times the roofline"]
    print_table("Exact attention, one head, D = E = 64", header, rows)


def pda(options):
    """Low rank, certificate included, beside exact attention by its quadratic law."""
    n = max(options.lengths)
    law = seconds(attention(on_card(smooth_heads((1, n, 64))), method="exact"), options.repeats) / n**2
    rows = []
    for n in options.long:
        call = attention(on_card(smooth_heads((1, n, 64))), rank=128, method="pda")
        time = seconds(call, options.repeats)
        best = sum(x for name, x in predicted(n).items() if name.startswith("PDA")) or None
        rows.append((f"{n:,}", time * 1e3, shown(best, 1e3), law * n**2 * 1e3, f"{law * n**2 / time:.1f}x"))
    header = ["N", "PDA, ms", "rows and apply at best, ms", "exact, ms, by its law", "ratio"]
    print_table("Low rank, one head, D = E = 64, rank 128, certificate on", header, rows)


def passes(options):
    """Which drivers the time of one low-rank call goes to."""
    n = max(options.long)
    call = attention(on_card(smooth_heads((1, n, 64))), rank=128, method="pda")
    call()
    spent = launch_times(call)
    total = sum(sum(times) for times in spent.values())
    by_time = sorted(spent.items(), key=lambda item: -sum(item[1]))
    rows = [
        (name.removeprefix("pda_numba."), len(times), sum(times) * 1e3, f"{sum(times) / total:.0%}")
        for name, times in by_time[:20]
    ]
    print_table(f"Drivers of one low-rank call, N = {n:,}, rank 128", ["driver", "launches", "ms", "share"], rows)


def launch_times(call):
    """driver -> seconds of each of its launches in one call."""
    from numba import cuda

    from pda_numba._jit import CudaKernel

    names = {id(kernel): name for name, kernel in launches.drivers().items()}
    events, launch = [], CudaKernel.launch

    def watched(kernel, grid, stream, *arguments):
        start, stop = cuda.event(), cuda.event()
        start.record(stream)
        launch(kernel, grid, stream, *arguments)
        stop.record(stream)
        events.append((names[id(kernel)], start, stop))

    CudaKernel.launch = watched
    try:
        call()
    finally:
        CudaKernel.launch = launch
    cuda.synchronize()
    spent = {}
    for name, start, stop in events:
        spent.setdefault(name, []).append(cuda.event_elapsed_time(start, stop) / 1e3)
    return spent


def heads(options):
    """Many short heads."""
    shape = (16, 2048, 64)
    arrays = on_card(smooth_heads(shape))
    calls = {
        "auto": attention(arrays),
        "exact": attention(arrays, method="exact"),
        "torch float32, efficient": flash(shape, "float32", "EFFICIENT_ATTENTION"),
        "torch float16, flash": flash(shape, "float16", "FLASH_ATTENTION"),
    }
    flops = shape[0] * exact_flops(2048, 2048, 64, 64)
    rows = []
    for name, call in calls.items():
        time = timed(call, options)
        rows.append((name, shown(time, 1e3), shown(flops / time if time else None, 1e-12)))
    print_table("16 heads, N = 2,048, D = 64", ["method", "ms", "TFLOP/s of exact attention"], rows)


SECTIONS = {f.__name__: f for f in (exact, pda, passes, heads)}


# --- compute-sanitizer ---


def sanitize():
    """The small calls of `codegen.launches` under both tools; exits with 1 if one of them finds something."""
    sanitizer = build.tool("compute-sanitizer")
    if sanitizer is None:
        sys.exit(
            "compute-sanitizer is not found: install the CUDA toolkit, or the package nvidia-cuda-sanitizer-api-cu12 "
            "(CUDA 12) or nvidia-cuda-sanitizer-api (CUDA 13)"
        )
    failed = []
    for check in ("racecheck", "memcheck"):
        print(f"compute-sanitizer --tool {check}", flush=True)
        command = [sanitizer, "--tool", check, "--error-exitcode", "1", sys.executable, __file__, "--workload"]
        if subprocess.run(command).returncode:
            failed.append(check)
    if failed:
        sys.exit(f"compute-sanitizer complains: {', '.join(failed)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"any of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="short sequences, few repeats")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sanitize", action="store_true", help="run a small workload under compute-sanitizer instead")
    parser.add_argument("--workload", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}")
    if reason := why_no_card():
        parser.exit(1, f"bench/gpu.py needs an NVIDIA GPU: {reason}\n")
    warnings.simplefilter("ignore", pda_numba.AccuracyWarning)
    if options.workload:
        launches.calls()
    elif options.sanitize:
        sanitize()
    else:
        options.lengths, options.long = (SHORT, SHORT) if options.quick else (LENGTHS, LONG)
        options.repeats = 3 if options.quick else options.repeats
        print_versions("numba", "numba-cuda")
        print(f"{this_card().name}, {this_card().multiprocessors} multiprocessors", flush=True)
        for section in options.sections or SECTIONS:
            SECTIONS[section](options)


def why_no_card():
    from numba.core import config

    from pda_numba.gpu import why_no_gpu

    return "the CUDA simulator is on" if config.ENABLE_CUDASIM else why_no_gpu()


if __name__ == "__main__":
    main()
