"""Peak memory of one call beyond its inputs and its output, each measurement in a fresh process (Linux only).

    python bench/memory.py
    python bench/memory.py --tokens 131072 1048576

The peak is taken during the call, less what was resident just before it (interpreter, imports, inputs and output).
In the first column the kernels are already loaded; in the second the call loads them itself, from the cache on disk.
"both" are four probes of 64 keys and a window of 32.
"""

import argparse
import subprocess
import sys

from common import print_table, print_versions

CHILD = """
import sys, warnings
import numpy as np
import pda_numba
from pda_numba.data import smooth_heads

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

warnings.simplefilter("ignore", pda_numba.AccuracyWarning)
tokens, dim, loaded = map(int, sys.argv[1:4])
near = pda_numba.NearField(32, n_probes=4, bucket_size=64) if sys.argv[4] == "both" else sys.argv[4]
q, k, v = smooth_heads((tokens, dim))
out = np.ones_like(v)  # written to, so that it is resident
call = lambda n: pda_numba.attention(q[:n], k[:n], v[:n], rank=128, method="pda", near=near, out=out[:n])
if loaded:
    call(min(tokens, 32_768))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts afresh
before = status("VmRSS")
call(tokens)
print((status("VmHWM") - before) / 1e6)
"""


def measure(tokens, dim, near, *, loaded):
    """Megabytes."""
    command = [sys.executable, "-c", CHILD, str(tokens), str(dim), str(int(loaded)), near]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(run.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[65_536, 1_048_576])
    parser.add_argument("--dim", type=int, default=64)
    options = parser.parse_args()
    rows = []
    for near in ("auto", "both"):
        measure(32_768, options.dim, near, loaded=False)  # fills the cache
        for n in options.tokens:
            rows.append((f"{n:,}", near, *(measure(n, options.dim, near, loaded=x) for x in (True, False))))
    header = ["N", "near field", "kernels loaded, MB", "kernels loaded by the call, MB"]
    print_versions("numba")
    print_table(f"Peak beyond inputs and output, rank 128, D = E = {options.dim}, float32", header, rows)
