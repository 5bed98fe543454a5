"""``finetune`` in whole runs: killed with SIGKILL, stopped by Ctrl-C, and shared by processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.compressor.tiny_project import STORE, Project, torch_project
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


def project(folder: Path, **options: Any) -> Project:
    found = torch_project(folder)
    network = folder / "tiny_net.py"
    # Statistics of batch norm are each process's own.
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


def run(where: Project, *launcher: str, call: int = -1, by: str = "") -> tuple[int, str]:
    """Run the spec in a process of its own; return its exit code and what it said."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # sums depend on it in the last bits
        "PYTHONPATH": str(ROOT),
        "DEADLY_CALL": str(call),
        "DEADLY_SIGNAL": by,
    }
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "compressor", "run", where.path.name],
        cwd=where.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    whole = project(tmp_path_factory.mktemp("whole"), **SAVING)
    whole.run()
    return whole.artifacts()


@pytest.mark.parametrize(
    ("by", "code", "saved"), [("SIGKILL", -signal.SIGKILL, 8), ("SIGINT", 130, 11)]
)
def test_a_killed_training_resumes_to_the_same_bytes(
    tmp_path: Path, unbroken: dict[str, bytes], by: str, code: int, saved: int
) -> None:
    broken = project(tmp_path, **SAVING)
    assert run(broken, call=11, by=by)[0] == code
    assert broken.artifacts() == {}
    report = broken.run().report
    assert f"resumed from the state saved after step {saved}" in report["passes"][0]["notes"]
    assert not list((broken.output / STORE).glob("training-*"))
    assert broken.artifacts() == unbroken
    assert broken.run().cached


def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    alone, shared = project(tmp_path / "alone"), project(tmp_path / "shared")
    for each in (alone, shared):  # a teacher's outputs are shared out with the batches, too
        each.spec["passes"].append({"pass": "distill", "steps": STEPS, "learning-rate": 0.01})
    alone.run()
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    code, said = run(shared, *launcher, *rendezvous)
    assert code == 0, said
    for first, second in zip(alone.report()["passes"], shared.report()["passes"], strict=True):
        one, two = first["training"]["losses"], second["training"]["losses"]
        assert len(one) == STEPS
        assert [step for step, _ in two] == list(range(1, STEPS + 1))
        for (_, left), (_, right) in zip(one, two, strict=True):
            assert right == pytest.approx(left, abs=1e-4)
    tensors, others = (load_file(p.output / "model.safetensors") for p in (alone, shared))
    before = torch.load(alone.folder / "tiny.pt", weights_only=True)
    for name, untrained in before.items():
        torch.testing.assert_close(others[name], tensors[name], rtol=0, atol=1e-4)
        assert not torch.equal(tensors[name], untrained)
