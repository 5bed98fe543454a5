"""A comparison, a verdict and a trend as rows of text, for every form in which they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compressor.lab.compare.compare import Comparison
from compressor.lab.compare.difference import Difference
from compressor.lab.compare.sides import LatencyRatio, Side
from compressor.lab.compare.trend import LevelChange, Point, Trend
from compressor.lab.inspect.run_output import REPORT
from compressor.report import formats
from compressor.report.past_runs import PastRun, PastRuns
from compressor.report.rows import FLOAT_MODEL
from compressor.run.artifacts import FLOAT

Status = Literal["passed", "failed", "undecided"]


def metric_verdict(
    difference: Difference, share: bool, limit: float | None, alpha: float, status: Status
) -> str:
    """Say what the metric's check came to.

    Args:
        difference: how much worse the candidate is.
        share: the metric is in percent, so that differences are points.
        limit: the greatest drop that is allowed, if one was given.
        alpha: level of the test.
        status: what was decided.
    """
    shown = drop_words(difference, share=share)
    if status == "passed":
        return f"{shown}: within the limit {limit:g}" if limit is not None else shown
    if status == "failed":
        return f"{shown}: " + (
            "the loss is real" if limit is None else f"fails the limit {limit:g}"
        )
    samples = formats.plural(difference.samples, "sample")
    if difference.drop > (limit or 0.0):
        return f"{shown}: not distinguishable with {samples}{_would_do(difference, alpha, 0.0)}"
    assert limit is not None
    would = _would_do(difference, alpha, limit)
    return f"{shown}: within the limit {limit:g} as measured, not proved with {samples}{would}"


def drop_words(difference: Difference, *, share: bool) -> str:
    """Say how much worse or better the candidate is, with interval and chance."""
    if difference.equal:
        return f"the same on all {formats.plural(difference.samples, 'sample')}"
    worse = difference.drop >= 0
    size = formats.metric_change(abs(difference.drop), share=share)
    low, high = difference.ci95 if worse else (-difference.ci95[1], -difference.ci95[0])
    amount = f"{'worse' if worse else 'better'} by {size}" if difference.drop else "no difference"
    chance = f" ({probability(difference.p)})" if worse else ""
    return f"{amount}, 95 % interval {drop_interval(low, high, share=share)}{chance}"


def drop_interval(low: float, high: float, *, share: bool) -> str:
    """Format the ends of an interval of drops."""
    ends = [formats.metric_change(end, share=share).removesuffix(" points") for end in (low, high)]
    return " to ".join(ends)


def probability(p: float) -> str:
    """Format the chance of so large a loss between equal models."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def latency_verdict(ratio: LatencyRatio, limit: float, status: Status) -> str:
    """Say what the latency's check came to."""
    assert ratio.value is not None
    assert ratio.ci95 is not None
    shown = f"{formats.ratio(ratio.value)}, 95 % interval {formats.ratio_interval(ratio.ci95)}"
    ends = {
        "passed": f"within the limit {limit:g}",
        "failed": f"fails the limit {limit:g}",
        "undecided": f"not distinguishable from the limit {limit:g}",
    }
    return f"{shown} at batch {ratio.batch}, {ratio.source}: {ends[status]}"


def size_verdict(comparison: Comparison, limit: float, *, ok: bool) -> str:
    """Say what the size's check came to."""
    sizes = " over ".join(formats.size(s.bytes) for s in (comparison.candidate, comparison.base))
    end = f"within the limit {limit:g}" if ok else f"fails the limit {limit:g}"
    ratio, _ = formats.compared(comparison.size_ratio, limit)
    return f"{sizes}, {ratio} ×: {end}"


def _would_do(difference: Difference, alpha: float, limit: float) -> str:
    needed = difference.samples_needed(alpha, limit)
    return "" if needed is None else f"; {formats.count(needed)} would do"


@dataclass(frozen=True)
class ComparedRow:
    """One quantity of both models.

    Attributes:
        name: what it is.
        base: the base's.
        candidate: the candidate's.
        change: the difference or the ratio.
        interval: its 95 % interval; empty without one.
    """

    name: str
    base: str
    candidate: str
    change: str
    interval: str


def heading(side: Side) -> str:
    """Name a model by the folder of its run, as the user named that, and its file."""
    path = Path(side.run.path)
    folder = path.parent if path.name == REPORT else path
    return f"{folder}: {FLOAT_MODEL}" if side.name == FLOAT else str(folder / side.name)


def compared_rows(comparison: Comparison) -> list[ComparedRow]:
    """Return metric, size and latency, side by side."""
    sides = (comparison.base, comparison.candidate)
    sizes = [formats.size(side.bytes) for side in sides]
    return [
        _metric(comparison, sides),
        ComparedRow("size", sizes[0], sizes[1], formats.ratio(comparison.size_ratio), ""),
        _latency(comparison.latency),
    ]


def remarks(comparison: Comparison) -> list[str]:
    """Return how the difference was judged, why numbers are missing, and what else to know."""
    found = []
    difference = comparison.difference
    if difference is None:
        found.append(f"metric {formats.NOT_MEASURED}: {comparison.difference_reason}")
    else:
        share = formats.is_share(comparison.candidate.metric)
        found.append(f"{drop_words(difference, share=share)}; {_evidence(comparison)}")
    latency = comparison.latency
    at = "" if latency.batch is None else f" at batch {latency.batch}"
    measured = "" if latency.value is not None else f" {formats.NOT_MEASURED}"
    found.append(f"latency ratio{at}{measured}: {latency.source}")
    return [*found, *comparison.notes]


def _evidence(comparison: Comparison) -> str:
    difference = comparison.difference
    assert difference is not None
    samples = formats.plural(difference.samples, "sample")
    if difference.lost is None or difference.won is None:
        return f"{difference.method} of {samples}"
    lost, won = formats.count(difference.lost), formats.count(difference.won)
    return f"{difference.method}: {lost} of {samples} lost, {won} won"


def _metric(comparison: Comparison, sides: Sequence[Side]) -> ComparedRow:
    values = [formats.metric(s.metric) if s.metric else formats.NOT_MEASURED for s in sides]
    metric = comparison.candidate.metric
    name = "metric" if metric is None else str(metric["name"])
    difference = comparison.difference
    if difference is None or metric is None:
        return ComparedRow(name, values[0], values[1], formats.NOTHING, "")
    share = formats.is_share(metric)
    # As a change of the value, which is positive where it rises, whether that is good or bad.
    sign = -1 if metric["higher_is_better"] else 1
    low, high = sorted(sign * end for end in difference.ci95)
    change = formats.metric_change(sign * difference.drop, share=share)
    return ComparedRow(name, values[0], values[1], change, drop_interval(low, high, share=share))


def _latency(latency: LatencyRatio) -> ComparedRow:
    ours, theirs = (
        formats.NOT_MEASURED if p50 is None else formats.milliseconds(p50) for p50 in latency.p50
    )
    change = formats.NOTHING if latency.value is None else formats.ratio(latency.value)
    interval = "" if latency.ci95 is None else formats.ratio_interval(latency.ci95)
    return ComparedRow("latency p50", ours, theirs, change, interval)


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
    interval = drop_interval(low, high, share=share)
    went = "worse" if worse else "better"
    stepped = "stepped down" if worse == trend.higher_is_better else "stepped up"
    return (
        f"{trend.metric} {stepped} at run {change.index + 1}, {change.label!r}: {went} by {size}, "
        f"95 % interval {interval} ({probability(change.p)})"
    )
