"""The gate: hold a comparison against limits, and write what a CI system reads.

A metric fails its limit where two things are true: the loss is real (equally good models would
lose so much with a chance below ``alpha``), and as measured it is over the limit. So noise alone
fails a build at most in ``alpha`` of all cases, whatever the limit is, and a real loss is not
excused because its interval also reaches below the limit. Where the evidence does not suffice the
check is undecided, which fails only a strict gate: that asks for evidence that the loss lies
within the limit, as a test of non-inferiority does.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn
from xml.etree import ElementTree as Tree

from compressor.errors import DataError, SpecError
from compressor.files import disk_errors, write_text
from compressor.lab.compare.compare import CompareOptions, Comparison, compare_runs
from compressor.lab.compare.statistics import Difference
from compressor.lab.compare.trend import Trend, record
from compressor.progress import Progress
from compressor.report import formats
from compressor.report.pages.compare import drop_words, gate_markdown

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The environment variable that names the file of a GitHub job's summary."""
Status = Literal["passed", "failed", "undecided"]


@dataclass(frozen=True)
class GateLimits:
    """The limits that the candidate must keep.

    Attributes:
        metric_drop: greatest drop of the metric, in points where it is a share; ``None``: none
            that is real.
        latency_ratio: greatest latency over the base's; ``None`` for no limit.
        size_ratio: greatest size over the base's; ``None`` for no limit.
        alpha: level of the metric's test, one-sided.
        strict: what is undecided fails.
    """

    metric_drop: float | None = None
    latency_ratio: float | None = None
    size_ratio: float | None = None
    alpha: float = 0.05
    strict: bool = False


@dataclass(frozen=True)
class Check:
    """One limit and its verdict.

    Attributes:
        name: ``metric-drop``, ``latency-ratio`` or ``size-ratio``.
        limit: the limit, where one was given.
        ci95: its 95 % interval, where it has one.
    """

    name: str
    limit: float | None
    measured: float
    ci95: tuple[float, float] | None
    status: Status
    ok: bool
    text: str


@dataclass(frozen=True)
class GateResult:
    """What the gate decided."""

    comparison: Comparison
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """The candidate passes."""
        return all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return decision and comparison as JSON values."""
        checks = [asdict(check) for check in self.checks]
        return {"ok": self.ok, "checks": checks, **self.comparison.as_json()}


def _check_limits(limits: GateLimits) -> None:
    if limits.strict and limits.metric_drop is None and limits.latency_ratio is None:
        raise SpecError(
            "--strict",
            "asks for evidence that limits hold, and none is given",
            "add --max-metric-drop or --max-latency-ratio",
        )


def judge(comparison: Comparison, limits: GateLimits) -> GateResult:
    """Hold a comparison against limits.

    Raises:
        SpecError: strictness has no limit to hold to.
        DataError: what a limit is about was not measured, or nothing can be judged.
    """
    _check_limits(limits)
    checks: list[Check] = []
    if comparison.difference is not None:
        checks.append(_metric(comparison, comparison.difference, limits))
    elif limits.metric_drop is not None:
        _refuse("--max-metric-drop", comparison.difference_reason)
    if limits.latency_ratio is not None:
        checks.append(_latency(comparison, limits.latency_ratio, strict=limits.strict))
    if limits.size_ratio is not None:
        checks.append(_size(comparison, limits.size_ratio))
    if not checks:
        _refuse("gate", comparison.difference_reason)
    return GateResult(comparison, tuple(checks))


def _metric(comparison: Comparison, difference: Difference, limits: GateLimits) -> Check:
    limit, alpha = limits.metric_drop, limits.alpha
    real = difference.drop > 0 and difference.p < alpha
    over = difference.drop > (limit or 0.0)
    status: Status
    if over:
        status = "failed" if real else "undecided"
    elif limit is None:
        status = "passed"
    else:
        status = "passed" if difference.within_p(limit) < alpha else "undecided"
    ok = status == "passed" or (status == "undecided" and not limits.strict)
    share = formats.is_share(comparison.candidate.metric)
    text = _metric_words(difference, share, limits, status)
    return Check("metric-drop", limit, difference.drop, difference.ci95, status, ok, text)


def _latency(comparison: Comparison, limit: float, *, strict: bool) -> Check:
    """Judge by the interval: it fails above the limit, holds below, and is undecided across it."""
    latency = comparison.latency
    if latency.value is None or latency.ci95 is None:
        _refuse("--max-latency-ratio", latency.source)
    low, high = latency.ci95
    status: Status = "failed" if low > limit else "passed" if high <= limit else "undecided"
    ok = status == "passed" or (status == "undecided" and not strict)
    end = {
        "passed": f"within the limit {limit:g}",
        "failed": f"fails the limit {limit:g}",
        "undecided": f"not distinguishable from the limit {limit:g}",
    }[status]
    interval = formats.ratio_interval(latency.ci95)
    shown = f"{formats.ratio(latency.value)}, 95 % interval {interval}"
    text = f"{shown} at batch {latency.batch}, {latency.source}: {end}"
    return Check("latency-ratio", limit, latency.value, latency.ci95, status, ok, text)


def _size(comparison: Comparison, limit: float) -> Check:
    ok = comparison.size_ratio <= limit
    sizes = " over ".join(formats.size(s.bytes) for s in (comparison.candidate, comparison.base))
    ratio, _ = formats.compared(comparison.size_ratio, limit)
    text = f"{sizes}, {ratio} ×: {'within' if ok else 'fails'} the limit {limit:g}"
    status: Status = "passed" if ok else "failed"
    return Check("size-ratio", limit, comparison.size_ratio, None, status, ok, text)


def _refuse(subject: str, reason: str) -> NoReturn:
    raise DataError(subject, f"has nothing to judge ({reason})", "see the two runs' reports")


def _metric_words(difference: Difference, share: bool, limits: GateLimits, status: Status) -> str:
    limit = limits.metric_drop
    shown = drop_words(difference, share=share)
    if status == "passed":
        return f"{shown}: within the limit {limit:g}" if limit is not None else shown
    if status == "failed":
        real = "the loss is real" if limit is None else f"fails the limit {limit:g}"
        return f"{shown}: {real}"
    samples = formats.plural(difference.samples, "sample")
    over = difference.drop > (limit or 0.0)
    needed = difference.samples_needed(limits.alpha, 0.0 if over else limit or 0.0)
    would = "" if needed is None else f"; {formats.count(needed)} would do"
    if over:
        return f"{shown}: not distinguishable with {samples}{would}"
    return f"{shown}: within the limit {limit:g} as measured, not proved with {samples}{would}"


def append_summary(path: Path, markdown: str) -> None:
    """Add text to the summary of a CI job, to which other steps add theirs.

    Raises:
        SpecError: the file cannot be written.
        InputError: the disk is full.
    """
    with disk_errors(path.parent):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        with os.fdopen(handle, "a", encoding="utf-8") as stream:
            stream.write(markdown)


def junit_text(result: GateResult) -> str:
    """Return a test suite with one case for each check; without times, so that it is repeatable.

    What is undecided and let pass is a case that passed, with the words in its output.
    """
    side = result.comparison.candidate
    suite = Tree.Element(
        "testsuite",
        name="compress gate",
        tests=str(len(result.checks)),
        failures=str(sum(not check.ok for check in result.checks)),
        errors="0",
        skipped="0",
    )
    model = _printable(f"{side.run.report['name']}.{side.name}")
    for check in result.checks:
        suite.append(_case(check, model))
    root = Tree.Element("testsuites")
    root.append(suite)
    Tree.indent(root)
    text = Tree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _case(check: Check, model: str) -> Tree.Element:
    case = Tree.Element("testcase", classname=model, name=check.name)
    text = _printable(check.text)
    if not check.ok:
        failure = Tree.SubElement(case, "failure", message=text, type=check.status)
        failure.text = text
    else:
        Tree.SubElement(case, "system-out").text = f"{check.status}: {text}"
    return case


def _printable(text: str) -> str:
    """Show control characters, which XML cannot hold, by their escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class GateFiles:
    """What a gate writes.

    Attributes:
        history: the file that the candidate is added to.
        label: what the history calls the candidate.
    """

    junit: Path | None = None
    markdown: Path | None = None
    history: Path | None = None
    label: str = ""


def run_gate(
    base: Path,
    candidate: Path,
    options: CompareOptions,
    limits: GateLimits,
    files: GateFiles,
    progress: Progress,
) -> tuple[GateResult, Trend | None]:
    """Hold a run against another one, and write what was asked for.

    Artifacts are timed where that is judged. The result is added to the file that
    ``GITHUB_STEP_SUMMARY`` names, where it is set.

    Args:
        base: output folder or report of the run that is compared with.
        candidate: the same of the run that is judged.

    Raises:
        CompressorError: the runs cannot be compared, or a file cannot be written.
    """
    _check_limits(limits)  # before the runs are compared, which takes its time
    timing = options.timing and limits.latency_ratio is not None
    comparison = compare_runs(base, candidate, replace(options, timing=timing), progress)
    result = judge(comparison, limits)
    trend = None
    if files.history is not None:
        trend = record(files.history, comparison.candidate, files.label, options.allowed)
    text = gate_markdown(result, trend)
    if files.junit is not None:
        write_text(files.junit, junit_text(result))
    if files.markdown is not None:
        write_text(files.markdown, text)
    if os.environ.get(SUMMARY):
        append_summary(Path(os.environ[SUMMARY]), text)
    return result, trend
