"""Arrays of other libraries, in place and on their streams; NumPy arrays, streamed: exact attention on the simulator.

The simulator's device memory is NumPy's, so that an array with `__cuda_array_interface__` around a NumPy array stands
for one of CuPy, and a tensor of PyTorch on the host, said to be on a GPU, for one that is.
"""

import naive
import numpy as np
import pytest
from common import host
from foreign import Foreign

import pda_numba
from pda_numba import _arrays, _place, _streamed, attention
from pda_numba.device import Cuda

pytestmark = pytest.mark.cudasim

EXACT = {"method": "exact", "return_info": True}


def problem(rng, heads=(2,), key_heads=None, n=5, m=7, d=4, e=3, dtype=np.float32):
    key_heads = heads if key_heads is None else key_heads
    shapes = (*heads, n, d), (*key_heads, m, d), (*key_heads, m, e)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


def close(out, arrays, rounding=2e-6):
    exact = naive.attention_heads(*(np.asarray(x, np.float64) for x in arrays))
    assert naive.relative(np.asarray(out, np.float64), exact) <= rounding


ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2e-6, "float64": 1e-14}


def dtype_named(name):
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if name == "bfloat16" else np.dtype(name)


# --- NumPy in, NumPy out ---


@pytest.mark.parametrize("name", ROUNDING)
def test_numpy_arrays(name, rng):
    arrays = problem(rng, dtype=dtype_named(name))
    out, info = attention(*arrays, device="cuda", **EXACT)
    assert type(out) is np.ndarray
    assert out.dtype == arrays[0].dtype
    assert info.device == "cuda (simulator)"
    assert info.device_reason.startswith("asked for")
    close(out, arrays, ROUNDING[name])


def test_the_info_is_that_of_the_cpu(rng):
    arrays = problem(rng)
    found, expected = (attention(*arrays, device=device, **EXACT)[1] for device in ("cuda", "cpu"))
    np.testing.assert_allclose(found.error_limit, expected.error_limit, rtol=1e-5)  # sums of floats in another order
    np.testing.assert_array_equal(found.rows, expected.rows)


def test_auto_leaves_numpy_arrays_on_the_cpu(rng):
    assert attention(*problem(rng), **EXACT)[1].device == "cpu"


def test_numpy_out(rng):
    arrays = problem(rng, heads=(1,))
    plain = attention(*arrays, device="cuda", method="exact")
    for out in (np.empty_like(plain), np.empty((1, 5, 6), np.float32)[..., ::2], np.asfortranarray(plain)):
        out[...] = 0
        assert attention(*arrays, device="cuda", method="exact", out=out) is out
        np.testing.assert_array_equal(out, plain)


def test_nothing_to_do():
    for lead, n, e in (((), 0, 3), ((2,), 4, 0), ((0,), 4, 3)):
        arrays = [np.ones((*lead, *s), np.float32) for s in ((n, 4), (7, 4), (7, e))]
        assert attention(*arrays, device="cuda").shape == (*lead, n, e)
        out, info = attention(*(Foreign(x) for x in arrays), return_info=True)
        assert out.shape == (*lead, n, e)
        assert info.error.shape == lead


# --- chunks of heads ---


def bytes_of(arrays, head_of_keys):
    q, k, v = arrays
    return q[0].nbytes + head_of_keys * (k[0].nbytes + v[0].nbytes) + q[0].size // q.shape[-1] * v.shape[-1] * 4


@pytest.mark.parametrize(("room", "expected"), [(1, [1] * 4), (2, [1] * 4), (2.9, [2, 2]), (4, [4])])
def test_chunks_give_the_bits_of_one(room, expected, rng, monkeypatch):
    """With `room` for so many single heads; query heads that share a key head travel together where they fit."""
    arrays = problem(rng, heads=(4,), key_heads=(2,))
    whole = attention(*arrays, device="cuda", method="exact")
    chunks = []
    original = _streamed._Slot.problem
    monkeypatch.setattr(_streamed._Slot, "problem", lambda s, c: chunks.append(len(c.heads)) or original(s, c))
    one = bytes_of(arrays, 1) + 2 * 5 * 4
    monkeypatch.setattr(Cuda, "free_bytes", lambda self: one * room / _streamed.USABLE)
    monkeypatch.setattr(_streamed, "_STAGE_BYTES", 48)  # many pieces, each a part of a head
    out = attention(*arrays, device="cuda", method="exact")
    assert out.tobytes() == whole.tobytes()
    assert chunks == expected


def test_chunks_of_half_precision_and_broadcast_keys(rng, monkeypatch):
    arrays = problem(rng, heads=(2, 2), key_heads=(1, 1), dtype=np.float16)
    monkeypatch.setattr(Cuda, "free_bytes", lambda self: 3 * bytes_of([x[0] for x in arrays], 1))
    close(attention(*arrays, device="cuda", method="exact"), arrays, 2.0**-11)


def test_a_head_that_does_not_fit(rng, monkeypatch):
    monkeypatch.setattr(Cuda, "free_bytes", lambda self: 200)
    arrays = problem(rng)
    out = np.full((2, 5, 3), 7, np.float32)
    with pytest.raises(MemoryError, match=r"needs 376 bytes .* 175 are free; use device='cpu'"):
        attention(*arrays, device="cuda", method="exact", out=out)
    assert (out == 7).all()


def test_auto_falls_back_where_a_head_does_not_fit(rng, monkeypatch):
    monkeypatch.setattr(Cuda, "free_bytes", lambda self: 200)
    monkeypatch.setattr(pda_numba.call, "resolve_device", lambda *_, **__: ("cuda", "auto: fast"))
    _, info = attention(*problem(rng), **EXACT)
    assert info.device == "cpu"
    assert "do not fit" in info.device_reason


def test_an_error_in_a_value_comes_before_any_copy(rng, monkeypatch):
    monkeypatch.setattr(_streamed.Streamed, "groups", lambda *_: pytest.fail("copied"))
    q, k, v = problem(rng)
    v[1, 2, 0] = np.nan
    with pytest.raises(ValueError, match=r"v must be finite.*head 1, token 2"):
        attention(q, k, v, device="cuda")


def test_an_error_in_the_copying_thread_is_raised(rng, monkeypatch):
    def fail(*_):
        raise OSError("the file behind the array is gone")

    monkeypatch.setattr(_streamed._Staging, "fill", fail)
    with pytest.raises(OSError, match="is gone"):
        attention(*problem(rng), device="cuda", method="exact")


# --- arrays on the GPU ---


@pytest.mark.parametrize("name", ROUNDING)
def test_foreign_arrays(name, rng):
    arrays = problem(rng, dtype=dtype_named(name))
    typestr = "<V2" if name == "bfloat16" else None
    out, info = attention(*(Foreign(x, typestr=typestr) for x in arrays), **EXACT)
    assert isinstance(out, type(Cuda().cuda.device_array(1)))
    assert out.dtype == arrays[0].dtype
    assert info.device_reason.startswith("auto: the arrays are on the GPU")
    assert info.dtype == name
    close(host(out), arrays, ROUNDING[name])


def test_numba_arrays(rng):
    arrays = problem(rng, heads=())
    out = attention(*map(Cuda().cuda.to_device, arrays), method="exact")
    assert out.shape == (5, 3)
    close(host(out), arrays)


LAYOUTS = {
    "batch, tokens, heads": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "columns first": lambda x: np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3),
    "backwards": lambda x: x[:, ::-1, ::-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_read_in_place(layout, rng, monkeypatch):
    arrays = [LAYOUTS[layout](x) for x in problem(rng, heads=(2, 2), key_heads=(2, 1), n=3)]
    seen = []
    original = _place._slices
    monkeypatch.setattr(_place, "_slices", lambda heads, size: seen.append(heads) or original(heads, size))
    monkeypatch.setattr(Cuda, "upload", only_small(Cuda.upload))
    out, info = attention(*map(Foreign, arrays), **EXACT)
    close(host(out), arrays)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(4))
    _, expected = attention(*map(np.ascontiguousarray, arrays), **EXACT)
    np.testing.assert_allclose(info.error_limit, expected.error_limit, rtol=1e-5)


def only_small(upload):
    """`upload`, but a failure for what could be q, k or v."""

    def checked(self, array):
        assert array.size < 12
        return upload(self, array)

    return checked


def test_keys_and_values_in_layouts_of_their_own(rng):
    q, k, v = problem(rng, heads=(2, 2), n=2)
    v = np.ascontiguousarray(v.swapaxes(1, 2)).swapaxes(1, 2)
    close(host(attention(Foreign(q), Foreign(k), Foreign(v), method="exact")), (q, k, v))


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_out_on_the_gpu(name, rng):
    arrays = problem(rng, heads=(1, 2), n=3, dtype=dtype_named(name))
    typestr = "<V2" if name == "bfloat16" else None
    given = [Foreign(x, typestr=typestr) for x in arrays]
    plain = host(attention(*given, method="exact"))
    around = np.zeros((1, 3, 2, 6), arrays[0].dtype)
    for memory in (np.zeros_like(plain), around[..., ::2].swapaxes(1, 2)):
        out = Foreign(memory, typestr=typestr)
        assert attention(*given, out=out, method="exact") is out
        np.testing.assert_array_equal(memory, plain)
    assert not around[..., 1::2].any()


def test_values_are_checked_on_the_gpu(rng):
    q, k, v = problem(rng)
    k[1, 6, 2] = np.inf
    with pytest.raises(ValueError, match=r"k must be finite.*head 1, token 6, column 2"):
        attention(Foreign(q), Foreign(k), Foreign(v))
    swapped = [np.ascontiguousarray(np.stack([x, x]).swapaxes(1, 2)).swapaxes(1, 2) for x in (q, np.ones_like(k), v)]
    swapped[2][1, 1, 3, 1] = np.nan
    with pytest.raises(ValueError, match=r"v must be finite.*head 1, token 3, column 1.*counted from 2 on"):
        attention(*map(Foreign, swapped))


def test_without_checks_and_info_nothing_waits(rng, monkeypatch):
    arrays = problem(rng, heads=(1,))
    for name in ("download", "synchronize"):
        monkeypatch.setattr(Cuda, name, lambda *_: pytest.fail("waited for the device"))
    out = attention(*map(Foreign, arrays), method="exact", check_finite=False)
    close(host(out), arrays)


def test_the_callers_stream(rng, monkeypatch):
    opened = []
    original = _place.open_stream
    monkeypatch.setattr(_place, "open_stream", lambda handle=None: opened.append(handle) or original(handle))
    arrays = problem(rng, heads=(1,), n=2)
    attention(*(Foreign(x, stream=77) for x in arrays), method="exact")
    attention(*map(Foreign, arrays), method="exact")
    assert opened == [77, 0]


# --- tensors: DLPack, and results of the caller's library ---


@pytest.fixture
def torch(monkeypatch):
    """PyTorch, whose tensors on the host are said to be on a GPU."""
    torch = pytest.importorskip("torch")
    original = _arrays._dlpack_device
    monkeypatch.setattr(_arrays, "_dlpack_device", lambda x: (2, 0) if isinstance(x, torch.Tensor) else original(x))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: type("Stream", (), {"cuda_stream": 5}))
    return torch


@pytest.mark.parametrize("name", ROUNDING)
def test_tensors(name, torch, rng):
    arrays = [torch.from_numpy(x).to(getattr(torch, name)) for x in problem(rng, heads=(1,))]
    out = attention(*arrays, method="exact")
    assert isinstance(out, torch.Tensor)
    assert out.dtype == arrays[0].dtype
    close(out.double().numpy(), [x.double().numpy() for x in arrays], ROUNDING[name])


def test_export_by_dlpack(torch, rng):
    """How a result becomes an array of JAX: whoever takes it keeps the memory alive, and lets go of it in the end."""
    array = rng.standard_normal((2, 3)).astype(np.float32)
    described = _arrays.describe("out", Foreign(array))
    taken = np.from_dlpack(_arrays._Exported(described))
    np.testing.assert_array_equal(taken, array)
    assert len(_arrays._EXPORTED) == 1
    del taken
    assert not _arrays._EXPORTED
    bits = np.array([[0x3F80, 0x4000]], np.int16)
    brain = _arrays.GpuArray("jax", None, bits, bits.ctypes.data, (1, 2), (4, 2), _arrays.BFLOAT16)
    assert torch.from_dlpack(_arrays._Exported(brain)).tolist() == [[1.0, 2.0]]


# --- rounding to 16 bits ---


def test_rounding_is_that_of_numpy(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.concatenate([10.0 ** rng.uniform(-9, 6, 60), [0.0, 65520.0, np.inf, np.nan, 1 + 2**-9, 1 + 3 * 2**-9]])
    x = (x * rng.choice([-1, 1], x.shape)).astype(np.float32).reshape(1, 11, 6)
    device = Cuda()
    for dtype, seen in ((np.float16, np.float16), (ml_dtypes.bfloat16, np.int16)):
        out = device.empty(x.shape, seen)
        with np.errstate(over="ignore"):
            device.store(device.upload(x), 0, out)
            expected = x.astype(dtype)
        np.testing.assert_array_equal(host(out).view(dtype).astype(np.float64), expected.astype(np.float64))


# --- judging an output ---


@pytest.mark.slow
def test_judging_an_output(rng):
    """The same draws and nearly the same numbers wherever the arrays lie, in one chunk or in several."""
    arrays = problem(rng, heads=(2,), n=12)
    out = attention(*arrays, method="exact")
    out[0, 3] += 0.1
    expected = pda_numba.estimate_error(out, *arrays, n_rows=6)
    swapped = Foreign(np.ascontiguousarray(out.swapaxes(0, 1)).swapaxes(0, 1))
    found = [
        pda_numba.estimate_error(swapped, *map(Foreign, arrays), n_rows=6),
        pda_numba.estimate_error(out, *arrays, n_rows=6, device="cuda"),
    ]
    for one in found:
        for name in ("error", "error_limit", "row_error", "row_share", "n_rows"):
            np.testing.assert_allclose(getattr(one, name), getattr(expected, name), rtol=1e-3, atol=1e-6)
    spoiled = out.copy()
    spoiled[1, 2, 0] = np.inf
    for given, others in ((spoiled, {"device": "cuda"}), (Foreign(spoiled), {})):
        wrap = Foreign if isinstance(given, Foreign) else np.asarray
        with pytest.raises(ValueError, match="out must be finite"):
            pda_numba.estimate_error(given, *map(wrap, arrays), **others)
    with pytest.raises(TypeError, match="out must be on a GPU"):
        pda_numba.estimate_error(out, *map(Foreign, arrays))
