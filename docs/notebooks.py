"""Run the notebooks of the user guide, and keep them with their output: ``make notebooks``."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from nbclient import NotebookClient

if TYPE_CHECKING:
    from nbformat import NotebookNode

FOLDER = Path(__file__).parent / "notebooks"


def executed(path: Path, folder: Path) -> NotebookNode:
    """Return a notebook as its kernel leaves it, run from its first cell in an empty folder.

    What goes to the error stream is left out: progress, and what the libraries of one machine warn
    about. The folder, which is another one each time, is named ``~/work`` in what is printed.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, resources=where, record_timing=False).execute()
    for cell in notebook.cells:
        cell.get("outputs", [])[:] = _joined(cell.get("outputs", []), str(folder.resolve()))
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def _joined(outputs: list[NotebookNode], folder: str) -> list[NotebookNode]:
    """Return outputs with each run of printed pieces as one, without the error stream."""
    kept: list[NotebookNode] = []
    for output in outputs:
        if output.output_type != "stream":
            kept.append(output)
        elif output.name == "stdout":
            text = re.sub(re.escape(folder), "~/work", output.text)
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += text
            else:
                kept.append(nbformat.from_dict({**output, "text": text}))
    return kept


def main(names: list[str]) -> None:
    """Run the named notebooks, or all of them, and write them again."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                nbformat.write(executed(path, Path(folder)), path)


if __name__ == "__main__":
    main(sys.argv[1:])
