"""Which device a call runs on and why, and what is known of arrays on a GPU: what needs neither GPU nor simulator."""

import types

import numpy as np
import pytest
from foreign import Foreign
from numba.core import config

import pda_numba
from pda_numba import _arrays, _streamed, _validate, gpu
from pda_numba.gpu import estimated_seconds, resolve_device, why_no_gpu

pytestmark = pytest.mark.skipif(bool(config.ENABLE_CUDASIM), reason="the simulator is always there")


# --- what is missing ---


def driver(error=None, available=True, gpus=1, capability=(9, 0)):
    """What `numba.cuda` would say on some machine."""
    current = types.SimpleNamespace(compute_capability=capability, name=b"NVIDIA H200", id=0)
    return types.SimpleNamespace(
        is_available=lambda: available,
        cuda_error=lambda: error,
        gpus=[None] * gpus,
        get_current_device=lambda: current,
    )


def without_package(monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)


def with_driver(monkeypatch, **facts):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu, "import_cuda", lambda: driver(**facts))


def broken_package(monkeypatch):
    def fail():
        raise ImportError("NVIDIA CUDA Python bindings not found")

    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu, "import_cuda", fail)


NO_LIBRARY = "\nCUDA driver library cannot be found.\nEnsure that a compatible NVIDIA driver is installed.\n"
MISSING = {
    "package": (without_package, ["numba-cuda is not installed", 'pip install "pda_numba[cuda12]"', "[cuda13]"]),
    "bindings": (broken_package, ["cannot be imported", "bindings not found", "pip install"]),
    "driver": (lambda m: with_driver(m, error=NO_LIBRARY, available=False), ["no NVIDIA driver is found"]),
    "no device": (
        lambda m: with_driver(m, error="Call to cuInit results in CUDA_ERROR_NO_DEVICE (100)", available=False),
        ["driver finds no GPU"],
    ),
    "no devices": (lambda m: with_driver(m, gpus=0), ["driver finds no GPU"]),
    "another error": (
        lambda m: with_driver(m, error="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH\n(803)", available=False),
        ["does not start", "MISMATCH (803)"],
    ),
    "compiler": (lambda m: with_driver(m, available=False), ["NVVM", "pip install"]),
    "capability": (lambda m: with_driver(m, capability=(6, 1)), ["6.1", "7.0"]),
}


@pytest.mark.parametrize("case", MISSING)
def test_cuda_says_what_is_missing(case, monkeypatch, rng):
    prepare, words = MISSING[case]
    prepare(monkeypatch)
    with pytest.raises(RuntimeError, match=r"^device='cuda'") as caught:
        pda_numba.attention(*rng.standard_normal((3, 5, 4)), device="cuda")
    message = str(caught.value)
    assert all(word in message for word in [*words, "device='cpu'"]), message
    assert "\n" not in message


def test_disabled_by_the_environment(monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_CUDA", "1")
    with_driver(monkeypatch, error="CUDA is disabled", available=False)
    assert why_no_gpu() == "NUMBA_DISABLE_CUDA is set"


def test_nothing_is_missing(monkeypatch):
    with_driver(monkeypatch)
    assert why_no_gpu() is None
    assert resolve_device("cuda") == ("cuda", "asked for")
    assert gpu.gpu_name() == "NVIDIA H200, compute capability 9.0"


# --- auto ---


def test_auto_takes_the_gpu_only_where_it_is_faster(monkeypatch):
    with_driver(monkeypatch)
    small = estimated_seconds(1e6, "exact", 4, 10**5)
    large = estimated_seconds(1e13, "exact", 4, 10**8)
    assert small[0] < small[1]
    assert large[0] > large[1]
    name, reason = resolve_device("auto", seconds=small)
    assert name == "cpu"
    assert "on the CPU" in reason
    assert resolve_device("auto", seconds=large)[0] == "cuda"
    # Transfers count: much to move and little to do.
    assert resolve_device("auto", seconds=estimated_seconds(1e9, "exact", 4, 10**10))[0] == "cpu"
    assert resolve_device("auto") == ("cpu", "auto: nothing to compute")


def test_auto_without_a_gpu_says_why(monkeypatch):
    without_package(monkeypatch)
    name, reason = resolve_device("auto", seconds=(10.0, 0.1))
    assert name == "cpu"
    assert "numba-cuda is not installed" in reason


def test_a_small_call_does_not_look_for_a_gpu(monkeypatch, rng):
    monkeypatch.setattr(gpu, "why_no_gpu", lambda: pytest.fail("looked for a GPU"))
    _, info = pda_numba.attention(*rng.standard_normal((3, 20, 4)), return_info=True)
    assert info.device == "cpu"
    assert "on the CPU" in info.device_reason
    assert pda_numba.attention(*rng.standard_normal((3, 20, 4)), device="cpu", return_info=True)[1].device_reason == (
        "asked for"
    )


# --- arrays on a GPU: refusals come before anything is looked for ---


def test_device_arrays_are_not_computed_on_the_cpu(rng):
    q, k, v = (Foreign(x) for x in rng.standard_normal((3, 6, 4)))
    with pytest.raises(ValueError, match=r"device must be .cuda. or .auto..*copy them"):
        pda_numba.attention(q, k, v, device="cpu")


def test_mixed_places_name_both(rng):
    q, k, v = rng.standard_normal((3, 6, 4))
    with pytest.raises(TypeError, match=r"q and k must both.*foreign\.Foreign on a GPU and a NumPy array"):
        pda_numba.attention(Foreign(q), k, v)
    with pytest.raises(TypeError, match=r"q and v must both.*a NumPy array and foreign\.Foreign on a GPU"):
        pda_numba.attention(q, k, Foreign(v))
    with pytest.raises(TypeError, match="q and v must be on the same GPU, got GPU 0 and GPU 1"):
        pda_numba.attention(Foreign(q, device=0), Foreign(k, device=0), Foreign(v, device=1))


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda x: Foreign(x.astype(np.int32)), TypeError, ["v must be an array of float16", "int32"]),
        (lambda x: Foreign(x.astype(">f8")), TypeError, [">f8"]),
        (lambda x: Foreign(x.astype(np.float32)), TypeError, ["q and v", "float64", "float32"]),
        (lambda x: Foreign(x[0]), ValueError, ["two axes", "(4,)"]),
        (lambda x: Foreign(x[:5]), ValueError, ["number of keys", "(5, 4)"]),
        (lambda x: [1.0], TypeError, ["v must be a NumPy array or an array on a GPU", "list"]),
    ],
)
def test_bad_device_arrays(wrong, error, words, rng, monkeypatch):
    monkeypatch.setattr(pda_numba.call, "place", lambda *_: pytest.fail("memory was allocated"))
    q, k, v = rng.standard_normal((3, 6, 4))
    with pytest.raises(error) as caught:
        pda_numba.attention(Foreign(q), Foreign(k), wrong(v))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda q: np.zeros((6, 4)), TypeError, ["out must be on a GPU", "ndarray"]),
        (lambda q: Foreign(np.zeros((6, 5))), ValueError, ["(6, 4)", "(6, 5)"]),
        (lambda q: Foreign(np.zeros((6, 4), np.float32)), TypeError, ["float64", "float32"]),
        (lambda q: Foreign(np.zeros((6, 4)), read_only=True), ValueError, ["writable"]),
        (lambda q: Foreign(np.broadcast_to(np.zeros(4), (6, 4))), ValueError, ["room for every element"]),
        (lambda q: Foreign(q[::-1]), ValueError, ["overlap q"]),
    ],
)
def test_bad_out_on_a_gpu(make, error, words, rng, monkeypatch):
    with_driver(monkeypatch)
    monkeypatch.setattr(pda_numba.call, "place", lambda *_: pytest.fail("memory was allocated"))
    q, k, v = rng.standard_normal((3, 6, 4))
    with pytest.raises(error, match=r"^out must") as caught:
        pda_numba.attention(Foreign(q), Foreign(k), Foreign(v), out=make(q))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_device_out_for_numpy_arrays_is_refused(rng):
    q, k, v = rng.standard_normal((3, 6, 4))
    with pytest.raises(TypeError, match="out must be a NumPy array"):
        pda_numba.attention(q, k, v, out=Foreign(np.zeros((6, 4))))


def test_tensors_on_the_host_are_refused(rng):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.ones(4, 3) for _ in range(3))
    with pytest.raises(TypeError, match=r"q must be a NumPy array or an array on a GPU.*torch\.Tensor"):
        pda_numba.attention(q, k, v)


def test_a_tensor_that_requires_grad_says_detach(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(_arrays, "_on_gpu", lambda value: True)  # what a CUDA tensor would say
    with pytest.raises(TypeError, match=r"q must be readable in place, got Tensor:.*detach"):
        _arrays.describe("q", torch.ones(3, 2, requires_grad=True))


# --- what arrays say of themselves ---


def test_description(rng):
    array = rng.standard_normal((2, 5, 3)).astype(np.float32)
    found = _arrays.describe("q", Foreign(array[:, ::2], stream=7, device=1))
    assert (found.kind, found.shape, found.strides) == ("other", (2, 3, 3), (60, 24, 4))
    assert (found.pointer, found.dtype, found.stream, found.ordinal) == (array.ctypes.data, np.float32, 7, 1)
    np.testing.assert_array_equal(found.shadow(), array[:, ::2])
    assert _arrays.describe("q", array) is None
    assert _arrays.describe("q", [1.0]) is None


def test_bfloat16_in_both_interfaces():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).T
    capsule, _ = _arrays._from_dlpack(tensor, "torch")
    assert capsule["shape"] == (4, 3)
    assert capsule["strides"] == [2, 8]
    assert capsule["data"][0] == tensor.data_ptr()
    assert _arrays._dtype(capsule["typestr"], tensor) is _arrays.BFLOAT16
    ml_dtypes = pytest.importorskip("ml_dtypes")
    found = _arrays.describe("q", Foreign(np.ones((3, 2), ml_dtypes.bfloat16), typestr="<V2"))
    assert found.dtype is _arrays.BFLOAT16
    assert found.stored == np.int16
    assert str(found.dtype) == "bfloat16"


def read(stacks):
    """All heads of some stacks, from the host's memory that stands for a GPU's."""
    parts = []
    for pointer in stacks.pointers:
        described = _arrays._interface_of(pointer, (stacks.size, *stacks.shape[1:]), stacks.strides, stacks.dtype)
        parts.append(np.asarray(_arrays._HostMemory(described, None)))
    return np.concatenate(parts)


LAYOUTS = {
    "contiguous": (lambda x: x, 1),
    "batch, tokens, heads": (lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3), 2),
    "tokens first": (lambda x: np.ascontiguousarray(x.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3), 1),
    "columns first": (lambda x: np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3), 1),
    "every other head": (lambda x: np.repeat(x, 2, axis=1)[:, ::2], 1),
    "some heads of each": (lambda x: np.concatenate([x, x], axis=1)[:, :3], 2),
    "backwards": (lambda x: x[:, ::-1, ::-1, ::-1], 2),
    "all backwards": (lambda x: x[::-1, ::-1], 1),
    "broadcast": (lambda x: np.broadcast_to(x[:, :1], x.shape), 2),
    "one head": (lambda x: x[1, 2], 1),
    "heads of length one": (lambda x: x[:, :1], 1),
    "batch of length one": (lambda x: x[1:], 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stacks_read_any_layout_in_place(layout, rng):
    change, count = LAYOUTS[layout]
    array = change(rng.standard_normal((2, 3, 5, 4)))
    stacks = _arrays.stacked(_arrays.describe("q", Foreign(array)))
    assert len(stacks.pointers) == count
    assert stacks.shape == (array.size // 20, 5, 4)
    np.testing.assert_array_equal(read(stacks), array.reshape(-1, 5, 4))
    for size in (1, stacks.size):
        np.testing.assert_array_equal(read(stacks.cut(size)), array.reshape(-1, 5, 4))


def test_contiguous_arrays_are_seen_to_be_so(rng):
    for lead in ((), (1,), (2, 1), (1, 3), (2, 3)):
        stacks = _arrays.stacked(_arrays.describe("q", Foreign(rng.standard_normal((*lead, 5, 4)))))
        assert stacks.strides == (160, 32, 8)


def test_keys_and_values_share_their_stacks(rng):
    """Values in (batch, tokens, heads) order, keys contiguous: both are read as one stack per batch."""
    q, k, v = rng.standard_normal((3, 2, 3, 5, 4))
    v = np.ascontiguousarray(v.swapaxes(1, 2)).swapaxes(1, 2)
    problem, lead, _ = _validate.build_problem(Foreign(q), Foreign(k), Foreign(v), None, 0, accept=_validate.any_array)
    assert lead == (2, 3)
    assert (problem.q.size, problem.k.size, problem.v.size) == (6, 3, 3)
    np.testing.assert_array_equal(read(problem.k), k.reshape(6, 5, 4))


# --- pieces of a transfer ---


@pytest.mark.parametrize("size", [8, 24, 56, 100, 480, 10**6])
def test_pieces_cover_an_array_in_order(size, rng):
    for array in (rng.standard_normal((4, 5, 3)), rng.standard_normal((5, 4, 3)).swapaxes(0, 1)):
        pieces = list(_streamed._pieces(array, size))
        assert all(piece.nbytes <= size for piece in pieces)
        np.testing.assert_array_equal(np.concatenate([p.reshape(-1) for p in pieces]), array.reshape(-1))
