"""Which CUDA drivers a call launches, and with arguments of which types.

Recorded on Numba's simulator, in a process of its own: tiny calls of the public functions on device="cuda", for every
dtype and every way through the pipeline. `CudaKernel.launch` notes the types and does not run the kernel, whose results
do not matter here; every array on the device is filled with zeros, and in a second run with ones, so that the loop over
ranks ends at once, or goes on to the last.

    NUMBA_ENABLE_CUDASIM=1 python -m codegen.launches     # from bench/; prints what was launched as JSON
"""

import contextlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

BENCH = Path(__file__).parents[1]


class Launch(NamedTuple):
    """One driver with one set of argument types, as Numba writes them."""

    kernel: str
    types: tuple

    @property
    def signature(self):
        return f"void({', '.join(self.types)})"

    @property
    def other_loads(self):
        """Does it only load its numbers in another way than the launch for contiguous float32 or float64 arrays?"""
        return any(re.match(r"u?int16|.*:\]$", text) for text in self.types)

    @property
    def numbers(self):
        """The dtypes of its arrays of numbers, in their order; uint16 and int16 are the bits of 16-bit floats."""
        found = (re.match(r"(float\d+|u?int16)\[", text) for text in self.types)
        return list(dict.fromkeys(x[1] for x in found if x))


def drivers():
    """Every CUDA driver of the package, by module and variable: "pda_numba.rows:_merge_cuda"."""
    import pda_numba
    from pda_numba._jit import CudaKernel

    found = {}
    for name in sorted(module.name for module in pkgutil.walk_packages(pda_numba.__path__, "pda_numba.")):
        if "cuda_kernel(" in Path(importlib.util.find_spec(name).origin).read_text():
            for variable, value in vars(importlib.import_module(name)).items():
                for label, entry in _entries(value):
                    if isinstance(entry, CudaKernel) and entry.function.__module__ == name:
                        found[f"{name}:{variable}{label}"] = entry
    return found


def _entries(value):
    """(label, driver) of a variable: drivers for several dtypes are kept in a dict."""
    if not isinstance(value, dict):
        return [("", value)]
    return [(f"[{getattr(key, '__name__', key)}]", entry) for key, entry in value.items()]


def record():
    """Every driver and signature that the package launches, sorted; starts the simulator."""
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "codegen.launches"]
    done = subprocess.run(command, cwd=BENCH, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the calls on Numba's simulator failed:\n{done.stderr[-4000:]}")
    return read(json.loads(done.stdout.splitlines()[-1]))


def read(pairs):
    """Launches from [[driver, types], ...]."""
    return [Launch(kernel, tuple(types)) for kernel, types in pairs]


# --- in the simulator's process ---


def _type(argument):
    """The type that the compiler would see."""
    import numba
    import numpy as np

    if hasattr(argument, "dtype") and getattr(argument, "ndim", 0):
        array = getattr(argument, "_ary", argument)  # the simulator's arrays are wrapped ones of NumPy
        contiguous = array.flags["C_CONTIGUOUS"] if isinstance(array, np.ndarray) else array.is_c_contiguous()
        return f"{argument.dtype}[{':,' * (argument.ndim - 1)}:{':1' * contiguous}]"
    return {"bool": "boolean"}.get(name := str(numba.typeof(argument)), name)


def watch(seen, *, run):
    """Note every launch of this process in the set `seen`; with `run` the kernels run as ever."""
    from pda_numba._jit import CudaKernel

    names = {id(kernel): name for name, kernel in drivers().items()}
    launch = CudaKernel.launch

    def watched(kernel, grid, stream, *arguments):
        seen.add(Launch(names[id(kernel)], tuple(map(_type, arguments))))
        if run:
            launch(kernel, grid, stream, *arguments)

    CudaKernel.launch = watched


def _fill_memory(values):
    """Every array of the device holds values[0] from now on: its kernels are not run."""
    import numpy as np

    from pda_numba.device import Cuda

    empty = Cuda.empty

    def filled(device, shape, dtype):
        array = empty(device, shape, dtype)
        if array.size:
            array.copy_to_device(np.full(array.shape, values[0], array.dtype))
        return array

    Cuda.empty = filled


def gradient_calls():
    """The same for the backward pass."""
    import ml_dtypes
    import numpy as np

    import pda_numba

    rng = np.random.default_rng(0)
    options = {"device": "cuda", "check_finite": False}
    fixed = options | {"method": "pda", "rank": 8, "tol": None}
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        q, k, v = (rng.standard_normal((2, 2200, 8)).astype(dtype) for _ in range(3))
        ways = [fixed, options | {"method": "exact"}]
        if np.dtype(dtype).itemsize > 2:
            ways += [fixed | {"proj_dim": 4, "projection": kind} for kind in ("pca", "srht")]
            ways += [fixed | {"proj_dim": 4, "projection": kind, "calibrate": False} for kind in ("pca", "srht")]
        for way in ways:
            for move in (np.asarray, _on_device) if np.dtype(dtype).name != "bfloat16" else (np.asarray,):
                out, residuals = pda_numba.attention_forward(*map(move, (q, k, v)), **way)
                pda_numba.attention_backward(residuals, out, return_info=True)
    q, k, v = (_on_device(rng.standard_normal((2200, 2, 8), dtype=np.float32), (1, 0, 2)) for _ in range(3))
    for way in (fixed, options | {"method": "exact"}):
        out, residuals = pda_numba.attention_forward(q, k, v, **way)
        pda_numba.attention_backward(residuals, out)


def masked_calls():
    """The same under masks; 256 queries are a leaf, and 2200 of them more than one rectangle."""
    import ml_dtypes
    import numpy as np

    import pda_numba

    rng = np.random.default_rng(0)
    options = {"device": "cuda", "check_finite": False, "causal": True}
    fixed = options | {"method": "pda", "rank": 8, "tol": None}
    lengths, mask = {"key_lengths": 2000}, {"key_mask": rng.random(2200) < 0.9}
    padded = fixed | lengths | {"causal": False, "query_lengths": 2000}
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        arrays = [rng.standard_normal((2, 2200, 8)).astype(dtype) for _ in range(3)]
        ways = [fixed, fixed | mask, options | {"method": "exact"} | lengths]
        ways += [fixed | {"proj_dim": 4}, padded] if np.dtype(dtype).itemsize > 2 else []
        for way in ways:
            for move in (np.asarray, _on_device) if np.dtype(dtype).name != "bfloat16" else (np.asarray,):
                out, residuals = pda_numba.attention_forward(*map(move, arrays), **way)
                pda_numba.attention_backward(residuals, out)
    q, k, v = (_on_device(rng.standard_normal((2200, 2, 8), dtype=np.float32), (1, 0, 2)) for _ in range(3))
    for way in (fixed, options | {"method": "exact"}):
        out, residuals = pda_numba.attention_forward(q, k, v, **way)
        pda_numba.attention_backward(residuals, out)


def calls():
    """Tiny calls that go every way through the pipeline."""
    import ml_dtypes
    import numpy as np

    import pda_numba

    rng = np.random.default_rng(0)
    options = {"method": "pda", "device": "cuda", "check_finite": False}
    fixed = options | {"rank": 8, "tol": None}
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        # More than 2048 keys are cut in two. Rank 64 is the first of the loop, for more than 4 * 64 + 192 rows.
        shape = 2200, 8
        q, k, v = (rng.standard_normal((heads, *shape)).astype(dtype) for heads in (2, 1, 1))
        out = pda_numba.attention(q, k, v, **fixed)
        pda_numba.attention(q, k, v, tol=1e-3, **options)
        pda_numba.attention(q, k, v, **options | {"method": "exact"})
        pda_numba.estimate_error(out, q, k, v, device="cuda", check_finite=False)
    for dtype in (np.float32, np.float64):
        q, k, v = (_on_device(rng.standard_normal((2, *shape)).astype(dtype)) for _ in range(3))
        pda_numba.attention(q, k, v, **fixed)
        pda_numba.attention(q, k, v, **options | {"method": "exact"}, return_info=True)
        for projection in ("pca", "srht", "gaussian", "orthogonal"):
            projected = {"proj_dim": 4, "projection": projection}
            pda_numba.attention(q, k, v, **projected, **fixed)
            pda_numba.attention(q, k, v, calibrate=False, **projected, **fixed)
        # Beyond 8192 queries the leverage rows are drawn among some of them.
        longer = _on_device(rng.standard_normal((2, 9000, 8)).astype(dtype))
        pda_numba.attention(longer, k, v, **fixed)
        bad = _on_device(np.full((2, *shape), np.nan, dtype))
        with contextlib.suppress(ValueError):
            pda_numba.attention(bad, k, v, **options | {"method": "exact", "check_finite": True})
    # Heads and tokens the other way round, as many libraries keep them.
    q, k, v = (_on_device(rng.standard_normal((2200, 2, 8), dtype=np.float32), (1, 0, 2)) for _ in range(3))
    pda_numba.attention(q, k, v, **fixed)


def content_calls():
    """The near field by content, whose numbers do not matter here: forward and backward, with and without a window."""
    import numpy as np

    import pda_numba
    from pda_numba import NearField, tree

    tree._FLAT = 2  # levels of centres for few keys as well
    near = NearField(n_probes=2, bucket_size=8), NearField(window=3, n_probes=1, bucket_size=8)
    for dtype in (np.float32, np.float64, np.float16):
        q, k, v = (np.ones((2, 300, d), dtype) for d in (8, 8, 4))
        for choice in near:
            options = {"rank": 4, "tol": None, "method": "pda", "near": choice, "device": "cuda", "check_finite": False}
            _, residuals = pda_numba.attention_forward(q, k, v, **options)
            pda_numba.attention_backward(residuals, np.ones((2, 300, 4), dtype), return_info=True)


def decoding_calls():
    """A cache with a model of its past: a token at a time, and several."""
    import ml_dtypes
    import numpy as np

    import pda_numba
    from pda_numba import fitting

    fitting._WORTH = 0.0  # also of a past that is too short to be worth it
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        q, k, v = (rng.standard_normal((heads, 608, 8)).astype(dtype) for heads in (2, 1, 1))
        options = {"recent": 128, "rank": 8, "tol": None, "device": "cuda", "check_finite": False}
        cache = pda_numba.AttentionCache(q[:, :600], k[:, :600], v[:, :600], **options)
        for first, last in ((600, 601), (601, 608)):
            cache.append(k[:, first:last], v[:, first:last])
            cache.attend(q[:, first:last])


def _on_device(array, axes=(0, 1, 2)):
    from numba import cuda

    return cuda.to_device(array).transpose(axes)


def main():
    warnings.simplefilter("ignore")
    seen, values = set(), [0]
    watch(seen, run=False)
    _fill_memory(values)
    for values[0] in (0, 1):
        calls()
        gradient_calls()
        decoding_calls()
        content_calls()
        masked_calls()
    print(json.dumps(sorted(seen)))


if __name__ == "__main__":
    main()
