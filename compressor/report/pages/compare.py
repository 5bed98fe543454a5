"""The pages of ``compress compare`` and ``compress gate``, and the gate's in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compressor.errors import printable
from compressor.lab.compare.compare import Comparison
from compressor.lab.compare.gate import Check, GateResult, drop_words, loss_words, probability
from compressor.lab.compare.runs import Side
from compressor.lab.compare.trend import LevelChange, Point, Trend
from compressor.lab.verify.manifests import REPORT
from compressor.report import formats
from compressor.report.markdown import MARKS, code, listed, table, text
from compressor.report.page import (
    GAP,
    Block,
    Cell,
    Column,
    Line,
    Page,
    Table,
    bullets,
    right,
)
from compressor.report.tables import FLOAT_MODEL
from compressor.report.terminal import VERDICT_STYLES
from compressor.run.artifacts import FLOAT
from compressor.run.verdicts.statistics import Difference

_MOST_RUNS = 20


def comparison_page(comparison: Comparison, trend: Trend | None) -> Page:
    """Return two models side by side, with remarks on their numbers."""
    page: list[Block] = [_models(comparison), *bullets(remarks(comparison))]
    if trend is not None:
        page += [GAP, _runs(trend), *bullets(change_lines(trend))]
    return page


def gate_page(result: GateResult, trend: Trend | None) -> Page:
    """Return the comparison and what the gate decided."""
    verdict = Line(("gate: ", Cell(verdict=result.verdict)))
    checks = [_check(check) for check in result.checks]
    return [*comparison_page(result.comparison, trend), GAP, *checks, verdict]


def failure_lines(result: GateResult) -> list[str]:
    """Return a line for each check that fails: all that ``--quiet`` prints."""
    return [printable(f"{c.name}: {c.verdict}; {c.text}") for c in result.checks if not c.ok]


def gate_markdown(result: GateResult, trend: Trend | None) -> str:
    """Return what the gate decided, and the comparison behind it, in Markdown."""
    candidate = code(heading(result.comparison.candidate))
    sections = [
        f"## {MARKS[result.verdict]} Gate {result.verdict}: {candidate}",
        listed(f"{_mark(c)} {code(c.name)}: {text(c.text)}" for c in result.checks),
        table(_models(result.comparison)),
        listed(map(text, remarks(result.comparison))),
    ]
    if trend is not None:
        sections += [table(_runs(trend)), listed(map(text, change_lines(trend)))]
    return "\n\n".join(sections) + "\n"


def heading(side: Side) -> str:
    """Name a model by the folder of its run, as the user named that, and its file."""
    path = Path(side.run.path)
    folder = path.parent if path.name == REPORT else path
    return f"{folder}: {FLOAT_MODEL}" if side.name == FLOAT else str(folder / side.name)


def _check(check: Check) -> Line:
    style = "bad" if not check.ok else VERDICT_STYLES[check.verdict]
    return Line((f"{check.name}: ", Cell(check.verdict, style=style), f"; {check.text}"))


def _mark(check: Check) -> str:
    return MARKS[check.verdict if check.ok else "failed"]


def _models(comparison: Comparison) -> Table:
    sides = (comparison.base, comparison.candidate)
    columns = [Column(heading(side), "number", code=True) for side in sides]
    sizes = [formats.size(side.bytes) for side in sides]
    latency = comparison.latency
    times = [
        formats.NOT_MEASURED if p50 is None else formats.milliseconds(p50) for p50 in latency.p50
    ]
    change = formats.NOTHING if latency.value is None else formats.ratio(latency.value)
    interval = "" if latency.ci95 is None else formats.ratio_interval(latency.ci95)
    rows = [
        _metric(comparison, sides),
        ["size", *sizes, formats.ratio(comparison.size_ratio), ""],
        ["latency p50", *times, change, interval],
    ]
    return Table([Column(""), *columns, *right("change", "95 % interval")], rows)


def _metric(comparison: Comparison, sides: Sequence[Side]) -> list[str]:
    values = [formats.metric(s.metric) if s.metric else formats.NOT_MEASURED for s in sides]
    metric, difference = comparison.candidate.metric, comparison.difference
    name = "metric" if metric is None else str(metric["name"])
    if difference is None or metric is None:
        return [name, *values, formats.NOTHING, ""]
    share = formats.is_share(metric)
    # As a change of the value, which is positive where it rises, whether that is good or bad.
    sign = -1 if metric["higher_is_better"] else 1
    low, high = sorted(sign * end for end in difference.ci95)
    change = formats.metric_change(sign * difference.drop, share=share)
    return [name, *values, change, formats.metric_change_interval((low, high), share=share)]


def _runs(trend: Trend) -> Table:
    columns = [Column("run"), *right(trend.metric, "95 % interval", "size", "latency p50")]
    points = trend.points[-_MOST_RUNS:]
    return Table(columns, [[Cell(p.label, code=True), *point_texts(trend, p)] for p in points])


def remarks(comparison: Comparison) -> list[str]:
    """Return how the difference was judged, why numbers are missing, and what else to know."""
    difference = comparison.difference
    if difference is None:
        lines = [f"metric {formats.NOT_MEASURED}: {comparison.difference_reason}"]
    else:
        share = formats.is_share(comparison.candidate.metric)
        lines = [f"{drop_words(difference, share=share)}; {_evidence(difference)}"]
    latency = comparison.latency
    at = "" if latency.batch is None else f" at batch {latency.batch}"
    measured = "" if latency.value is not None else f" {formats.NOT_MEASURED}"
    return [*lines, f"latency ratio{at}{measured}: {latency.source}", *comparison.notes]


def _evidence(difference: Difference) -> str:
    samples = formats.plural(difference.samples, "sample")
    if difference.lost is None or difference.won is None:
        return f"{difference.method} of {samples}"
    lost, won = formats.count(difference.lost), formats.count(difference.won)
    return f"{difference.method}: {lost} of {samples} lost, {won} won"


def change_lines(trend: Trend) -> list[str]:
    """Return a sentence for each step of the metric, or that there is none."""
    if not trend.changes:
        return [
            f"{trend.metric} has no step in {formats.plural(len(trend.points), 'run')} "
            f"({trend.method})"
        ]
    return [_change_line(trend, change) for change in trend.changes]


def _change_line(trend: Trend, change: LevelChange) -> str:
    size, interval, _ = loss_words(change.drop, change.ci95, share=trend.unit == "%")
    worse = change.drop > 0
    stepped = "stepped down" if worse == trend.higher_is_better else "stepped up"
    return (
        f"{trend.metric} {stepped} at run {change.index + 1}, {change.label!r}: "
        f"{'worse' if worse else 'better'} by {size}, 95 % interval {interval} "
        f"({probability(change.p)})"
    )


def point_texts(trend: Trend, point: Point) -> tuple[str, str, str, str]:
    """Return metric, its interval, size and latency of a run."""
    metric = {"value": point.value, "ci95": point.ci95, "unit": trend.unit}
    latency = formats.NOT_MEASURED
    if point.latency_ms is not None:
        latency = formats.milliseconds(point.latency_ms)
    value, interval = formats.metric(metric), formats.metric_interval(metric)
    return value, interval, formats.size(point.bytes), latency
