"""Novels of some hundred thousand words that are in the public domain: Jane Austen's, from a Debian package of them.

    python examples/fetch_novel.py                      # downloads less than 2 MB
    python examples/fetch_novel.py --archive FILE.deb   # of `apt-get download r-cran-janeaustenr`

The package is made for R: its data file is a row of streams of zlib, each a vector of lines in R's serialised form.
Lines are joined to paragraphs. The texts are those of Project Gutenberg; they are kept in the user's cache directory.
"""

import os
import re
import struct
import zlib
from pathlib import Path

import click
import fetch_documents

MIRROR = "https://deb.debian.org/debian/pool/main/r/r-cran-janeaustenr/"
PACKAGE = re.compile(r"r-cran-janeaustenr_[\w.+~-]+_all\.deb")
NOVELS = ("emma", "mansfield-park", "northanger-abbey", "persuasion", "pride-and-prejudice", "sense-and-sensibility")
STRINGS = b"\x00\x00\x00\x10"  # R's type 16, without attributes


def lines_of(vector):
    """The strings of a serialised character vector: each a word of flags, its length, its bytes."""
    at = vector.index(STRINGS) + len(STRINGS)
    (count,) = struct.unpack_from(">i", vector, at)
    at += 4
    for _ in range(count):
        (size,) = struct.unpack_from(">i", vector, at + 4)
        yield vector[at + 8 : at + 8 + size].decode("utf-8")
        at += 8 + size


def novels_of(package):
    """By their names, the novels of a Debian package."""
    with fetch_documents.files_of(package) as tar:
        member = next((x for x in tar if x.name.endswith("/janeaustenr/data/Rdata.rdb")), None)
        if member is None:
            raise click.ClickException("the package has no data of janeaustenr")
        data = tar.extractfile(member).read()
    found = {}
    while data:
        stream = zlib.decompressobj()
        text = "\n".join(lines_of(stream.decompress(data[4:])))  # behind the length of what is compressed
        text = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
        found[re.sub(r"\W+", "-", text.partition("\n")[0]).lower()] = text
        data = stream.unused_data
    return found


def novel(name, url=MIRROR, archive=None):
    """The text of one novel: of `archive`, or from the cache, or from `url`."""
    folder = fetch_documents.cache_directory() / "novels"
    path = folder / f"{name}.txt"
    if archive is not None or not path.exists():
        package = fetch_documents.download(url, PACKAGE) if archive is None else Path(archive).read_bytes()
        folder.mkdir(parents=True, exist_ok=True)
        for title, text in novels_of(package).items():
            unfinished = folder / f"{title}.{os.getpid()}.part"  # two processes may be at it
            unfinished.write_bytes(text.encode())
            os.replace(unfinished, folder / f"{title}.txt")
    return path.read_bytes().decode()


@click.command(help=__doc__)
@click.option("--url", default=MIRROR, show_default=True, help="A .deb, or the folder of a mirror that has it.")
@click.option("--archive", type=click.Path(exists=True, dir_okay=False), help="A .deb that is here already.")
def main(url, archive):
    for name in NOVELS:
        text = novel(name, url, archive)
        click.echo(f"{name}: {len(text):,} characters")
    click.echo(f"in {fetch_documents.cache_directory() / 'novels'}")


if __name__ == "__main__":
    main()
