"""Arrays of CuPy, PyTorch, JAX and Numba on a real card: in place, on the caller's stream; NumPy arrays in chunks."""

import naive
import numpy as np
import pytest

from pda_numba import _streamed, attention
from pda_numba.device import Cuda

pytestmark = pytest.mark.gpu

PDA = {"rank": 64, "method": "pda", "tol": None}


def make(rng, lead=(2, 4), n=700, d=64, e=48):
    spread = 3.0 / (1 + np.arange(d))
    return [
        (s * rng.standard_normal((*lead, n, c))).astype(np.float32) for c, s in ((d, spread), (d, spread), (e, 1.0))
    ]


def oracle(arrays):
    return naive.attention_heads(*arrays)


# --- NumPy arrays, chunk by chunk ---


@pytest.mark.parametrize("options", [{"method": "exact"}, PDA])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_chunks_of_any_size(heads, options, rng, monkeypatch):
    """As all heads at once, but for rounding: how the keys are split depends on how many heads go together."""
    arrays = make(rng, lead=(6,))
    plain = attention(*arrays, device="cuda", **options)
    counts = []
    monkeypatch.setattr(_streamed.Streamed, "_fit", fixed(heads, counts))
    monkeypatch.setattr(_streamed, "_STAGE_BYTES", 100_000)
    out = attention(*arrays, device="cuda", **options)
    assert counts == [-(-6 // heads)]
    # By low rank another rounding may choose another landmark: the same to within the error of rank 64.
    assert naive.relative(out, plain) < (0.2 if options is PDA else 2e-6)
    assert attention(*arrays, device="cuda", **options).tobytes() == out.tobytes()


def fixed(heads, counts):
    """A `_fit` with chunks of so many heads."""

    def fit(self, _size, _workspace):
        every = np.arange(len(self.problem.query_head))
        chunks = [_streamed._Chunk(self, every[i : i + heads]) for i in range(0, len(every), heads)]
        counts.append(len(chunks))
        return chunks, min(2, len(chunks))

    return fit


def test_little_free_memory(rng, monkeypatch):
    arrays = make(rng, lead=(8,))
    monkeypatch.setattr(Cuda, "free_bytes", lambda self: 3_000_000)
    out = attention(*arrays, device="cuda", method="exact")
    for head, exact in enumerate(oracle(arrays)):
        assert naive.relative(out[head], exact) < 1e-5
    monkeypatch.setattr(Cuda, "free_bytes", lambda self: 300_000)
    with pytest.raises(MemoryError, match=r"bytes of device memory for one head.*are free; use device='cpu'"):
        attention(*arrays, device="cuda", method="exact")


def test_free_memory_is_asked_for():
    assert 0 < Cuda().free_bytes() < 2**50


# --- CuPy ---


@pytest.fixture
def cupy():
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.runtime.getDeviceCount():
        pytest.skip("CuPy finds no GPU")
    return cupy


@pytest.mark.parametrize("options", [{"method": "exact"}, PDA])
def test_cupy(cupy, options, rng):
    arrays = make(rng)
    on_gpu = [cupy.asarray(x) for x in arrays]
    out, info = attention(*on_gpu, return_info=True, **options)
    assert isinstance(out, cupy.ndarray)
    assert info.device == "cuda"
    exact = oracle(arrays)
    for head in np.ndindex(2, 4):
        assert naive.relative(cupy.asnumpy(out)[head], exact[head]) <= 1.1 * info.error_limit[head] + 1e-5
    given = cupy.empty_like(out)
    assert attention(*on_gpu, out=given, **options) is given
    assert (given == out).all()


def test_cupy_strides_and_stream(cupy, rng):
    arrays = make(rng)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        swapped = [cupy.asarray(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in arrays]
        backwards = [x[:, ::-1, ::-1] for x in swapped]
        first = attention(*swapped, method="exact", check_finite=False)
        second = attention(*backwards, method="exact", check_finite=False)
        half = (first - second[:, ::-1, ::-1]).astype(cupy.float64)  # in the order of the stream
        stream.synchronize()
    assert float(cupy.abs(half).max()) < 1e-5
    assert naive.relative(cupy.asnumpy(first), oracle(arrays)) < 1e-5


def test_cupy_half_precision(cupy, rng):
    arrays = [x.astype(np.float16) for x in make(rng)]
    out = attention(*(cupy.asarray(x) for x in arrays), method="exact")
    assert out.dtype == np.float16
    assert naive.relative(cupy.asnumpy(out), oracle([x.astype(np.float64) for x in arrays])) < 2.0**-11


# --- PyTorch ---


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch finds no GPU")
    return torch


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("options", [{"method": "exact"}, PDA])
def test_torch(torch, options, name, rng):
    dtype = getattr(torch, name)
    arrays = [torch.from_numpy(x).to(dtype).cuda() for x in make(rng)]
    out, info = attention(*arrays, return_info=True, **options)
    assert out.dtype == dtype
    assert out.device == arrays[0].device
    exact = oracle([x.double().cpu().numpy() for x in arrays])
    rounding = {"float32": 1e-5, "float64": 1e-13, "float16": 2.0**-11, "bfloat16": 2.0**-8}[name]
    for head in np.ndindex(2, 4):
        limit = 0.0 if options["method"] == "exact" else 1.1 * info.error_limit[head]
        assert naive.relative(out[head].double().cpu().numpy(), exact[head]) <= np.hypot(limit, rounding)


def test_torch_layout_of_projections(torch, rng):
    """(batch, tokens, heads, dim), as a projection leaves it: read as it is."""
    arrays = make(rng)
    ours = [torch.from_numpy(np.ascontiguousarray(x.swapaxes(1, 2))).cuda().transpose(1, 2) for x in arrays]
    before = torch.cuda.memory_allocated()
    out = attention(*ours, method="exact")
    assert torch.cuda.memory_allocated() - before <= out.numel() * 4 + 2**20  # the output and nothing else
    assert naive.relative(out.cpu().numpy(), oracle(arrays)) < 1e-5


def test_torch_stream(torch, rng):
    arrays = [torch.from_numpy(x).cuda() for x in make(rng)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        slow = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            slow = slow @ slow / 64
        q = arrays[0] + 0 * slow[0, 0].nan_to_num(0, 0, 0)  # ready only when all that is
        out = attention(q, *arrays[1:], method="exact", check_finite=False)
        twice = 2 * out
    stream.synchronize()
    assert naive.relative(twice.cpu().numpy(), 2 * oracle([x.cpu().numpy() for x in arrays])) < 1e-5


def test_torch_that_requires_grad(torch):
    q = torch.ones(5, 4, device="cuda", requires_grad=True)
    with pytest.raises(TypeError, match=r"q must be readable in place.*detach"):
        attention(q, q, q)


# --- JAX and Numba ---


def test_jax(rng):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX finds no GPU")
    arrays = make(rng)
    for dtype, rounding in ((jax.numpy.float32, 1e-5), (jax.numpy.bfloat16, 2.0**-8)):
        ours = [jax.numpy.asarray(x, dtype) for x in arrays]
        out = attention(*ours, method="exact")
        assert isinstance(out, jax.Array)
        assert out.dtype == dtype
        exact = oracle([np.asarray(x, np.float64) for x in ours])
        assert naive.relative(np.asarray(out, np.float64), exact) < rounding
        with pytest.raises(ValueError, match="out must be writable"):
            attention(*ours, method="exact", out=out)


@pytest.mark.parametrize("options", [{"method": "exact"}, PDA])
def test_numba(options, rng):
    from numba import cuda

    arrays = make(rng, lead=(3,))
    stream = cuda.stream()
    ours = [cuda.to_device(x, stream=stream) for x in arrays]
    out, info = attention(*ours, return_info=True, **options)
    for head, exact in enumerate(oracle(arrays)):
        assert naive.relative(out.copy_to_host()[head], exact) <= 1.1 * info.error_limit[head] + 1e-5


def test_mixed_places(rng):
    from numba import cuda

    q, k, v = make(rng, lead=())
    with pytest.raises(TypeError, match="q and k must both be"):
        attention(cuda.to_device(q), k, v)
    with pytest.raises(ValueError, match="device must be 'cuda' or 'auto'"):
        attention(*map(cuda.to_device, (q, k, v)), device="cpu")
