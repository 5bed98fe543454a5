"""The verdict in words: which limits and checks hold, which do not, and which are unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compressor.report import formats
from compressor.run.verdicts.verdicts import WIDEST_RATIO, Verdict, verdict_of
from compressor.spec.user_code import HELD

Report = Mapping[str, Any]
METRIC_DROP = "metric-drop"
_ORDER: tuple[Verdict, ...] = ("failed", "unknown", "passed")
_TITLES = {
    "accuracy": "Accuracy",
    "top5": "Top-5 accuracy",
    "mse": "Mean squared error",
    "cosine": "Cosine similarity",
    "perplexity": "Perplexity",
    "embedding": "Cosine of embeddings",
    "f1": "F1 score",
    "spearman": "Spearman correlation",
    "token-accuracy": "Token accuracy",
    "subset-accuracy": "Subset accuracy",
    "span-accuracy": "Span accuracy",
    "character-error-rate": "Character error rate",
    "metric": "Metric",
}


@dataclass(frozen=True)
class LimitRow:
    """A limit and what was measured.

    Attributes:
        name: what is limited, in words.
        key: its name in the spec.
        interval: its 95 % interval; empty without one.
        note: by how much it is exceeded, or why the verdict is unknown.
        share: measured over limit; ``None`` where that says nothing.
    """

    name: str
    key: str
    artifact: str
    limit: str
    measured: str
    interval: str
    verdict: Verdict
    note: str
    share: float | None


@dataclass(frozen=True)
class CheckRow:
    """A check of an artifact."""

    artifact: str
    name: str
    verdict: Verdict
    detail: str

    @property
    def ok(self) -> bool:
        """Whether it does not fail."""
        return self.verdict != "failed"


def metric_name(report: Report) -> str:
    """The metric's name, or ``metric`` where none was measured."""
    entry = report["baseline"]["metric"]
    return "metric" if entry is None else str(entry["name"]).removeprefix(f"{HELD}:")


def metric_title(report: Report) -> str:
    """The metric's name as a heading; the name of a user's function stays as it is."""
    return _TITLES.get(metric_name(report), metric_name(report))


def limit_rows(report: Report) -> list[LimitRow]:
    """Return the limits in words: failed ones first, then unknown ones."""
    rows = [_limit_row(report, entry) for entry in report["limits"]]
    return sorted(rows, key=lambda row: _ORDER.index(row.verdict))


def check_rows(report: Report) -> list[CheckRow]:
    """Return the checks of all artifacts, failed ones first."""
    rows = [
        CheckRow(artifact["path"], check["name"], _check_verdict(check), check.get("detail") or "")
        for artifact in report["artifacts"]
        for check in artifact["checks"]
    ]
    return sorted(rows, key=lambda row: _ORDER.index(row.verdict))


def _check_verdict(check: Mapping[str, Any]) -> Verdict:
    verdict: Verdict = check.get("verdict") or "passed"
    return verdict if check["ok"] else "failed"


def headline(report: Report) -> str:
    """Return in one sentence whether the run passed."""
    limits, checks = [row.verdict for row in limit_rows(report)], check_rows(report)
    broken = sum(not check.ok for check in checks)
    verdict = report["verdict"]
    if verdict == "failed":
        parts = [
            f"{failed} of {formats.plural(total, noun)}"
            for failed, total, noun in (
                (limits.count("failed"), len(limits), "limit"),
                (broken, len(checks), "check"),
            )
            if failed
        ]
        return f"Failed: {' and '.join(parts) or 'see the report'}"
    held = formats.plural(sum(check.verdict == "passed" for check in checks), "check")
    if verdict == "unknown":
        if report["baseline"]["metric"] is None:
            return f"Unknown: written, {held} held, quality not measured"
        undecided = limits.count("unknown")
        open_limits = f"{undecided} of {formats.plural(len(limits), 'limit')} cannot be decided"
        return f"Unknown: {open_limits if undecided else 'written'}, {held} held"
    if not limits:
        return f"Passed: {held} held, no limits are set"
    return f"Passed: {formats.plural(len(limits), 'limit')} and {held} held"


def failures(report: Report) -> list[tuple[str, str]]:
    """Return what failed: the artifact, and what is wrong with it in words."""
    return _limits_that_are(report, "failed") + [
        (check.artifact, f"check “{check.name}” failed: {check.detail or 'no detail'}")
        for check in check_rows(report)
        if not check.ok
    ]


def unknowns(report: Report) -> list[tuple[str, str]]:
    """Return what could not be decided: the artifact, and why in words."""
    return _limits_that_are(report, "unknown") + [
        (check.artifact, f"check “{check.name}” {check.detail}")
        for check in check_rows(report)
        if check.verdict == "unknown"
    ]


def _limits_that_are(report: Report, verdict: Verdict) -> list[tuple[str, str]]:
    lines = []
    for row in limit_rows(report):
        if row.verdict == verdict:
            interval = f" (95 % CI {row.interval})" if row.interval else ""
            text = f"{row.name} {row.measured}{interval}, limit {row.limit}: {row.note}"
            lines.append((row.artifact, text))
    return lines


def artifact_verdict(report: Report, artifact: Mapping[str, Any]) -> Verdict:
    """Return the verdict on one artifact by its limits and checks."""
    rows = [row.verdict for row in limit_rows(report) if row.artifact == artifact["path"]]
    rows += [_check_verdict(check) for check in artifact["checks"]]
    if "failed" in rows:
        return "failed"
    return "unknown" if "unknown" in rows else "passed"


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


def remarks(report: Report) -> list[str]:
    """Return what else is to be known of the main artifact, one sentence each."""
    artifact = main_artifact(report)
    said = [] if artifact is None else [str(words) for words in artifact.get("remarks") or ()]
    return [words for words in (faster_float(report), *said, _given(report)) if words]


def _given(report: Report) -> str:
    """Return which objects a Python program gave; empty if none, as for a spec in a file."""
    given = [str(entry["key"]) for entry in report.get("objects") or ()]
    if not given:
        return ""
    return f"only the program that made {', '.join(given)} can repeat this run: no file holds them"


def faster_float(report: Report) -> str:
    """Return what is faster than the main artifact, in one sentence; empty if nothing is.

    That is the float model after fusion alone, where it was timed beside the artifact.
    """
    artifact = main_artifact(report)
    if artifact is None or not artifact["deployed"]:
        return ""
    ratio = artifact["latency"][0].get("fused_ratio")
    if ratio is None:
        return ""
    low, high = (float(end) for end in ratio["ci95"])
    if verdict_of((low, high), 1.0, WIDEST_RATIO) != "failed":
        return ""
    return (
        f"the float model is faster than this after fuse alone: the artifact takes "
        f"{_times(float(ratio['value']))} its time ({formats.ratio_interval((low, high))}); "
        f"for speed, export it without the other passes"
    )


def _size_words(ratio: float) -> str:
    if 0.995 <= ratio <= 1.005:
        return "the same size"
    return f"{_times(1 / ratio)} smaller" if ratio < 1 else f"{_times(ratio)} the size"


def _speed_words(artifact: Mapping[str, Any]) -> str:
    if artifact["latency_ratio"] is None:
        return ""
    ratio = artifact["latency"][0]["ratio"]
    low, high = (float(end) for end in ratio["ci95"])
    verdict = verdict_of((low, high), 1.0, WIDEST_RATIO)
    if verdict != "unknown":
        value = float(ratio["value"])
        return f"{_times(1 / value)} faster" if value < 1 else f"{_times(value)} the latency"
    interval = formats.ratio_interval((low, high))
    if low <= 1.0 <= high <= WIDEST_RATIO * low:
        return f"as fast as the float model within noise ({interval} ×)"
    return f"speed unknown (too wide an interval: {interval} × the float model's latency)"


def _metric_words(report: Report, artifact: Mapping[str, Any]) -> str:
    metric = artifact["metric"]
    if metric is None:
        return f"{metric_name(report)} {formats.NOT_MEASURED}"
    before, after = report["baseline"]["metric"], float(metric["value"])
    change = after - float(before["value"])
    if change == 0:
        return f"{metric_name(report)} unchanged"
    amount = formats.metric_change(abs(change), share=formats.is_share(metric))
    words = f"{metric_name(report)} {'up' if change > 0 else 'down'} {amount}"
    # A cosine near 1 is easy to reach: 17 dB are 0.99.
    if metric["name"] == "cosine" and artifact["sqnr_db"] is not None:
        words += f" (output SQNR {formats.decibel(artifact['sqnr_db'])})"
    return words


def _times(value: float) -> str:
    return f"{value:.2f} ×" if value < 1.95 else f"{value:.1f} ×"


def _limit_row(report: Report, entry: Mapping[str, Any]) -> LimitRow:
    key, limit, measured = entry["name"], float(entry["limit"]), entry["measured"]
    share = formats.is_share(report["baseline"]["metric"])
    is_metric = key == METRIC_DROP
    name = f"{metric_name(report)} drop" if is_metric else key.replace("-", " ")
    unit = (" points" if share else "") if is_metric else " ×"
    verdict: Verdict = entry["verdict"]
    interval, note = entry.get("ci95"), entry.get("reason") or ""
    if measured is None:
        texts = formats.NOT_MEASURED, formats.compared(limit, limit)[0]
    else:
        pair = formats.compared(float(measured), limit, significant=is_metric and not share)
        texts = pair[0] + unit, pair[1]
        if verdict == "failed":
            note = f"over by {formats.excess(measured - limit, pair[0])}{unit}"
    if interval and is_metric:
        bounds = formats.metric_change_interval(interval, share=share)
    else:
        bounds = formats.ratio_interval(interval) if interval else ""
    return LimitRow(
        name=name,
        key=key,
        artifact=entry["artifact"],
        limit=texts[1] + unit + (" (default)" if entry.get("default") else ""),
        measured=texts[0],
        interval=bounds,
        verdict=verdict,
        note=note,
        share=max(0.0, measured / limit) if measured is not None and limit > 0 else None,
    )
