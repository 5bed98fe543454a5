"""Results that depend on more than they seem to: a second run equals one from the beginning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor.progress import Silent
from compressor.run.lowered import KeptGraph
from compressor.run.pipeline import pass_parts
from compressor.run.store import Store
from compressor.run.workspace import Workspace
from tests.compressor.tiny_project import (
    MODULE,
    Project,
    onnx_project,
    sample_images,
    torch_project,
)

OWN = """

from pathlib import Path


def loaded():
    net = build()
    net.load_state_dict(torch.load(Path(__file__).parent / "own.pt"))
    return net.eval()
"""
NOISY = """
import numpy as np


def noisy(batch, rng):
    noise = rng.normal(0, 2, batch["image"].shape).astype("float32")
    return {**batch, "image": batch["image"] + noise}


def share(output, target):
    return (output.argmax(1) == target).astype("float64")
"""

Facts = Callable[[dict[str, Any]], Any]


def equal_to_fresh(project: Project, change: Callable[[], object], facts: Facts) -> None:
    """Run, change something, and run again: as if nothing were stored, and not as before."""
    before = facts(project.run().report)
    change()
    again = facts(project.run().report)
    assert again == facts(project.run(fresh=True).report)
    assert again != before


@pytest.fixture
def static(tmp_path: Path) -> Project:
    project = onnx_project(tmp_path / "project")
    project.spec["passes"] = [{"pass": "quantize-static"}]
    (project.folder / "noise.py").write_text(NOISY)
    return project


def metrics(report: dict[str, Any]) -> Any:
    artifact = report["artifacts"][0]
    return report["baseline"]["metric"], artifact["metric"], artifact["metric_drop"]


def test_weights_that_a_factory_reads(tmp_path: Path):
    project = torch_project(tmp_path / "project")
    (file,) = project.folder.glob(f"{MODULE}.py")
    file.write_text(file.read_text() + OWN)
    weights = torch.load(project.folder / project.spec["model"].pop("checkpoint"))
    project.spec["model"].update(factory=f"{MODULE}:loaded", config={})
    torch.save(weights, project.folder / "own.pt")

    def change() -> None:
        turned = {name: value.flip(0) for name, value in weights.items()}
        torch.save({**weights, "fc.bias": turned["fc.bias"] + 5}, project.folder / "own.pt")

    equal_to_fresh(project, change, lambda report: report["artifacts"][0]["files"])


def test_the_batch_by_which_a_transform_draws(static: Project):
    evaluation = static.spec["data"]["evaluation"]
    evaluation.update(transform="noise:noisy")
    static.spec["metric"] = "perplexity"
    equal_to_fresh(static, lambda: evaluation.update(batch=5), metrics)


def test_whether_higher_is_better(static: Project):
    metric: dict[str, Any] = {"function": "noise:share"}
    static.spec["metric"] = metric
    equal_to_fresh(static, lambda: metric.update({"higher-is-better": False}), metrics)


def test_samples_on_which_layers_are_compared(static: Project):
    def change() -> None:
        images = 3 * sample_images(11)
        np.savez(static.folder / "test.npz", image=images, label=np.zeros(len(images), np.int64))

    def compared(report: dict[str, Any]) -> Any:
        (entry,) = report["passes"]
        return [row["sqnr_db"] for row in entry["layers"]], entry["histograms"], entry["weakest"]

    equal_to_fresh(static, change, compared)


def test_a_file_that_a_transform_reads(static: Project):
    source = "import numpy as np\nfrom pathlib import Path\n\n\ndef centred(batch):\n"
    source += "    mean = np.load(Path(__file__).parent / 'mean.npy')\n"
    source += "    return {**batch, 'image': batch['image'] - mean}\n"
    (static.folder / "centring.py").write_text(source)
    static.spec["data"]["calibration"]["transform"] = "centring:centred"
    static.spec["data"]["evaluation"]["transform"] = "centring:centred"
    np.save(static.folder / "mean.npy", np.float32(0))

    def change() -> None:
        np.save(static.folder / "mean.npy", np.float32(2))

    equal_to_fresh(static, change, lambda r: (metrics(r), r["artifacts"][0]["files"]))


def test_a_number_that_a_factory_reads(tmp_path: Path):
    """It stands in the graph that was kept; neither code nor weights show it."""
    project = torch_project(tmp_path / "project")
    (file,) = project.folder.glob(f"{MODULE}.py")
    numbered = """

class Scaled(TinyNet):
    def forward(self, image):
        return super().forward(image * self.factor)


def scaled(width=8):
    net = Scaled(width)
    net.factor = float((Path(__file__).parent / "factor.txt").read_text())
    return net
"""
    file.write_text("from pathlib import Path\n" + file.read_text() + numbered)
    project.spec["model"]["factory"] = f"{MODULE}:scaled"
    factor = project.folder / "factor.txt"
    factor.write_text("1.0")
    equal_to_fresh(project, lambda: factor.write_text("3.0"), lambda r: r["artifacts"][0]["files"])


def test_fresh_uses_no_kept_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    project = torch_project(tmp_path / "project")
    project.run()
    monkeypatch.setattr(KeptGraph, "used_by", lambda *_: pytest.fail("what was kept is used"))
    project.run(fresh=True)


def test_data_that_are_timed_where_none_are_evaluated(static: Project):
    del static.spec["data"]["evaluation"]
    static.spec["passes"] = [{"pass": "quantize-weights", "bits": 4}]
    static.spec.pop("metric", None)

    def change() -> None:
        np.savez(static.folder / "calib.npz", image=5 * sample_images(3))

    equal_to_fresh(static, change, lambda r: r["artifacts"][0]["max_abs_diff"])


@pytest.mark.parametrize("reads", [True, False])
def test_the_metric_counts_where_a_pass_trains_for_it(static: Project, reads: bool):
    method = "reconstruct" if reads else "rtn"
    static.spec["passes"] = [{"pass": "quantize-weights", "bits": 4, "method": method}]
    keys = []
    for metric in ("accuracy", "agreement"):
        static.spec["metric"] = metric
        plan = static.plan()
        workspace = Workspace(plan, Store(static.store), Silent())
        keys.append(pass_parts(workspace, 0, plan.passes[0]))
    assert (keys[0] != keys[1]) == reads


def test_the_lengths_of_samples_count_where_work_is_counted(static: Project):
    static.spec["passes"] = [{"pass": "quantize-weights", "bits": 4}]
    parts = []
    for side in (8, 16):
        images = np.zeros((4, 1, side, 8), np.float32)
        plan = static.plan()
        shapes = {"image": images.shape}
        plan = replace(plan, context=replace(plan.context, shapes=shapes))
        workspace = Workspace(plan, Store(static.store), Silent())
        parts.append(pass_parts(workspace, 0, plan.passes[0]))
    assert parts[0] != parts[1]
