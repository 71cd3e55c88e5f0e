"""What `import pda_numba` costs and brings in, in a fresh interpreter."""

import json
import subprocess
import sys

PROBE = """
import json, sys, time
start = time.perf_counter()
import pda_numba
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules), "names": pda_numba.__all__,
                  "version": pda_numba.__version__}))
"""


def probe():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout.splitlines()[-1])


def test_import_is_light():
    found = probe()
    modules = set(found["modules"])
    for name in ("torch", "dask", "matplotlib", "pandas", "ml_dtypes", "rich", "click", "pda_numba.cli"):
        assert name not in modules, name
    # Numba may import its own CUDA stubs; a driver or a simulator is another matter.
    started = {m for m in modules if m.startswith("numba.cuda") and (".cudadrv" in m or ".simulator" in m)}
    assert not any(m in modules for m in ("cupy", "pycuda", "numba_cuda"))
    assert not started, started
    # 0.7 s on a quiet machine; the margin is for a busy one with a cold disk
    assert found["seconds"] < 10
    assert found["version"].count(".") == 2


def test_exported_names_exist():
    import pda_numba

    assert probe()["names"] == sorted(pda_numba.__all__)
    assert all(hasattr(pda_numba, name) for name in pda_numba.__all__)
