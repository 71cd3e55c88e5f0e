"""The examples: they train, say what came of it, and go on from a checkpoint as if nothing had been."""

import csv
import functools
import gzip
import http.server
import io
import sys
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("autograd")
pytest.importorskip("matplotlib")

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import fetch_documents
import long_documents
import masked_characters
import training

SUBJECTS = {"apes": "gorilla bonobo gibbon ", "boats": "keel rudder anchor ", "cheese": "rind curd whey "}


def member(name, content):
    """A file in an ar archive, by the format's description."""
    header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
    return header + content + b"\n" * (len(content) % 2)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A Debian package with documents of three subjects, and some that are not wanted."""
    rng, data = np.random.default_rng(0), io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as tar:

        def add(path, content):
            about = tarfile.TarInfo("./usr/share/doc/linux-doc-6.1/" + path)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))

        for subject, words in SUBJECTS.items():
            for i in range(10):
                text = " ".join(rng.choice(words.split(), 2000)).encode()
                add(f"Documentation/{subject}/{i}.rst.gz", gzip.compress(text))
            add(f"Documentation/{subject}/short.rst", b"too short")
            add(f"Documentation/{subject}/figure.svg", b"x" * 10_000)
        add("Documentation/translations/long.txt", b"x" * 10_000)
        add("Documentation/index.rst", b"x" * 10_000)
    path = tmp_path_factory.mktemp("mirror") / "linux-doc-6.1_6.1.9-1_all.deb"
    parts = member("debian-binary", b"2.0\n"), member("control.tar.xz", b"odd"), member("data.tar.xz", data.getvalue())
    path.write_bytes(b"!<arch>\n" + b"".join(parts))
    path.with_name("linux-doc-6.1_6.1.10-1_all.deb").write_bytes(path.read_bytes())
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_documents, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(params=["characters", "documents"])
def example(request, package):
    """An example as a function of its output folder and options."""
    which = {"characters": (masked_characters, []), "documents": (long_documents, ["--archive", str(package)])}
    module, given = which[request.param]

    def call(out, *options):
        result = CliRunner().invoke(module.main, ["--out", str(out), "--quick", *given, *options])
        return result

    return call


def state(out):
    """What a checkpoint holds, without the times."""
    with np.load(out / "checkpoint.npz") as kept:
        return {name: kept[name][:, 0] if name.endswith("/log") else kept[name] for name in kept.files}


def test_trains_and_reports(example, tmp_path):
    result = example(tmp_path)
    assert result.exit_code == 0, result.output
    with open(tmp_path / "steps.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    for method in training.METHODS:
        losses = [float(line["loss"]) for line in lines if line["method"] == method]
        assert len(losses) == 12
        assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "runs.csv").read_text().splitlines()) == 1 + len(training.METHODS)
    assert "PDA" in (tmp_path / "report.md").read_text()


def test_resumes_to_the_bit(example, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for out, options in ((whole, ["4"]), (parts, ["2"]), (parts, ["4", "--resume"])):
        result = example(out, "--steps", *options)
        assert result.exit_code == 0, result.output
    expected, got = state(whole), state(parts)
    assert expected.keys() == got.keys()
    for name, x in expected.items():
        assert x.tobytes() == got[name].tobytes(), name


def test_refuses_to_resume_something_else(example, tmp_path):
    assert "nothing to resume" in example(tmp_path, "--resume").output
    assert example(tmp_path, "--steps", "1").exit_code == 0
    result = example(tmp_path, "--steps", "2", "--rank", "8", "--resume")
    assert result.exit_code == 1
    assert "other settings" in result.output


def test_gradients_by_hand(package, rng):
    """Against central differences, in float64."""
    task = long_documents.Documents(fetch_documents.documents(archive=package), tokens=200, buckets=64)
    p = {name: x.astype(np.float64) for name, x in task.initial(0).items()}
    of = functools.partial(task.gradient, batch=task.batch(0, 0), attend={"method": "exact"})
    _, gradients = of(p)
    assert gradients.keys() == p.keys()
    for name, x in p.items():
        step = 1e-7 * rng.standard_normal(x.shape)
        change = (of({**p, name: x + step})[0] - of({**p, name: x - step})[0]) / 2
        np.testing.assert_allclose((gradients[name] * step).sum(), change, rtol=1e-4, atol=1e-13, err_msg=name)


def test_characters_stay_in_float32():
    text = np.arange(1000) % 90
    task = masked_characters.Characters(text, text, tokens=300)
    _, gradients = task.gradient(task.initial(0), task.batch(0, 0), {"method": "exact"})
    assert {x.dtype for x in gradients.values()} == {np.dtype("float32")}


def test_heads_begin_by_looking_beside():
    task = masked_characters.Characters(np.zeros(300, int), np.zeros(300, int), tokens=200)
    p = task.initial(0)
    q, k = (task._turned(np.zeros((2, 200, task.head_dim)) + p[name]) for name in ("0.q0", "0.k0"))
    scores = q[:, 100] @ k[0].T
    assert scores.argmax(1).tolist() == [101, 99]


def test_documents_of_a_package(package, cache):
    documents = fetch_documents.documents(archive=package)
    assert [name for name, _ in documents] == sorted(10 * list(SUBJECTS))
    assert min(len(text) for _, text in documents) >= 8192
    assert fetch_documents.documents(url="nowhere.deb") == [list(x) for x in documents]  # from the cache
    assert [x.name for x in cache.iterdir()] == ["linux-doc-6.1.json.gz"]


def test_download_takes_the_newest(package, capsys):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=package.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        content = fetch_documents.download(f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()
    assert content == package.read_bytes()
    assert "6.1.10-1" in capsys.readouterr().err


def test_no_package():
    with pytest.raises(Exception, match="ar archive"):
        fetch_documents.documents_of(b"<html>")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
@pytest.mark.parametrize("method", training.METHODS)
def test_peak_of_a_step(package, method):
    task = long_documents.Documents(fetch_documents.documents(archive=package), tokens=2048)
    documents = len(task.batch(0, 0)[0][1])
    assert documents < training.peak_of_step(task, method, 16) < 1e9
