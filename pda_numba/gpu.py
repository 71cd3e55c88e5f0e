"""Which GPU there is, what it is called, and whether a call goes there or stays on the CPU."""

import contextlib
import importlib.util
import os

import numba

from ._jit import SIMULATED, import_cuda

# --- which device a call gets ---

# For device="auto", seconds of a call with NumPy arrays, from measured or published rates: the CPU's exact kernel does
# 50 GFLOP/s per core in float32, half of that in float64; any GPU of the last years at least 5 TFLOP/s in float32, but
# a consumer card only 0.2 in float64. Pinned memory travels at 12 GB/s over PCIe 3. Some hundred launches and a few
# waits of the loop over ranks take some milliseconds.
_CPU_RATE = {4: 50e9, 8: 25e9}  # per core, by bytes of an element
_GPU_RATE = {4: 5e12, 8: 0.2e12}
_TRANSFER_RATE = 12e9
_LAUNCHES = {"pda": 10e-3, "exact": 1e-3}


def resolve_device(wish, *, on_gpu=False, seconds=None):
    """(device, reason) for the caller's wish: "auto", "cpu" or "cuda".

    `on_gpu`: the arrays are there already. `seconds`: (CPU, GPU) as estimated, for NumPy arrays.
    """
    if not isinstance(wish, str) or wish not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {wish!r}")
    if wish == "cpu":
        if on_gpu:
            raise ValueError(
                "device must be 'cuda' or 'auto' for arrays on a GPU, got 'cpu'; to compute on the CPU copy them to "
                "NumPy first: cupy.asnumpy(x), x.cpu().numpy(), numpy.asarray(x) or x.copy_to_host()"
            )
        return "cpu", "asked for"
    if wish == "auto" and not on_gpu:
        return _cheaper(seconds)
    missing = why_no_gpu()
    if missing:
        raise RuntimeError(f"device={wish!r}: {missing}" + ("" if on_gpu else "; or use device='cpu'"))
    return "cuda", "asked for" if wish == "cuda" else "auto: the arrays are on the GPU"


def _cheaper(seconds):
    if seconds is None:
        return "cpu", "auto: nothing to compute"
    cpu, gpu = seconds
    about = f"about {cpu:.2g} s on the CPU, {gpu:.2g} s with the transfer on a GPU"
    if cpu <= gpu:
        return "cpu", f"auto: {about}"
    if SIMULATED:
        return "cpu", "auto: the CUDA simulator is slow"
    missing = why_no_gpu()
    return ("cpu", f"auto: {missing}") if missing else ("cuda", f"auto: {about}")


def estimated_seconds(flops, method, itemsize, moved_bytes):
    """(CPU, GPU) for a call with NumPy arrays of `moved_bytes`, output included, whose elements have `itemsize`."""
    cpu = flops / (_CPU_RATE[itemsize] * numba.get_num_threads())
    return cpu, flops / _GPU_RATE[itemsize] + moved_bytes / _TRANSFER_RATE + _LAUNCHES[method]


# --- what is missing ---

_LEAST_CAPABILITY = (7, 0)
_INSTALL = 'pip install "pda_numba[cuda12]" or "pda_numba[cuda13]", by the version of CUDA that the driver supports'


def why_no_gpu():
    """What is missing for device="cuda", or None."""
    if SIMULATED:
        return None
    if importlib.util.find_spec("numba_cuda") is None:
        return f"the package numba-cuda is not installed: {_INSTALL}"
    try:
        module = import_cuda()
    except ImportError as error:
        return f"numba-cuda cannot be imported ({error}): {_INSTALL}"
    available = module.is_available()  # starts the driver
    failure = module.cuda_error()
    if failure:
        return _driver_problem(str(failure))
    if not len(module.gpus):
        return "the NVIDIA driver finds no GPU"
    if not available:
        return f"the CUDA compiler NVVM is not found: {_INSTALL}"
    capability = tuple(module.get_current_device().compute_capability)
    if capability < _LEAST_CAPABILITY:
        return "the GPU has compute capability {}.{}; {}.{} is the least".format(*capability, *_LEAST_CAPABILITY)
    return None


def _driver_problem(error):
    if os.environ.get("NUMBA_DISABLE_CUDA", "0") not in ("", "0"):
        return "NUMBA_DISABLE_CUDA is set"
    if "NO_DEVICE" in error or "(100)" in error:
        return "the NVIDIA driver finds no GPU"
    if "cannot be found" in error:
        return "no NVIDIA driver is found: install one that supports CUDA 12 or 13"
    return "the NVIDIA driver does not start: " + " ".join(error.split())


# --- the GPU that is there ---


def current_gpu():
    """The number of the GPU that this thread works on."""
    return 0 if SIMULATED else import_cuda().get_current_device().id


def on_gpu(number):
    """A context in which this thread works on the GPU of that number; None is the current one."""
    return contextlib.nullcontext() if number is None else import_cuda().gpus[number]


def open_stream(handle=None):
    """The stream of a handle (0 is the default stream), or a new one."""
    module = import_cuda()
    if SIMULATED:
        return module.stream()
    if handle is None:
        return module.stream()
    return module.external_stream(handle) if handle else module.default_stream()


def gpu_name():
    """What the current GPU is called."""
    if SIMULATED:
        return "Numba's CUDA simulator"
    device = import_cuda().get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
    return "{}, compute capability {}.{}".format(name, *device.compute_capability)
