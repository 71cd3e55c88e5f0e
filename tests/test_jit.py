"""How kernels are compiled: the notice about slow compilation, and one thread at a time."""

import io
import os
import subprocess
import sys
import textwrap
import threading
import time

import numba
import numpy as np
import pytest
from numba.core import event

from pda_numba import _jit


class _Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


def compile_for(seconds, after, stream, monkeypatch):
    """Pretend to compile for some time, with a notice that waits for `after` seconds."""
    monkeypatch.setattr("sys.stderr", stream)
    listener = _jit._CompileNotice(after=after)
    with event.install_listener("numba:compile", listener):
        for _ in range(2):
            with event.trigger_event("numba:compile"):
                time.sleep(seconds)
    return stream.getvalue()


def test_slow_compilation_is_announced_once(monkeypatch):
    text = compile_for(0.4, 0.1, _Stream(True), monkeypatch)
    assert text.count("\n") == 1
    assert "compiling" in text


def test_fast_compilation_is_silent(monkeypatch):
    assert compile_for(0.0, 0.3, _Stream(True), monkeypatch) == ""


def test_logs_are_not_disturbed(monkeypatch):
    """No terminal, no notice."""
    assert compile_for(0.4, 0.1, _Stream(False), monkeypatch) == ""


def test_the_notice_is_installed_once():
    _jit.announce_slow_compilation()
    count = len(event._registered["numba:compile"])
    _jit.announce_slow_compilation()
    assert len(event._registered["numba:compile"]) == count > 0


def test_kernels_take_turns():
    """Two Python threads never run parallel code at the same time."""
    inside, most = 0, 0

    def body(x):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.02)
        inside -= 1
        return x

    kernel = _jit.cpu_kernel(lambda x: x)
    kernel.__closure__[
        [c.cell_contents is kernel.dispatcher for c in kernel.__closure__].index(True)
    ].cell_contents = body
    workers = [threading.Thread(target=kernel, args=(1,)) for _ in range(5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert most == 1


@_jit.cpu_kernel
def _classify(x, out):
    for i in numba.prange(x.shape[0]):
        out[i, 0], out[i, 1], out[i, 2] = np.isnan(x[i]), x[i] == np.inf, x[i] == -np.inf


def test_kernels_know_nan_and_infinity():
    """Masks are minus infinity and checks look for NaN: the compiler may not assume them away."""
    x, out = np.array([np.nan, np.inf, -np.inf, 0.0]), np.zeros((4, 3), np.bool_)
    _classify(x, out)
    assert (out == np.eye(4, 3, dtype=bool)).all()


@_jit.cpu_kernel
def _cancel(x, out):
    for i in numba.prange(x.shape[0]):
        out[i] = (1.0 + x[i]) - 1.0


def test_kernels_add_in_the_order_that_is_written():
    """A compiler that may reorder sums would return x itself."""
    x, out = np.array([1e-17, 1e-20]), np.empty(2)
    _cancel(x, out)
    assert (out == 0).all()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # everything is compiled anew, with checks
def test_no_index_is_out_of_bounds(tmp_path):
    """In float64, whose panels are half as wide as those of the other 32-bit arrays; under a mask in float32."""
    code = """
        import numpy as np
        from pda_numba import NearField, attention_backward, attention_forward
        near = NearField(window=32, n_probes=3, bucket_size=16)
        for element, options in ((np.float64, {"near": near}), (np.float32, {"causal": True})):
            q, k, v, g = np.random.default_rng(0).normal(size=(4, 1, 1100, 9)).astype(element)
            out, residuals = attention_forward(q, k, v, rank=16, tol=None, method="pda", **options)
            attention_backward(residuals, g)
            assert np.isfinite(out).all()
    """
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=True)
