"""Real documents of many thousands of characters: the Linux kernel's documentation, from Debian's package of it.

    python examples/fetch_documents.py                      # downloads about 40 MB
    python examples/fetch_documents.py --archive FILE.deb   # of `apt-get download linux-doc-6.1`, say

What is kept, in the user's cache directory, are the texts of at least 8,192 characters with the directory they lie in.
Nothing but the standard library is needed to unpack the package: a .deb is an `ar` archive with a tar file in it.
The documentation is licensed by its authors, mostly under GPL-2.0; it is not part of this package.
"""

import gzip
import io
import json
import os
import re
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

import click

MIRROR = "https://deb.debian.org/debian/pool/main/l/linux/"
PACKAGE = re.compile(r"linux-doc-6\.1_[\w.+~-]+_all\.deb")
SHORTEST = 8192
# Translations repeat other documents; bindings of device trees are tables, told from text at first sight.
LEFT_OUT = {"translations", "devicetree"}


def cache_directory():
    """Where a user's caches are kept on this system."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "pda_numba"


def download(url, package=PACKAGE):
    """The Debian package at `url`; if that is a folder, the newest one there whose name `package` matches."""
    if not url.endswith(".deb"):
        with urllib.request.urlopen(url, timeout=60) as answer:
            names = set(package.findall(urllib.parse.unquote(answer.read().decode("utf-8", errors="replace"))))
        if not names:
            raise click.ClickException(f"no {package.pattern} in {url}; give --url of a .deb, or --archive")
        newest = max(names, key=lambda name: [int(x) for x in re.findall(r"\d+", name)])
        url = urllib.parse.urljoin(url, urllib.parse.quote(newest))
    click.echo(f"downloading {url}", err=True)
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


def members(archive):
    """Names and contents of an `ar` archive: headers of 60 bytes, contents filled up to an even length."""
    if not archive.startswith(b"!<arch>\n"):
        raise click.ClickException("this is no Debian package: it does not begin as an ar archive does")
    at = 8
    while at + 60 <= len(archive):
        name, size = archive[at : at + 16].decode("ascii").strip().rstrip("/"), int(archive[at + 48 : at + 58])
        yield name, archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2


def files_of(package):
    """The tar archive of the files that the Debian package installs."""
    data = next((x for name, x in members(package) if name.startswith("data.tar")), None)
    if data is None:
        raise click.ClickException("the package has no data.tar")
    return tarfile.open(fileobj=io.BytesIO(data), mode="r:*")


def documents_of(package):
    """(directory, text) of every long document, in the order of their paths."""
    found = []
    with files_of(package) as tar:
        for member in tar:
            _, _, path = member.name.partition("/Documentation/")
            directory, slash, _ = path.partition("/")
            if not (member.isfile() and slash and path.removesuffix(".gz").endswith((".rst", ".txt"))):
                continue
            if directory in LEFT_OUT:
                continue
            content = tar.extractfile(member).read()
            text = (gzip.decompress(content) if path.endswith(".gz") else content).decode("utf-8", errors="replace")
            if len(text) >= SHORTEST:
                found.append((path, directory, text))
    return [x[1:] for x in sorted(found)]


def documents(url=MIRROR, archive=None):
    """(directory, text) of every long document: of `archive`, or from the cache, or from `url`."""
    cached = cache_directory() / "linux-doc-6.1.json.gz"
    if archive is None and cached.exists():
        return json.loads(gzip.decompress(cached.read_bytes()))
    found = documents_of(Path(archive).read_bytes() if archive is not None else download(url))
    cached.parent.mkdir(parents=True, exist_ok=True)
    unfinished = cached.with_suffix(".part")
    unfinished.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))
    os.replace(unfinished, cached)
    return found


@click.command(help=__doc__)
@click.option("--url", default=MIRROR, show_default=True, help="A .deb, or the folder of a mirror that has it.")
@click.option("--archive", type=click.Path(exists=True, dir_okay=False), help="A .deb that is here already.")
def main(url, archive):
    found = documents(url, archive)
    click.echo(f"{len(found)} documents, {sum(len(text) for _, text in found):,} characters, in {cache_directory()}")


if __name__ == "__main__":
    main()
