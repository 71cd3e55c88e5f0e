"""Start-up times, each in a fresh process.

python bench/startup.py                # import; import and first calls, exact and low rank, with kernels on disk
python bench/startup.py --compile      # also the very first calls, with an empty cache
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

from common import print_table, print_versions

IMPORT = """
import time
start = time.perf_counter()
import pda_numba
print(time.perf_counter() - start)
"""
FIRST_CALL = """
import time
import numpy as np
q, k, v = np.random.default_rng(0).standard_normal((3, 4096, 64), np.float32)
start = time.perf_counter()
import pda_numba
pda_numba.attention(q, k, v)
pda_numba.attention(q, k, v, rank=64, tol=None, method="pda")
print(time.perf_counter() - start)
"""


def seconds(code, repeats=1, **environment):
    """Median over fresh processes."""
    command, environment = [sys.executable, "-W", "ignore", "-c", code], {**os.environ, **environment}
    runs = (subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment) for _ in range(repeats))
    return statistics.median(float(run.stdout) for run in runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="time the very first call too")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    seconds(FIRST_CALL)  # fills the cache
    rows = [
        ("import pda_numba", seconds(IMPORT, options.repeats)),
        ("import, an exact and a low-rank call at (4096, 64), kernels cached", seconds(FIRST_CALL, options.repeats)),
    ]
    if options.compile:
        with tempfile.TemporaryDirectory() as empty:
            rows.append(("the same for the very first time, empty cache", seconds(FIRST_CALL, NUMBA_CACHE_DIR=empty)))
    print_versions("numba")
    print_table("Start-up", ["what", "seconds"], rows)
