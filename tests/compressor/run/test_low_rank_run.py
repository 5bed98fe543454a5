"""low-rank in whole runs: planned, stored, taken up again, followed by other passes, exported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import compressor
from compressor.errors import SpecError
from compressor.models.onnx.ort_session import OrtRunner
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.carrier import Capability
from tests.compressor.tiny_project import Project, sample_images

FACTOR = {"pass": "low-rank", "target": {"macs": 0.6}, "weighted": True}
LATER = {
    "pass": "quantize-static",
    "weights": {"rounding": "nearest"},
    "activations": {"observer": "min-max"},
}


@pytest.fixture
def project(on_torch: Project) -> Project:
    on_torch.spec["exports"] = [{"format": "onnx"}, {"format": "safetensors"}]
    return on_torch


def test_a_run_goes_on_where_it_was(project: Project):
    project.spec["passes"] = [FACTOR]
    first = project.run()
    assert [entry["cached"] for entry in first.report["passes"]] == [False]
    made = project.artifacts()
    again = project.run()
    assert [entry["cached"] for entry in again.report["passes"]] == [True]
    assert project.artifacts() == made
    project.run(fresh=True)
    assert project.artifacts() == made
    project.spec["passes"] = [FACTOR, {**LATER, "layers": [{"match": "fc*", "skip": True}]}]
    last = project.run()
    assert [entry["cached"] for entry in last.report["passes"]] == [True, False]


def test_the_report_and_the_loaded_model(project: Project):
    project.spec["passes"] = [{"pass": "low-rank", "rank": 2}]
    project.run()
    (entry,) = project.report()["passes"]
    rows = {row["name"]: row for row in entry["layers"]}
    assert set(rows) == {f"{n}.{end}" for n in ("conv1", "conv2", "fc") for end in ("down", "up")}
    assert rows["fc.up"]["scheme"] == "float32, rank 2 of 4"
    assert rows["fc.up"]["weight_sqnr_db"] > 0
    assert rows["fc.up"]["sqnr_db"] is not None
    assert 0 < rows["conv2.up"]["details"]["energy"] < 1
    assert any(note.startswith("MACs ") for note in entry["notes"])
    loaded = compressor.load(project.output)
    assert loaded.state_dict()["conv2.down.weight"].shape == (2, 8, 3, 3)
    images = sample_images(7)
    with torch.inference_mode():
        found = loaded(torch.from_numpy(images))["output"].numpy()
    (served,) = OrtRunner(project.output / "model.onnx", "artifact").run({"image": images}).values()
    np.testing.assert_allclose(found, served, atol=1e-5)


def test_a_plan_follows_layers_into_their_parts(project: Project):
    project.spec["passes"] = [{"pass": "low-rank", "rank": 2}, {**LATER}]
    plan = project.plan()
    rows = {row.name: row for row in plan.rows}
    assert rows["conv2"].actions[0] == "rank 2 of 8"
    assert rows["conv2"].actions[1].startswith("int8")
    # 2 * 72 codes and 2 scales and zero points; 8 * 2 codes, 8 scales, zero points and biases
    assert rows["conv2"].bytes_before == 4 * (8 * 72 + 8)
    assert rows["conv2"].bytes_after < 4 * (2 * 72 + 8 * 2 + 8)
    assert rows["conv2"].bytes_after > 2 * 72 + 8 * 2
    assert Capability.TRAIN not in plan.final.offers
    project.spec["passes"] = [{"pass": "low-rank", "rank": 2}]
    plan = project.plan()
    assert Capability.TRAIN in plan.final.offers
    assert isinstance(plan.final, TorchCarrier)
    assert plan.passes[0].bytes == sum(t.nbytes for t in plan.final.tensors().values())


def test_what_is_planned_has_the_bytes_of_the_run(project: Project):
    project.spec["passes"] = [{"pass": "low-rank", "rank": 3}]
    planned = {e.format: e.bytes for e in project.plan().exports}
    project.run()
    written = project.report()["artifacts"]
    for row in written:
        assert row["bytes"] == pytest.approx(planned[row["format"]], rel=0.1)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rank": 0}, "passes.0.rank"),
        ({}, "give one of rank, energy, target"),
        ({"rank": 2, "energy": 0.5}, "give one of rank, energy"),
        ({"target": {"macs": 0.001}}, r"target.macs: is 0.001, and 0\.\d+ of the multiply"),
        (
            {"rank": 2, "layers": [{"match": "head", "rank": 1}]},
            "matches no layer; there is: conv1",
        ),
    ],
)
def test_messages_name_the_place(on_onnx: Project, entry: dict[str, Any], message: str):
    on_onnx.spec["passes"] = [{"pass": "low-rank", **entry}]
    with pytest.raises(SpecError, match=message) as raised:
        on_onnx.plan()
    assert "spec.yaml:" in str(raised.value)


def test_weighted_without_calibration_data(on_onnx: Project):
    del on_onnx.spec["data"]["calibration"]
    on_onnx.spec["passes"] = [FACTOR]
    with pytest.raises(SpecError, match="needs statistics of 3 tensors, and there is no calib"):
        on_onnx.plan()
