"""Turn the scripts in notebooks/ into executed pages of the gallery, each with its picture first.

With GPEXT_DATA set they are executed at full size on the real data; otherwise at the size of the tests, on generated
data where a notebook reads a file. A page is made again when its script, the package's version or that choice changes.
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

import gpext

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
_SMALL = """```{note}
The outputs below are of the small sizes of the test suite, on generated data where the notebook reads a file: remarks
on real data do not apply to them. `GPEXT_DATA=folder make docs` executes it at full size.
```"""
_PICTURES = {"chan_2013": 2}  # the number of the figure that represents a notebook, where it is not the first


def write(folder: Path) -> None:
    """Write a page and a picture into a folder for every notebook, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(partial(_write, folder), sorted(NOTEBOOKS.glob("*.py"))))


def _write(folder: Path, path: Path) -> None:
    is_full = "GPEXT_DATA" in os.environ
    page, picture = folder / f"{path.stem}.ipynb", folder / f"{path.stem}.png"
    state = hashlib.sha256(f"{path.read_text()} {gpext.__version__} {is_full}".encode()).hexdigest()
    if page.exists() and nbformat.read(page, 4).metadata.get("gpext") == state:
        return
    notebook = _executed(path, is_full)
    picture.write_bytes(_figures(notebook)[_PICTURES.get(path.stem, 0)])
    title, text = notebook.cells[0].source.split("\n", 1)
    size = "" if is_full else _SMALL
    notebook.cells[
        0
    ].source = f"{title}\n\n![A figure of this notebook]({picture.name}){{.gallery-picture}}\n\n{size}\n{text}"
    notebook.metadata["gpext"] = state
    nbformat.write(notebook, page)


def _executed(path: Path, is_full: bool) -> nbformat.NotebookNode:
    """Return the notebook of a script with its outputs."""
    notebook = jupytext.read(path)
    size = {} if is_full else {"GPEXT_SMOKE": "1"}
    client = nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(NOTEBOOKS.parent)}})
    client.execute(env=os.environ | size)
    return notebook


def _figures(notebook: nbformat.NotebookNode) -> list[bytes]:
    """Return the pictures among the outputs, in order."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [base64.b64decode(o.data["image/png"]) for o in outputs if "image/png" in o.get("data", {})]
