"""What the artifacts of a run are timed on."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from compressor.exporters import SafetensorsExporter
from compressor.models.onnx import module as onnx_module
from compressor.models.onnx.ort_session import OrtRunner
from compressor.run import verify
from compressor.run.timing import timing
from compressor.run.timing.timing import Latencies
from compressor.types.carrier import Runner
from tests.compressor.tiny_project import ONNX, SAMPLES, Project


def with_branch(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give a model's output out by one of two branches, whichever the values say."""
    graph = model.graph
    output = graph.output[0]
    value = helper.make_tensor_value_info("chosen", TensorProto.FLOAT, None)
    graph.node.extend(
        [
            helper.make_node("ReduceMax", [output.name], ["most"], keepdims=0),
            helper.make_node("Cast", ["most"], ["late"], to=TensorProto.BOOL),
            helper.make_node(
                "If",
                ["late"],
                ["branched"],
                **{
                    branch: helper.make_graph(
                        [helper.make_node("Identity", [output.name], ["chosen"])], "b", [], [value]
                    )
                    for branch in ("then_branch", "else_branch")
                },
            ),
        ]
    )
    graph.output[0].name = "branched"
    return model


@pytest.mark.parametrize(("change", "inputs"), [(lambda model: model, 1), (with_branch, SAMPLES)])
def test_a_model_with_branches_is_timed_on_many_samples(
    on_onnx: Project,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[onnx.ModelProto], onnx.ModelProto],
    inputs: int,
):
    monkeypatch.setattr(
        timing, "_affordable", lambda once, inputs, __: (inputs, dict.fromkeys(once, 2))
    )
    # What threads of other tests compute is not the model's.
    monkeypatch.setattr(time, "process_time", time.thread_time)
    path = on_onnx.folder / ONNX
    onnx.save(change(onnx.load(path)), path)
    on_onnx.run()
    rows: list[Mapping[str, Any]] = on_onnx.report()["artifacts"][0]["latency"]
    assert [(row["batch"], row["inputs"]) for row in rows] == [(1, inputs), (16, 1)]
    for row in rows:
        assert row["artifact"]["inputs"] == row["inputs"]
        assert row["ratio"]["clock"] == "cpu"
        for model in ("float", "artifact"):
            assert row[model]["best"] <= row[model]["p99"]
            assert row[model]["cpu_ms"] > 0
            assert 0 <= row[model]["waiting"] < 1
            assert row[model]["load"] >= 0
        low, high = row["artifact"]["ci95"]
        assert 0 < low <= row["artifact"]["mean"] <= high


def test_the_float_model_after_fusion_is_timed_beside_the_artifact(on_onnx: Project):
    on_onnx.spec["passes"] = [{"pass": "fuse"}]
    (row, *_) = on_onnx.run().report["artifacts"][0]["latency"]
    assert (row["fused"], row["fused_ratio"]) == (None, None), "the artifact is that itself"
    on_onnx.spec["passes"].append({"pass": "nudge"})
    row, larger = on_onnx.run().report["artifacts"][0]["latency"]
    low, high = row["fused_ratio"]["ci95"]
    assert 0 < low <= row["fused_ratio"]["value"] <= high
    assert row["fused"]["openings"] == row["artifact"]["openings"]
    assert (larger["fused"], larger["fused_ratio"]) == (None, None), "nothing depends on it"


def test_what_is_not_judged_is_opened_once_to_be_timed(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    """An archive may take many seconds to decode."""
    opened: list[Path] = []
    opens, times = SafetensorsExporter.open, verify.measure_sizes

    def counted(self: SafetensorsExporter, path: Path) -> Runner:
        opened.append(path)
        return opens(self, path)

    def timed(*arguments: Any, **options: Any) -> list[Latencies]:
        opened.clear()
        measured = times(*arguments, **options)
        assert len(opened) == 1
        return measured

    monkeypatch.setattr(SafetensorsExporter, "open", counted)
    monkeypatch.setattr(verify, "measure_sizes", timed)
    on_onnx.spec["exports"] = [{"format": "safetensors"}]
    (row,) = on_onnx.run().report["artifacts"][0]["latency"]
    assert row["artifact"]["openings"] > 1


def test_a_users_own_file_is_what_artifacts_are_compared_with(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    opened: list[Any] = []

    class Recorded(OrtRunner):
        def __init__(self, model: Any, subject: str, **options: Any):
            opened.append(model)
            super().__init__(model, subject, **options)

    monkeypatch.setattr(onnx_module, "OrtRunner", Recorded)
    on_onnx.run()
    assert opened
    assert set(opened) == {on_onnx.folder / ONNX}
