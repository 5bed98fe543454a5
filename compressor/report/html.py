"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from compressor.errors import printable
from compressor.lab.compare.trend import Trend
from compressor.lab.explain.explanation import Explanation
from compressor.report import formats
from compressor.report.layer_drawing import layer_drawing
from compressor.report.layer_table import Distributions, distributions, layer_table, trainings
from compressor.report.next_step import graph_file, next_words
from compressor.report.page import Bar, Interval
from compressor.report.pages.compare import change_lines, point_texts
from compressor.report.pages.explain import cost_table
from compressor.report.past_runs import NONE, Point, Related, points
from compressor.report.samples import Sample
from compressor.report.tables import (
    FLOAT_MODEL,
    check_table,
    class_table,
    contents_words,
    flipped_words,
    limit_table,
    memory_missing,
    metric_cell,
    metric_interval,
    model_table,
    pass_table,
    slowest_table,
)
from compressor.report.verdict import (
    LimitRow,
    Report,
    failures,
    gist,
    headline,
    limit_rows,
    main_artifact,
    metric_name,
    metric_title,
    remarks,
    unknowns,
)

_MOST_FILES = 40
_MOST_COSTS = 60


@dataclass(frozen=True)
class Tile:
    """One big number: what it is, before and after, and its limit."""

    title: str
    value: str
    change: str
    limit: LimitRow | None
    reason: str = ""
    bars: tuple[tuple[str, str, Bar], ...] = ()
    interval: Interval | None = None


def html_report(
    report: Report,
    related: Related = NONE,
    history: Trend | None = None,
    explanation: Explanation | None = None,
    samples: Sequence[Sample] = (),
) -> str:
    """Render a report as one file without scripts, fonts or images from elsewhere.

    Args:
        history: the earlier runs of this spec and this one.
        explanation: the cost of each layer, if known.
        samples: samples whose decision flipped.
    """
    counted = distributions(report)
    runs = [] if history is None else _past_runs(history)
    plotted = points(report, related) if related.reports else []
    return template("report.html").render(
        **_summary(report),
        flipped=report.get("flipped"),
        flipped_words=flipped_words(report),
        samples=samples,
        classes=class_table(report),
        slowest=slowest_table(report),
        graph_file=graph_file(report),
        contents=contents_words(report),
        costs=None if explanation is None else cost_table(explanation, _MOST_COSTS),
        explanation=explanation,
        drawing=layer_drawing(report),
        metric=metric_name(report),
        metric_title=metric_title(report),
        unweighed=memory_missing(report),
        passes=pass_table(report),
        checks=check_table(report),
        latencies=[(a["path"], row) for a in report["artifacts"] for row in a["latency"]],
        layers=layer_table(report),
        trainings=trainings(report),
        distributions=counted,
        points=plotted,
        related=related,
        history=runs,
        steps=[] if history is None else change_lines(history),
        chart_data={
            **_chart_data(report, plotted, counted),
            "history": runs,
        },
        library=chart_library(),
        most_files=_MOST_FILES,
        formats=formats,
    )


def first_screen(report: Report) -> str:
    """Render what the report begins with, and its table of models: a page without scripts."""
    return template("screen.html").render(**_summary(report))


def _summary(report: Report) -> dict[str, Any]:
    """Return what the first screen shows, and the table of models."""
    content = model_table(report)
    measured = {"chart": report["baseline"]["metric"] is not None}
    keep = [measured.get(column.kind, True) for column in content.columns]
    return {
        "report": report,
        "headline": headline(report),
        "gist": gist(report),
        "remarks": remarks(report),
        "verdict": report["verdict"],
        "failures": [*failures(report), *unknowns(report)],
        "main": main_artifact(report),
        "advice": report.get("advice"),
        "next_words": next_words(report),
        "tiles": _tiles(report),
        "models": content.picked([*keep[:-2], not memory_missing(report), False]),
        "limits": limit_table(report),
    }


def _shown(value: Any) -> Any:
    """Escape what a browser would obey in a text; markup of our own stays."""
    return printable(value, lines=True) if type(value) is str else value


@cache
def template(name: str) -> Template:
    """Return a template of this folder; texts are escaped."""
    environment = Environment(
        loader=PackageLoader("compressor", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


@cache
def chart_library() -> Markup:
    """The charts' library: a part of Observable Plot, see the folder ``plot``."""
    path = files("compressor.report") / "plot" / "observable-plot.js"
    return Markup(path.read_text(encoding="utf-8"))


def _chart_data(report: Report, plotted: list[Point], counted: Distributions) -> dict[str, Any]:
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


def _past_runs(trend: Trend) -> list[dict[str, Any]]:
    stepped = {change.index for change in trend.changes}
    return [
        {
            "label": point.label,
            "value": point.value,
            "low": point.ci95[0],
            "high": point.ci95[1],
            "stepped": number in stepped,
            "texts": point_texts(trend, point),
        }
        for number, point in enumerate(trend.points)
    ]


def _tiles(report: Report) -> list[Tile]:
    """Return the three numbers of the main artifact that people ask for first."""
    artifact = main_artifact(report)
    if artifact is None:
        return []
    limits = {row.key: row for row in limit_rows(report) if row.artifact == artifact["path"]}
    old_size = artifact.get("float_bytes", report["baseline"]["bytes"])
    new_size = artifact["bytes"]
    size = Tile(
        "Size",
        formats.size(new_size),
        f"from {formats.size(old_size)}, {formats.ratio(artifact['size_ratio'])}",
        limits.get("size-ratio"),
        bars=_bars(old_size, new_size, artifact["path"], formats.size),
    )
    metric = _metric_tile(report, artifact, limits.get("metric-drop"))
    return [metric, size, _latency_tile(artifact, limits.get("latency-ratio"))]


def _metric_tile(report: Report, artifact: Mapping[str, Any], limit: LimitRow | None) -> Tile:
    metric, before = metric_cell(report, artifact), report["baseline"]["metric"]
    drop = formats.NOT_MEASURED
    if artifact["metric_drop"] is not None:
        share = formats.is_share(artifact["metric"])
        drop = formats.metric_change(artifact["metric_drop"], share=share)
    return Tile(
        metric_title(report),
        metric.text,
        f"from {formats.metric(before)}, drop {drop}" if before else "",
        limit,
        metric.small,
        interval=metric_interval(report, artifact),
    )


def _latency_tile(artifact: Mapping[str, Any], limit: LimitRow | None) -> Tile:
    if not artifact["latency"]:
        reason = artifact.get("latency_ms_reason") or "the report gives no reason"
        return Tile("Latency", formats.NOT_MEASURED, "", limit, reason)
    measured = artifact["latency"][0]
    before, after, ratio = measured["float"]["p50"], measured["artifact"]["p50"], measured["ratio"]
    interval = formats.ratio_interval(ratio["ci95"])
    return Tile(
        f"Latency, batch {measured['batch']}",
        formats.milliseconds(after),
        f"from {formats.milliseconds(before)}, {formats.ratio(ratio['value'])} ({interval})",
        limit,
        "" if artifact["deployed"] else f"not judged: {artifact['latency_ratio_reason']}",
        bars=_bars(before, after, artifact["path"], formats.milliseconds),
    )


def _bars(
    before: float, after: float, name: str, text: Callable[[float], str]
) -> tuple[tuple[str, str, Bar], ...]:
    longest = max(before, after) or 1.0
    return (
        (FLOAT_MODEL, text(before), Bar(100.0 * before / longest, ours=False)),
        (name, text(after), Bar(100.0 * after / longest, ours=True)),
    )
