"""The verdict in words: which limits and checks hold, and by how much they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compressor.report import formats

Report = Mapping[str, Any]
_METRIC_DROP = "metric-drop"
_TITLES = {
    "accuracy": "Accuracy",
    "top5": "Top-5 accuracy",
    "mse": "Mean squared error",
    "cosine": "Cosine similarity",
    "perplexity": "Perplexity",
    "metric": "Metric",
}


@dataclass(frozen=True)
class LimitRow:
    """A limit and what was measured.

    Attributes:
        name: what is limited, in words.
        key: its name in the spec.
        interval: its 95 % interval; empty without one.
        note: by how much it is exceeded, or why it holds nevertheless.
        share: measured over limit; ``None`` where that says nothing.
    """

    name: str
    key: str
    artifact: str
    limit: str
    measured: str
    interval: str
    ok: bool
    note: str
    share: float | None


@dataclass(frozen=True)
class CheckRow:
    """A check of an artifact."""

    artifact: str
    name: str
    ok: bool
    detail: str


def metric_name(report: Report) -> str:
    """The metric's name, or ``metric`` where none was measured."""
    entry = report["baseline"]["metric"]
    return "metric" if entry is None else str(entry["name"])


def metric_title(report: Report) -> str:
    """The metric's name as a heading; the name of a user's function stays as it is."""
    return _TITLES.get(metric_name(report), metric_name(report))


def limit_rows(report: Report) -> list[LimitRow]:
    """Return the limits in words, failed ones first."""
    rows = [_limit_row(report, entry) for entry in report["limits"]]
    return sorted(rows, key=lambda row: row.ok)


def check_rows(report: Report) -> list[CheckRow]:
    """Return the checks of all artifacts, failed ones first."""
    rows = [
        CheckRow(artifact["path"], check["name"], check["ok"], check.get("detail") or "")
        for artifact in report["artifacts"]
        for check in artifact["checks"]
    ]
    return sorted(rows, key=lambda row: row.ok)


def headline(report: Report) -> str:
    """Return in one sentence whether the run passed."""
    limits, checks = report["limits"], check_rows(report)
    lost = sum(not entry["ok"] for entry in limits)
    broken = sum(not check.ok for check in checks)
    if report["ok"]:
        held = formats.plural(len(checks), "check")
        if not limits:
            return f"Passed: {held} held, no limits are set"
        return f"Passed: {formats.plural(len(limits), 'limit')} and {held} held"
    parts = [
        f"{failed} of {formats.plural(len(rows), noun)}"
        for failed, rows, noun in ((lost, limits, "limit"), (broken, checks, "check"))
        if failed
    ]
    return f"Failed: {' and '.join(parts) or 'see the report'}"


def failures(report: Report) -> list[tuple[str, str]]:
    """Return what failed: the artifact, and what is wrong with it in words."""
    failed = []
    for row in limit_rows(report):
        if not row.ok:
            interval = f" (95 % CI {row.interval})" if row.interval else ""
            text = f"{row.name} {row.measured}{interval}, limit {row.limit}: {row.note}"
            failed.append((row.artifact, text))
    failed += [
        (check.artifact, f"check “{check.name}” failed: {check.detail or 'no detail'}")
        for check in check_rows(report)
        if not check.ok
    ]
    return failed


def artifact_ok(report: Report, artifact: Mapping[str, Any]) -> bool:
    """Return whether all limits and checks of one artifact hold."""
    limits = [e["ok"] for e in report["limits"] if e["artifact"] == artifact["path"]]
    return all(limits) and all(check["ok"] for check in artifact["checks"])


def main_artifact(report: Report) -> Mapping[str, Any] | None:
    """The artifact that a summary speaks about: the first that is deployed, else the first."""
    artifacts: Sequence[Mapping[str, Any]] = report["artifacts"]
    return next((a for a in artifacts if a["deployed"]), artifacts[0] if artifacts else None)


def gist(report: Report) -> str:
    """Return in one sentence what the main artifact gained and lost; empty without one."""
    artifact = main_artifact(report)
    if artifact is None:
        return ""
    parts = [_size_words(float(artifact["size_ratio"])), _speed_words(artifact)]
    parts.append(_metric_words(report, artifact))
    return ", ".join(part for part in parts if part)


def _size_words(ratio: float) -> str:
    if 0.995 <= ratio <= 1.005:
        return "the same size"
    return f"{_times(1 / ratio)} smaller" if ratio < 1 else f"{_times(ratio)} the size"


def _speed_words(artifact: Mapping[str, Any]) -> str:
    if artifact["latency_ratio"] is None:
        return ""
    ratio = artifact["latency"][0]["ratio"]
    low, high = ratio["ci95"]
    if low <= 1.0 <= high:
        return "as fast as the float model within noise"
    value = float(ratio["value"])
    return f"{_times(1 / value)} faster" if value < 1 else f"{_times(value)} the latency"


def _metric_words(report: Report, artifact: Mapping[str, Any]) -> str:
    metric = artifact["metric"]
    if metric is None:
        return f"{metric_name(report)} {formats.NOT_MEASURED}"
    before, after = report["baseline"]["metric"], float(metric["value"])
    change = after - float(before["value"])
    if change == 0:
        return f"{metric_name(report)} unchanged"
    amount = formats.metric_change(abs(change), share=formats.is_share(metric))
    return f"{metric_name(report)} {'up' if change > 0 else 'down'} {amount}"


def _times(value: float) -> str:
    return f"{value:.2f} ×" if value < 1.95 else f"{value:.1f} ×"


def _limit_row(report: Report, entry: Mapping[str, Any]) -> LimitRow:
    key, limit, measured = entry["name"], float(entry["limit"]), float(entry["measured"])
    if key == _METRIC_DROP:
        share = formats.is_share(report["baseline"]["metric"])
        name, unit = f"{metric_name(report)} drop", " points" if share else ""
        texts = formats.compared(measured, limit, significant=not share)
    else:
        name, unit = key.replace("-", " "), " ×"
        texts = formats.compared(measured, limit)
    note = ""
    if not entry["ok"]:
        note = f"over by {formats.excess(measured - limit, texts[0])}{unit}"
    elif measured > limit:
        note = "over, but within the noise"
    interval = entry.get("ci95")
    return LimitRow(
        name=name,
        key=key,
        artifact=entry["artifact"],
        limit=texts[1] + unit,
        measured=texts[0] + unit,
        interval=formats.ratio_interval(interval) if interval else "",
        ok=bool(entry["ok"]),
        note=note,
        share=max(0.0, measured / limit) if limit > 0 else None,
    )
