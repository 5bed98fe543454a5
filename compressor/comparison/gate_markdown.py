"""A gate's result in Markdown, for a pull request or a job's summary."""

from __future__ import annotations

import os
from pathlib import Path

from compressor.comparison.gate import Check, GateResult
from compressor.comparison.rows import compared_rows, heading, remarks
from compressor.comparison.trend import Trend
from compressor.comparison.trend_text import change_lines, trend_rows
from compressor.files import disk_errors
from compressor.report.markdown_text import FAILED, PASSED, cell, code, table, text

_OPEN = "⚠️"


def gate_markdown(result: GateResult, trend: Trend | None = None) -> str:
    """Render what the gate decided, and the comparison behind it."""
    comparison = result.comparison
    mark, word = (PASSED, "passed") if result.ok else (FAILED, "failed")
    base, candidate = (heading(s) for s in (comparison.base, comparison.candidate))
    header = ["", cell(base), cell(candidate), "change", "95 % interval"]
    rows = [
        [text(row.name), row.base, row.candidate, row.change, row.interval]
        for row in compared_rows(comparison)
    ]
    sections = [
        f"## {mark} Gate {word}: {code(candidate)}",
        "\n".join(f"- {_check(check)}" for check in result.checks),
        table(header, rows, "lrrrr"),
        "\n".join(f"- {text(line)}" for line in remarks(comparison)),
    ]
    if trend is not None:
        runs = [[cell(label), *rest] for label, *rest in trend_rows(trend)]
        columns = ["run", text(trend.metric), "95 % interval", "size", "latency p50"]
        sections.append(table(columns, runs, "lrrrr"))
        sections.append("\n".join(f"- {text(line)}" for line in change_lines(trend)))
    return "\n\n".join(sections) + "\n"


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


def _check(check: Check) -> str:
    mark = FAILED if not check.ok else _OPEN if check.status == "undecided" else PASSED
    return f"{mark} {code(check.name)}: {text(check.text)}"
