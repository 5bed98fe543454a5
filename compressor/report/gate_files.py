"""What a gate leaves for a CI system: its verdict as JUnit XML and as Markdown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree as Tree

from compressor.errors import SpecError, printable
from compressor.files import disk_errors, publish, staging
from compressor.lab.compare.compare import CompareOptions, compare_runs
from compressor.lab.compare.gate import Check, GateLimits, GateResult, judge
from compressor.lab.compare.trend import Trend, record
from compressor.progress import Progress
from compressor.report.pages.compare import gate_markdown

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The environment variable that names the file of a GitHub job's summary."""


def append_summary(path: Path, markdown: str) -> None:
    """Add text to the summary of a CI job, to which other steps add theirs.

    Raises:
        SpecError: the file cannot be written.
        InputError: the disk is full.
    """
    if path.is_dir():
        raise SpecError(f"{SUMMARY} {str(path)!r}", "is a folder", "name a file, or unset it")
    with disk_errors(path.parent):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        with os.fdopen(handle, "a", encoding="utf-8") as stream:
            stream.write(markdown)


def junit_text(result: GateResult) -> str:
    """Return a test suite with one case for each check; without times, so that it is repeatable.

    An unknown verdict that the gate lets pass is a case that was skipped, with the reason.
    """
    side = result.comparison.candidate
    suite = Tree.Element(
        "testsuite",
        name="compress gate",
        tests=str(len(result.checks)),
        failures=str(sum(not check.ok for check in result.checks)),
        errors="0",
        skipped=str(sum(check.ok and check.verdict == "unknown" for check in result.checks)),
    )
    model = f"{side.run.report['name']}.{side.name}"
    for check in result.checks:
        suite.append(_case(check, model))
    root = Tree.Element("testsuites")
    root.append(suite)
    Tree.indent(root)
    text = Tree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _case(check: Check, model: str) -> Tree.Element:
    case = Tree.Element("testcase", classname=printable(model), name=printable(check.name))
    text = printable(check.text)
    if not check.ok:
        failure = Tree.SubElement(case, "failure", message=text, type=check.verdict)
        failure.text = text
    elif check.verdict == "unknown":
        Tree.SubElement(case, "skipped", message=text)
    else:
        Tree.SubElement(case, "system-out").text = f"{check.verdict}: {text}"
    return case


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
    timing = options.timing and limits.latency_ratio is not None
    comparison = compare_runs(base, candidate, replace(options, timing=timing), progress)
    result = judge(comparison, limits)
    trend = None
    if files.history is not None:
        trend = record(files.history, comparison.candidate, files.label, options.allowed)
    text = gate_markdown(result, trend)
    # JUnit last: a gate that fails on a full disk has not left a verdict before.
    with _written(files.junit, junit_text(result)), _written(files.markdown, text):
        if os.environ.get(SUMMARY):
            append_summary(Path(os.environ[SUMMARY]), text)
    return result, trend


@contextmanager
def _written(target: Path | None, text: str) -> Iterator[None]:
    """Write a file beside its place, which it takes if the block succeeds; ``None`` for none."""
    if target is None:
        yield
        return
    with staging(target.parent) as folder:
        staged = folder / target.name
        staged.write_text(text, encoding="utf-8")
        yield
        publish(staged, target)
