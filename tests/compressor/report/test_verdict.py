from typing import Any

import pytest

from compressor import catalog
from compressor.graph.costs import BARE, FOREIGN
from compressor.passes.quantize.static.placement import profile_for
from compressor.report import verdict
from compressor.report.html import html_report
from compressor.report.markdown import markdown_report
from compressor.report.next_step import ALL_INTEGERS, next_step
from compressor.report.tables import pass_notes
from compressor.report.terminal import plain_text, reason_line, run_page
from compressor.run.verdicts.verdicts import BLIND, COPIES, TRAINED_ON, judge
from compressor.spec.keys import LimitKeys

Report = dict[str, Any]


def test_a_passed_run_says_what_held(passed_report: Report):
    assert verdict.headline(passed_report) == "Passed: 5 limits and 4 checks held"
    assert verdict.failures(passed_report) == []
    assert verdict.gist(passed_report) == "3.5 × smaller, 1.77 × faster, accuracy down 0.15 points"


def test_a_failed_run_says_what_failed_and_by_how_much(failed_report: Report):
    assert verdict.headline(failed_report) == "Failed: 2 of 5 limits and 1 of 4 checks"
    assert verdict.failures(failed_report) == [
        (
            "model.onnx",
            "accuracy drop 1.20 points (95 % CI 0.95 to 1.50), limit 0.50 points: "
            "over by 0.70 points",
        ),
        (
            "model.onnx",
            "latency ratio 1.26 × (95 % CI 1.24 to 1.28), limit 1.00 × (default): over by 0.26 ×",
        ),
        (
            "model.onnx",
            "check “agrees with the model it was exported from” failed: 12.1 dB; at least 35.3 dB",
        ),
    ]
    good, bad = failed_report["artifacts"]
    assert verdict.artifact_verdict(failed_report, good) == "passed"
    assert verdict.artifact_verdict(failed_report, bad) == "failed"


def test_a_run_without_limits_does_not_claim_any(passed_report: Report):
    passed_report["limits"] = []
    assert verdict.headline(passed_report) == "Passed: 4 checks held, no limits are set"


def test_failed_limits_come_first(failed_report: Report):
    failed_report["limits"][0]["verdict"] = "unknown"
    order = [row.verdict for row in verdict.limit_rows(failed_report)]
    assert order == ["failed", "failed", "unknown", "passed", "passed"]


def test_a_limit_missed_by_a_hair_is_not_rounded_away(failed_report: Report):
    limit = {"name": "metric-drop", "artifact": "m", "limit": 0.5, "measured": 0.5004}
    failed_report["limits"] = [{**limit, "ok": False, "verdict": "failed"}]
    (row,) = verdict.limit_rows(failed_report)
    assert (row.measured, row.limit) == ("0.5004 points", "0.5000 points")
    assert row.note == "over by 0.0004 points"


def test_an_interval_that_contains_its_limit_is_unknown(passed_report: Report):
    artifact = passed_report["artifacts"][1]
    artifact["latency"][0]["ratio"] = {"value": 1.02, "ci95": [0.98, 1.06]}
    entries = judge(LimitKeys(metric_drop=None), [artifact], None, shrinks=True)
    passed_report.update(verdict="unknown", limits=entries)
    assert verdict.headline(passed_report) == (
        "Unknown: 1 of 2 limits cannot be decided, 4 checks held"
    )
    assert verdict.failures(passed_report) == []
    assert verdict.unknowns(passed_report) == [
        (
            "model.onnx",
            "latency ratio 1.02 × (95 % CI 0.98 to 1.06), limit 1.00 × (default): "
            "the 95 % interval contains the limit",
        )
    ]
    assert next_step(passed_report, "out/a") == "measure longer: compress bench out/a"
    assert next_step(passed_report, "my run") == "measure longer: compress bench 'my run'"


def test_a_limit_that_every_answer_holds_is_not_met_by_other_rules(passed_report: Report):
    limit = next(e for e in passed_report["limits"] if e["name"] == "metric-drop")
    reason = f"{BLIND}: it loses at most 0.00995"
    unknown = {**limit, "ok": True, "verdict": "unknown", "reason": reason}
    advice = {"suggested": [{"match": "a", "skip": True}]}
    passed_report.update(verdict="unknown", limits=[unknown], advice=advice)
    assert "state a smaller limits.metric-drop" in next_step(passed_report, "out/a")
    passed_report["limits"] = [{**unknown, "reason": "the 95 % interval contains the limit"}]
    assert next_step(passed_report, "out/a") == "compress explain out/a --apply"


def test_quality_that_was_not_measured_is_unknown(blind_report: Report):
    assert verdict.headline(blind_report) == (
        "Unknown: written, 4 checks held, quality not measured"
    )
    assert {what for _, what in verdict.unknowns(blind_report)} == {
        "metric drop not measured, limit 0.50: the spec has no data.evaluation"
    }
    assert next_step(blind_report, "out/a").endswith("of the float model (compress init)")
    blind_report["baseline"]["latency_ms_reason"] = BARE  # as for compress quantize without --eval
    step = next_step(blind_report, "out/a")
    assert "for a causal language model, add --eval TEXT" in step
    assert "or to a spec data.evaluation (text, with target: labels) and metric: perplex" in step
    assert "; otherwise, name data.evaluation in a spec of the float model" in step
    blind_report["objects"] = [{"key": "model.factory", "type": "Net"}]
    assert "data to evaluate on" in next_step(blind_report, "out/a")


def test_a_model_that_cannot_be_run_is_not_told_to_name_data(blind_report: Report):
    """Data for it would be refused."""
    blind_report["baseline"]["metric_reason"] = FOREIGN
    step = next_step(blind_report, "out/a")
    assert step.startswith("to measure quality, export the model without the operators that")
    assert "data.evaluation" not in step


@pytest.mark.parametrize(
    ("reason", "step"),
    [
        ("", "evaluate more samples, or allow more"),
        (BARE, "evaluate on more text, take more bits or another method (gptq, awq, reconstruct)"),
    ],
)
def test_a_metric_that_is_undecided_wants_more_evidence(
    passed_report: Report, reason: str, step: str
):
    passed_report["baseline"]["latency_ms_reason"] = reason  # of compress quantize
    for limit in passed_report["limits"]:
        limit["verdict"] = "unknown" if limit["name"] == "metric-drop" else "passed"
    passed_report.update(verdict="unknown", advice=None)
    assert next_step(passed_report, "out/a").startswith(step)


@pytest.mark.parametrize(
    ("reason", "step"),
    [
        (TRAINED_ON, "name other samples for data.evaluation, or let"),
        (f"90 % {COPIES}", "name other samples for data.evaluation, each once"),
    ],
)
def test_samples_that_show_nothing_are_to_be_others_not_more(
    passed_report: Report, reason: str, step: str
):
    for limit in passed_report["limits"]:
        limit["verdict"] = "unknown" if limit["name"] == "metric-drop" else "passed"
        limit["reason"] = reason if limit["name"] == "metric-drop" else None
    passed_report.update(verdict="unknown", advice=None)
    assert next_step(passed_report, "out/a").startswith(step)


def test_an_artifact_that_cannot_run_here_needs_another_machine(passed_report: Report):
    artifact = passed_report["artifacts"][1]
    why = dict.fromkeys(("latency_ms_reason", "latency_ratio_reason"), "needs a GPU")
    artifact.update(deployed=False, latency=[], **why)
    artifact.update(metric=None, metric_reason="needs a GPU", metric_drop=None)
    artifact["metric_drop_ci95"] = None
    entries = judge(LimitKeys(), passed_report["artifacts"], artifact["metric"], shrinks=True)
    passed_report.update(verdict="unknown", limits=entries)
    assert next_step(passed_report, "out/a").startswith("run it on a machine that can")


def test_what_failed_is_explained(failed_report: Report):
    assert next_step(failed_report, "out/a") == "read the failed checks in out/a/report.md"
    failed_report["artifacts"][1]["checks"][1]["ok"] = True
    assert next_step(failed_report, "out/a") == "compress explain out/a --apply"
    failed_report["objects"] = [{"key": "model.factory", "type": "Net"}]
    assert next_step(failed_report, "out/a") == "compress explain out/a"  # no spec to write
    del failed_report["advice"]
    assert next_step(failed_report, "out/a") == "compress explain out/a"
    (line,) = reason_line(failed_report, "out/a").splitlines()
    assert line.endswith("over by 0.70 points. Next: compress explain out/a")
    failed_report["limits"] = [e for e in failed_report["limits"] if e["name"] == "latency-ratio"]
    assert next_step(failed_report, "out/a") == "compress inspect --roofline out/a"
    for artifact in failed_report["artifacts"]:
        artifact["path"] = "model.xml"  # a roofline needs a graph that ONNX Runtime runs
    assert next_step(failed_report, "out/a").startswith("add the export onnx")


@pytest.mark.parametrize(
    ("limit", "step"),
    [
        ("metric-drop", "compress explain out/a --apply"),
        ("latency-ratio", "compress inspect --roofline out/a"),
        ("size-ratio", "take fewer bits or channels, or allow more with limits.size-ratio"),
    ],
)
def test_rules_for_layers_are_no_remedy_for_time_and_bytes(
    failed_report: Report, limit: str, step: str
):
    failed_report["artifacts"][1]["checks"][1]["ok"] = True
    for entry in failed_report["limits"]:
        entry["verdict"] = "failed" if entry["name"] == limit else "passed"
        entry["ok"] = entry["name"] != limit
    assert next_step(failed_report, "out/a") == step


def test_what_failed_comes_before_what_is_not_decided(failed_report: Report):
    failed_report["artifacts"][1]["checks"][1]["ok"] = True
    del failed_report["advice"]
    of_metric = [e for e in failed_report["limits"] if e["name"] == "metric-drop"]
    failed_report["limits"] = [*of_metric[:1], {**of_metric[0], "artifact": "other"}]
    for entry, outcome in zip(failed_report["limits"], ("failed", "unknown"), strict=True):
        entry["verdict"] = outcome
    assert next_step(failed_report, "out/a") == "compress explain out/a"


def test_what_training_lost_is_not_explained_layer_by_layer(failed_report: Report):
    """The step was ``compress explain``, which refuses a run whose only pass trains."""
    failed_report["artifacts"][1]["checks"][1]["ok"] = True
    del failed_report["advice"]
    drop = {"metric": failed_report["baseline"]["metric"], "metric_drop": 0.5, "won_back": -200.0}
    tuned = {
        **failed_report["passes"][0],
        "pass": "qat",
        "attribution": None,
        "metric_drop": 1.5,
        "training": {"losses": [[0, 1.0]]},
        "untrained": drop,
        "notes": [],
    }
    failed_report["passes"] = [tuned]
    step = next_step(failed_report, "out/a")
    assert step.startswith("the training of qat lost 1.00 points on top of what quantizing lost: l")
    (note,) = pass_notes(tuned)
    assert note.endswith("0.50 points lost in this pass; training lost another 1.00 points")
    drop.update(metric_drop=2.0, won_back=25.0)
    words = "ask less of qat, which lost 1.50 points, or train longer, or allow more with limits."
    assert next_step(failed_report, "out/a").startswith(words)
    tuned["metric_drop"] = None
    assert next_step(failed_report, "out/a").startswith("allow more with limits.metric-drop")


def test_fewer_bits_do_not_shrink_a_graph(failed_report: Report):
    failed_report["artifacts"][1]["checks"][1]["ok"] = True
    (artifact,) = (a for a in failed_report["artifacts"] if a.get("contents"))
    artifact["contents"] = {"weights": 12_044, "scales": 0, "graph": 300_000}
    for limit in failed_report["limits"]:
        of_size = limit["name"] == "size-ratio" and limit["artifact"] == "model.onnx"
        limit.update(verdict="failed" if of_size else "passed", ok=not of_size, limit=0.2)
    words = "quantize fewer layers (300 kB of 312 kB are the graph, not weights)"
    assert next_step(failed_report, "out/a").startswith(words)
    artifact["contents"] = {"weights": 300_000, "scales": 0, "graph": 12_044}
    assert next_step(failed_report, "out/a").startswith("take fewer bits")
    failed_report["passes"] = [{**failed_report["passes"][0], "pass": "fuse"}]
    assert next_step(failed_report, "out/a").startswith("add a pass that quantizes or prunes")


def test_what_pruning_lost_no_rule_for_a_layer_wins_back(failed_report: Report):
    failed_report["artifacts"][1]["checks"][1]["ok"] = True
    del failed_report["advice"]
    pruning = {**failed_report["passes"][0], "pass": "prune-structured", "metric_drop": 7.25}
    failed_report["passes"].insert(0, pruning)
    words = "ask less of prune-structured, which lost 7.25 points"
    assert next_step(failed_report, "out/a") == words
    training = {"losses": [[0, 1.0], [10, 0.5]]}
    failed_report["passes"][1] = {**failed_report["passes"][1], "training": training}
    assert next_step(failed_report, "out/a") == f"{words}, or train longer after it"
    for entry in failed_report["limits"]:  # too few samples to fail; more of them hardly help
        entry["verdict"] = "unknown" if entry["verdict"] == "failed" else entry["verdict"]
    assert next_step(failed_report, "out/a").startswith(words)
    tuning = {**pruning, "pass": "finetune", "metric_drop": 17.25, "training": training}
    failed_report["passes"].insert(1, tuning)
    words = "finetune lost 10.00 points: lower its learning-rate, or train longer"
    assert next_step(failed_report, "out/a") == words
    del failed_report["passes"][1]
    for entry in failed_report["limits"]:
        entry["verdict"] = "passed" if entry["ok"] else "failed"
    pruning["metric_drop"] = -0.5  # then the other passes lost it
    assert next_step(failed_report, "out/a") == "compress explain out/a"


def test_a_metric_that_is_no_share_has_no_points(passed_report: Report):
    for entry in (passed_report["baseline"], *passed_report["artifacts"]):
        entry["metric"] = {
            "name": "perplexity",
            "value": 5.7,
            "samples": 10,
            "ci95": [5.6, 5.8],
            "unit": "",
            "higher_is_better": False,
        }
    passed_report["artifacts"][1]["metric"]["value"] = 5.75
    limit = {"name": "metric-drop", "artifact": "m", "limit": 0.02, "measured": 0.05}
    passed_report["limits"] = [{**limit, "ok": False, "verdict": "failed"}]
    (row,) = verdict.limit_rows(passed_report)
    assert (row.name, row.measured, row.limit) == ("perplexity drop", "0.0500", "0.0200")
    assert verdict.gist(passed_report).endswith("perplexity up 0.0500")
    assert "points" not in verdict.gist(passed_report)


def test_slower_and_larger_and_unchanged_are_said_plainly(passed_report: Report):
    artifact = passed_report["artifacts"][1]
    artifact["size_ratio"] = 1.3
    artifact["latency"][0]["ratio"] = {"value": 1.01, "ci95": [0.99, 1.03]}
    artifact["metric"] = passed_report["baseline"]["metric"]
    assert verdict.gist(passed_report) == (
        "1.30 × the size, as fast as the float model within noise (0.99 to 1.03 ×), "
        "accuracy unchanged"
    )


@pytest.mark.parametrize(
    ("value", "interval", "words"),
    [
        (
            1.33,
            [0.17, 36.0],
            "speed unknown (too wide an interval: 0.17 to 36.00 × the float model's latency)",
        ),
        (
            1.33,
            [1.02, 112.0],
            "speed unknown (too wide an interval: 1.02 to 112 × the float model's latency)",
        ),
        (0.5, [0.48, 0.52], "2.0 × faster"),
        (2.4, [2.3, 2.5], "2.4 × the latency"),
    ],
)
def test_a_speed_that_is_hardly_known_is_not_called_the_same(
    passed_report: Report, value: float, interval: list[float], words: str
):
    artifact = passed_report["artifacts"][1]
    artifact["latency"][0]["ratio"] = {"value": value, "ci95": interval}
    artifact["latency_ratio"] = value
    assert f", {words}, " in verdict.gist(passed_report)


def test_the_first_deployed_artifact_is_the_main_one(passed_report: Report):
    main = verdict.main_artifact(passed_report)
    assert main is not None
    assert main["path"] == "model.onnx"
    passed_report["artifacts"] = []
    assert verdict.main_artifact(passed_report) is None
    assert verdict.gist(passed_report) == ""


def test_a_fused_float_model_that_is_faster_is_advised(passed_report: Report):
    row = passed_report["artifacts"][1]["latency"][0]
    assert verdict.faster_float(passed_report) == ""
    for interval, advised in (([1.02, 1.08], True), ([0.97, 1.08], False), ([0.5, 0.6], False)):
        row["fused_ratio"] = {"value": sum(interval) / 2, "ci95": interval}
        assert bool(verdict.faster_float(passed_report)) == advised
    row["fused_ratio"] = {"value": 1.05, "ci95": [1.02, 1.08]}
    words = verdict.faster_float(passed_report)
    assert "takes 1.05 × its time (1.02 to 1.08)" in words
    for page in (
        plain_text(run_page(passed_report)),
        markdown_report(passed_report),
        html_report(passed_report),
    ):
        assert "after fuse alone" in page


def slow(report: Report, passes: list[dict[str, Any]], beside: str = "safetensors") -> Report:
    """Return a report whose ONNX file is slower than allowed, and nothing else is wrong."""
    report["artifacts"][0]["format"] = beside
    for limit in report["limits"]:
        name = limit["name"], limit["artifact"].endswith(".onnx")
        limit["verdict"] = "failed" if name == ("latency-ratio", True) else "passed"
    report.update(verdict="failed", advice=None, passes=passes)
    return report


@pytest.mark.parametrize("name", ALL_INTEGERS)
def test_an_export_that_makes_the_onnx_file_slower_is_named(passed_report: Report, name: str):
    """The next step was to measure the layers, and the cause stood among the pass's notes."""
    passes = [{**passed_report["passes"][0], "pass": "quantize-static", "layers": []}]
    step = next_step(slow(passed_report, passes, name), "out/a")
    assert step.startswith(f"export {name} from a spec of its own")


def test_formats_that_take_all_layers_in_integers():
    formats = {name: catalog.load("exporter", name) for name in catalog.names("exporter")}
    strict = {
        name
        for name, declared in formats.items()
        if not profile_for(declared().targets | {"ort-cpu"}).latencies
    }
    assert strict == set(ALL_INTEGERS)


@pytest.mark.parametrize(
    ("width", "operator", "named"),
    [(20, "Conv", True), (24, "Conv", False), (5, "Conv", False), (20, "Gemm", False)],
)
def test_widths_that_fill_no_block_are_named(
    passed_report: Report, width: int, operator: str, named: bool
):
    passed_report["graph"] = {"layers": [{"name": "x", "operator": operator}]}
    row = {"name": "x", "details": {"inputs_before": 32, "inputs_after": width}}
    passes = [{**passed_report["passes"][0], "pass": "prune-structured", "layers": [row]}]
    step = next_step(slow(passed_report, passes), "out/a")
    assert ("round-to" in step) == named
