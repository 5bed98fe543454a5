"""``finetune`` in whole runs: killed with SIGKILL, and stopped by Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.compressor.tiny_project import Project, sample_images, torch_project
from tests.paths import ROOT

# A loss that ends its process once, at the call that the environment names.
LOSS = """
import os, signal, torch
calls = 0
def loss(outputs, target):
    global calls
    calls += 1
    if calls == int(os.environ.get("DEADLY_CALL", "-1")):
        os.kill(os.getpid(), getattr(signal, os.environ["DEADLY_SIGNAL"]))
    return torch.nn.functional.cross_entropy(outputs, target, reduction="none")
"""
STEPS = 20
SAVING: dict[str, Any] = {"loss": "tiny_loss:loss", "save-every": 4}


def project(folder: Path, *, norms: bool = False, **options: Any) -> Project:
    found = torch_project(folder)
    network = folder / "tiny_net.py"
    if not norms:
        network.write_text(network.read_text().replace("nn.BatchNorm2d(width)", "nn.Identity()"))
    torch.manual_seed(5)
    scope: dict[str, Any] = {}
    exec(network.read_text(), scope)
    torch.save(scope["build"]().state_dict(), folder / "tiny.pt")
    (folder / "tiny_loss.py").write_text(LOSS, encoding="utf-8")
    found.spec["data"]["training"] = {
        "npz": "test.npz",
        "inputs": {"image": "image"},
        "target": "label",
        "batch": 10,
    }
    found.spec["passes"] = [{"pass": "finetune", "steps": STEPS, "learning-rate": 0.01, **options}]
    found.spec["exports"] = [{"format": "safetensors"}]
    return found


def run(where: Project, call: int, by: str) -> int:
    """Run the spec in a process of its own that ends at a call; return its exit code."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # sums depend on it in the last bits
        "PYTHONPATH": str(ROOT),
        "DEADLY_CALL": str(call),
        "DEADLY_SIGNAL": by,
    }
    return subprocess.run(
        [sys.executable, "-m", "compressor", "run", where.path.name],
        cwd=where.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    ).returncode


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    whole = project(tmp_path_factory.mktemp("whole"), **SAVING)
    whole.run()
    return whole.artifacts()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "code", "saved"), [("SIGKILL", -signal.SIGKILL, 8), ("SIGINT", 130, 11)]
)
def test_a_killed_training_resumes_to_the_same_bytes(
    tmp_path: Path, unbroken: dict[str, bytes], by: str, code: int, saved: int
) -> None:
    broken = project(tmp_path, **SAVING)
    assert run(broken, call=11, by=by) == code
    assert broken.artifacts() == {}
    report = broken.run().report
    assert f"resumed from the state saved after step {saved}" in report["passes"][0]["notes"]
    assert not list(broken.store.glob("training-*"))
    assert broken.artifacts() == unbroken
    assert broken.run().cached


PIXELS = """
import torch
from torch import nn


class Pixels(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv2d(1, classes, 3, padding=1)

    def forward(self, image):
        return self.conv(image)


def build(classes=8):
    return Pixels(classes)
"""


@pytest.mark.parametrize("classes", [3, 8])  # of 8 classes, there are as many as columns
def test_held_out_pixels_are_judged_by_their_classes(tmp_path: Path, classes: int) -> None:
    found = project(tmp_path, validation=0.25, **{"learning-rate": 1e-12})
    (tmp_path / "tiny_net.py").write_text(PIXELS)
    torch.manual_seed(5)
    conv = torch.nn.Conv2d(1, classes, 3, padding=1)
    torch.save({f"conv.{n}": t for n, t in conv.state_dict().items()}, tmp_path / "tiny.pt")
    found.spec["model"]["config"] = {"classes": classes}
    images = sample_images(0)
    labels = conv(torch.from_numpy(images)).argmax(1).numpy()
    np.savez(tmp_path / "test.npz", image=images, label=labels)
    (entry,) = found.run().report["passes"]
    assert any(note.startswith("held-out accuracy: 100 after") for note in entry["notes"])


def test_passes_of_one_name_share_a_log(tmp_path: Path) -> None:
    """The second one removed the rows of the first."""
    twice = project(tmp_path, steps=2, log={"csv": "log.csv"})
    twice.spec["passes"] *= 2
    assert twice.run().exit_code == 0
    rows = (tmp_path / "log.csv").read_text().splitlines()[1:]
    assert [row.split(",")[:2] for row in rows] == [
        ["finetune", "1"],
        ["finetune", "2"],
        ["finetune 2", "1"],
        ["finetune 2", "2"],
    ]
