"""Run the gate: compare, judge, and leave what a CI system shows."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from compressor.comparison.compare import CompareOptions, compare_runs
from compressor.comparison.gate import GateLimits, GateResult, check_limits, judge
from compressor.comparison.gate_markdown import append_summary, gate_markdown
from compressor.comparison.junit import junit_text
from compressor.comparison.recording import record
from compressor.comparison.trend import Trend
from compressor.files import write_text
from compressor.progress import Progress

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The environment variable that names the file of a GitHub job's summary."""


@dataclass(frozen=True)
class GateFiles:
    """What a gate writes.

    Attributes:
        junit: the checks as JUnit XML.
        markdown: the result as Markdown.
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
        options: what is compared.
        limits: what it is held against.
        files: what is written.
        progress: shows how far it is.

    Raises:
        CompressorError: the runs cannot be compared, or a file cannot be written.
    """
    check_limits(limits)
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
