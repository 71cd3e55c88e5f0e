"""`pda-numba info`: what this installation is made of and what it runs on."""

import importlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import llvmlite.binding
import numba

import pda_numba

from .. import gpu
from . import text

_PACKAGES = ("numba", "llvmlite", "numpy", "scipy")
_OPTIONAL = ("numba-cuda", "matplotlib", "ml_dtypes")
_LAYERS = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}
_FEATURES = ("avx", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "neon", "sve")


def facts():
    """[(name, value)] in the order of the printout."""
    return [
        ("pda_numba", f"{pda_numba.__version__} in {Path(pda_numba.__file__).parent}"),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        *((name, importlib.metadata.version(name)) for name in _PACKAGES),
        *((name, _version_or_none(name)) for name in _OPTIONAL),
        ("platform", platform.platform()),
        ("cpu", f"{llvmlite.binding.get_host_cpu_name()}; {_features()}"),
        ("threads", _threads()),
        ("threading layer", _layer()),
        ("devices", f"cpu; {_gpu()}"),
        ("kernel cache", _cache()),
    ]


def _version_or_none(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (optional)"


def _features():
    host = llvmlite.binding.get_host_cpu_features()
    return " ".join(name for name in _FEATURES if host.get(name)) or "no vector features reported"


def _threads():
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{numba.get_num_threads()} used, {usable} cores usable (NUMBA_NUM_THREADS sets the number)"


def _layer():
    """The first of Numba's layers, in its order of preference, whose library loads here."""
    settings = vars(numba.config)
    chosen = settings["THREADING_LAYER"]
    order = (
        settings["THREADING_LAYER_PRIORITY"] if chosen in ("default", "safe", "threadsafe", "forksafe") else [chosen]
    )
    loads = [name for name in order if _loads(_LAYERS.get(name, name))]
    return f"{loads[0] if loads else 'none'} (NUMBA_THREADING_LAYER={chosen}; here: {', '.join(loads) or 'none'})"


def _loads(module):
    try:
        importlib.import_module(f"numba.np.ufunc.{module}")
    except ImportError:
        return False
    return True


def _gpu():
    missing = gpu.why_no_gpu()
    return f"no cuda: {missing}" if missing else f"cuda: {gpu.gpu_name()}"


def _cache():
    from ..rows import _rows_cpu

    path = Path(_rows_cpu.dispatcher.stats.cache_path)
    files = list(path.glob("*.nb[ic]")) if path.is_dir() else []
    size = text.size(sum(file.stat().st_size for file in files))
    return f"{path} ({len(files)} files, {size}; NUMBA_CACHE_DIR moves it)"
