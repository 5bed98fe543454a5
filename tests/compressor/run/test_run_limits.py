"""Limits and checks: what fails a run, with which exit code, and what it leaves then."""

from typing import Any

import pytest

from compressor.errors import ArtifactError, DataError, ExitCode, ModelError
from compressor.exporters import OnnxExporter
from compressor.report.next_step import next_step
from compressor.run import verify
from compressor.run.verdicts.verdicts import NO_SHARE
from tests.compressor.tiny_project import ONNX, REPORTS, Project


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


@pytest.mark.parametrize(("factor", "verdict"), [(-1.0, "unknown"), (1.0, "passed")])
def test_a_metric_that_is_zero_for_the_float_model_tells_no_limit(
    on_onnx: Project, factor: float, verdict: str
):
    """A share of nothing was guessed from the outputs, and passed what answers at random."""
    (on_onnx.folder / "tiny_far.py").write_text(
        "def far(outputs, target):\n    return abs(outputs - target).max(1)\n"
    )
    del on_onnx.spec["data"]["evaluation"]["target"]
    on_onnx.spec["metric"] = {"function": "tiny_far:far", "higher-is-better": False}
    on_onnx.spec["passes"] = [{"pass": "nudge", "factor": factor}]
    report = on_onnx.run().report
    (found,) = [e for e in report["limits"] if e["name"] == "metric-drop"]
    assert found["verdict"] == verdict
    assert (found["reason"] == NO_SHARE) is (verdict == "unknown")
    words = "state limits.metric-drop in the metric's own unit"
    assert (next_step(report, "out") == words) is (verdict == "unknown")


def test_a_larger_model_fails_only_if_it_was_to_be_smaller(on_onnx: Project):
    del on_onnx.spec["limits"]["size-ratio"]
    result = on_onnx.run()
    assert result.exit_code is ExitCode.DONE
    assert result.report["artifacts"][0]["size_ratio"] > 1
    assert "size-ratio" not in {e["name"] for e in result.report["limits"]}
    on_onnx.spec["limits"]["size-ratio"] = 1.0
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
    on_onnx.spec["limits"]["size-ratio"] = 1.0
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
    ]
    assert "failed" in (on_onnx.output / "report.md").read_text()


def test_a_prediction_that_was_too_small_fails_nothing(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(OnnxExporter, "checked_bytes", lambda *_: 10)
    on_onnx.spec["exports"] = [{"format": "onnx"}]
    result = on_onnx.run()
    (artifact,) = result.report["artifacts"]
    assert result.exit_code is ExitCode.DONE
    assert artifact["predicted_bytes"] == 10 < artifact["bytes"]


def test_a_size_is_compared_with_the_users_own_file_of_the_same_format(on_onnx: Project):
    own = (on_onnx.folder / ONNX).stat().st_size
    on_onnx.spec["exports"] = [{"format": "onnx"}, {"format": "safetensors"}]
    onnx_file, stored = on_onnx.run().report["artifacts"]
    assert (onnx_file["float_file"], onnx_file["float_bytes"]) == (ONNX, own)
    assert onnx_file["size_ratio"] == onnx_file["bytes"] / own
    # Nobody has the float model in this format: it is written the same way.
    assert stored["float_file"] == "model.safetensors"
    on_onnx.spec["passes"] = []
    same = on_onnx.run().report["artifacts"][1]
    assert same["float_bytes"] == same["bytes"] == stored["float_bytes"]
    assert same["size_ratio"] == 1.0


def test_the_owners_figure_is_checked_before_anything_is_compressed(on_onnx: Project):
    right = on_onnx.run().report["baseline"]["metric"]["value"]
    on_onnx.spec["metric"] = {"name": "accuracy", "expect": right}
    assert on_onnx.run().exit_code is ExitCode.DONE
    on_onnx.spec["metric"]["expect"] = right - 60
    on_onnx.spec["passes"] = [{"pass": "nudge", "factor": 1.25}]
    with pytest.raises(DataError, match=f"and the spec expects {right - 60:g} %; check the norm"):
        on_onnx.run()
    assert on_onnx.report()["passes"] == [], "the report is still that of the first run"


def test_a_lost_metric_is_never_green_even_if_nobody_set_a_limit(on_onnx: Project):
    on_onnx.spec["passes"] = [{"pass": "nudge", "factor": -1.0}]
    on_onnx.spec["limits"].pop("metric-drop", None)
    found = failed(on_onnx)
    assert (found["name"], found["limit"], found["default"]) == ("metric-drop", 1.0, True)


def test_what_was_not_measured_is_unknown_and_fails_a_strict_run(on_onnx: Project):
    del on_onnx.spec["data"]
    result = on_onnx.run()
    assert (result.exit_code, result.report["ok"]) == (ExitCode.DONE, True)
    assert result.report["verdict"] == "unknown"
    strict = on_onnx.run(strict=True)
    assert strict.exit_code is ExitCode.LIMIT_FAILED


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
    assert message.startswith("artifact 'model.onnx': returns outputs of shape [[")
    assert ", 3]], but the model it was exported from [[" in message


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
    assert ": layer 'conv2': returns NaN or infinity after this pass; " in message
    assert message.startswith(str(on_onnx.folder / "spec.yaml"))
    assert on_onnx.leftovers() == []
