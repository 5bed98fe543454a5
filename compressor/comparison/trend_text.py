"""A trend as text, for every form in which it is shown."""

from __future__ import annotations

from compressor.comparison import verdict_text as words
from compressor.comparison.trend import LevelChange, Point, Trend
from compressor.report import formats
from compressor.report.past_runs import PastRun, PastRuns

_SHOWN = 20


def trend_rows(trend: Trend) -> list[tuple[str, str, str, str, str]]:
    """Return name, metric, its interval, size and latency of the latest runs."""
    return [(point.label, *_texts(trend, point)) for point in trend.points[-_SHOWN:]]


def past_runs(trend: Trend) -> PastRuns:
    """Return a trend as the report shows it."""
    stepped = {change.index for change in trend.changes}
    runs = (
        PastRun(p.label, p.value, *p.ci95, number in stepped, _texts(trend, p))
        for number, p in enumerate(trend.points)
    )
    return PastRuns(tuple(runs), tuple(change_lines(trend)))


def _texts(trend: Trend, point: Point) -> tuple[str, str, str, str]:
    metric = {"value": point.value, "ci95": point.ci95, "unit": trend.unit}
    latency = formats.NOT_MEASURED
    if point.latency_ms is not None:
        latency = formats.milliseconds(point.latency_ms)
    value, interval = formats.metric(metric), formats.metric_interval(metric)
    return value, interval, formats.size(point.bytes), latency


def change_lines(trend: Trend) -> list[str]:
    """Say where the metric stepped, and how that was found."""
    runs = formats.plural(len(trend.points), "run")
    if not trend.changes:
        return [f"{trend.metric} has no step in {runs} ({trend.method})"]
    return [_line(trend, change) for change in trend.changes]


def _line(trend: Trend, change: LevelChange) -> str:
    share = trend.unit == "%"
    worse = change.drop > 0
    size = formats.metric_change(abs(change.drop), share=share)
    low, high = change.ci95 if worse else (-change.ci95[1], -change.ci95[0])
    interval = words.interval(low, high, share=share)
    went = "worse" if worse else "better"
    stepped = "stepped down" if worse == trend.higher_is_better else "stepped up"
    return (
        f"{trend.metric} {stepped} at run {change.index + 1}, {change.label!r}: {went} by {size}, "
        f"95 % interval {interval} ({words.probability(change.p)})"
    )
