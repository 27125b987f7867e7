"""Turn the scripts in notebooks/ into executed pages of the gallery, each with its picture first.

With GPEXT_DATA set they are executed at full size on the real data; otherwise at the size of the tests, on generated
data where a notebook reads a file; or not at all, to check the pages. A page is made again when its script, the
package's version or that choice changes.
"""

import base64
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jupytext
import nbclient
import nbformat
import numpy as np
from matplotlib import pyplot

import gpext

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
_SMALL = """```{note}
The outputs below are of the small sizes of the test suite, on generated data where the notebook reads a file: remarks
on real data do not apply to them. `GPEXT_DATA=folder make docs` executes it at full size.
```"""
_PICTURES = {"chan_2013": 2}  # the number of the figure that represents a notebook, where it is not the first


def write(folder: Path, execute: bool) -> None:
    """Write a page and a picture into a folder for every notebook, as many at a time as there are cores."""
    size = "none" if not execute else "full" if "GPEXT_DATA" in os.environ else "small"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(partial(_write, folder, size), sorted(NOTEBOOKS.glob("*.py"))))


def _write(folder: Path, size: str, path: Path) -> None:
    page, picture = folder / f"{path.stem}.ipynb", folder / f"{path.stem}.png"
    state = hashlib.sha256(f"{path.read_text()} {gpext.__version__} {size}".encode()).hexdigest()
    if page.exists() and nbformat.read(page, 4).metadata.get("gpext") == state:
        return
    notebook = jupytext.read(path)
    if size == "none":
        pyplot.imsave(picture, np.ones((1, 1, 3)))  # in its place, so that links to it are checked
    else:
        _execute(notebook, {} if size == "full" else {"GPEXT_SMOKE": "1"})
        picture.write_bytes(_figures(notebook)[_PICTURES.get(path.stem, 0)])
    title, text = notebook.cells[0].source.split("\n", 1)
    note = _SMALL if size == "small" else ""
    notebook.cells[
        0
    ].source = f"{title}\n\n![A figure of this notebook]({picture.name}){{.gallery-picture}}\n\n{note}\n{text}"
    notebook.metadata["gpext"] = state
    nbformat.write(notebook, page)


def _execute(notebook: nbformat.NotebookNode, settings: dict[str, str]) -> None:
    """Run the cells of a notebook, which then hold their outputs, with settings added to the environment."""
    client = nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(NOTEBOOKS.parent)}})
    client.execute(env=os.environ | settings)


def _figures(notebook: nbformat.NotebookNode) -> list[bytes]:
    """Return the pictures among the outputs, in order."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [base64.b64decode(o.data["image/png"]) for o in outputs if "image/png" in o.get("data", {})]
