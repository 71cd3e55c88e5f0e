"""Bad input: the type of each error, that it names the argument and what it was, and that nothing has been touched."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pda_numba
from pda_numba import attention

N, M, D, E = 12, 9, 5, 3


def arrays(dtype=np.float32, lead=()):
    rng = np.random.default_rng(1)
    shapes = {"q": (N, D), "k": (M, D), "v": (M, E)}
    return {name: rng.standard_normal((*lead, *shape)).astype(dtype) for name, shape in shapes.items()}


def call(**changes):
    return attention(**{**arrays(), **changes})


def spoiled(name, value):
    array = arrays()[name]
    array[4, 1] = value
    return {name: array}


def with_lists():
    return {"q": arrays()["q"].tolist()}


NAN, INF = float("nan"), float("inf")

CASES = {
    # arrays: type, dtype, axes
    "list": (with_lists(), TypeError, ["q", "NumPy array", "list"]),
    "None": ({"v": None}, TypeError, ["v", "NumPy array", "NoneType"]),
    "integers": ({"k": np.ones((M, D), int)}, TypeError, ["k", "float32", "int64"]),
    "booleans": ({"v": np.ones((M, E), bool)}, TypeError, ["v", "bool"]),
    "complex": ({"q": np.ones((N, D), complex)}, TypeError, ["q", "complex128"]),
    "objects": ({"q": np.ones((N, D), object)}, TypeError, ["q", "object"]),
    "strings": ({"q": np.full((N, D), "a")}, TypeError, ["q", "<U1"]),
    "long double": ({"q": np.ones((N, D), np.longdouble)}, TypeError, ["q", str(np.dtype(np.longdouble))]),
    "byte order": ({"q": np.ones((N, D), ">f4")}, TypeError, ["q", "native byte order", ">f4"]),
    "masked": ({"q": np.ma.masked_array(np.ones((N, D), np.float32))}, TypeError, ["q", "masked"]),
    "mixed dtypes": ({"k": np.ones((M, D))}, TypeError, ["q and k", "float32", "float64"]),
    "mixed values": ({"v": np.ones((M, E), np.float16)}, TypeError, ["q and v", "float32", "float16"]),
    "one axis": ({"q": np.ones(D, np.float32)}, ValueError, ["q", "two axes", "(5,)"]),
    "no axes": ({"q": np.float32(1) * np.ones((), np.float32)}, (TypeError, ValueError), ["q"]),
    # arrays: shapes
    "more axes": ({"q": np.ones((2, N, D), np.float32)}, ValueError, ["q, k and v", "(2, 12, 5)", "(9, 5)"]),
    "dimension": ({"k": np.ones((M, D + 1), np.float32)}, ValueError, ["q and k", "(12, 5)", "(9, 6)"]),
    "keys": ({"v": np.ones((M + 1, E), np.float32)}, ValueError, ["k and v", "(9, 5)", "(10, 3)"]),
    "no keys": (
        {"k": np.ones((0, D), np.float32), "v": np.ones((0, E), np.float32)},
        ValueError,
        ["at least one key", "(0, 5)"],
    ),
    "no columns": ({"q": np.ones((N, 0), np.float32), "k": np.ones((M, 0), np.float32)}, ValueError, ["one column"]),
    "heads": ({**arrays(lead=(2,)), "q": arrays(lead=(3,))["q"]}, ValueError, ["multiple", "3", "2"]),
    "key heads": ({**arrays(lead=(2,)), "v": arrays(lead=(4,))["v"]}, ValueError, ["k and v", "(4, 9, 3)"]),
    "batch": ({**arrays(lead=(2, 1)), "q": arrays(lead=(3, 1))["q"]}, ValueError, ["broadcast", "(3, 1, 12, 5)"]),
    # arrays: values
    "NaN in q": (spoiled("q", NAN), ValueError, ["q", "finite", "token 4", "column 1"]),
    "inf in k": (spoiled("k", INF), ValueError, ["k", "finite", "token 4", "column 1"]),
    "-inf in v": (spoiled("v", -INF), ValueError, ["v", "finite", "check_finite=False"]),
    # options
    "rank 0": ({"rank": 0}, ValueError, ["rank", "at least 1", "0"]),
    "rank -3": ({"rank": -3}, ValueError, ["rank", "-3"]),
    "rank 2.0": ({"rank": 2.0}, TypeError, ["rank", "integer", "2.0"]),
    "rank True": ({"rank": True}, TypeError, ["rank", "integer", "True"]),
    "rank 'auto'": ({"rank": "auto"}, TypeError, ["rank", "integer", "'auto'"]),
    "tol 0": ({"tol": 0}, ValueError, ["tol", "above 0", "0"]),
    "tol -1": ({"tol": -1.0}, ValueError, ["tol", "-1.0"]),
    "tol NaN": ({"tol": NAN}, ValueError, ["tol", "nan"]),
    "tol inf": ({"tol": INF}, ValueError, ["tol", "inf"]),
    "tol text": ({"tol": "1e-2"}, TypeError, ["tol", "number", "'1e-2'"]),
    "tol True": ({"tol": True}, TypeError, ["tol", "True"]),
    "proj_dim 0": ({"proj_dim": 0}, ValueError, ["proj_dim", "0"]),
    "proj_dim too large": ({"proj_dim": D + 1}, ValueError, ["proj_dim", "head dimension 5", "6"]),
    "proj_dim 2.5": ({"proj_dim": 2.5}, TypeError, ["proj_dim", "2.5"]),
    "projection": ({"projection": "fft"}, ValueError, ["projection", "'srht'", "'fft'"]),
    "calibrate": ({"calibrate": 1}, TypeError, ["calibrate", "True or False", "1"]),
    "window -1": ({"window": -1}, ValueError, ["window", "-1"]),
    "window too wide": ({"window": max(N, M)}, ValueError, ["window", "12"]),
    "window text": ({"window": "wide"}, ValueError, ["window", "'wide'"]),
    "window 1.5": ({"window": 1.5}, TypeError, ["window", "1.5"]),
    "window None": ({"window": None}, TypeError, ["window", "None"]),
    "scale 0": ({"scale": 0.0}, ValueError, ["scale", "0.0"]),
    "scale -1": ({"scale": -1}, ValueError, ["scale", "-1"]),
    "scale NaN": ({"scale": NAN}, ValueError, ["scale", "nan"]),
    "scale text": ({"scale": "1"}, TypeError, ["scale", "'1'"]),
    "method": ({"method": "fast"}, ValueError, ["method", "'exact'", "'fast'"]),
    "method None": ({"method": None}, ValueError, ["method", "None"]),
    "device": ({"device": "tpu"}, ValueError, ["device", "'cpu'", "'tpu'"]),
    "device 0": ({"device": 0}, ValueError, ["device", "0"]),
    "seed -1": ({"seed": -1}, ValueError, ["seed", "-1"]),
    "seed too large": ({"seed": 2**63}, ValueError, ["seed", str(2**63)]),
    "seed None": ({"seed": None}, TypeError, ["seed", "None"]),
    "seed 0.5": ({"seed": 0.5}, TypeError, ["seed", "0.5"]),
    "check_finite": ({"check_finite": "no"}, TypeError, ["check_finite", "'no'"]),
    "progress": ({"progress": 2}, TypeError, ["progress", "2"]),
    "return_info": ({"return_info": None}, TypeError, ["return_info", "None"]),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_argument(name):
    changes, kind, words = CASES[name]
    lead = changes["q"].shape[:-2] if set(changes) == {"q", "k", "v"} else ()
    out = np.full((*lead, N, E), 7, np.float32)
    with pytest.raises(kind) as caught:
        call(out=out, **changes)
    assert type(caught.value) in (kind if isinstance(kind, tuple) else (kind,))
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert (out == 7).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_place_of_a_value_that_is_not_finite(name, value):
    """The first bad token of the first bad head, also beyond the first few thousand tokens and in 16-bit arrays."""
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if name == "bfloat16" else np.dtype(name)
    q, k, v = np.ones((2, 3, 4), dtype), np.ones((2, 9000, 4), dtype), np.ones((2, 9000, 2), dtype)
    k[1, 8500, 3] = k[1, 8999, 0] = value
    with pytest.raises(ValueError, match=r"^k must be finite.* head 1, token 8500, column 3;"):
        attention(q, k, v)


def test_large_values_are_finite():
    """Squares that overflow do not make an array infinite."""
    given = arrays()
    given["v"] *= np.float32(1e30)
    assert np.isfinite(attention(**given)).all()


def test_cuda_is_refused_with_a_reason():
    out = np.full((N, E), 7, np.float32)
    with pytest.raises(RuntimeError, match="device='cuda'"):
        call(device="cuda", out=out)
    assert (out == 7).all()


def read_only():
    out = np.zeros((N, E), np.float32)
    out.flags.writeable = False
    return out


OUTS = {
    "list": ([[0.0]], TypeError, ["NumPy array", "list"]),
    "shape": (np.zeros((N, E + 1), np.float32), ValueError, ["(12, 3)", "(12, 4)"]),
    "axes": (np.zeros((1, N, E), np.float32), ValueError, ["(12, 3)", "(1, 12, 3)"]),
    "dtype": (np.zeros((N, E)), TypeError, ["float32", "float64"]),
    "read-only": (read_only(), ValueError, ["writable", "read-only"]),
}


@pytest.mark.parametrize("name", OUTS)
def test_bad_out(name):
    out, kind, words = OUTS[name]
    before = np.array(out).tobytes()
    with pytest.raises(kind) as caught:
        call(out=out)
    message = str(caught.value)
    assert message.startswith("out must")
    assert all(word in message for word in words), message
    assert np.array(out).tobytes() == before


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_that_overlaps_an_input(name):
    pool = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    given = {n: np.ones((20, 4), np.float32) for n in "qkv"} | {name: pool[:20]}
    before = pool.tobytes()
    for out in (pool[:20], pool[19:39], pool[:20][::-1]):
        with pytest.raises(ValueError, match=f"out must not overlap {name}"):
            attention(**given, out=out)
    assert pool.tobytes() == before
    assert attention(**given, out=pool[20:]) is not None


def test_interleaved_out_is_allowed():
    """Every other column of one array is the query, the rest the output: bounds overlap, memory does not."""
    pool = np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)
    k, v = np.ones((5, 4), np.float32), np.ones((5, 4), np.float32)
    out = attention(pool[:, ::2], k, v, out=pool[:, 1::2])
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)  # five roundings


def test_non_finite_output_of_estimate():
    given = arrays()
    out = attention(**given)
    out[0, 0] = np.nan
    with pytest.raises(ValueError, match="out must be finite"):
        pda_numba.estimate_error(out, **given)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"out": [1]}, TypeError, ["out", "list"]),
        ({"out": np.zeros((N, E + 1), np.float32)}, ValueError, ["out", "(12, 3)", "(12, 4)"]),
        ({"out": np.zeros((N, E))}, TypeError, ["out and q", "float64", "float32"]),
        ({"n_rows": 0}, ValueError, ["n_rows", "0"]),
        ({"n_rows": 1.5}, TypeError, ["n_rows", "1.5"]),
        ({"seed": -1}, ValueError, ["seed", "-1"]),
        ({"scale": 0}, ValueError, ["scale", "0"]),
        ({"device": "tpu"}, ValueError, ["device", "'tpu'"]),
        ({"check_finite": 1}, TypeError, ["check_finite", "1"]),
        (spoiled("k", NAN), ValueError, ["k", "finite"]),
    ],
)
def test_bad_argument_of_estimate(changes, kind, words):
    given = {"out": np.zeros((N, E), np.float32), **arrays(), **changes}
    with pytest.raises(kind) as caught:
        pda_numba.estimate_error(**given)
    assert type(caught.value) is kind
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("args", "options", "kind", "words"),
    [
        ((np.ones((4, 3), int), 2), {}, TypeError, ["x", "int64"]),
        ((np.ones((4, 3)), 4), {}, ValueError, ["proj_dim", "dimension 3", "4"]),
        ((np.ones((4, 3)), 0), {}, ValueError, ["proj_dim", "0"]),
        ((np.ones((4, 3)), 2), {"kind": "pca"}, ValueError, ["kind", "'srht'", "'pca'"]),
        ((np.ones((4, 3)), 2), {"seed": -1}, ValueError, ["seed", "-1"]),
    ],
)
def test_bad_argument_of_project(args, options, kind, words):
    with pytest.raises(kind) as caught:
        pda_numba.project(*args, **options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("args", "options", "kind", "words"),
    [
        ((0, 1), {}, ValueError, ["dim", "0"]),
        ((4, 5), {}, ValueError, ["proj_dim", "5"]),
        ((4, 2), {"dtype": np.float16}, TypeError, ["dtype", "float16"]),
        ((4, 2), {"kind": 3}, ValueError, ["kind", "3"]),
    ],
)
def test_bad_argument_of_projection_matrix(args, options, kind, words):
    with pytest.raises(kind) as caught:
        pda_numba.projection_matrix(*args, **options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        (((5, 4), (6, 3), (6, 2)), {}, ["q and k", "(5, 4)", "(6, 3)"]),
        (((5, 4), (0, 4), (0, 2)), {}, ["at least one key"]),
        (((5, 4), (6, 4), (6, 2)), {"rank": 0}, ["rank", "0"]),
        (((5, 4), (6, 4), (6, 2)), {"tol": -1}, ["tol", "-1"]),
        (((5, 4), (6, 4), (6, 2)), {"method": "x"}, ["method", "'x'"]),
    ],
)
def test_bad_argument_of_plan(shapes, options, words):
    with pytest.raises(ValueError, match=r"must") as caught:
        pda_numba.plan(*shapes, **options)
    assert all(word in str(caught.value) for word in words), caught.value


# --- random junk: an error of the two kinds that names the option, or a right answer ---


def outcome(function):
    """(result, None), or (None, message) of an error of the two kinds that are allowed."""
    try:
        return function(), None
    except (TypeError, ValueError) as error:
        return None, str(error)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["auto", "pda", "exact", "cpu", "srht"]),
    st.lists(st.integers(0, 3), max_size=2),
    st.builds(complex),
    st.builds(np.int8, st.integers(-3, 9)),
    st.builds(np.float32, st.floats(width=32)),
)
OPTIONS = ("rank", "tol", "proj_dim", "projection", "calibrate", "window", "scale", "method", "device", "seed")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from([*OPTIONS, "check_finite", "return_info"]), JUNK, min_size=1, max_size=3))
def test_random_options(options):
    out = np.full((N, E), 7, np.float32)
    result, message = outcome(lambda: call(out=out, **options))
    if message:
        assert any(message.startswith(name) for name in options), message
        assert (out == 7).all()
    else:
        assert (result[0] if options.get("return_info") else result) is out
        assert np.isfinite(out).all()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(*(st.lists(st.integers(0, 3), min_size=0, max_size=4) for _ in range(3)))
def test_random_shapes(a, b, c):
    """Whatever the shapes are: a ValueError that shows them, or a result of the right shape."""
    q, k, v = (np.ones(s, np.float32) for s in (a, b, c))
    out, message = outcome(lambda: attention(q, k, v))
    if message:
        assert any(str(tuple(s)) in message for s in (a, b, c)), message
    else:
        assert out.shape == (*out.shape[:-2], a[-2], c[-1])
        np.testing.assert_allclose(out, 1.0, rtol=1e-6)  # five roundings


def test_out_that_overlaps_itself_is_refused(rng):
    q, k, v = (rng.standard_normal((50, 3), np.float32) for _ in range(3))
    out = np.lib.stride_tricks.as_strided(np.zeros(200, np.float32), (50, 3), (4, 4))
    with pytest.raises(ValueError, match="out must have room for every element"):
        pda_numba.attention(q, k, v, out=out)


def test_sums_that_would_overflow_are_refused():
    zero, large = np.zeros((4000, 8), np.float32), np.full((4000, 2), 1e36, np.float32)
    with pytest.raises(ValueError, match="v must be small enough"):
        pda_numba.attention(zero, zero, large)
    with pytest.raises(ValueError, match="scale must be representable"):
        pda_numba.attention(zero, zero, zero, scale=1e300)
    with pytest.raises(ValueError, match=r"q \. k must be small enough"):
        pda_numba.attention(zero + np.float32(1e25), zero + np.float32(1e25), zero)
