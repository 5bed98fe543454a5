"""Runs beside this one, as points between cost and metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressor.errors import ModelError
from compressor.lab.verify.forms import read_mapping
from compressor.lab.verify.manifests import REPORT
from compressor.report.formats import plural
from compressor.report.verdict import Report, artifact_verdict
from compressor.run.verdicts.verdicts import Verdict

_MOST_RUNS = 200
_BROKEN = (ModelError, ValueError, KeyError, TypeError, IndexError, AttributeError)


@dataclass(frozen=True)
class Point:
    """An artifact as a point between two costs and the metric.

    Attributes:
        run: the run's name: that of its folder, or of this report.
        size_ratio: bytes over the float model's.
        latency_ratio: latency over the float model's, timed side by side; ``None`` for what is
            not deployed.
        verdict: by the run's limits and checks.
        own: it is of this report.
        beaten_in_size: another point is at least as good in metric and size, and better in one.
        beaten_in_latency: the same for metric and latency.
    """

    run: str
    artifact: str
    metric: float
    metric_ci95: tuple[float, float]
    size_ratio: float
    latency_ratio: float | None
    latency_ci95: tuple[float, float] | None
    verdict: Verdict
    own: bool
    beaten_in_size: bool = False
    beaten_in_latency: bool = False


@dataclass(frozen=True)
class Related:
    """What lies beside a run's folder.

    Attributes:
        reports: readable reports of the same model, data and metric, by the folder's name.
    """

    reports: Mapping[str, Report]
    notes: tuple[str, ...] = ()


NONE = Related({})


def related_runs(output: Path, report: Report) -> Related:
    """Read the reports of runs whose folders lie beside this run's.

    A run belongs to the plot if it measured the same float model on the same data by the same
    metric. Where this run measured none, there is no plot.
    """
    if report["baseline"]["metric"] is None or "identity" not in report:
        return NONE
    identity = _identity(report)
    reports: dict[str, Report] = {}
    notes: list[str] = []
    others = 0
    for folder in _folders(output):
        try:
            other = read_mapping(folder / REPORT)
            same = _identity(other) == identity
            if same:
                list(_points(folder.name, other, own=False))  # raises where something is missing
        except _BROKEN as error:
            notes.append(f"Run {folder.name!r} is left out: {_problem(error)}.")
            continue
        if same:
            reports[folder.name] = other
        else:
            others += 1
    if others:
        notes.append(f"Left out: {plural(others, 'run')} of another model, data or metric.")
    if len(reports) > _MOST_RUNS:
        notes.append(f"Left out: {len(reports) - _MOST_RUNS} more runs.")
        reports = dict(list(reports.items())[:_MOST_RUNS])
    return Related(reports, tuple(notes))


def points(report: Report, related: Related) -> list[Point]:
    """Return all measured artifacts: this run's first, then the others' by name."""
    measured = list(_points(str(report["name"]), report, own=True))
    for name, other in related.reports.items():
        measured += _points(name, other, own=False)
    higher = bool((report["baseline"]["metric"] or {}).get("higher_is_better", True))
    return with_beaten(measured, higher_is_better=higher)


def with_beaten(points: Sequence[Point], *, higher_is_better: bool) -> list[Point]:
    """Return the points with a note of the costs in which another point beats them."""
    sign = -1.0 if higher_is_better else 1.0
    sizes = [(p.size_ratio, sign * p.metric) for p in points]
    times = [(p.latency_ratio, sign * p.metric) for p in points if p.latency_ratio is not None]
    return [
        replace(
            point,
            beaten_in_size=_beaten(point.size_ratio, sign * point.metric, sizes),
            beaten_in_latency=point.latency_ratio is not None
            and _beaten(point.latency_ratio, sign * point.metric, times),
        )
        for point in points
    ]


def _folders(output: Path) -> Iterator[Path]:
    here = output.resolve()
    for path in sorted(here.parent.glob(f"*/{REPORT}")):
        if path.parent.resolve() != here:
            yield path.parent


def _identity(report: Report) -> tuple[Any, ...]:
    identity, metric = report["identity"], report["baseline"]["metric"]
    known = None if metric is None else (metric["name"], metric["higher_is_better"])
    return identity["model"], identity["data"], identity["metric_code"], known


def _problem(error: Exception) -> str:
    if isinstance(error, ModelError) and isinstance(error.__cause__, OSError):
        return f"its {REPORT} {error.problem}"
    return f"its {REPORT} is damaged, or of another version"


def _points(name: str, report: Report, *, own: bool) -> Iterator[Point]:
    for artifact in report["artifacts"]:
        if artifact["metric"] is None:
            continue
        ratio = None if artifact["latency_ratio"] is None else artifact["latency"][0]["ratio"]
        yield Point(
            run=name,
            artifact=str(artifact["path"]),
            metric=float(artifact["metric"]["value"]),
            metric_ci95=_pair(artifact["metric"]["ci95"]),
            size_ratio=float(artifact["size_ratio"]),
            latency_ratio=None if ratio is None else float(ratio["value"]),
            latency_ci95=None if ratio is None else _pair(ratio["ci95"]),
            verdict=artifact_verdict(report, artifact),
            own=own,
        )


def _pair(bounds: Sequence[Any]) -> tuple[float, float]:
    low, high = bounds
    return float(low), float(high)


def _beaten(cost: float, loss: float, others: Sequence[tuple[float, float]]) -> bool:
    """Whether another point is as cheap and loses as little, and is better in one of the two."""
    return any(c <= cost and x <= loss and (c, x) != (cost, loss) for c, x in others)
