"""What a report advises, and what ``compress explain --apply`` writes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from ruamel.yaml import YAML

from compressor.cli.application import application
from compressor.errors import SpecError
from compressor.lab.explain import advice, by_sqnr
from compressor.lab.explain.advice import advise, write_changed
from compressor.lab.explain.by_sqnr import FinishedRun, explain_by_sqnr, finished_run
from compressor.lab.explain.doubts import doubts
from compressor.lab.explain.explanation import Change, Gain, LayerCost
from compressor.report.run import run_spec
from compressor.spec.load import load_spec
from tests.compressor.conftest import spine_of_tests
from tests.compressor.tiny_project import onnx_project

SPEC = """\
# What we ship.
version: 1
name: tiny
model: {onnx: tiny.onnx}   # from the vendor
data:
  calibration: {npz: calib.npz, inputs: {image: image}, batch: 16}
  evaluation: {npz: test.npz, inputs: {image: image}, target: label, batch: 16}
passes:
  - pass: quantize-static   # as the target wants
    prepare: none
    layers:
      # the narrow one
      - {match: conv2, bits: 4}
exports:
  - {format: onnx}
limits: {size-ratio: null, latency-ratio: null, metric-drop: 1.0}
"""


def explained(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application, ["explain", *map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "project"
    onnx_project(folder)
    (folder / "our.yaml").write_text(SPEC)
    with spine_of_tests():
        run_spec(load_spec(folder / "our.yaml"))
    return folder


@pytest.fixture
def spoiled(finished: Path, tmp_path: Path, spine: None) -> Path:
    """A spec with comments, one of whose layers is rounded to four bits; it was run."""
    return shutil.copytree(finished, tmp_path / "project") / "our.yaml"


def output(spec: Path) -> Path:
    return spec.parent / "out" / "tiny"


def report(spec: Path) -> dict[str, Any]:
    return dict(json.loads((output(spec) / "report.json").read_text()))


def changed(spec: Path, **drop: Any) -> FinishedRun:
    """Return the run with another loss of its metric."""
    run = finished_run(spec)
    document = json.loads(json.dumps(run.report))
    document["artifacts"][0].update(drop)
    document["limits"] = drop.get("limits", [])
    return FinishedRun(run.folder, document, run.manifest, run.spec)


def test_the_layer_that_costs_the_metric_is_advised(spoiled: Path):
    advice = advise(changed(spoiled, metric_drop=8.0, metric_drop_ci95=[3.0, 13.0]))
    assert advice.reason == ""
    assert advice.diff == (
        " passes:",
        "   - pass: quantize-static # passes.0",
        "     layers:",
        "+      - {match: conv2, bits: 8}",
    )
    found = advice.as_json()
    assert [(c["layer"], c["change"]) for c in found["suggested"]] == [("conv2", {"bits": 8})]
    assert found["predicted"]["metric_share"] > 50


def _drop_limit(limit: float, verdict: str) -> dict[str, Any]:
    return {
        "name": "metric-drop",
        "artifact": "model.onnx",
        "limit": limit,
        "verdict": verdict,
        "ok": verdict != "failed",
    }


@pytest.mark.parametrize(("limit", "verdict"), [(0.8, "passed"), (0.01, "failed")])
def test_a_loss_of_a_tenth_of_the_limit_is_worth_a_change(
    spoiled: Path, limit: float, verdict: str
):
    limits = [_drop_limit(limit, verdict)]
    run = changed(spoiled, metric_drop=0.04, metric_drop_ci95=[0.01, 0.09], limits=limits)
    assert advise(run).reason == ""


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        ({"metric_drop": 0.0, "metric_drop_ci95": [-1.0, 1.0]}, "accuracy lost nothing"),
        (
            {"metric_drop": 2.0, "metric_drop_ci95": [-1.0, 5.0]},
            "before more samples are evaluated: that accuracy lost anything may",
        ),
        ({"metric": None}, "before quality is measured"),
        (
            {
                "metric_drop": 0.04,
                "metric_drop_ci95": [0.01, 0.09],
                "limits": [_drop_limit(1.0, "passed")],
            },
            "accuracy lost less than a tenth of its limit",
        ),
        (
            {
                "metric_drop": 8.0,
                "metric_drop_ci95": [3.0, 13.0],
                "float_bytes": 10_000,
                "bytes": 3_999,
                "limits": [
                    {"name": "size-ratio", "artifact": "model.onnx", "limit": 0.4, "ok": True}
                ],
            },
            "would break the limit size-ratio",
        ),
    ],
)
def test_nothing_is_worth_trying_and_why(spoiled: Path, drop: dict[str, Any], said: str):
    advice = advise(changed(spoiled, **drop))
    assert advice.reason.startswith("nothing is worth trying")
    assert said in advice.reason
    assert advice.diff == ()
    assert advice.as_json()["suggested"] == []


def test_another_limit_that_failed_is_named(spoiled: Path):
    """It said that nothing is worth trying, of a run that failed."""
    slow = {**_drop_limit(1.0, "failed"), "name": "latency-ratio"}
    kept = {"metric_drop": 0.0, "metric_drop_ci95": [-1.0, 1.0]}
    advice = advise(changed(spoiled, **kept, limits=[slow]))
    assert advice.reason == "rules for layers win back accuracy, and what failed is 'latency-ratio'"
    lost = {"metric_drop": 8.0, "metric_drop_ci95": [3.0, 13.0]}
    assert advise(changed(spoiled, **lost, limits=[slow])).reason == ""


def test_a_run_without_a_spec_is_given_options(spoiled: Path):
    run = changed(spoiled, metric_drop=8.0, metric_drop_ci95=[3.0, 13.0])
    manifest = {**run.manifest, "spec_file": None}
    made = FinishedRun(run.folder, run.report, manifest, None)
    advice = advise(made)
    assert advice.diff == (" compress quantize", "+    --skip conv2")
    found = advice.as_json()
    assert [(c["layer"], c["change"]) for c in found["suggested"]] == [("conv2", {"skip": True})]
    assert advice.explanation.as_json()["options"] == ["--skip conv2"]
    assert advice.explanation.as_json()["spec"] == {}
    with pytest.raises(SpecError, match=r"was made by compress quantize.*options"):
        write_changed(made, advice.explanation.suggested)


def test_the_report_holds_the_advice(spoiled: Path):
    found = report(spoiled)["advice"]
    assert found == advise(finished_run(spoiled)).as_json()


def test_the_changed_spec_keeps_comments_and_order(spoiled: Path):
    before = spoiled.read_text()
    result = explained(output(spoiled), "--apply", "--json")
    assert result.exit_code == 0, result.stderr
    written = Path(json.loads(result.stdout)["written"])
    assert written == spoiled.resolve().with_name("our.next.yaml")
    assert spoiled.read_text() == before
    rule = "      - {match: conv2, bits: 8}\n"
    lines = written.read_text().splitlines(keepends=True)
    assert rule in lines
    lines.remove(rule)
    assert "".join(lines) == before
    assert YAML(typ="safe").load(written)["passes"][0]["layers"][0] == {"match": "conv2", "bits": 8}
    loss = report(spoiled)["passes"][0]["sqnr_db"]
    run_spec(load_spec(written))
    assert report(spoiled)["passes"][0]["sqnr_db"] > loss + 6


def test_no_file_is_overwritten(spoiled: Path):
    names = []
    for _ in range(2):
        result = explained(spoiled, "--apply")
        assert result.exit_code == 0, result.stderr
        names.append(result.stdout.splitlines()[-2])
    assert "our.next.yaml. Next: compress run" in names[0]
    assert "our.next2.yaml. Next: compress run" in names[1]


def test_a_spec_that_is_not_that_of_the_run_is_refused(spoiled: Path):
    spoiled.write_text(SPEC.replace("# What we ship.", "# Changed."))
    result = explained(output(spoiled), "--apply")
    assert result.exit_code == 2
    assert "has changed since it was run; compress run" in result.stderr
    spoiled.unlink()
    result = explained(output(spoiled), "--apply")
    assert result.exit_code == 2
    assert "has no spec at" in result.stderr
    assert "pass the spec instead of the folder" in result.stderr


def test_a_program_holds_its_own_spec(tmp_path: Path):
    """The remedy was to name a spec, of which there is none."""
    report = {"objects": [{"key": "model.factory", "type": "Net"}]}
    with pytest.raises(SpecError, match=r"by a Python program.*change the program's passes"):
        write_changed(FinishedRun(tmp_path, report, {}, None), [])


def test_what_set_changed_is_in_the_changed_spec(spoiled: Path):
    """The rules were written beside the file's own passes, which were not those that ran."""
    text = spoiled.read_text().replace("    layers:\n      # the narrow one\n", "")
    text = text.replace("      - {match: conv2, bits: 4}\n", "")
    spoiled.write_text(f"{text}metric: accuracy\n")
    passes = "passes=[{pass: quantize-static, prepare: none, layers: [{match: conv2, bits: 4}]}]"
    settings = (passes, "limits.metric-drop=2.0", "metric.name=agreement")
    run_spec(load_spec(spoiled, settings))
    with pytest.raises(SpecError, match=r"other settings \(--set\).*with the same --set"):
        write_changed(finished_run(output(spoiled)), [])
    found = write_changed(finished_run(spoiled, settings), [Change(0, "conv2", {"bits": 8})])
    spec = load_spec(found)
    assert [(rule.match, rule.bits) for rule in spec.passes[0].layers] == [  # type: ignore[attr-defined]
        ("conv2", 8),
        ("conv2", 4),
    ]
    assert spec.limits.metric_drop == 2.0
    assert spec.resolved["metric"]["name"] == "agreement"  # in place of a short form
    assert "# What we ship." in found.read_text()


@pytest.mark.parametrize(
    ("bases", "said", "unsaid"),
    [
        (("divergence",), "the divergence of the answers' probabilities;", "each sample's value"),
        (("metric",), "the change of each sample's value;", "divergence"),
        (("divergence", None, "metric"), "probabilities and the change of each", "else"),
    ],
)
def test_the_footnote_says_what_was_measured(bases: tuple[str | None, ...], said: str, unsaid: str):
    """Outputs that are numbers of classes have no probabilities."""
    passes = [{"attribution": {"metric_basis": basis}} for basis in bases]
    gain = Gain(bytes=0, sqnr_db=None, noise_share=None, metric_share=1.0)
    cost = LayerCost("round", "int8", None, Change(0, "x", {"skip": True}), gain)
    (note,) = by_sqnr._effect_note([cost], passes)
    assert said in note
    assert unsaid not in note


def row(noise: float) -> dict[str, Any]:
    return {"name": "x", "own_sqnr_db": 30.0, "output_sqnr_db": 30.0, "metric_noise": noise}


def made(rows: list[dict[str, Any]], basis: str, sqnr: float) -> dict[str, Any]:
    entry = {
        "basis": "outputs",
        "metric_basis": basis,
        "shared_inputs": 0.0,
        "shared_metric_noise": 0.0,
        "layers": rows,
    }
    metric = {"name": "f1", "value": 1.0}
    given = {"pass": "round", "attribution": entry, "metric": metric, "metric_drop": 1.0}
    return {"passes": [{**given, "sqnr_db": sqnr}]}


def test_what_cannot_be_known_is_said():
    """Ten layers of 30 dB each: together 20 dB."""
    few = made([row(0.1), *[row(0.0)] * 9], "metric", 20.0)
    assert doubts(few).startswith("the noise of 1 of 10 layers alone changes f1 of any")
    assert doubts(made([row(0.1)] * 10, "metric", 20.0)) == ""
    assert doubts(made([row(0.1), *[row(0.0)] * 9], "divergence", 20.0)) == ""
    assert "adds up to 4 times that in the model's output" in doubts(
        made([row(0.1)] * 10, "divergence", 26.02)
    )
    assert "adds up to 0.25 times" in doubts(made([row(0.1)] * 10, "divergence", 13.98))
    unknown = made([{**row(0.0), "metric_noise": None}], "metric", 30.0)
    assert "is not known" in doubts(unknown)


@pytest.mark.parametrize(("samples", "known"), [(600, False), (6000, True)])
def test_so_few_answers_are_not_predicted(samples: int, known: bool):
    """Half a point of 600 is three answers: a gain was promised, and a loss was measured."""
    report = made([row(0.1)], "divergence", 30.0)
    report["passes"][0]["metric"] = {"name": "agreement", "unit": "%", "samples": samples}
    cost = LayerCost(
        "round", "", 20.0, Change(0, "a", {"skip": True}), Gain(9, 1.0, 60.0, metric_share=50.0)
    )
    gain = by_sqnr._predicted(report, [cost])
    assert (gain.metric == pytest.approx(0.5)) if known else (gain.metric is None)


def test_what_training_makes_up_for_is_not_predicted():
    """distil won back what pruning had lost; 1.13 points were promised, and none came."""
    (pruned,) = made([row(0.1)], "divergence", 30.0)["passes"]
    distilled = {**pruned, "pass": "distill", "attribution": None, "training": {"steps": 4}}
    words = "distill trains behind round, and makes up for what its layers lose"
    assert doubts({"passes": [pruned, distilled]}) == words
    assert words not in doubts({"passes": [{**distilled, "metric_drop": 0.0}, pruned]})


@pytest.mark.parametrize(
    ("target", "divided"),
    [({"macs": 0.5}, True), ({"latency": 0.5}, True), ({"ratio": 0.5}, False)],
)
def test_what_a_rule_spares_one_layer_others_lose(target: dict[str, float], divided: bool):
    spec = {"passes": [{"pass": "prune-structured", "target": target}]}
    run = FinishedRun(Path(), {"passes": [{"pass": "prune-structured"}]}, {"spec": spec}, None)
    gain = Gain(100, 1.0, 30.0)
    cost = LayerCost("prune-structured", "", 20.0, Change(0, "conv", {"skip": True}), gain)
    words = "what a rule spares one layer, prune-structured takes from others"
    assert by_sqnr._divided(run, [cost]) == (words if divided else "")
    assert by_sqnr._divided(run, []) == ""


@pytest.mark.parametrize(
    ("before", "after", "doubted"),
    [(0.4, 1.0, False), (0.6, 1.0, True), (1.2, 1.0, True), (0.0, 0.0, False), (-0.5, 0.2, False)],
)
def test_what_a_pass_without_rules_lost_is_not_won_back(before, after, doubted):
    (rounding,) = made([row(0.1)], "divergence", 30.0)["passes"]
    trained = {"pass": "finetune", "attribution": None, "metric_drop": before}
    report = {"passes": [trained, {**rounding, "metric_drop": after}]}
    words = "most of what f1 lost was lost by finetune, which has no rules for single layers"
    assert doubts(report) == (words if doubted else "")


def test_layers_that_two_passes_change_are_not_foreseen():
    (rounding,) = made([row(0.1)], "divergence", 30.0)["passes"]
    other = {**rounding, "attribution": {**rounding["attribution"], "layers": []}}
    first, second = ({**rounding, "pass": name, "metric_drop": 0.5} for name in ("cut", "round"))
    words = "round changes layers behind cut, and what a layer loses by one of them depends on"
    assert doubts({"passes": [first, {**second, "metric_drop": 1.0}]}).startswith(words)
    assert words not in doubts({"passes": [{**other, "metric_drop": 0.5}, second]})
    scaled = {"layers": [{**row(0.0), "own_sqnr_db": 130.0}]}  # as equalize leaves it
    exact = {**first, "attribution": {**rounding["attribution"], **scaled}, "metric_drop": 0.0}
    assert words not in doubts({"passes": [exact, second]})


def test_a_doubt_names_the_command_that_measures_where_a_file_holds_the_spec(
    spoiled: Path, monkeypatch: pytest.MonkeyPatch
):
    run = finished_run(spoiled)
    doubtful = replace(explain_by_sqnr(run, 3), doubt="nobody knows")
    monkeypatch.setattr(advice, "explain_by_sqnr", lambda *_: doubtful)
    monkeypatch.setattr(advice, "_unneeded", lambda _: "")
    assert "nobody knows; compress explain SPEC --method leave-one-out" in advise(run).reason
    run.manifest["spec_file"] = None  # of compress quantize
    assert advise(run).reason.endswith("because nobody knows")
