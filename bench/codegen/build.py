"""PTX and machine code of a CUDA driver, for a compute capability that need not be there.

The compiler asks the current device for its compute capability: a stand-in answers. NVVM makes PTX of Numba's code and
`ptxas` machine code of that, as the driver of a real card would; both come with `numba-cuda`'s extra cu12 or cu13.
"""

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from . import sass
from .launches import Launch, drivers

CAPABILITIES = ((8, 0), (9, 0), (10, 0))
_REPRESENTATIVE = (9, 0)

_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_COMMENT = re.compile(r"//.*")


@dataclass
class Code:
    """What became of one launch on one compute capability."""

    launch: Launch
    capability: tuple
    ptx: str
    threads: int
    on_tiles: bool  # does it multiply tiles of shared memory (`pda_numba.kernels.tile`)?
    registers: int = 0
    shared: int = 0
    frame: int = 0
    spilled: int = 0  # bytes of spill stores and loads
    program: sass.Program = field(default_factory=sass.Program)
    error: str = ""  # of the compiler, if there is no code

    def __str__(self):
        numbers = " ".join(self.launch.numbers) or "no numbers"
        return f"{self.launch.kernel} on {self.capability[0]}.{self.capability[1]}, {numbers}"

    def count(self, pattern):
        """How often a pattern occurs in the PTX."""
        return len(re.findall(pattern, self.ptx))


def tool(name):
    """The path of ptxas or nvdisasm: of the package from PyPI, else the one on PATH; None if there is none."""
    nvidia = importlib.util.find_spec("nvidia")
    roots = list(nvidia.submodule_search_locations) if nvidia else []
    found = sorted(path for root in roots for path in Path(root).glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


def missing():
    """Why nothing can be compiled here, or None."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed"
    lacking = [name for name in ("ptxas", "nvdisasm") if tool(name) is None]
    return f"{' and '.join(lacking)} not found" if lacking else None


def compile_all(launches, capabilities=CAPABILITIES, processes=2, **options):
    """A Code for every launch and capability, compiled side by side.

    16-bit floats and arrays that are not contiguous are for 9.0 alone: they change no more than the loads.
    """
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        tasks = []
        for launch in launches:
            wanted = set(capabilities) & {_REPRESENTATIVE} if launch.other_loads else capabilities
            tasks.append(pool.submit(compile_launch, launch, sorted(wanted), **options))
        return [code for task in tasks for code in task.result()]


def compile_launch(launch, capabilities=CAPABILITIES, *, lines=False):
    """A Code for each capability. With `lines` the instructions know their line of source; that may cost registers."""
    _pretend_a_device()
    driver = drivers()[launch.kernel]
    on_tiles = "tile" in driver.function.__code__.co_names
    try:
        codes = []
        for capability, ptx in _ptx(driver, launch.signature, capabilities, lines).items():
            codes.append(Code(launch, capability, _COMMENT.sub("", ptx), driver.threads, on_tiles))
            _assemble(codes[-1], ptx, lines)
        return codes
    except Exception as error:  # whatever the compiler raises belongs to this driver; the others are still to be seen
        return [Code(launch, capabilities[0], "", driver.threads, on_tiles, error=_essence(error))]


def _essence(error):
    """What Numba says of its innermost trouble: the lines around it tell the same of every caller."""
    said = str(error).splitlines()
    telling = r"Error: |Cannot unify|Undecided type|No conversion|Unresolved extern|multiply defined"
    inner = [line.strip() for line in said if re.search(telling, line)]
    return f"{type(error).__name__}: {inner[-1] if inner else said[0]}"


def _ptx(driver, signature, capabilities, lines):
    """The PTX for each capability. Numba's part of the work is the same for all of them, NVVM's is not."""
    from numba import cuda
    from numba.cuda.codegen import CUDACodeLibrary

    libraries, generate = [], CUDACodeLibrary.get_asm_strs

    def watched(library, **options):
        libraries.append(library)
        return generate(library, **options)

    options = {"device": False, "abi": "numba", "output": "ptx", "launch_bounds": driver.bounds, "lineinfo": lines}
    CUDACodeLibrary.get_asm_strs = watched
    try:
        cuda.compile(driver.function, signature, cc=capabilities[0], **options)
    finally:
        CUDACodeLibrary.get_asm_strs = generate
    return {cc: "\n".join(libraries[-1].get_asm_strs(cc=cc)) for cc in capabilities}


@functools.cache
def _pretend_a_device():
    from pda_numba._jit import import_cuda

    import_cuda()
    from numba.cuda import dispatcher
    from numba.cuda.cudadrv import nvvm

    class Device:
        compute_capability = CAPABILITIES[0]

    dispatcher.get_current_device = Device
    nvvm.CompilationUnit.verify = _verify_aloud(nvvm.CompilationUnit.verify)


def _verify_aloud(verify):
    """NVVM says why it refuses a program in a log that Numba does not show."""

    def verify_aloud(unit):
        try:
            verify(unit)
        except Exception as error:
            raise RuntimeError(unit.get_log()) from error

    return verify_aloud


def _assemble(code, ptx, lines):
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        major, minor = code.capability
        flags = ["-v", f"-arch=sm_{major}{minor}", *(["-lineinfo"] if lines else [])]
        said = run(tool("ptxas"), *flags, source, "-o", binary).stderr
        listing = run(tool("nvdisasm"), "-c", *(["-g"] if lines else []), binary).stdout
    code.registers = max(map(int, _REGISTERS.findall(said)))
    code.shared = max(map(int, _SHARED.findall(said)), default=0)
    frames = [tuple(map(int, found)) for found in _FRAME.findall(said)]
    code.frame = max((frame for frame, _, _ in frames), default=0)
    code.spilled = sum(stores + loads for _, stores, loads in frames)
    code.program = sass.parse(listing)


def run(*command):
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr[-2000:]}")
    return done
