"""Files: .npy arrays memory-mapped in, arrays and pictures atomically out."""

import contextlib
import importlib.util
import os
import secrets
import stat

import click
import numpy as np

_MAGIC = b"\x93NUMPY"
_FLOATS = ("float16", "float32", "float64")
_PICTURES = (".png", ".svg", ".pdf")
_unfinished: set[str] = set()


class BadInput(click.ClickException):
    """The user's files or arguments are at fault: exit code 2."""

    exit_code = 2


# --- reading ---


def read(path, name):
    """The array in a .npy file, memory-mapped and read-only; `name` is what the message calls it."""
    where = f"{name} file '{path}'"
    try:
        with open(path, "rb") as file:
            start = file.read(len(_MAGIC))
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise BadInput(f"{where} cannot be read: {error.strerror}") from error
    if start[:2] == b"PK":
        raise BadInput(f"{where} is a .npz archive; save the array itself with np.save")
    if start != _MAGIC:
        raise BadInput(f"{where} is not a .npy file; write one with np.save")
    _check_header(path, where, size)
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _check_header(path, where, size):
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _order, dtype = header(file)
            needed = file.tell() + int(np.prod(shape, dtype=object)) * dtype.itemsize
    except ValueError as error:
        raise BadInput(f"{where} has a damaged header ({error}); write it again with np.save") from error
    if dtype.hasobject:
        raise BadInput(f"{where} holds Python objects; save numbers: np.save(path, array.astype('float32'))")
    if dtype.name not in _FLOATS or not dtype.isnative:
        raise BadInput(f"{where} holds {dtype.str} values; it must be float16, float32 or float64 in native byte order")
    if size < needed:
        raise BadInput(f"{where} is truncated: {size:,} bytes where its header promises {needed:,}")


# --- writing ---


def remove_unfinished():
    """Remove what an interrupted run has begun to write."""
    for path in list(_unfinished):
        _remove(path)


def _remove(path):
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    _unfinished.discard(path)


class Output:
    """A file that appears complete or not at all.

    `with Output(path, force) as output:` opens a temporary file in the same directory (so an unwritable one is found
    out before any work); `output.finish()` flushes it to the disk and gives it its name; leaving without it removes it.
    """

    def __init__(self, path, force=False, advice="give another path with -o"):
        # The link's target is replaced, not the link.
        self.path = os.path.realpath(path)
        self.force = force
        self.advice = advice
        self._array = None
        directory, name = os.path.split(self.path)
        self.temporary = os.path.join(directory, f".{name}.{secrets.token_hex(4)}.part")

    def __enter__(self):
        self._refuse_to_overwrite()
        _unfinished.add(self.temporary)
        try:
            os.close(os.open(self.temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
        except OSError as error:
            _unfinished.discard(self.temporary)
            raise BadInput(f"cannot write '{self.path}': {error.strerror}; {self.advice}") from error
        return self

    def __exit__(self, *_error):
        self._array = None
        if self.temporary in _unfinished:
            _remove(self.temporary)

    def _refuse_to_overwrite(self):
        try:
            mode = os.stat(self.path).st_mode
        except OSError:
            return
        if not stat.S_ISREG(mode):
            raise BadInput(f"'{self.path}' is not a regular file; {self.advice}")
        if not self.force:
            raise BadInput(f"'{self.path}' exists; add --force to replace it")

    def array(self, shape, dtype):
        """A memory-mapped array in the temporary file, with its disk space reserved."""
        self._array = np.lib.format.open_memmap(self.temporary, mode="w+", dtype=dtype, shape=shape)
        if hasattr(os, "posix_fallocate"):
            # A full disk is an error here; in the middle of a memory-mapped write it would kill the process.
            with open(self.temporary, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        return self._array

    def finish(self):
        """Flush to the disk, then give the file its name in one step."""
        if self._array is not None:
            self._array.flush()
            self._array = None
        self._refuse_to_overwrite()
        _sync(self.temporary)
        if os.path.exists(self.path):
            os.chmod(self.temporary, stat.S_IMODE(os.stat(self.path).st_mode))
        os.replace(self.temporary, self.path)
        _unfinished.discard(self.temporary)
        if os.name == "posix":
            _sync(os.path.dirname(self.path))


def picture(path, option):
    """The `Output` for a picture that `option` names, to be opened before any work; nothing without a path."""
    if path is None:
        return contextlib.nullcontext()
    if os.path.splitext(path)[1].lower() not in _PICTURES:
        raise BadInput(f"{option} must end in {', '.join(_PICTURES)}; got '{path}'")
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput(f"{option} needs matplotlib, which is not installed: pip install matplotlib")
    return Output(path, force=True, advice=f"give another path with {option}")


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY if os.path.isdir(path) else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
