"""Make the gallery's pictures from its scripts: `python docs/pictures.py`, or with the names of some of them.

They are kept in the repository: to build the documentation takes no kernels.
"""

import io
import runpy
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from PIL import Image

HERE = Path(__file__).parent
SCRIPTS = sorted((HERE / "gallery").glob("*.py"))
COLOURS = 128  # of a picture's palette


def make(script, folder):
    """Run one script and write its figure to `folder`; returns the names that the script leaves behind."""
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        names = runpy.run_path(str(script))
        drawn = io.BytesIO()
        names["figure"].savefig(drawn, dpi=110, facecolor="white")
        plt.close(names["figure"])
    picture = Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    picture.save(folder / f"{script.stem}.png", optimize=True)
    return names


if __name__ == "__main__":
    wanted = sys.argv[1:] or [script.stem for script in SCRIPTS]
    for name in wanted:
        make(HERE / "gallery" / f"{name}.py", HERE / "_static" / "gallery")
        print(name)
