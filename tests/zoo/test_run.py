"""The zoo's runner: limits, what follows a cell that had to be killed, and going on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.zoo.cases import cases

pytestmark = pytest.mark.slow  # each process imports PyTorch

# In a process of its own: the runner forks, which a process with threads must not.
SCRIPT = """
import sys, time
from pathlib import Path
from tests.zoo import one, run

def take(case, folder, skip):
    yield {"begins": "source"}
    yield {"cell": "source"}
    cells = {"plan": bool, "fuse": endless, "static": greedy, "prune": bool}
    for name, work in cells.items():
        if name not in skip:
            yield {"begins": name}
            work()
            yield {"cell": name, "code": 0}

def endless():
    while True:
        pass

def greedy():
    held = bytearray(run._BYTES)
    held[:] = b"x" * len(held)
    time.sleep(20)

one.take, run._preload = take, lambda: None
run.FOLDER, run._CPU_SECONDS = Path(sys.argv.pop(1)), 1
run.RESULTS, run._BYTES = run.FOLDER / "results.jsonl", 1 << 30
run.KEPT = run.FOLDER / "kept.jsonl"
run.main()
"""


def typed(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", SCRIPT, str(folder), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_cell_that_is_killed_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    said = typed(tmp_path, "small/unet")
    assert said.startswith("[1/1] small/unet")
    (line,) = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    cells = json.loads(line)["cells"]
    assert cells["fuse"] == {"killed": "time"}
    assert cells["static"] == {"killed": "memory"}
    assert cells["plan"] == cells["prune"] == {"code": 0}


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    count = sum(not case.apart for case in cases())
    assert f"{count} cases are left" in typed(tmp_path, "--for", "0")
    (tmp_path / "results.jsonl").write_text('{"case": "small/unet"}\n', encoding="utf-8")
    assert f"{count - 1} cases are left" in typed(tmp_path, "--for", "0")
    (tmp_path / "kept.jsonl").write_text('{"case": "small/bert"}\n', encoding="utf-8")
    assert f"{count - 2} cases are left" in typed(tmp_path, "--for", "0")
    assert f"{count} cases are left" in typed(tmp_path, "--for", "0", "--again")
    assert f"{len(cases()) - 2} cases are left" in typed(tmp_path, "--for", "0", "--all")


def test_two_jobs_share_the_cases(tmp_path: Path) -> None:
    names = ["small/unet", "small/bert", "small/vit"]
    said = typed(tmp_path, "--jobs", "2", *names)
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert sorted(json.loads(line)["case"] for line in lines) == sorted(names)
    assert all(f"[{number}/3]" in said for number in (1, 2, 3))
