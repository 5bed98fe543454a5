"""The tables that every form of the report shows: models side by side, and passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compressor.report import formats
from compressor.report.verdict import Report, artifact_ok, metric_name

FLOAT_MODEL = "float model"
_NO_REASON = "the report gives no reason"
_MOST_NOTES = 20


@dataclass(frozen=True)
class Figure:
    """A number as text.

    Attributes:
        text: the number with its unit, or that there is none.
        note: its interval.
        reason: why there is no number; empty where there is one.
    """

    text: str
    note: str = ""
    reason: str = ""


@dataclass(frozen=True)
class ModelRow:
    """The float model or an artifact.

    Attributes:
        name: the artifact's file name.
        format: the artifact's format; empty for the float model.
        runtime: what ran it.
        metric: value and interval.
        drop: how much worse the metric is than the float model's.
        bytes: size of all files.
        size_ratio: size over the float model's.
        latency: median for one run of the smallest batch.
        latency_ratio: latency over the float model's, measured side by side.
        memory: the most memory that the process took while it ran.
        ok: limits and checks hold; ``None`` for the float model.
    """

    name: str
    format: str
    runtime: str
    metric: Figure
    drop: Figure
    bytes: Figure
    size_ratio: Figure
    latency: Figure
    latency_ratio: Figure
    memory: Figure
    ok: bool | None


@dataclass(frozen=True)
class PassRow:
    """What one pass did.

    Attributes:
        name: the pass.
        seconds: how long it took.
        cached: an earlier run did it.
        metric: the metric after it.
        drop: how much worse than the float model.
        sqnr: the model's output against the float model's.
        bytes: the model's tensors after it.
        weakest: the layer whose output lost most, empty if none did.
        weakest_sqnr: that layer's output SQNR.
        schemes: how many layers have which scheme.
        notes: what the pass had to say.
    """

    name: str
    seconds: str
    cached: bool
    metric: Figure
    drop: Figure
    sqnr: Figure
    bytes: str
    weakest: str
    weakest_sqnr: str
    schemes: str
    notes: tuple[str, ...]


def model_rows(report: Report) -> list[ModelRow]:
    """Return the float model and each artifact."""
    return [_float_row(report), *(_artifact_row(report, a) for a in report["artifacts"])]


def pass_rows(report: Report) -> list[PassRow]:
    """Return the passes in the order in which they ran."""
    return [_pass_row(report, entry) for entry in report["passes"]]


def missing_reasons(report: Report) -> list[str]:
    """Say once for each number that is not there why that is so."""
    named: dict[str, None] = {}
    for row in model_rows(report):
        for label, figure in (
            (metric_name(report), row.metric),
            (f"latency of {row.name}", row.latency),
            (f"latency ratio of {row.name}", row.latency_ratio),
        ):
            if figure.reason:
                named[f"{label} {figure.text}: {figure.reason}"] = None
    return list(named)


def schemes(layers: list[Mapping[str, Any]]) -> str:
    """Count the schemes of layers, the most frequent first, ``int8/channel (20), float32 (1)``."""
    counted = Counter(str(layer["scheme"]) for layer in layers)
    ordered = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} ({number})" for name, number in ordered)


def _figure(
    entry: Mapping[str, Any], key: str, text: Callable[[Any], str], reason: str | None = None
) -> Figure:
    """Format ``entry[key]``, or say why it is ``None``."""
    value = entry[key]
    if value is not None:
        return Figure(text(value))
    return Figure(formats.NOT_MEASURED, reason=entry.get(f"{key}_reason") or reason or _NO_REASON)


def _metric(report: Report, entry: Mapping[str, Any]) -> Figure:
    if entry["metric"] is not None:
        return Figure(formats.metric(entry["metric"]), formats.metric_interval(entry["metric"]))
    return _figure(entry, "metric", str, report["baseline"].get("metric_reason"))


def _drop(report: Report, entry: Mapping[str, Any]) -> Figure:
    share = formats.is_share(entry["metric"])
    return _figure(
        entry,
        "metric_drop",
        lambda value: formats.metric_change(value, share=share),
        entry.get("metric_reason") or report["baseline"].get("metric_reason"),
    )


def _latency(entry: Mapping[str, Any]) -> Figure:
    return _figure(entry, "latency_ms", lambda times: formats.milliseconds(times["p50"]))


def _memory(entry: Mapping[str, Any]) -> Figure:
    found = _figure({"peak_memory_bytes": None, **entry}, "peak_memory_bytes", formats.size)
    bounds = entry.get("peak_memory_range")
    if not bounds:
        return found
    return replace(found, note=" to ".join(formats.size(bound) for bound in bounds))


def _float_row(report: Report) -> ModelRow:
    base, none = report["baseline"], Figure(formats.NOTHING)
    return ModelRow(
        name=FLOAT_MODEL,
        format="",
        runtime="",
        metric=_metric(report, base),
        drop=none,
        bytes=Figure(formats.size(base["bytes"])),
        size_ratio=none,
        latency=_latency(base),
        latency_ratio=none,
        memory=_memory(base),
        ok=None,
    )


def _artifact_row(report: Report, artifact: Mapping[str, Any]) -> ModelRow:
    ratio = _figure(artifact, "latency_ratio", formats.ratio)
    if artifact["latency_ratio"] is not None:
        interval = artifact["latency"][0]["ratio"]["ci95"]
        ratio = Figure(ratio.text, formats.ratio_interval(interval))
    elif not artifact["deployed"]:
        ratio = Figure("not judged", reason=artifact["latency_ratio_reason"])
    return ModelRow(
        name=artifact["path"],
        format=artifact["format"],
        runtime=artifact["runtime"],
        metric=_metric(report, artifact),
        drop=_drop(report, artifact),
        bytes=Figure(formats.size(artifact["bytes"])),
        size_ratio=Figure(formats.ratio(artifact["size_ratio"])),
        latency=_latency(artifact),
        latency_ratio=ratio,
        memory=_memory(artifact),
        ok=artifact_ok(report, artifact),
    )


def _pass_row(report: Report, entry: Mapping[str, Any]) -> PassRow:
    weakest = entry["weakest"]
    metric = _metric(report, entry)
    if entry["sqnr_db"] is not None:
        sqnr = Figure(formats.decibel(entry["sqnr_db"]))
    else:
        sqnr = Figure(formats.NOT_MEASURED if metric.reason else "equal", reason=metric.reason)
    return PassRow(
        name=entry["pass"],
        seconds=formats.seconds(entry["seconds"]),
        cached=entry["cached"],
        metric=metric,
        drop=_drop(report, entry),
        sqnr=sqnr,
        bytes=formats.size(entry["bytes"]),
        weakest=weakest["name"] if weakest else "",
        weakest_sqnr=formats.decibel(weakest["sqnr_db"]) if weakest else "",
        schemes=schemes(entry["layers"]),
        notes=_notes([*_won_back(entry), *entry["notes"]]),
    )


def _won_back(entry: Mapping[str, Any]) -> list[str]:
    """Say what the pass would have given without training."""
    untrained = entry.get("untrained")
    if untrained is None:
        return []
    share = formats.is_share(untrained["metric"])
    drop = formats.metric_change(untrained["metric_drop"], share=share)
    shown = f"without training {formats.metric(untrained['metric'])}, {drop} lost in this pass"
    if untrained["won_back"] is None:
        return [f"{shown}: nothing to win back"]
    return [f"{shown}; training won {untrained['won_back']:.0f} % of that back"]


def _notes(notes: Sequence[str]) -> tuple[str, ...]:
    left = len(notes) - _MOST_NOTES
    return (*notes[:_MOST_NOTES], *([f"{left} more in report.json"] if left > 0 else []))
