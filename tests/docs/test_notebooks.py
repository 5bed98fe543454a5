"""The guide's notebooks: kept with the output of all their cells, and run by the slow tests."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from docs.notebooks import FOLDER, executed
from tests.docs import test_docs

ROOT = test_docs.ROOT
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell: NotebookNode) -> Iterator[str]:
    for output in cell.outputs:
        yield from (str(value) for value in output.get("data", {}).values())
        yield output.get("text", "")


def test_each_kind_of_user_has_one():
    assert [path.stem for path in NOTEBOOKS] == ["ci", "language-model", "module", "onnx-file"]
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert all(f"](notebooks/{path.name})" in index for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_are_kept_as_they_ran(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert {"stream"} <= kinds <= {"stream", "execute_result"}
    shown = [text for cell in cells for text in texts(cell)]
    assert not [text for text in shown if re.search(r"\x1b|/home/|/root/|/work/(?!out)", text)]
    for cell in cells:
        if cell.source.startswith("%%sh"):
            assert cell.outputs, cell.source
            for line in re.findall(r"^(compress .+?)(?: 2>&1| \|\| .*)?$", cell.source, re.M):
                test_docs.test_commands_exist_with_their_arguments_and_options(path.name, line)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kept, ran = nbformat.read(path, as_version=4), executed(path, tmp_path)
    for before, after in zip(code(kept), code(ran), strict=True):
        kinds = [[output.output_type for output in cell.outputs] for cell in (before, after)]
        assert kinds[0] == kinds[1], before.source
