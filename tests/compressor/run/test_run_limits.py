"""Limits and checks: what fails a run, with which exit code, and what it leaves then."""

from typing import Any

import pytest

from compressor.errors import ArtifactError, DataError, ExitCode, ModelError
from compressor.exporters.onnx import OnnxExporter
from compressor.run import verify
from compressor.run.verify import judge
from compressor.spec.keys import LimitKeys
from tests.compressor.tiny_project import REPORTS, Project


def entry(**changes: Any) -> dict[str, Any]:
    ratio = changes.pop("ratio", (0.9, 0.8, 1.0))
    return {
        "path": "model.onnx",
        "deployed": True,
        "metric_drop": 0.4,
        "size_ratio": 0.3,
        "latency": [{"batch": 1, "ratio": {"value": ratio[0], "ci95": [ratio[1], ratio[2]]}}],
        **changes,
    }


def limits(**given: float | None) -> LimitKeys:
    return LimitKeys(**{"size_ratio": None, "latency_ratio": None, **given})


def verdicts(keys: LimitKeys, *artifacts: dict[str, Any]) -> list[tuple[str, bool]]:
    return [(e["name"], e["ok"]) for e in judge(keys, artifacts)]


def test_each_limit_and_artifact_has_an_entry():
    keys = LimitKeys(metric_drop=0.5, size_ratio=0.3, latency_ratio=1.0)
    artifacts = [entry(), entry(path="model.safetensors", deployed=False)]
    found = judge(keys, artifacts)
    assert [(e["name"], e["artifact"], e["limit"], e["measured"]) for e in found] == [
        ("metric-drop", "model.onnx", 0.5, 0.4),
        ("size-ratio", "model.onnx", 0.3, 0.3),
        ("latency-ratio", "model.onnx", 1.0, 0.9),
        ("metric-drop", "model.safetensors", 0.5, 0.4),
        ("size-ratio", "model.safetensors", 0.3, 0.3),
    ]
    assert all(e["ok"] for e in found)


def test_limits_that_are_off():
    assert verdicts(limits(), entry()) == []


@pytest.mark.parametrize(
    ("limit", "drop", "ok"), [(0.5, 0.5, True), (0.5, 0.6, False), (0.0, -1.0, True)]
)
def test_metric_drop(limit: float, drop: float, ok: bool):
    assert verdicts(limits(metric_drop=limit), entry(metric_drop=drop)) == [("metric-drop", ok)]


@pytest.mark.parametrize(("ratio", "ok"), [(0.3, True), (0.31, False)])
def test_size_ratio(ratio: float, ok: bool):
    assert verdicts(limits(size_ratio=0.3), entry(size_ratio=ratio)) == [("size-ratio", ok)]


@pytest.mark.parametrize(
    ("ratio", "ok"),
    [
        ((0.8, 0.7, 0.9), True),
        ((1.1, 0.9, 1.3), True),  # slower, but not more than noise explains
        ((1.1, 1.0, 1.3), True),
        ((1.1, 1.01, 1.3), False),
    ],
)
def test_latency_fails_only_where_the_whole_interval_lies_above(
    ratio: tuple[float, float, float], ok: bool
):
    (found,) = judge(limits(latency_ratio=1.0), [entry(ratio=ratio)])
    assert (found["name"], found["ok"]) == ("latency-ratio", ok)
    assert found["ci95"] == list(ratio[1:])


def failed(project: Project) -> dict[str, Any]:
    """Run a project that misses one limit; return that limit's entry."""
    result = project.run()
    assert result.exit_code is ExitCode.LIMIT_FAILED
    assert not result.report["ok"]
    # Everything is there to be looked at.
    assert project.report() == result.report
    names = {p.name for p in project.output.iterdir()}
    assert names >= {*REPORTS, "manifest.json", "model.onnx"}
    (found,) = [e for e in result.report["limits"] if not e["ok"]]
    return dict(found)


def test_a_worse_model(on_onnx: Project):
    on_onnx.spec["passes"] = [{"pass": "nudge", "factor": -1.0}]
    on_onnx.spec["limits"]["metric-drop"] = 1.0
    found = failed(on_onnx)
    assert (found["name"], found["limit"]) == ("metric-drop", 1.0)
    assert found["measured"] > 1
    assert found["measured"] == 100 - on_onnx.report()["artifacts"][0]["metric"]["value"]


def test_a_larger_model_fails_without_being_asked(on_onnx: Project):
    del on_onnx.spec["limits"]["size-ratio"]
    found = failed(on_onnx)
    assert (found["name"], found["limit"]) == ("size-ratio", 1.0)
    assert found["measured"] > 1


def test_a_slower_artifact(on_onnx: Project):
    on_onnx.spec["exports"] = [{"format": "slow"}]
    on_onnx.spec["limits"]["latency-ratio"] = 1.5
    found = failed(on_onnx)
    assert (found["name"], found["limit"]) == ("latency-ratio", 1.5)
    assert found["ci95"][0] > 1.5


def test_limits_can_be_loosened_without_computing_again(on_onnx: Project):
    del on_onnx.spec["limits"]["size-ratio"]
    failed(on_onnx)
    assert on_onnx.run("limits.size-ratio=2").exit_code is ExitCode.DONE


def test_another_target_does_not_inherit_the_verdict_on_the_same_graph(on_onnx: Project):
    on_onnx.spec["passes"] = []
    on_onnx.spec["limits"] = {"size-ratio": None, "latency-ratio": None}
    on_onnx.spec["exports"] = [{"format": "onnx", "target": "ort-cpu"}]
    (first,) = on_onnx.run().report["artifacts"]
    on_onnx.spec["exports"] = [{"format": "onnx", "target": "tensorrt"}]
    (second,) = on_onnx.run().report["artifacts"]
    assert first["sha256"] != second["sha256"], "a file says what it was written for"
    assert first["latency_ratio"] is not None
    assert first["latency_ratio_reason"] is None
    assert second["latency_ratio"] is None
    assert "TensorRT" in second["latency_ratio_reason"]


def test_latencies_of_another_machine_are_not_reused(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    assert not on_onnx.run().cached
    assert on_onnx.run().cached
    monkeypatch.setattr(verify, "machine", lambda: {"processor": "another"})
    assert not on_onnx.run().cached


def test_an_artifact_that_gives_other_values(on_onnx: Project):
    on_onnx.spec["exports"] = [{"format": "liar"}]
    result = on_onnx.run()
    assert result.exit_code is ExitCode.ARTIFACT_FAILED
    assert not result.report["ok"]
    (artifact,) = result.report["artifacts"]
    assert [(c["name"], c["ok"]) for c in artifact["checks"]] == [
        ("opens in its runtime", True),
        ("agrees with the model it was exported from", False),
        ("takes the bytes that the plan predicted", True),
    ]
    assert "failed" in (on_onnx.output / "report.md").read_text()


def test_an_artifact_that_is_larger_than_predicted(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(OnnxExporter, "predict", lambda *_: 10)
    monkeypatch.setattr(verify, "_SLACK_BYTES", 0)
    on_onnx.spec["exports"] = [{"format": "onnx"}]
    result = on_onnx.run()
    assert result.exit_code is ExitCode.ARTIFACT_FAILED
    (artifact,) = result.report["artifacts"]
    size = artifact["checks"][-1]
    assert not size["ok"]
    assert size["detail"] == f"{artifact['bytes']:,}; predicted 10"


def test_a_failed_check_outweighs_a_failed_limit(on_onnx: Project):
    on_onnx.spec["exports"] = [{"format": "liar"}]
    on_onnx.spec["limits"]["size-ratio"] = 0.001
    assert on_onnx.run().exit_code is ExitCode.ARTIFACT_FAILED


@pytest.mark.parametrize("with_data", [True, False])
def test_an_artifact_with_outputs_of_another_shape(on_onnx: Project, with_data: bool):
    on_onnx.spec["exports"] = [{"format": "cut"}]
    if not with_data:
        del on_onnx.spec["data"]
    with pytest.raises(ArtifactError) as caught:
        on_onnx.run()
    assert caught.value.exit_code is ExitCode.ARTIFACT_FAILED
    message = str(caught.value)
    assert message.startswith("artifact 'model.onnx': gives outputs of shape [[")
    assert ", 3]], the model it was exported from [[" in message


def test_an_artifact_that_gives_nan(on_onnx: Project):
    on_onnx.spec["exports"] = [{"format": "empty"}]
    with pytest.raises(DataError, match="output 'logits': is NaN or infinite for sample 1; "):
        on_onnx.run()
    assert on_onnx.artifacts() == {}
    assert on_onnx.leftovers() == []
    assert not (on_onnx.output / "report.json").exists()


def test_a_failed_run_leaves_the_results_of_the_one_before(on_onnx: Project):
    on_onnx.run()
    before = on_onnx.artifacts()
    report = on_onnx.report()
    on_onnx.spec["passes"] = [{"pass": "nudge", "factor": 1.5}]
    on_onnx.spec["exports"] = [{"format": "empty"}]
    with pytest.raises(DataError):
        on_onnx.run()
    assert on_onnx.artifacts() == before
    assert on_onnx.report() == report


def test_a_pass_that_overflows_names_the_layer(on_onnx: Project):
    on_onnx.spec["passes"] = [{"pass": "nudge"}, {"pass": "nudge", "factor": 1e30}]
    with pytest.raises(ModelError) as caught:
        on_onnx.run()
    message = str(caught.value)
    assert ": layer 'conv2': gives NaN or infinity after this pass; " in message
    assert message.startswith(str(on_onnx.folder / "spec.yaml"))
    assert on_onnx.leftovers() == []
