"""``compress explain`` on whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result
from ruamel.yaml import YAML

from compressor.cli.application import application
from compressor.errors import DataError
from compressor.models.onnx.carrier import open_onnx
from compressor.run.metrics.metric_effect import MetricEffect
from compressor.run.noise import attribution
from tests.compressor.conftest import spine_of_tests
from tests.compressor.passes.prepare.networks import stretched
from tests.compressor.tiny_project import ONNX, Project, copied, onnx_project

QUANTIZE = {"pass": "quantize-static", "prepare": "none", "layers": [{"match": "*"}]}
NARROW = [{"match": "conv2", "bits": 4}, {"match": "*"}]
MEASURE = ("--method", "leave-one-out")


def explained(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application, ["explain", *map(str, arguments)])


def document(*arguments: str | Path) -> Any:
    result = explained("--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = onnx_project(tmp_path_factory.mktemp("finished") / "project")
    project.spec["passes"] = [dict(QUANTIZE)]
    with spine_of_tests():
        project.run()
    return project


@pytest.fixture
def quantized(finished: Project, tmp_path: Path, spine: None) -> Project:
    """A project of its own that was quantized."""
    return copied(finished, tmp_path / "project")


def paste(project: Project, found: Any) -> None:
    """Write what was suggested in front of the passes' rules."""
    for index, text in found["spec"].items():
        entry = project.spec["passes"][int(index)]
        entry["layers"] = YAML(typ="safe").load(text)["layers"] + entry.get("layers", [])


def test_the_report_says_whose_the_noise_is(quantized: Project):
    found = quantized.report()["passes"][0]["attribution"]
    assert found["basis"] == "outputs"
    rows = {row["name"]: row for row in found["layers"]}
    assert list(rows) == ["conv1", "conv2", "fc"]
    shares = sum(row["noise_share"] for row in rows.values())
    assert shares + found["shared_inputs"] == pytest.approx(100)
    # What the last layer writes is the model's output.
    assert rows["fc"]["own_sqnr_db"] == pytest.approx(rows["fc"]["output_sqnr_db"])
    assert rows["conv2"]["bytes_to_skip"] == 3 * 8 * 8 * 9 - 2 * 4 * 8  # scales of weight and bias


def test_a_folder_a_report_and_a_spec_say_the_same(quantized: Project):
    found = document(quantized.output)
    assert found["method"] == "sqnr"
    assert found == document(quantized.output / "report.json") == document(quantized.path)
    page = explained(quantized.output)
    assert page.exit_code == 0
    assert "In front of the rules of passes.0 (quantize-static):" in page.stdout
    for lines in found["spec"].values():
        assert lines in page.stdout


@pytest.mark.parametrize(
    ("before", "prepare"),
    [
        ([], "none"),
        ([], "auto"),
        pytest.param([{"pass": "equalize"}], "none", marks=pytest.mark.slow),
    ],
)
def test_the_layer_that_is_spoiled_is_found(
    on_onnx: Project, before: list[dict[str, Any]], prepare: str
):
    """Rounded to 4 bits, one layer makes nearly all of the noise; 8 bits are suggested for it.

    That holds where channels were scaled, too, before the pass or in it.
    """
    if prepare == "auto" or before:
        path = on_onnx.folder / ONNX
        ir.save(stretched(open_onnx(path, 21), 16.0).graph(), path)
    place = len(before)
    on_onnx.spec["passes"] = [*before, {**QUANTIZE, "prepare": prepare, "layers": NARROW}]
    on_onnx.run()
    found = document(on_onnx.output)
    assert found["doubt"] is None
    assert found["layers"][0]["layer"] == "conv2"
    assert found["layers"][0]["gain"]["noise_share"] > 80
    assert found["suggested"] == [{"index": place, "layer": "conv2", "change": {"bits": 8}}]
    predicted = found["predicted"]
    report = on_onnx.report()
    before_change = report["passes"][place]["bytes"]
    assert found["bytes"] == report["artifacts"][0]["bytes"] != before_change  # what is delivered
    paste(on_onnx, found)
    assert on_onnx.run().exit_code == 0
    after = on_onnx.report()["passes"][place]
    assert after["sqnr_db"] - found["sqnr_db"] == pytest.approx(predicted["sqnr_db"], abs=6)
    # With 8 bits the bias, too, has codes and a scale for each row.
    assert after["bytes"] - before_change == pytest.approx(predicted["bytes"], rel=0.15)


def test_rounding_by_fusion_is_not_measured(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    measure = attribution.measured_noise

    def counted(carrier: Any, *arguments: Any) -> Any:
        measured.append(carrier.kind)
        return measure(carrier, *arguments)

    monkeypatch.setattr(attribution, "measured_noise", counted)
    on_onnx.spec["passes"] = [{"pass": "fuse"}, dict(QUANTIZE)]
    assert on_onnx.run().exit_code == 0
    assert len(measured) == 1
    found = on_onnx.report()["passes"][1]["attribution"]
    assert all(row["output_sqnr_db"] < 100 for row in found["layers"])


def test_rounding_that_stays_is_nobodys_gain(on_onnx: Project):
    """The kernel of conv1 writes codes: its output is rounded whether conv2 is skipped or not."""
    widths = {"activations": {"bits": 4}, "weights": {"bits": 8}, "first-last": "same"}
    coarse = {**QUANTIZE, **widths}
    on_onnx.spec["passes"] = [coarse]
    on_onnx.run()
    before = on_onnx.report()["passes"][0]
    (row,) = [row for row in before["attribution"]["layers"] if row["name"] == "conv2"]
    on_onnx.spec["passes"] = [{**coarse, "layers": [{"match": "conv2", "skip": True}]}]
    on_onnx.run()
    after = on_onnx.report()["passes"][0]
    gone = 100 * (1 - 10 ** ((before["sqnr_db"] - after["sqnr_db"]) / 10))
    assert row["noise_share"] == pytest.approx(gone, abs=15)
    assert row["noise_share"] < 5


def test_measured_gains_are_those_of_the_pasted_spec(quantized: Project):
    found = document(quantized.path, *MEASURE, "--top", "2")
    assert found["data"] == "evaluation"
    assert {row["layer"] for row in found["layers"]} == {"conv1", "conv2", "fc"}
    assert all(row["gain"]["ci95"] is not None for row in found["layers"])
    before = quantized.report()["passes"][0]
    paste(quantized, found)
    quantized.run()
    after = quantized.report()["passes"][0]
    measured = found["measured"] or found["layers"][0]["gain"]
    if len(found["suggested"]) == 2:
        assert after["bytes"] - before["bytes"] == measured["bytes"]
        assert after["sqnr_db"] - before["sqnr_db"] == pytest.approx(measured["sqnr_db"])
        gained = after["metric"]["value"] - before["metric"]["value"]
        assert gained == pytest.approx(measured["metric"])


def test_what_was_measured_is_not_measured_again(
    quantized: Project, monkeypatch: pytest.MonkeyPatch
):
    nothing = document(quantized.path, *MEASURE, "--seconds", "0")
    assert nothing["layers"] == []
    assert nothing["left_out"] == ["3 layers: the time was up (--seconds)"]
    one = document(quantized.path, *MEASURE, "--layers", "1")
    assert len(one["layers"]) == 1
    assert one["left_out"] == ["2 layers with less noise: the budget was 1 (--layers)"]
    again = document(quantized.path, *MEASURE, "--seconds", "0")
    assert again["layers"] == one["layers"]
    every = document(quantized.path, *MEASURE, "--top", "2")
    assert len(every["layers"]) == 3
    assert every["measured"] is not None
    from compressor.lab.explain.leave_one_out import Variants

    monkeypatch.setattr(Variants, "make", None)  # nobody may make a model again
    assert document(quantized.path, *MEASURE, "--top", "2") == every


def test_statistics_are_collected_once(quantized: Project, monkeypatch: pytest.MonkeyPatch):
    from compressor.run import pipeline

    asked: list[int] = []
    collect = pipeline.calibrate

    def counting(workspace: Any, label: str, carrier: Any, requests: Any) -> Any:
        asked.append(len(requests))
        return collect(workspace, label, carrier, requests)

    monkeypatch.setattr(pipeline, "calibrate", counting)
    document(quantized.path, *MEASURE)
    assert sum(1 for count in asked if count) <= 2  # the rest, where the first variant lacked some


def test_without_labels_the_calibration_data_judge(quantized: Project):
    del quantized.spec["data"]["evaluation"]
    quantized.run()
    found = document(quantized.path, *MEASURE)
    assert found["data"] == "calibration"
    assert found["metric"]["name"] == "cosine"


def test_passes_that_train_are_left_out_with_the_reason(on_torch: Project):
    on_torch.spec["data"]["training"] = {
        "npz": "test.npz",
        "inputs": {"image": "image"},
        "target": "label",
        "batch": 16,
    }
    on_torch.spec["passes"] = [
        {"pass": "prune-magnitude", "sparsity": 0.5},
        {"pass": "finetune", "epochs": 1},
    ]
    on_torch.run()
    found = document(on_torch.path, *MEASURE)
    assert found["layers"] == []
    (reason,) = found["left_out"]
    assert reason.startswith("all layers of prune-magnitude: finetune comes after it, and would")
    # Whose noise is larger after pruning is told all the same.
    assert document(on_torch.output)["layers"][0]["gain"]["noise_share"] > 0


def test_a_model_that_the_runtime_refuses_in_parts_still_runs(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    from compressor.errors import ModelError

    def refuse(*_: Any) -> None:
        raise ModelError("the layers", "do not load", "nothing helps")

    monkeypatch.setattr(attribution, "measured_noise", refuse)
    on_onnx.spec["passes"] = [dict(QUANTIZE)]
    on_onnx.run()
    found = on_onnx.report()["passes"][0]["attribution"]
    assert found["reason"] == "the layers: do not load; nothing helps"
    assert all(row["noise_share"] is None for row in found["layers"])
    assert "quantize-static: the layers: do not load" in explained(on_onnx.output).stdout


def test_a_metric_that_refuses_noise_does_not_fail_the_run(on_onnx: Project):
    on_onnx.spec["passes"] = [dict(QUANTIZE)]
    with pytest.MonkeyPatch.context() as patch:
        refused = DataError("metric 'f1'", "failed", "check it")
        patch.setattr(MetricEffect, "relative_to", Mock(side_effect=refused))
        on_onnx.run()
    found = on_onnx.report()["passes"][0]["attribution"]
    assert found["reason"] == "metric 'f1': failed; check it"


def test_bad_input(quantized: Project, tmp_path: Path):
    def refused(code: int, text: str, *arguments: str | Path) -> None:
        result = explained(*arguments)
        assert (result.exit_code, text in result.stderr) == (code, True), result.stderr
        assert "Traceback" not in result.stderr

    folder = quantized.output
    report = folder / "report.json"
    refused(2, "does not exist; name the output folder of a run, or its spec", tmp_path / "none")
    refused(2, "has no report.json; name the output folder of a run", tmp_path)
    refused(2, "is not a report; name the output folder", folder / "model.onnx")
    refused(2, "pass the spec instead of the folder, or use --method sqnr", folder, *MEASURE)
    refused(2, "add --method leave-one-out", folder, "--layers", "2")
    refused(2, "--set: changes a spec, and a run is named", folder, "--set", "seed=1")
    refused(2, "has changed since it was run; compress run", quantized.path, "--set", "seed=1")
    other = quantized.path.with_name("other.yaml")
    other.write_text(json.dumps({**json.loads(quantized.path.read_text()), "seed": 1}))
    words = f"run last into '{quantized.output}': that was '{quantized.path.name}'; compress run"
    refused(2, words, other)
    document = quantized.report()
    report.write_text("{")
    refused(3, "report.json does not match manifest.json: it was edited", folder)
    for other, problem in (
        ([], "is not a mapping"),
        ({**document, "schema": 2}, "a report that this version cannot read (schema: "),
        ({**document, "passes": [{"pass": "x"}]}, "cannot read (passes.0."),
    ):
        quantized.write_report(other)
        refused(3, problem, folder)
    report.unlink()
    refused(2, "has no report.json; compress run", quantized.path)


def test_nothing_to_attribute(on_torch: Project):
    on_torch.spec["passes"] = [{"pass": "fuse"}]
    on_torch.run()
    result = explained(on_torch.output)
    assert result.exit_code == 2
    assert "has no layers that noise is attributed to: of fuse, each trains, has" in result.stderr


def test_nothing_to_measure_on(quantized: Project):
    del quantized.spec["data"]
    quantized.spec["passes"] = [{"pass": "quantize-dynamic"}]
    quantized.run()
    result = explained(quantized.path, *MEASURE)
    assert result.exit_code == 2
    assert "has neither evaluation nor calibration" in result.stderr
    assert "add data.evaluation, or use --method sqnr" in result.stderr
