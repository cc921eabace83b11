"""Notebooks for tests: the chapters, and tiny ones."""

from __future__ import annotations

from pathlib import Path

import nbformat

from muonbook import jobs
from tools import run_notebooks, set_address

ROOT = Path(__file__).resolve().parents[3]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HERE = set_address.current(ROOT)


def first_cell(name: str) -> str:
    """Return what starts the notebook of this name, as committed."""
    return run_notebooks.first_cell(HERE.url, name)


PICTURE = """\
import numpy as np
from matplotlib.figure import Figure
from muonbook.figures import style

figure = Figure(figsize=(4, 3))
axes = figure.subplots()
axes.tick_params(labelsize=style.SMALL)
axes.plot(np.arange(4.0))
notebook.picture(figure, "A line that rises from 0 to 3, drawn to see that pictures are stored.")"""


def ran_first_cell(name: str) -> nbformat.NotebookNode:
    """Return that cell as it is stored; no comparison asks what it says of the machine."""
    said = nbformat.v4.new_output("stream", text=f"{jobs.READY}torch 2.11.0, 2 cores.\n")
    return nbformat.v4.new_code_cell(first_cell(name), execution_count=1, outputs=[said])


def tiny_notebook(path: Path, *cells: str) -> Path:
    """Write a notebook with the shared first cell and these code cells, and run it as `make notebooks` does."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_markdown_cell("# Tiny"),
        *map(nbformat.v4.new_code_cell, (first_cell(path.stem), *cells)),
    ]
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    run_notebooks.regenerate(path)
    return path
