"""Nothing is computed twice, and nothing stale is used: what invalidates what, and resuming."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import compressor.calibration.collect
from compressor.errors import ExitCode
from compressor.exporters.onnx.exporter import OnnxExporter
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.progress import Silent
from compressor.report.run import run_spec
from compressor.run import verify, workspace
from compressor.run.model import open_model
from compressor.run.options import RunOptions
from compressor.spec.load import load_spec
from compressor.spec.user_code import importable
from tests.compressor.conftest import spine_of_tests
from tests.compressor.spine_plugins import Strike, in_another_process
from tests.compressor.tiny_project import (
    MODULE,
    NETWORK,
    ONNX,
    Project,
    copied,
    forget_modules,
    onnx_project,
    sample_images,
    setting,
    tiny_module,
    tiny_onnx,
)

STATIC: dict[str, Any] = {
    "pass": "quantize-static",
    "weights": {"rounding": "nearest"},
    "activations": {"observer": "min-max"},
    "layers": [{"match": "*"}],
}
TRANSFORM = """\
from tiny_blocks import SCALE

def scale(batch):
    return {**batch, 'image': batch['image'] * SCALE * 2}
"""

Change = Callable[[Project], None]


def two_passes(project: Project) -> Project:
    project.spec["passes"] = [{"pass": "strike", "factor": 1.5}, dict(STATIC)]
    (project.folder / "tiny_data.py").write_text(TRANSFORM)
    (project.folder / "tiny_blocks.py").write_text("SCALE = 1.0\n")
    project.spec["data"]["calibration"]["transform"] = "tiny_data:scale"
    return project


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose run of two passes is done."""
    project = two_passes(onnx_project(tmp_path_factory.mktemp("finished") / "project"))
    with spine_of_tests():
        assert cached(project) == [False, False]
    return project


@pytest.fixture
def done(finished: Project, tmp_path: Path, spine: None) -> Project:
    """A copy of that project."""
    return copied(finished, tmp_path / "project")


def cached(project: Project) -> list[bool]:
    return [entry["cached"] for entry in project.run().report["passes"]]


def fail(*_: Any, **__: Any) -> Any:
    raise AssertionError("computed again")


def test_a_second_run_computes_nothing_again(done: Project, monkeypatch: pytest.MonkeyPatch):
    first, artifacts = done.report(), done.artifacts()
    for place, name in (
        (compressor.calibration.collect, "collect"),
        (Strike, "apply"),
        (QuantizeStatic, "apply"),
        (OnnxExporter, "write"),
        (workspace, "evaluate"),
        (verify, "measure_sizes"),
    ):
        monkeypatch.setattr(place, name, fail)
    done.run()
    second = done.report()
    assert [entry.pop("cached") for entry in first["passes"]] == [False, False]
    assert [entry.pop("cached") for entry in second["passes"]] == [True, True]
    assert second == first
    assert done.artifacts() == artifacts


def test_a_damaged_store_gives_the_same_bytes(done: Project):
    project, report, artifacts = done, done.report(), done.artifacts()
    entries = sorted(project.store.glob("[0-9a-f][0-9a-f]/*"))
    for number, entry in enumerate(entries):
        file = max((p for p in entry.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        content = bytearray(file.read_bytes())
        file.unlink()  # published files are links to it
        content[len(content) // 2] ^= 1
        file.write_bytes(content[: len(content) // 2] if number % 2 else content)
    notes: list[str] = []
    forget_modules()
    with importable([project.folder]):
        again = run_spec(load_spec(project.path), RunOptions(), Noting(notes))
    assert again.report["verdict"] == report["verdict"]
    assert project.artifacts() == artifacts
    assert len(notes) == len(entries) > 5
    assert all("is damaged" in note and note.endswith("it is done again") for note in notes)
    assert cached(project) == [True, True]


class Noting(Silent):
    """Keeps the lines about damage."""

    def __init__(self, notes: list[str]):
        self._notes = notes

    def note(self, message: str) -> None:
        if "damaged" in message:
            self._notes.append(message)


def test_fresh_forgets(done: Project):
    report = done.run(fresh=True).report
    assert [entry["cached"] for entry in report["passes"]] == [False, False]


def new_weights(project: Project) -> None:
    onnx.save(tiny_onnx(seed=9), project.folder / ONNX)


def new_calibration(project: Project) -> None:
    np.savez(project.folder / "calib.npz", image=sample_images(7))


def new_evaluation(project: Project) -> None:
    labels = np.zeros(48, np.int64)
    np.savez(project.folder / "test.npz", image=sample_images(8), label=labels)


def new_transform(project: Project) -> None:
    source = TRANSFORM.replace("* 2", "* 3.5")
    (project.folder / "tiny_data.py").write_text(source)


def new_blocks(project: Project) -> None:
    (project.folder / "tiny_blocks.py").write_text("SCALE = 3.0\n")


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        pytest.param(lambda _: None, [True, True], id="nothing"),
        pytest.param(setting("seed", 1), [False, False], id="seed"),
        pytest.param(setting("passes.0.factor", 2.0), [False, False], id="first pass"),
        pytest.param(
            setting("passes.1.activations", {"observer": "percentile"}),
            [True, False],
            id="second pass",
        ),
        pytest.param(new_weights, [False, False], id="weights"),
        pytest.param(new_calibration, [True, False], id="calibration data"),
        pytest.param(new_transform, [True, False], id="source of the transform"),
        pytest.param(new_blocks, [True, False], id="what the transform imports"),
        pytest.param(
            setting("data.calibration.samples", 40), [True, False], id="calibration samples"
        ),
        pytest.param(setting("data.calibration.batch", 8), [True, False], id="calibration batch"),
        pytest.param(new_evaluation, [True, True], id="evaluation data"),
        pytest.param(setting("data.evaluation.batch", 8), [True, True], id="evaluation batch"),
        pytest.param(setting("name", "other"), [True, True], id="name"),
        pytest.param(setting("exports.0.opset", 20), [True, True], id="opset"),
        pytest.param(setting("exports.0.target", "tensorrt"), [False, False], id="target"),
        pytest.param(setting("limits.metric-drop", 90), [True, True], id="limit"),
        pytest.param(setting("metric", "top5"), [True, True], id="metric"),
    ],
)
def test_a_change_invalidates_what_depends_on_it_and_nothing_else(
    done: Project, change: Change, kept: list[bool]
):
    done.spec["output"] = "out/tiny"
    change(done)
    assert cached(done) == kept


def test_earlier_results_are_kept(done: Project):
    for factor, kept in ((2.0, False), (1.5, True)):
        done.spec["passes"][0]["factor"] = factor
        assert cached(done) == [kept, kept]


def test_new_evaluation_data_are_evaluated(on_onnx: Project):
    before = on_onnx.run().report
    new_evaluation(on_onnx)
    after = on_onnx.run().report
    assert before["baseline"]["metric"]["value"] == 100
    assert after["baseline"]["metric"]["value"] < 100
    assert after["artifacts"][0]["metric"]["value"] < 100


def test_a_changed_metric_is_evaluated(on_onnx: Project):
    own = on_onnx.folder / "tiny_metric.py"
    own.write_text("def f(output, target): return output[:, 0] * 0 + 1\n")
    on_onnx.spec["metric"] = "tiny_metric:f"
    assert on_onnx.run().report["baseline"]["metric"]["value"] == 1
    own.write_text("def f(output, target): return output[:, 0] * 0 + 25\n")
    assert on_onnx.run().report["baseline"]["metric"]["value"] == 25


def new_factory(project: Project) -> None:
    source = NETWORK.replace("torch.relu(self.conv2(x))", "torch.tanh(self.conv2(x))")
    (project.folder / f"{MODULE}.py").write_text(source)


def new_checkpoint(project: Project) -> None:
    tensors = {n: t * 0.5 for n, t in tiny_module().state_dict().items()}
    torch.save(tensors, project.folder / "tiny.pt")


def key_of(project: Project) -> str:
    """Return the key that all results of a project's model start from."""
    forget_modules()
    with importable([project.folder]):
        return open_model(load_spec(project.path)).digest()


def test_a_module_s_code_and_checkpoint_count(on_torch: Project):
    source = NETWORK.replace("import torch\n", "import torch\nfrom tiny_blocks import SCALE\n", 1)
    (on_torch.folder / f"{MODULE}.py").write_text(source)
    (on_torch.folder / "tiny_blocks.py").write_text("SCALE = 1.0\n")
    keys = [key_of(on_torch)]
    assert key_of(on_torch) == keys[0]
    for change in (
        new_blocks,
        new_checkpoint,
        new_factory,
        setting("seed", 1),
        setting("model.config", {"width": 8}),
        setting("model.inputs.image.shape", ["n", 1, 8, 8]),
    ):
        change(on_torch)
        keys.append(key_of(on_torch))
    assert len(set(keys)) == len(keys)
    on_torch.spec["name"] = "other"
    assert key_of(on_torch) == keys[-1]


def test_a_changed_module_is_compressed_again(on_torch: Project):
    on_torch.spec["passes"] = [{"pass": "nudge", "factor": 1.5}]
    assert cached(on_torch) == [False]
    before = on_torch.artifacts()
    new_factory(on_torch)
    assert cached(on_torch) == [False]
    assert on_torch.artifacts() != before


def test_a_damaged_artifact_is_written_again(on_onnx: Project):
    on_onnx.run()
    artifacts = on_onnx.artifacts()
    for damage in (b"", None):
        path = on_onnx.output / "model.onnx"
        path.unlink() if damage is None else path.write_bytes(damage)
        on_onnx.run()
        assert on_onnx.artifacts() == artifacts


def test_artifacts_that_the_spec_no_longer_asks_for_go_away(on_onnx: Project):
    on_onnx.spec["exports"] = [{"format": "onnx"}, {"format": "safetensors"}]
    on_onnx.run()
    assert set(on_onnx.artifacts()) == {"model.onnx", "model.safetensors", "model.json"}
    (on_onnx.output / "notes.txt").write_text("mine")
    del on_onnx.spec["exports"][1]
    on_onnx.run()
    assert set(on_onnx.artifacts()) == {"model.onnx"}
    assert (on_onnx.output / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("when", [pytest.param("apply", marks=pytest.mark.slow), "save"])
def test_an_interrupted_run_leaves_nothing_half_done(on_onnx: Project, tmp_path: Path, when: str):
    """In a process of its own: behind some other files, an interrupt ended that of the tests."""
    on_onnx.spec["passes"] = [{"pass": "nudge"}, {"pass": "strike", "when": when}, STATIC]
    command = ("-m", "compressor", "run", str(on_onnx.path))
    result = in_another_process(on_onnx, tmp_path / "site", *command, deadly="SIGINT")
    assert result.returncode == ExitCode.INTERRUPTED, result.stderr
    *done, last = result.stderr.splitlines()
    assert last == "interrupted; the same command resumes"
    assert "step 2 of 9: nudge" in [line.partition("  ")[0] for line in done]
    assert on_onnx.leftovers() == []
    assert cached(on_onnx) == [True, False, False]
    whole = onnx_project(tmp_path / "whole")
    whole.spec = on_onnx.spec
    whole.run()
    assert on_onnx.artifacts() == whole.artifacts()


def test_a_killed_run_resumes_and_ends_in_the_same_bytes(on_onnx: Project, tmp_path: Path):
    on_onnx.spec["passes"] = [
        {"pass": "nudge", "factor": 1.5},
        {"pass": "strike", "when": "save"},
        STATIC,
    ]
    command = ("-m", "compressor", "run", "spec.yaml")
    killed = in_another_process(on_onnx, tmp_path / "site", *command, deadly="SIGKILL")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (staged,) = on_onnx.store.glob(".staging-*")
    assert (staged / "model" / "graph.onnx").read_bytes() == b"half"
    shutil.copytree(staged, on_onnx.output / ".staging-left")  # as if an export had been killed

    assert cached(on_onnx) == [True, False, False]
    assert not list(on_onnx.output.rglob(".staging-*"))
    whole = onnx_project(tmp_path / "whole")
    whole.spec = on_onnx.spec
    whole.run()
    assert on_onnx.artifacts() == whole.artifacts()
