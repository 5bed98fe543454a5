"""The next step of the user: after a verdict that is not passed, or to improve the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compressor.errors import argument
from compressor.graph.costs import BARE, FOREIGN
from compressor.graph.operators import operator_named
from compressor.lab.tune.recipe import REMEDIES
from compressor.report import formats
from compressor.report.verdict import METRIC_DROP, Report, check_rows, limit_rows, metric_name
from compressor.run.verdicts.verdicts import BLIND, COPIES, NO_SHARE, TRAINED_ON

_LATENCY = "latency-ratio"
_SIZE = "size-ratio"
_REMOVE = ("prune-", "low-rank", "cluster", "early-exit")  # how passes are called that can do less
_TOO_SLOW = _LATENCY, "failed"
_STATIC = ("quantize-static", "qat")
_CHANNELS = "prune-structured"
_BLOCK = 8  # channels
ALL_INTEGERS = ("litert", "executorch", "coreml", "tensorrt")
"""Formats whose rules, which all exports of a run share, leave no layer in floats for speed."""
_TRAIN = ("finetune", "distill")  # passes that only train
_REWRITE = ("fuse", "equalize", "smooth", "rotate")  # passes that keep all weights


def advice_line(report: Report) -> str:
    """Return in one line which change of the spec is advised, or why none is; empty if unknown."""
    advice = report.get("advice")
    if advice is None or not advice["suggested"]:
        return str(advice["reason"]) if advice else ""
    changes = [
        f"{c['layer']} ({', '.join(f'{k}: {json.dumps(v)}' for k, v in c['change'].items())})"
        for c in advice["suggested"]
    ]
    gain = advice["predicted"]
    parts = [f"{formats.size(gain['bytes'])} more"]
    if gain["metric"]:
        share = formats.is_share(report["baseline"]["metric"])
        words = formats.metric_change(gain["metric"], share=share)
        parts.append(f"{metric_name(report)} better by {words}")
    elif gain["sqnr_db"]:
        parts.append(f"output SQNR up {formats.decibel(gain['sqnr_db'])}")
    return f"other rules for {', '.join(changes)}, predicted: {', '.join(parts)}"


def next_words(report: Report) -> str:
    """Return the next step for a page that does not know the run's folder; empty if unknown."""
    step = next_step(report, "RUN") if not (report.get("advice") or {}).get("suggested") else ""
    return "; ".join(words for words in (step, advice_line(report)) if words)


def next_step(report: Report, folder: str) -> str:
    """Return the next step after a verdict that is not passed, or an improvement.

    Empty where nothing is to be done.

    Args:
        folder: the run's output folder.
    """
    failed = _failed(report)
    undecided = {row.key for row in limit_rows(report) if row.verdict == "unknown"}
    if not all(check.ok for check in check_rows(report)):
        return f"read the failed checks in {folder}/report.md"
    # Rules for layers win back what the metric lost; they mend no other limit, and none that holds
    # whatever the artifact answers.
    unmet = failed | (undecided - {METRIC_DROP} if _is_blind(report) else undecided)
    of_metric = METRIC_DROP in unmet or not failed | undecided
    if of_metric and (report.get("advice") or {}).get("suggested"):
        # No file holds the spec of a Python program.
        return f"compress explain {argument(folder)}{'' if report.get('objects') else ' --apply'}"
    if costly := _costliest(report) if _lost_too_much(report) else "":
        return costly
    if failed:
        return _mend(report, folder, failed)
    return _decide(report, folder, undecided) if undecided else ""


def _failed(report: Report) -> set[str]:
    """Return the names of the limits that fail."""
    return {row.key for row in limit_rows(report) if row.verdict == "failed"}


def _mend(report: Report, folder: str, failed: set[str]) -> str:
    """Return how to keep limits that fail: first that of the metric, then of the size."""
    if METRIC_DROP in failed and any(e.get("attribution") for e in report["passes"]):
        return f"compress explain {argument(folder)}"
    if METRIC_DROP in failed:  # no layers are known to have lost it
        loss, entry = _largest_loss(report)
        more = "allow more with limits.metric-drop"
        if loss <= 0.0:
            return more
        longer = "train longer, or " if entry.get("training") else ""
        words = _change(report, loss)
        return f"ask less of {entry['pass']}, which lost {words}, or {longer}{more}"
    if failed != {_LATENCY}:
        return f"{_smaller(report)}, or allow more with limits.size-ratio"
    if cause := _why_slower(report):
        return cause
    if graph_file(report):
        return f"compress inspect --roofline {argument(folder)}"
    return (
        "add the export onnx, whose layers compress inspect --roofline measures, or allow more "
        "with limits.latency-ratio"
    )


def _decide(report: Report, folder: str, undecided: set[str]) -> str:
    """Return how to learn whether limits hold that nothing has decided."""
    if report["baseline"]["metric"] is None and METRIC_DROP in undecided:
        if report["baseline"]["metric_reason"] == FOREIGN:
            return (
                "to measure quality, export the model without the operators that ONNX Runtime does "
                "not know, or measure it where it runs"
            )
        if report.get("objects"):
            return "to measure quality, pass data to evaluate on"
        spec = "name data.evaluation in a spec of the float model (compress init)"
        text = (
            "for a causal language model, add --eval TEXT to compress quantize, or to a spec "
            "data.evaluation (text, with target: labels) and metric: perplexity; otherwise, "
            if _is_bare(report)
            else ""
        )
        return f"to measure quality{': ' if text else ', '}{text}{spec}"
    if any(e.get("reason") == NO_SHARE for e in report["limits"]):
        return "state limits.metric-drop in the metric's own unit"
    if _is_blind(report):
        return (
            "check the labels of data.evaluation, if there are any, or state a smaller "
            "limits.metric-drop"
        )
    if any(e.get("verdict") == "unknown" and e["measured"] is None for e in report["limits"]):
        return "run it on a machine that can run every artifact"
    if METRIC_DROP not in undecided:
        return f"measure longer: compress bench {argument(folder)}"
    if _is_bare(report):
        return (
            "evaluate on more text, take more bits or another method (gptq, awq, reconstruct), or "
            "set limits in a spec"
        )
    reasons = [str(e.get("reason") or "") for e in report["limits"]]
    if any(reason.endswith(COPIES) for reason in reasons):
        return "name other samples for data.evaluation, each once"
    if TRAINED_ON in reasons:
        return (
            "name other samples for data.evaluation, or let it and data.training each read every "
            "other one (fold: 1/2 and fold: 2/2)"
        )
    return "evaluate more samples, or allow more with limits.metric-drop"


def _is_blind(report: Report) -> bool:
    """Whether a limit is so wide that one answer for all samples would be within it."""
    return any((e.get("reason") or "").startswith(BLIND) for e in report["limits"])


def _why_slower(report: Report) -> str:
    """Return what to do about an ONNX file that options of the spec made slower; empty if none did.

    That are a format beside it whose runtime takes all layers in integers, and widths that a
    convolution reads and ONNX Runtime cannot compute in blocks.
    """
    late = [e["artifact"] for e in report["limits"] if (e["name"], e["verdict"]) == _TOO_SLOW]
    if not any(path.endswith((".onnx", ".ort")) for path in late):
        return ""
    formats_beside = [str(artifact["format"]) for artifact in report["artifacts"]]
    other = next((name for name in formats_beside if name in ALL_INTEGERS), "")
    if other and any(entry["pass"] in _STATIC for entry in report["passes"]):
        return (
            f"export {other} from a spec of its own: it takes all layers in integers, also where "
            "ONNX Runtime is faster with floats"
        )
    of_images = {
        row["name"]
        for row in (report.get("graph") or {"layers": ()})["layers"]
        if operator_named(row["operator"]).is_convolution
    }
    widths = [
        row.get("details", {}).get("inputs_after", 0)
        for entry in report["passes"]
        if entry["pass"] == _CHANNELS
        for row in entry["layers"]
        if row["name"] in of_images
    ]
    if any(width > _BLOCK and width % _BLOCK for width in widths):
        return (
            f"set round-to of {_CHANNELS} to {_BLOCK}: ONNX Runtime computes convolutions in "
            "blocks of channels, which the widths of this run do not fill"
        )
    return ""


def graph_file(report: Report) -> str:
    """Return the first artifact whose layers can be measured; empty if there is none."""
    paths = (str(artifact["path"]) for artifact in report["artifacts"])
    return next((path for path in paths if path.endswith(".onnx")), "")


def _smaller(report: Report) -> str:
    """Return what makes a file smaller that is too large, by what it holds."""
    if all(entry["pass"] in (*_REWRITE, *_TRAIN) for entry in report["passes"]):
        return "add a pass that quantizes or prunes weights, if layers have any"
    limits = [e for e in report["limits"] if (e["name"], e["verdict"]) == (_SIZE, "failed")]
    for limit in limits:
        for artifact in report["artifacts"]:
            contents, whole = artifact.get("contents"), artifact["bytes"]
            if artifact["files"][0]["name"] != limit["artifact"] or not contents:
                continue
            if whole - contents["weights"] > limit["limit"] * artifact["float_bytes"]:
                parts = f"{formats.size(contents['graph'])} of {formats.size(whole)}"
                return f"quantize fewer layers ({parts} are the graph, not weights)"
    return "take fewer bits or channels"


def _lost_too_much(report: Report) -> bool:
    """Whether the metric lost more than its limit, although that may be chance."""
    rows = [e for e in report["limits"] if e["name"] == METRIC_DROP and e["verdict"] != "passed"]
    return any(e["measured"] is not None and e["measured"] > e["limit"] for e in rows)


def _costliest(report: Report) -> str:
    """Return what to do about the pass that lost the most, if it removes something or trains."""
    loss, entry = _largest_loss(report)
    if loss <= 0.0:
        return ""
    name, words = entry["pass"], _change(report, loss)
    if name in _TRAIN:
        return f"{name} lost {words}: lower its learning-rate, or train longer"
    untrained = entry.get("untrained")
    if untrained is not None and loss > untrained["metric_drop"]:
        more = _change(report, loss - untrained["metric_drop"])
        return (
            f"the training of {name} lost {more} on top of what quantizing lost: lower its "
            f"learning-rate, train longer, or take {_STATIC[0]}, which does not train"
        )
    if not name.startswith(_REMOVE):
        return ""
    trains = any(entry.get("training") for entry in report["passes"])
    return f"ask less of {name}, which lost {words}{', or train longer after it' * trains}"


def _largest_loss(report: Report) -> tuple[float, Mapping[str, Any]]:
    """Return the loss of the pass that lost the most of the metric, and its entry."""
    known = [(float(e["metric_drop"]), e) for e in report["passes"] if e["metric_drop"] is not None]
    before = [0.0, *(drop for drop, _ in known)]
    losses = [(drop - start, e) for (drop, e), start in zip(known, before, strict=False)]
    return max(losses, key=lambda pair: pair[0], default=(0.0, {}))


def _change(report: Report, loss: float) -> str:
    return formats.metric_change(loss, share=formats.is_share(report["baseline"]["metric"]))


def _is_bare(report: Report) -> bool:
    """Whether the float model is a bare checkpoint, as for ``compress quantize``."""
    return BARE in (
        report["baseline"]["metric_reason"],
        report["baseline"].get("latency_ms_reason"),
    )


def tune_command(report: Report, spec: str) -> str:
    """Return the command that finds another recipe where the metric or the size fails its limit.

    Empty where none is to be found. A default limit that is a share of the float model's metric is
    given as an option, since the spec does not have it.
    """
    tunable = any(entry["pass"] in REMEDIES for entry in report["passes"])
    if not tunable or not _failed(report) & {METRIC_DROP, _SIZE}:
        return ""
    drops = [e["limit"] for e in report["limits"] if e["name"] == METRIC_DROP and e["default"]]
    stated = not drops or formats.is_share(report["baseline"]["metric"])
    return f"compress tune {argument(spec)}{'' if stated else f' --max-metric-drop {drops[0]:.3g}'}"
