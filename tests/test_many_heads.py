"""The example that spreads heads over dask's workers: on its local schedulers, and on a cluster on this machine."""

import subprocess
import sys
from pathlib import Path

import naive
import numpy as np
import pytest

import pda_numba
from pda_numba.data import smooth_heads

pytest.importorskip("dask")

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import dask
import many_heads

CHOICES = {"rank": 16, "tol": None, "method": "pda"}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Four query heads that share two key heads, in files of the working directory."""
    monkeypatch.chdir(tmp_path)
    q, k, v = smooth_heads((4, 700, 8))
    for name, x in {"q": q, "k": k[:2], "v": v[:2]}.items():
        np.save(f"{name}.npy", x)
    return ["q.npy", "k.npy", "v.npy"]


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_tasks_are_calls_on_their_heads(files, scheduler, at_once):
    limits = dask.compute(*many_heads.attend_files(files, "o.npy", at_once, **CHOICES), scheduler=scheduler)
    out, (q, k, v) = np.load("o.npy"), (np.load(file) for file in files)
    assert len(limits) == -(-2 // at_once)
    for first in range(0, 2, at_once):
        part = slice(first, first + at_once)
        own = slice(2 * first, 2 * (first + at_once))
        expected, info = pda_numba.attention(q[own], k[part], v[part], return_info=True, **CHOICES)
        np.testing.assert_array_equal(out[own], expected)  # bit for bit, whatever runs beside it
        np.testing.assert_array_equal(limits[first // at_once], info.error_limit)
    exact = naive.attention_heads(q, k, v)
    for head in range(4):  # as in any call: at 95 % confidence, and these seeds are none of the others
        assert naive.relative(out[head], exact[head]) <= np.concatenate(limits)[head]


def test_the_command(files, capsys):
    many_heads.main([*files, "-o", "o.npy", "--tol", "0.2"])
    assert capsys.readouterr().out.count("error at most") == 4
    q, k, v = (np.load(file) for file in files)
    for head, exact in zip(np.load("o.npy"), naive.attention_heads(q, k, v), strict=True):
        assert naive.relative(head, exact) <= 0.2


@pytest.fixture
def cluster(request):
    """Two workers of the distributed scheduler, in this process or in processes of their own."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=request.param, dashboard_address=None
    ) as cluster:
        yield cluster.scheduler_address


def check_heads(printed):
    """The output of `--at-once 1`: each key head is a call of its own, bit for bit, whichever worker took it."""
    q, k, v = (np.load(f"{name}.npy") for name in "qkv")
    for head, out in enumerate(np.load("o.npy").reshape(2, 2, 700, 8)):
        own = slice(2 * head, 2 * head + 2)
        expected = pda_numba.attention(q[own], k[head : head + 1], v[head : head + 1], tol=0.2)
        np.testing.assert_array_equal(out, expected)
        for one, exact in zip(out, naive.attention_heads(q[own], k[[head]], v[[head]]), strict=True):
            assert naive.relative(one, exact) <= 0.2
    assert printed.count("error at most") == 4


@pytest.mark.parametrize("cluster", [False], indirect=True, ids=["threads"])
def test_a_cluster_in_this_process(files, cluster, capsys):
    many_heads.main([*files, "-o", "o.npy", "--tol", "0.2", "--scheduler", cluster])
    check_heads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [True], indirect=True, ids=["processes"])
def test_a_cluster_of_processes(files, cluster):
    """As on several machines: the workers know of nothing but files, and have the function from the scheduler."""
    assert cluster.startswith("tcp://")
    command = [sys.executable, many_heads.__file__, *files, "-o", "o.npy", "--tol", "0.2", "--scheduler", cluster]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    check_heads(done.stdout)


def test_wrong_files_are_told_before_any_task(files):
    np.save("k.npy", np.zeros((3, 700, 8), np.float32))
    with pytest.raises(ValueError, match="k and v must have the same leading axes"):
        many_heads.attend_files(files, "o.npy")
    assert not Path("o.npy").exists()
