"""A run that removes channels is killed: the smaller model is kept, and the bytes are the same."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

import compressor
from compressor.passes.prune.structured.structured import PruneStructured
from compressor.passes.train.finetune import Finetune
from tests.compressor.spine_plugins import in_another_process
from tests.compressor.tiny_project import MODULE, NETWORK, WIDTH, Project

KEPT = WIDTH // 2
PRUNED = {
    "pass": "prune-structured",
    "target": {"ratio": 0.5},
    "criterion": "taylor",
    "re-estimate": True,
}
LATER = {
    "pass": "quantize-static",
    "weights": {"rounding": "nearest"},
    "activations": {"observer": "min-max"},
}
RIGID = NETWORK.replace("x.mean((2, 3))", f"x.reshape(-1, {WIDTH}, 64).mean(2)")
"""With a size in its forward, so that its graph is executed in its place."""

# What is stored of a smaller module is written one file after the other.
KILLED_WHILE_STORING = f"""
import os, runpy, signal, sys
from pathlib import Path
from compressor.models.torch.carrier import TorchCarrier

whole = TorchCarrier.save

def half(carrier, directory):
    whole(carrier, directory)
    assert carrier.module.state_dict()["conv1.weight"].shape[0] == {KEPT}
    (path,) = Path(directory).glob("*.json")
    path.write_bytes(path.read_bytes()[:20])
    os.kill(os.getpid(), signal.SIGKILL)

TorchCarrier.save = half
sys.argv = ["compressor", "run", "spec.yaml"]
runpy.run_module("compressor", run_name="__main__")
"""


def project(on_torch: Project, network: str) -> Project:
    (on_torch.folder / f"{MODULE}.py").write_text(network, encoding="utf-8")
    on_torch.spec["exports"] = [{"format": "onnx"}, {"format": "safetensors"}]
    return on_torch


def unbroken(killed: Project, folder: Path) -> dict[str, bytes]:
    """Run a copy of a project whose output was not made yet."""
    shutil.copytree(killed.folder, folder, ignore=shutil.ignore_patterns("out"))
    whole = Project(folder, {})
    whole.spec = killed.spec
    assert not any(entry["cached"] for entry in whole.run().report["passes"])
    return whole.artifacts()


@pytest.mark.slow
@pytest.mark.parametrize(
    "network",
    [pytest.param(NETWORK, id="module"), pytest.param(RIGID, id="executes its graph")],
)
def test_killed_after_pruning_it_goes_on_with_the_smaller_model(
    on_torch: Project, network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    killed = project(on_torch, network)
    killed.spec["passes"] = [PRUNED, {"pass": "strike"}]
    command = ("-m", "compressor", "run", "spec.yaml")
    process = in_another_process(killed, tmp_path / "site", *command, deadly="SIGKILL")
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert not killed.artifacts()
    whole = unbroken(killed, tmp_path / "whole")

    def again(*_: object) -> None:
        raise AssertionError("pruned again")

    monkeypatch.setattr(PruneStructured, "apply", again)
    report = killed.run().report
    assert [entry["cached"] for entry in report["passes"]] == [True, False]
    assert killed.artifacts() == whole
    note = "a module that executes the graph takes its place"
    assert any(note in text for text in report["passes"][0]["notes"]) == (network == RIGID)
    loaded = compressor.load(killed.output)
    assert loaded.state_dict()["conv2.weight"].shape == (KEPT, KEPT, 3, 3)


@pytest.mark.slow
def test_killed_while_the_smaller_model_is_stored_it_prunes_again(
    on_torch: Project, tmp_path: Path
):
    killed = project(on_torch, NETWORK)
    killed.spec["passes"] = [PRUNED, LATER]
    process = in_another_process(killed, tmp_path / "site", "-c", KILLED_WHILE_STORING)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert list(killed.store.glob(".staging-*/model/weights.safetensors"))
    whole = unbroken(killed, tmp_path / "whole")

    report = killed.run().report
    assert [entry["cached"] for entry in report["passes"]] == [False, False]
    assert killed.artifacts() == whole
    assert not list(killed.output.rglob(".staging-*"))


@pytest.mark.slow
def test_killed_after_rounds_of_pruning_and_training_it_does_none_again(
    on_torch: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    killed = project(on_torch, NETWORK)
    killed.spec["data"]["training"] = {**killed.spec["data"]["evaluation"], "batch": 8}
    training = {"pass": "finetune", "steps": 2}
    killed.spec["passes"] = [PRUNED, training, PRUNED, training, {"pass": "strike"}]
    command = ("-m", "compressor", "run", "spec.yaml")
    process = in_another_process(killed, tmp_path / "site", *command, deadly="SIGKILL")
    assert process.returncode == -signal.SIGKILL, process.stderr
    whole = unbroken(killed, tmp_path / "whole")

    def again(*_: object) -> None:
        raise AssertionError("pruned or trained again")

    monkeypatch.setattr(PruneStructured, "apply", again)
    monkeypatch.setattr(Finetune, "apply_training", again)
    report = killed.run().report
    assert [entry["cached"] for entry in report["passes"]] == [True] * 4 + [False]
    assert killed.artifacts() == whole
    narrow = compressor.load(killed.output).state_dict()["conv2.weight"]
    assert narrow.shape == (KEPT // 2, KEPT // 2, 3, 3)  # half of what was left
