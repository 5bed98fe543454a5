"""The bytes that a plan predicts, and which of them are estimates."""

from typing import Any

import pytest
import torch

from tests.compressor.run.test_plan import STATIC
from tests.compressor.tiny_project import (
    CHECKPOINT,
    Project,
)


@pytest.mark.parametrize(
    "passes",
    [
        [],
        [STATIC],
        [{"pass": "quantize-dynamic"}],
        [{"pass": "cast", "weights-only": True}],
        [{"pass": "fuse"}, {**STATIC, "layers": [{"match": "conv1", "skip": True}]}],
    ],
    ids=lambda passes: "+".join(p["pass"] for p in passes) or "none",
)
def test_predicted_bytes_are_those_that_are_written(on_onnx: Project, passes: list[dict[str, Any]]):
    on_onnx.spec["passes"] = passes
    on_onnx.spec["exports"] = [{"format": "onnx", "opset": 20}, {"format": "safetensors"}]
    exports = on_onnx.plan().exports
    predicted = {e.format: e.bytes for e in exports}
    for export, artifact in zip(exports, on_onnx.run().report["artifacts"], strict=True):
        # The file that is compared with is the user's own, or one that is predicted as closely.
        assert export.float_bytes == pytest.approx(artifact["float_bytes"], rel=0.03)
        assert export.size_ratio == pytest.approx(artifact["size_ratio"], rel=0.05)
        on_disk = sum((on_onnx.output / f["name"]).stat().st_size for f in artifact["files"])
        assert artifact["bytes"] == on_disk
        assert artifact["predicted_bytes"] == predicted[artifact["format"]]
        assert on_disk == pytest.approx(predicted[artifact["format"]], rel=0.03)


STRUCTURED = {"pass": "prune-structured", "target": {"macs": 0.5}, "minimum": 1}


@pytest.fixture
def uneven(on_torch: Project) -> Project:
    """A network most of whose small weights lie in the second convolution."""
    checkpoint = on_torch.folder / CHECKPOINT
    weights = torch.load(checkpoint, weights_only=True)
    weights["conv2.weight"][1:] *= 1e-3
    weights["fc.weight"][:, 1:] *= 1e-3
    torch.save(weights, checkpoint)
    on_torch.spec["exports"] = [{"format": "onnx"}, {"format": "safetensors", "sparse": "never"}]
    return on_torch


@pytest.mark.parametrize(
    ("options", "close"),
    [
        ({"target": {"ratio": 0.5}}, True),
        ({"scope": "local"}, True),
        ({"scope": "global"}, False),
        ({"scope": "sensitivity"}, False),
    ],
    ids=str,
)
def test_sizes_are_predicted_again_once_channels_are_chosen(
    uneven: Project, options: dict[str, Any], close: bool
):
    uneven.spec["passes"] = [{**STRUCTURED, **options}]
    plan = uneven.plan()
    assert [step.estimate for step in plan.passes] == [not close]
    assert [export.estimate for export in plan.exports] == [not close] * 2
    assert all("channels" in row.actions[0] for row in plan.rows[:2]) == close
    report = uneven.run().report
    assert report["ok"]
    for export, artifact in zip(plan.exports, report["artifacts"], strict=True):
        assert artifact["bytes"] == pytest.approx(artifact["predicted_bytes"], rel=0.03)
        assert (artifact["predicted_bytes"] == export.bytes) == close


@pytest.mark.parametrize(
    ("steps", "estimates"),
    [
        ([{"pass": "fuse"}, STATIC], [False, False]),
        ([{"pass": "low-rank", "rank": 2}], [False]),
        ([{"pass": "low-rank", "energy": 0.5}, {"pass": "fuse"}], [True, True]),
        ([{"pass": "low-rank", "target": {"parameters": 0.7}}], [True]),
        ([{"pass": "prune-structured", "target": {"latency": 0.9}, "scope": "local"}], [True]),
        ([{"pass": "fuse"}, {"pass": "cast"}], [False, True]),
        ([{"pass": "cast", "dtype": "bf16", "weights-only": True}], [False]),
    ],
    ids=lambda value: "+".join(s["pass"] for s in value) if isinstance(value[0], dict) else "",
)
def test_what_depends_on_weights_or_data_makes_all_that_follows_an_estimate(
    on_torch: Project, steps: list[dict[str, Any]], estimates: list[bool]
):
    on_torch.spec |= {"passes": steps, "exports": [{"format": "safetensors"}]}
    plan = on_torch.plan()
    assert [step.estimate for step in plan.passes] == estimates
    assert [export.estimate for export in plan.exports] == estimates[-1:]


def test_a_plan_warns_of_a_size_by_the_file_that_it_is_compared_with(on_onnx: Project):
    on_onnx.spec |= {"passes": [], "exports": [{"format": "onnx"}]}
    (export,) = on_onnx.plan().exports
    assert export.bytes > 1.2 * on_onnx.plan().bytes  # the file holds a graph beside the tensors
    assert on_onnx.plan("limits.size-ratio=1.2").warnings == ()
    (warning,) = on_onnx.plan("limits.size-ratio=0.5").warnings
    assert "predicted size ratio" in warning


def test_a_limit_that_an_estimate_exceeds_is_a_warning(on_torch: Project):
    on_torch.spec |= {"passes": [STRUCTURED], "exports": [{"format": "onnx"}]}
    (warning,) = on_torch.plan("limits.size-ratio=0.01").warnings
    assert warning.startswith("onnx: the estimated size ratio ")
