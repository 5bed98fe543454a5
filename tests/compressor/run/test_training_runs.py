"""What a run gives to a pass that trains, and what becomes of a training that is interrupted."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from compressor.errors import DataError
from compressor.progress import Silent
from compressor.report.run import run_spec
from compressor.run.options import RunOptions
from compressor.run.store import Store
from compressor.run.training import open_training_data
from compressor.run.workspace import Workspace
from compressor.spec.load import load_spec
from compressor.spec.user_code import importable
from compressor.types.training import Training
from tests.compressor.conftest import spine_of_tests
from tests.compressor.drill import STATE, Drill, told
from tests.compressor.spine_plugins import in_another_process
from tests.compressor.tiny_project import (
    ONNX,
    Project,
    copied,
    forget_modules,
    onnx_project,
    sample_images,
    setting,
    tiny_onnx,
)

JITTER = """
def jitter(batch, rng):
    return {**batch, "image": batch["image"] + rng.standard_normal(batch["image"].shape, "float32")}
"""
TRAINING: dict[str, Any] = {
    "npz": "test.npz",
    "inputs": {"image": "image"},
    "target": "label",
    "batch": 16,
}


def drilled(project: Project) -> Project:
    project.spec["passes"] = [{"pass": "drill"}]
    project.spec["data"]["training"] = dict(TRAINING)
    project.spec["exports"] = [{"format": "safetensors"}]
    return project


@pytest.fixture
def project(on_onnx: Project) -> Project:
    return drilled(on_onnx)


def trainings(project: Project) -> list[Path]:
    return sorted(project.store.glob("training-*"))


def test_what_a_training_is_given(project: Project):
    project.spec["passes"].insert(0, {"pass": "nudge", "factor": 2.0})
    report = project.run().report
    facts = told(report)
    weight = numpy_helper.to_array(tiny_onnx().graph.initializer[0]).sum()
    assert facts.pop("sum") != 0
    assert facts.pop("source") == pytest.approx(weight, abs=1e-5)
    assert facts.pop("given") == pytest.approx(2 * weight, abs=1e-5)
    assert facts == {
        "started": 0,
        "samples": 48,
        "target": "label",
        "random": False,
        "batch": 16,
        "metric": "accuracy",
        "folder": True,
        "cache": True,
        "copies": 1,
        "made_up": False,
        "ranks": 1,
        "teacher": None,
        "loss": None,
    }
    assert trainings(project) == [], "the result is stored"
    assert not list(project.output.rglob(".staging-*"))
    assert project.run().cached


def test_the_metric_is_known_without_evaluation(project: Project):
    project.spec["data"] = {"training": {**TRAINING, "samples": 20}}
    facts = told(project.run().report)
    assert (facts["metric"], facts["samples"], facts["made_up"]) == ("accuracy", 20, True)


def test_samples_of_a_factory_are_known_once_they_are_copied(project: Project):
    (project.folder / "tiny_data.py").write_text(
        "import numpy as np\n"
        "def batches():\n"
        "    for n in (5, 8):\n"
        "        image = np.ones((n, 1, 8, 8), np.float32)\n"
        "        yield {'image': image, 'label': np.zeros(n, np.int64)}\n" + JITTER
    )
    project.spec["data"]["training"] = {
        "factory": "tiny_data:batches",
        "target": "label",
        "transform": "tiny_data:jitter",
    }
    facts = told(project.run().report)
    assert (facts["samples"], facts["random"], facts["batch"]) == (13, True, 32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose training, with a loss and a teacher, is done."""
    project = drilled(onnx_project(tmp_path_factory.mktemp("trained") / "project"))
    (project.folder / "tiny_data.py").write_text("def loss(): return 3\n")
    shutil.copy(project.folder / ONNX, project.folder / "teacher.onnx")
    project.spec["passes"][0] |= {"loss": "tiny_data:loss", "teacher": {"onnx": "teacher.onnx"}}
    with spine_of_tests():
        project.run()
    return project


def new_images(project: Project) -> None:
    np.savez(project.folder / "test.npz", image=sample_images(9), label=np.zeros(48, np.int64))


def new_loss(project: Project) -> None:
    (project.folder / "tiny_data.py").write_text("def loss(): return 7\n")


def new_teacher(project: Project) -> None:
    onnx.save(tiny_onnx(seed=9), project.folder / "teacher.onnx")


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        pytest.param(lambda _: None, True, id="nothing"),
        pytest.param(new_images, False, id="training data"),
        pytest.param(setting("data.training.batch", 8), False, id="batch"),
        pytest.param(setting("data.training.samples", 40), False, id="samples"),
        pytest.param(setting("metric", "top5"), False, id="metric"),
        pytest.param(new_loss, False, id="code"),
        pytest.param(new_teacher, False, id="teacher"),
        pytest.param(setting("data.calibration.batch", 8), True, id="calibration batch"),
        pytest.param(setting("data.evaluation.batch", 8), True, id="evaluation batch"),
    ],
)
def test_a_training_is_done_again_if_it_would_come_to_something_else(
    trained: Project,
    tmp_path: Path,
    spine: None,
    change: Callable[[Project], None],
    kept: bool,
):
    project = copied(trained, tmp_path / "project")
    facts = told(project.report())
    assert facts["loss"] == 3
    change(project)
    (entry,) = project.run().report["passes"]
    assert entry["cached"] is kept
    if change is new_loss:
        assert told({"passes": [entry]})["loss"] == 7
    if change is new_teacher:
        assert told({"passes": [entry]})["teacher"] != facts["teacher"]


def killed(project: Project, site: Path) -> None:
    command = ("-m", "compressor", "run", "spec.yaml")
    done = in_another_process(project, site, *command, deadly="SIGKILL")
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_killed_training_goes_on_and_ends_in_the_same_bytes(project: Project, tmp_path: Path):
    project.spec["passes"] = [{"pass": "drill", "strike-at": 4}]
    killed(project, tmp_path / "site")
    (folder,) = trainings(project)
    assert json.loads((folder / STATE).read_text())["step"] == 4
    assert json.loads((folder / "training.json").read_text())["options"]["epochs"] == 2
    report = project.run().report
    assert told(report)["started"] == 4
    assert trainings(project) == []
    unbroken = drilled(onnx_project(tmp_path / "unbroken"))
    unbroken.spec["passes"] = project.spec["passes"]
    assert told(unbroken.run().report)["started"] == 0
    assert project.artifacts() == unbroken.artifacts()


class Notes(Silent):
    """Remembers what is to stay on the screen."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


def noted(project: Project, *, fresh: bool = False) -> tuple[list[str], Any]:
    forget_modules()
    notes = Notes()
    with importable([project.folder]):
        result = run_spec(load_spec(project.path), RunOptions(fresh=fresh), notes)
    return notes.lines, result.report


def interrupt(project: Project, monkeypatch: pytest.MonkeyPatch, at: int = 3) -> Path:
    """Run a drill until Ctrl-C; return the folder with its state."""
    step = Drill._step

    def interrupting(self: Drill, training: Training, index: int) -> float:
        if index == at:
            raise KeyboardInterrupt
        return step(self, training, index)

    with monkeypatch.context() as patch:
        patch.setattr(Drill, "_step", interrupting)
        with pytest.raises(KeyboardInterrupt):
            project.run()
    (folder,) = (f for f in trainings(project) if (f / STATE).is_file())
    return folder


def test_a_state_of_another_spec_is_said_and_not_used(
    project: Project, monkeypatch: pytest.MonkeyPatch
):
    folder = interrupt(project, monkeypatch)
    state = (folder / STATE).read_bytes()
    project.spec["passes"] = [{"pass": "drill", "epochs": 5}]
    project.spec["data"]["training"]["batch"] = 12
    lines, report = noted(project)
    expected = (
        f"a saved state of drill at out/.compressor/tiny/{folder.name} belongs to another spec "
        "(epochs 2, here 5; data.training.batch 16, here 12): it is not used; --fresh removes it"
    )
    assert lines == [expected]
    assert report["passes"][0]["notes"][0] == expected
    assert told(report)["started"] == 0
    assert (folder / STATE).read_bytes() == state
    assert trainings(project) == [folder]
    # The spec that it belongs to still finds it.
    project.spec["passes"] = [{"pass": "drill"}]
    project.spec["data"]["training"]["batch"] = 16
    lines, report = noted(project)
    assert lines == []
    assert told(report)["started"] == 3
    assert trainings(project) == []


def test_fresh_forgets_states(project: Project, monkeypatch: pytest.MonkeyPatch):
    interrupt(project, monkeypatch)
    project.spec["passes"] = [{"pass": "drill", "epochs": 5}]
    lines, _ = noted(project, fresh=True)
    assert lines == []
    assert trainings(project) == []


def test_a_training_that_came_to_no_state_is_not_worth_a_word(
    project: Project, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: Any) -> Any:
        raise DataError("training data", "are not there", "look for them")

    with monkeypatch.context() as patch:
        patch.setattr(Drill, "_step", fails)
        with pytest.raises(DataError):
            project.run()
    (folder,) = trainings(project)
    assert [p.name for p in folder.iterdir()] == ["training.json"]
    project.spec["passes"] = [{"pass": "drill", "epochs": 5}]
    lines, _ = noted(project)
    assert lines == []
    assert trainings(project) == []


def test_the_data_can_be_sent_to_a_process_that_does_not_know_the_code(project: Project):
    (project.folder / "tiny_data.py").write_text(JITTER)
    project.spec["data"]["training"]["transform"] = "tiny_data:jitter"
    workspace = Workspace(project.plan(), Store(project.store), Silent())
    data = open_training_data(workspace)
    content = pickle.dumps(data)
    wanted = data.batch(np.arange(3), (1, 2))
    forget_modules()
    assert str(project.folder) not in sys.path
    sent = pickle.loads(content)
    assert (sent.samples, sent.target, sent.random, sent.digest) == (48, "label", True, data.digest)
    assert np.array_equal(sent.batch(np.arange(3), (1, 2))["image"], wanted["image"])


def test_a_transform_that_fails_in_training_is_named_with_its_place(project: Project):
    (project.folder / "tiny_data.py").write_text(
        "def once(batch): return batch if len(batch['label']) == 1 else 1 / 0\n"
    )
    project.spec["data"]["training"]["transform"] = "tiny_data:once"
    with pytest.raises(DataError, match="raised ZeroDivisionError") as caught:
        project.run()
    assert caught.value.where is not None
    assert "spec.yaml:" in caught.value.where


@pytest.mark.slow
def test_two_processes_share_a_training(tmp_path: Path, project: Project):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    command = (*launcher, *rendezvous, "-m", "compressor", "run", "spec.yaml")
    done = in_another_process(project, tmp_path / "site", *command)
    assert done.returncode == 0, done.stderr
    facts = told(project.report())
    assert (facts["ranks"], facts["copies"]) == (2, 1)
    assert trainings(project) == []
    alone = project.run().report
    assert told(alone)["ranks"] == 1
    assert not alone["passes"][0]["cached"], "another number of processes is another training"
