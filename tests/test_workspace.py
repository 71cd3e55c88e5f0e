"""No result depends on what uninitialised memory holds: every array from np.empty is filled with NaN first."""

import sys
import types

import numpy as np
import pytest
from problems import make

import pda_numba
from pda_numba import attention
from pda_numba.device import Cpu

CALLS = {
    "exact": {"method": "exact"},
    "exact, split keys": {"method": "exact"},
    "low rank": {"method": "pda", "rank": 32, "tol": None},
    "window": {"method": "pda", "rank": 32, "tol": None, "window": 20},
    "projection": {"method": "pda", "rank": 32, "tol": None, "proj_dim": 6},
    "the paper's variant": {"method": "pda", "rank": 32, "tol": None, "proj_dim": 6, "calibrate": False},
    "outlier queries": {"method": "pda", "rank": 32, "tol": None},
    "duplicated keys": {"method": "pda", "rank": 64, "tol": None},
    "half precision": {"method": "pda", "rank": 32, "tol": None},
}


def arrays(name):
    kind = {"outlier queries": "outliers", "duplicated keys": "duplicated"}.get(name, "decaying")
    q, k, v = make(kind, 1100, seed=4, dtype=np.float16 if name == "half precision" else np.float32)
    if name == "exact, split keys":
        return q[:9], np.tile(k, (4, 1)), np.tile(v, (4, 1))
    return q, k, v


class _Poisoned(types.ModuleType):
    """NumPy, but what `empty` returns holds NaN, or the largest number of an integer type."""

    def __init__(self):
        super().__init__("numpy")
        self.made = 0

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, shape, dtype=float):
        self.made += 1
        out = np.empty(shape, dtype)
        kind = out.dtype.kind
        if kind == "f":
            out.fill(np.nan)
        elif kind in "iu":
            out.fill(np.iinfo(out.dtype).max)
        elif kind == "b":
            out.fill(True)
        return out


def everything(name):
    q, k, v = arrays(name)
    out, info = attention(q, k, v, return_info=True, **CALLS[name])
    estimate = pda_numba.estimate_error(out, q, k, v)
    numbers = (info.error, info.error_limit, info.row_error, info.rows, info.window, info.effective_rank)
    _, pullback = pda_numba.attention_vjp(q, k, v, **CALLS[name])
    *gradients, about = pullback(out, return_info=True)
    numbers = (*numbers, estimate.error, estimate.error_limit, about.gradient_error)
    return [np.asarray(x).tobytes() for x in (out, *numbers, *gradients)]


@pytest.mark.parametrize("name", CALLS)
def test_poisoned_memory_changes_nothing(name, monkeypatch):
    clean = everything(name)  # compiles, with the real NumPy, all that is needed
    poisoned = _Poisoned()
    rooms = [m for n, m in sys.modules.items() if n.startswith("pda_numba.") and getattr(m, "np", None) is np]
    assert len(rooms) >= 8
    for room in rooms:
        monkeypatch.setattr(room, "np", poisoned)
    monkeypatch.setattr(Cpu, "empty", staticmethod(poisoned.empty))
    assert everything(name) == clean
    assert poisoned.made > 5


def test_projection_with_poisoned_memory(monkeypatch, rng):
    x = rng.standard_normal((300, 20)).astype(np.float32)
    clean = pda_numba.project(x, 7)
    poisoned = _Poisoned()
    monkeypatch.setattr(sys.modules["pda_numba.project"], "np", poisoned)
    monkeypatch.setattr(Cpu, "empty", staticmethod(poisoned.empty))
    assert pda_numba.project(x, 7).tobytes() == clean.tobytes()
    assert poisoned.made >= 1
