"""The tables and sentences of a report, the same in every form: models, limits, passes, checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compressor.report import formats
from compressor.report.page import Bar, Cell, Column, Entry, Interval, Table, left, right
from compressor.report.verdict import (
    Report,
    artifact_verdict,
    check_rows,
    limit_rows,
    main_artifact,
    metric_name,
    metric_title,
)

FLOAT_MODEL = "float model"
_NO_REASON = "the report gives no reason"
_MOST_NOTES = 20
_MARGIN = 0.08
_SLOWEST = 10
_MEMORY, _VERDICT = "peak memory", "verdict"


def model_table(report: Report) -> Table:
    """Return the float model and each artifact, side by side."""
    base, main = report["baseline"], main_artifact(report)
    entries = [base, *report["artifacts"]]
    sizes = [int((main or base).get("float_bytes", base["bytes"]))]
    sizes += [int(entry["bytes"]) for entry in report["artifacts"]]
    limited = any(entry["name"] == "metric-drop" for entry in report["limits"])
    legend = "dashed: float, red: limit" if limited else "dashed: float"
    columns = [
        Column("model"),
        Column(metric_name(report), "number", note="95 % CI", title=metric_title(report)),
        Column(legend, "chart", title=legend, html=True),
        *right("drop", "size"),
        Column("size ratio", "number", brief="ratio"),
        Column("latency p50", "number"),
        Column("latency ratio", "number", note="95 % CI", brief="ratio"),
        Column(_MEMORY, "number", html=True),
        Column(_VERDICT),
    ]
    largest = max(*sizes, 1)
    rows: list[list[Entry]] = [
        [
            _name(report, entry),
            metric_cell(report, entry),
            Cell(chart=metric_interval(report, entry)),
            Cell(formats.NOTHING) if entry is base else _drop(report, entry),
            Cell(
                formats.size(size),
                chart=Bar(100.0 * size / largest, entry is not base),
            ),
            formats.NOTHING if entry is base else formats.ratio(entry["size_ratio"]),
            _latency(entry),
            Cell(formats.NOTHING) if entry is base else _latency_ratio(entry),
            _memory(entry),
            Cell(verdict="" if entry is base else artifact_verdict(report, entry)),
        ]
        for entry, size in zip(entries, sizes, strict=True)
    ]
    return Table(columns, rows)


def limit_table(report: Report) -> Table:
    """Return the limits and what was measured: failed ones first, then unknown ones."""
    columns = [
        *left("limit", "artifact"),
        *right("measured", "at most"),
        Column("used", "chart", html=True),
        Column("", title="Verdict"),
    ]
    rows: list[list[Entry]] = []
    for row in limit_rows(report):
        used = None
        if row.share is not None:
            over = row.verdict == "failed"
            used = Bar(min(row.share * 100, 100), True, over, 100 / max(row.share, 1))
        measured = Cell(row.measured, small=row.interval)
        name = Cell(row.artifact, code=True)
        verdict = Cell(row.note, verdict=row.verdict)
        rows.append([row.name, name, measured, row.limit, Cell(chart=used), verdict])
    return Table(columns, rows)


def pass_table(report: Report) -> Table:
    """Return the passes in the order in which they ran."""
    columns = [
        Column("pass"),
        Column("time", "number"),
        Column(f"{metric_name(report)} after", "number", title=f"{metric_title(report)} after"),
        Column("drop", "number"),
        Column("SQNR", "number", title="Output SQNR"),
        Column("bytes", "number", title="Tensors"),
        Column("weakest layer"),
        Column("layers by scheme", "words", html=True),
    ]
    return Table(columns, [_pass_row(report, entry) for entry in report["passes"]])


def check_table(report: Report) -> Table:
    """Return the checks of all artifacts, failed ones first."""
    columns = [
        Column("artifact"),
        Column("check", "words"),
        Column("", title="Result"),
        Column("detail", "words"),
    ]
    rows: list[list[Entry]] = [
        [
            Cell(check.artifact, code=True),
            check.name,
            Cell(verdict=check.verdict),
            check.detail,
        ]
        for check in check_rows(report)
    ]
    return Table(columns, rows)


def class_table(report: Report) -> Table:
    """Return the accuracy of each class, those that lost most first; no rows where not known."""
    columns = [Column("class"), *right("samples", "float", "artifact", "change")]
    rows: list[list[Entry]] = [
        [
            Cell(str(entry["class"]), code=True),
            formats.count(entry["samples"]),
            formats.percent(entry["float"]),
            formats.percent(entry["artifact"]),
            formats.metric_change(entry["change"], share=True),
        ]
        for entry in report.get("classes") or ()
    ]
    return Table(columns, rows)


def slowest_table(report: Report) -> Table:
    """Return the layers that are predicted to take most of the time; no rows where not known."""
    columns = [*left("layer", "operator"), *right("MACs", "bytes moved", "of the time")]
    layers = (report.get("graph") or {"layers": []})["layers"]
    known = [layer for layer in layers if layer["time_share"] is not None]
    known.sort(key=lambda layer: -float(layer["time_share"]))
    rows: list[list[Entry]] = [
        [
            Cell(layer["name"], code=True),
            layer["operator"],
            formats.short_count(layer["macs"]),
            formats.size(layer["bytes"]),
            formats.percent(layer["time_share"], 1),
        ]
        for layer in known[:_SLOWEST]
    ]
    return Table(columns, rows)


def flipped_words(report: Report) -> str:
    """Return in one sentence how many decisions flipped; empty where that is not known."""
    entry = report.get("flipped")
    if not entry:
        return ""
    what = f"{formats.count(entry['flipped'])} of {formats.plural(entry['samples'], 'sample')}"
    many = any(row["place"] is not None for row in entry["worst"])
    text = f"{entry['artifact']} decides otherwise than the float model in {what}"
    text += ", at least once" if many else ""
    if entry["lost"] is None:
        return text
    lost, won = formats.count(entry["lost"]), formats.count(entry["won"])
    which = "of the decisions that were overturned hardest" if many else "of them"
    return f"{text}; {lost} {which} were right before, {won} are now"


def contents_words(report: Report) -> str:
    """Return what the main artifact's file consists of; empty where that is not known."""
    artifact = main_artifact(report)
    parts = None if artifact is None else artifact.get("contents")
    if artifact is None or not parts:
        return ""
    texts = {name: formats.size(parts[name]) for name in ("weights", "scales", "graph")}
    rest = formats.size(artifact["bytes"] - parts["weights"])
    return (
        f"Of the {formats.size(artifact['bytes'])} of {artifact['path']}, {texts['weights']} are "
        f"weights, {texts['scales']} scales and zero points, and {texts['graph']} the graph: "
        f"names, shapes and operators. However narrow the weights become, {rest} stay."
    )


def missing_reasons(report: Report) -> list[str]:
    """Return a sentence for each number that is missing: why it is."""
    named: dict[str, None] = {}
    for entry in (report["baseline"], *report["artifacts"]):
        name = entry.get("path", FLOAT_MODEL)
        figures = {
            metric_name(report): metric_cell(report, entry),
            f"latency of {name}": _latency(entry),
        }
        if "path" in entry:
            figures[f"latency ratio of {name}"] = _latency_ratio(entry)
        for label, figure in figures.items():
            if figure.small:
                named[f"{label} {figure.text}: {figure.small}"] = None
    return list(named)


def memory_missing(report: Report) -> str:
    """Return why no model's peak memory was measured; empty where one was."""
    reasons = [_memory(entry).small for entry in (report["baseline"], *report["artifacts"])]
    return str(reasons[0]) if all(reasons) else ""


def facts(report: Report) -> list[str]:
    """Return what the numbers were measured on."""
    base = report["baseline"]
    words = [f"{formats.short_count(base['parameters'])} parameters"]
    if base["macs"] is not None:
        words.append(f"{formats.short_count(base['macs'])} MACs")
    if base["metric"] is not None:
        words.insert(0, f"{formats.count(base['metric']['samples'])} evaluation samples")
    artifact = main_artifact(report)
    if artifact is not None and artifact.get("kl") is not None:
        words.insert(1, f"{artifact['kl']:.3g} nats a token of KL divergence from the float model")
    if base["latency_ms"] is not None:
        words.append(f"latency at batch {base['latency_ms']['batch']}, ratios timed side by side")
    return words


def environment_words(report: Report) -> str:
    """Return the machine and the versions that the numbers are from."""
    environment = report["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in environment["versions"].items())
    machine = f"{environment['processor']}, {environment['cores']} cores, {environment['system']}"
    return f"{machine}; Python {environment['python']}, {versions}"


def pass_notes(entry: Mapping[str, Any]) -> list[str]:
    """Return a pass's notes, what its training won back first; of very many, the first."""
    notes = [*_won_back(entry), *entry["notes"]]
    left_out = len(notes) - _MOST_NOTES
    return [*notes[:_MOST_NOTES], *([f"{left_out} more in report.json"] if left_out > 0 else [])]


def metric_cell(report: Report, entry: Mapping[str, Any]) -> Cell:
    """Return the metric of a model or of the model after a pass, or why there is none."""
    if entry["metric"] is not None:
        return Cell(formats.metric(entry["metric"]), formats.metric_interval(entry["metric"]))
    return _figure(entry, "metric", str, report["baseline"].get("metric_reason"))


def metric_interval(report: Report, entry: Mapping[str, Any]) -> Interval | None:
    """Place a model's metric on the axis that all models share."""
    base, metric = report["baseline"]["metric"], entry["metric"]
    if base is None or metric is None:
        return None
    entries = [report["baseline"], *report["artifacts"]]
    bounds = [float(end) for e in entries if e["metric"] for end in e["metric"]["ci95"]]
    drops = [float(e["limit"]) for e in report["limits"] if e["name"] == "metric-drop"]
    worst = None
    if drops:
        sign = -1.0 if base.get("higher_is_better", True) else 1.0
        worst = float(base["value"]) + sign * drops[0]
        bounds.append(worst)
    place = _axis(min(bounds), max(bounds))
    low, high = metric["ci95"]
    return Interval(
        low=place(low),
        at=place(metric["value"]),
        high=place(high),
        reference=place(base["value"]),
        limit=None if worst is None else place(worst),
        label=f"{formats.metric(metric)}, 95 % interval {formats.metric_interval(metric)}",
    )


def _speed(ratio: Mapping[str, Any]) -> Interval:
    value, (low, high) = float(ratio["value"]), ratio["ci95"]
    place = _axis(0.0, max(2.0, high))
    return Interval(
        low=place(low),
        at=place(value),
        high=place(high),
        reference=place(1.0),
        limit=None,
        label=f"{formats.ratio(value)}, 95 % interval {formats.ratio_interval((low, high))}",
    )


def _axis(low: float, high: float) -> Callable[[float], float]:
    """Return the map from values to percent of an axis' length, with a margin on both sides."""
    span = (high - low) or max(abs(high), 1.0) * 0.01
    start, length = low - _MARGIN * span, span * (1 + 2 * _MARGIN)
    return lambda value: round(100.0 * (float(value) - start) / length, 2)


def _name(report: Report, entry: Mapping[str, Any]) -> Cell:
    if entry is report["baseline"]:
        return Cell(FLOAT_MODEL)
    path, kind = entry["path"], entry["format"]
    tag = "" if path.endswith(f".{kind}") else kind
    return Cell(path, tag=tag, small=entry["runtime"], code=True)


def _figure(
    entry: Mapping[str, Any], key: str, text: Callable[[Any], str], reason: str | None = None
) -> Cell:
    """Format ``entry[key]``, or say why it is ``None``."""
    value = entry[key]
    if value is not None:
        return Cell(text(value))
    reason = entry.get(f"{key}_reason") or reason or _NO_REASON
    return Cell(formats.NOT_MEASURED, small=reason, style="faint")


def _drop(report: Report, entry: Mapping[str, Any]) -> Cell:
    share = formats.is_share(entry["metric"])
    reason = entry.get("metric_reason") or report["baseline"].get("metric_reason")
    drop = _figure(entry, "metric_drop", lambda v: formats.metric_change(v, share=share), reason)
    # The reason stands beside the metric already.
    return drop if entry["metric"] is not None else replace(drop, small="")


def _latency(entry: Mapping[str, Any]) -> Cell:
    return _figure(entry, "latency_ms", lambda times: formats.milliseconds(times["p50"]))


def _latency_ratio(artifact: Mapping[str, Any]) -> Cell:
    if artifact["latency_ratio"] is not None:
        ratio = artifact["latency"][0]["ratio"]
        interval = formats.ratio_interval(ratio["ci95"])
        return Cell(formats.ratio(artifact["latency_ratio"]), interval, chart=_speed(ratio))
    if not artifact["deployed"]:
        return Cell("not judged", small=artifact["latency_ratio_reason"], style="faint")
    return _figure(artifact, "latency_ratio", formats.ratio)


def _memory(entry: Mapping[str, Any]) -> Cell:
    memory = _figure({"peak_memory_bytes": None, **entry}, "peak_memory_bytes", formats.size)
    bounds = entry.get("peak_memory_range")
    return replace(memory, note=" to ".join(map(formats.size, bounds))) if bounds else memory


def _pass_row(report: Report, entry: Mapping[str, Any]) -> Sequence[Cell]:
    metric, weakest = metric_cell(report, entry), entry["weakest"]
    if entry["sqnr_db"] is not None:
        sqnr = formats.decibel(entry["sqnr_db"])
    else:
        sqnr = formats.NOT_MEASURED if entry["metric"] is None else "equal"
    worst, moved = Cell(formats.NOTHING), ""
    if was_trained(report, entry) and entry["sqnr_db"] is not None:
        moved = "moved by training, not lost"
    if weakest:
        worst = Cell(weakest["name"], tag=formats.decibel(weakest["sqnr_db"]), code=True)
    return [
        Cell(entry["pass"], code=True),
        Cell(formats.seconds(entry["seconds"]), note="earlier run" if entry["cached"] else ""),
        replace(metric, note="", small=metric.note),
        replace(_drop(report, entry), small=""),
        Cell(sqnr, small=moved),
        Cell(formats.size(entry["bytes"])),
        worst,
        Cell(schemes(entry["layers"]), items=tuple(pass_notes(entry))),
    ]


def was_trained(report: Report, entry: Mapping[str, Any]) -> bool:
    """Whether a pass, or one before it, has trained: outputs then differ on purpose."""
    passes = report["passes"]
    done = passes[: next(i for i, each in enumerate(passes) if each is entry) + 1]
    return any(each.get("training") for each in done)


def schemes(layers: Sequence[Mapping[str, Any]]) -> str:
    """Count the schemes of layers, the most frequent first, ``int8/channel (20), float32 (1)``."""
    counted = Counter(str(layer["scheme"]) for layer in layers)
    ordered = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} ({number})" for name, number in ordered)


def _won_back(entry: Mapping[str, Any]) -> list[str]:
    untrained = entry.get("untrained")
    if untrained is None:
        return []
    share = formats.is_share(untrained["metric"])
    drop = formats.metric_change(untrained["metric_drop"], share=share)
    shown = f"without training {formats.metric(untrained['metric'])}, {drop} lost in this pass"
    if untrained["won_back"] is None:
        reason = untrained.get("won_back_reason") or "nothing was lost without training"
        return [f"{shown}: {reason}"]
    if untrained["won_back"] < 0:
        more = -untrained["won_back"] / 100 * untrained["metric_drop"]
        return [f"{shown}; training lost another {formats.metric_change(more, share=share)}"]
    return [f"{shown}; training won {untrained['won_back']:.0f} % of that back"]
