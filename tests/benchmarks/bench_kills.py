"""A run is killed at every one of its file events; the output folder is never of two runs.

An earlier run has left its files. Before the n-th event that changes a file, the process of the
next run ends at once, as SIGKILL ends it. Whatever the folder then holds must be the files of one
run, which its manifest proves: before any other command, unless the switch is under way, and in
any case once it is settled. Every tenth time, the same command is run again and has to end in the
bytes of a run that nobody killed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from compressor.files import file_sha256, settle
from compressor.run.timing import timing
from tests.compressor.brief_timing import BRIEF
from tests.compressor.tiny_project import Project, onnx_project

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
AGAIN = 10
PASSES = {
    "first": [{"pass": "prune-magnitude", "sparsity": 0.5}],
    "next": [{"pass": "prune-magnitude", "sparsity": 0.25}, {"pass": "fuse"}],
}


def run(project: Project, name: str) -> None:
    """Run the project's spec: the first with an archive, the next without."""
    formats = ("safetensors", "onnx", "archive")[: 3 if name == "first" else 2]
    project.spec["passes"] = PASSES[name][:1]
    project.spec["exports"] = [{"format": f} for f in formats]
    torch.set_num_threads(1)
    with patch.multiple(timing, **BRIEF):
        project.run()


def in_child(function: Callable[[], None], events: int | None = None) -> tuple[int, int]:
    """Call a function in a process that ends before an event; return its exit code and events."""
    arrived, send = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def count(name: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            written = name == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
            if name in CHANGES or written:
                seen += 1
                if seen == events:
                    os._exit(9)

        sys.addaudithook(count)
        function()
        os.write(send, str(seen).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(arrived, "rb") as stream:
        text = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(text or b"0")


def state(output: Path) -> str:
    """Return which run all files of a folder are of: ``first``, ``next``, or ``mixed``."""
    manifest = json.loads((output / "manifest.json").read_text())
    stated = {entry["name"]: entry["sha256"] for entry in manifest["outputs"]}
    held = {p.name for p in output.iterdir() if not p.name.startswith(".")} - {"manifest.json"}
    whole = held == set(stated) and all(file_sha256(output / n) == h for n, h in stated.items())
    sparsity = manifest["spec"]["passes"][0]["sparsity"]
    name = next(n for n, passes in PASSES.items() if passes[0]["sparsity"] == sparsity)
    return name if whole else "mixed"


@pytest.mark.benchmark
@pytest.mark.timeout(3600)
def test_no_state_is_mixed(tmp_path: Path) -> None:
    project, whole = onnx_project(tmp_path / "project"), onnx_project(tmp_path / "whole")
    assert in_child(lambda: run(project, "first"))[0] == 0
    shutil.copytree(project.folder, whole.folder, dirs_exist_ok=True)
    code, total = in_child(lambda: run(whole, "next"))
    assert (code, state(project.output), state(whole.output)) == (0, "first", "next")
    found: Counter[str] = Counter()
    for event in range(1, total + 1):
        trial = Project(tmp_path / "trial", project.spec["model"])
        shutil.copytree(project.folder, trial.folder)
        code, _ = in_child(lambda trial=trial: run(trial, "next"), event)  # type: ignore[misc]
        found["killed"] += code == 9
        pending = (trial.output / ".switch").exists()
        found["in the switch"] += pending
        if not pending:
            found[f"before a command: {state(trial.output)}"] += 1
        settle(trial.output)
        found[f"settled: {state(trial.output)}"] += 1
        if event % AGAIN == 0:
            in_child(lambda trial=trial: run(trial, "next"))  # type: ignore[misc]
            same = trial.artifacts() == whole.artifacts() and state(trial.output) == "next"
            found["resumed to the same bytes"] += same
            found["resumed"] += 1
        shutil.rmtree(trial.folder)
    print(f"\n{total} file events of a run")
    for name, count in sorted(found.items()):
        print(f"{count:6} {name}")
    assert not found["settled: mixed"]
    assert not found["before a command: mixed"]
    assert found["resumed"] == found["resumed to the same bytes"]
    assert found["killed"] == total
