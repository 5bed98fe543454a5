"""A comparison as rows of text, for every form in which it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compressor.comparison import verdict_text as words
from compressor.comparison.compare import Comparison
from compressor.comparison.latency_ratio import LatencyRatio
from compressor.comparison.opened_run import FLOAT
from compressor.comparison.sides import Side
from compressor.inspection.run_output import REPORT
from compressor.report import formats
from compressor.report.rows import FLOAT_MODEL


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
        found.append(f"{words.drop(difference, share=share)}; {_evidence(comparison)}")
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
    return ComparedRow(name, values[0], values[1], change, words.interval(low, high, share=share))


def _latency(latency: LatencyRatio) -> ComparedRow:
    ours, theirs = (
        formats.NOT_MEASURED if p50 is None else formats.milliseconds(p50) for p50 in latency.p50
    )
    change = formats.NOTHING if latency.value is None else formats.ratio(latency.value)
    interval = "" if latency.ci95 is None else formats.ratio_interval(latency.ci95)
    return ComparedRow("latency p50", ours, theirs, change, interval)
