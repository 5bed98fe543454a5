"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from compressor.report import formats
from compressor.report.layer_table import Distributions, distributions, layer_table, trainings
from compressor.report.past_runs import NONE, PastRuns, Point, Related, points
from compressor.report.rows import FLOAT_MODEL, model_rows, pass_rows
from compressor.report.verdict import (
    LimitRow,
    Report,
    check_rows,
    failures,
    gist,
    headline,
    limit_rows,
    main_artifact,
    metric_name,
    metric_title,
)

_MOST_FILES = 40
_MARGIN = 0.08


@dataclass(frozen=True)
class Interval:
    """A measured interval on an axis from 0 to 100.

    Attributes:
        low: its lower end.
        at: the measured value.
        high: its upper end.
        reference: the float model's value.
        limit: the worst value that the limits allow; ``None`` without a limit.
        label: the same in words.
    """

    low: float
    at: float
    high: float
    reference: float
    limit: float | None
    label: str


@dataclass(frozen=True)
class Bar:
    """A bar in a tile: name, number, and length in percent of the longest."""

    name: str
    text: str
    length: float
    ours: bool


@dataclass(frozen=True)
class Tile:
    """One big number: what it is, before and after, and its limit."""

    title: str
    value: str
    change: str
    bars: tuple[Bar, ...]
    interval: Interval | None
    limit: LimitRow | None
    reason: str


def html_report(report: Report, related: Related = NONE, history: PastRuns | None = None) -> str:
    """Render a report as one file without scripts, fonts or images from elsewhere.

    Args:
        report: the content of ``report.json``.
        related: other runs of the same model.
        history: the runs of this spec before it, and it.
    """
    rows = model_rows(report)
    entries = [report["baseline"], *report["artifacts"]]
    counted = distributions(report)
    plotted = points(report, related) if related.reports else []
    return _template().render(
        report=report,
        headline=headline(report),
        gist=gist(report),
        failures=failures(report),
        main=main_artifact(report),
        tiles=_tiles(report),
        limits=limit_rows(report),
        metric=metric_name(report),
        metric_title=metric_title(report),
        models=[
            (row, _metric_interval(report, entry), _size_length(entries, entry), _speed(entry))
            for row, entry in zip(rows, entries, strict=True)
        ],
        weighed=any(not row.memory.reason for row in rows),
        charted=report["baseline"]["metric"] is not None,
        drop_limited=any(entry["name"] == "metric-drop" for entry in report["limits"]),
        latencies=[(a["path"], row) for a in report["artifacts"] for row in a["latency"]],
        passes=pass_rows(report),
        layers=layer_table(report),
        trainings=trainings(report),
        distributions=counted,
        points=plotted,
        related=related,
        history=history,
        chart_data={
            **_chart_data(report, plotted, counted),
            "history": [] if history is None else [asdict(run) for run in history.runs],
        },
        library=_library(),
        checks=check_rows(report),
        most_files=_MOST_FILES,
        formats=formats,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("compressor", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")


@cache
def _library() -> Markup:
    """The charts' library: a part of Observable Plot, see the folder ``plot``."""
    path = files("compressor.report") / "plot" / "observable-plot.js"
    return Markup(path.read_text(encoding="utf-8"))


def _chart_data(report: Report, plotted: list[Point], counted: Distributions) -> dict[str, Any]:
    """Return what the page draws beside the layers, which it reads from their table."""
    base = report["baseline"]["metric"]
    return {
        "metric": {
            "title": metric_title(report),
            "unit": base.get("unit", "") if base else "",
            "float": base["value"] if base else None,
            "higher": base.get("higher_is_better", True) if base else True,
        },
        "points": [asdict(point) for point in plotted],
        "histograms": [[d.counts for d in layer.shown] for layer in counted.layers],
        "losses": [training.losses for training in trainings(report)],
    }


def _tiles(report: Report) -> list[Tile]:
    """The three numbers of the main artifact that people ask for first."""
    artifact = main_artifact(report)
    if artifact is None:
        return []
    limits = {row.key: row for row in limit_rows(report) if row.artifact == artifact["path"]}
    return [
        _metric_tile(report, artifact, limits.get("metric-drop")),
        _size_tile(report, artifact, limits.get("size-ratio")),
        _latency_tile(artifact, limits.get("latency-ratio")),
    ]


def _metric_tile(report: Report, artifact: Mapping[str, Any], limit: LimitRow | None) -> Tile:
    row = model_rows(report)[1 + list(report["artifacts"]).index(artifact)]
    before = report["baseline"]["metric"]
    return Tile(
        title=metric_title(report),
        value=row.metric.text,
        change=f"from {formats.metric(before)}, drop {row.drop.text}" if before else "",
        bars=(),
        interval=_metric_interval(report, artifact),
        limit=limit,
        reason=row.metric.reason,
    )


def _size_tile(report: Report, artifact: Mapping[str, Any], limit: LimitRow | None) -> Tile:
    before, after = report["baseline"]["bytes"], artifact["bytes"]
    return Tile(
        title="Size",
        value=formats.size(after),
        change=f"from {formats.size(before)}, {formats.ratio(artifact['size_ratio'])}",
        bars=_bars(before, after, artifact["path"], formats.size),
        interval=None,
        limit=limit,
        reason="",
    )


def _latency_tile(artifact: Mapping[str, Any], limit: LimitRow | None) -> Tile:
    measured = artifact["latency"][0] if artifact["latency"] else None
    if measured is None:
        reason = artifact.get("latency_ms_reason") or "the report gives no reason"
        return Tile("Latency", formats.NOT_MEASURED, "", (), None, limit, reason)
    before, after = measured["float"]["p50"], measured["artifact"]["p50"]
    ratio = measured["ratio"]
    change = (
        f"from {formats.milliseconds(before)}, {formats.ratio(ratio['value'])} "
        f"({formats.ratio_interval(ratio['ci95'])})"
    )
    return Tile(
        title=f"Latency, batch {measured['batch']}",
        value=formats.milliseconds(after),
        change=change,
        bars=_bars(before, after, artifact["path"], formats.milliseconds),
        interval=None,
        limit=limit,
        reason="" if artifact["deployed"] else f"not judged: {artifact['latency_ratio_reason']}",
    )


def _bars(before: float, after: float, name: str, text: Callable[[float], str]) -> tuple[Bar, ...]:
    longest = max(before, after) or 1.0
    return (
        Bar(FLOAT_MODEL, text(before), 100.0 * before / longest, ours=False),
        Bar(name, text(after), 100.0 * after / longest, ours=True),
    )


def _metric_interval(report: Report, entry: Mapping[str, Any]) -> Interval | None:
    """Place an entry's metric on the axis that all models share."""
    base, metric = report["baseline"]["metric"], entry["metric"]
    if base is None or metric is None:
        return None
    all_entries = [report["baseline"], *report["artifacts"]]
    bounds = [float(b) for e in all_entries if e["metric"] for b in e["metric"]["ci95"]]
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


def _size_length(entries: list[Mapping[str, Any]], entry: Mapping[str, Any]) -> float:
    """Length of a model's size bar in percent of the largest."""
    largest = max(int(e["bytes"]) for e in entries)
    return 100.0 * int(entry["bytes"]) / max(largest, 1)


def _speed(entry: Mapping[str, Any]) -> Interval | None:
    """Place an artifact's latency ratio on an axis from nothing to twice the float model."""
    if entry.get("latency_ratio") is None:
        return None
    ratio = entry["latency"][0]["ratio"]
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
