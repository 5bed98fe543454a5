"""Pages in GitHub's Markdown, short enough for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from compressor.errors import printable
from compressor.report.next_step import next_words
from compressor.report.page import Cell, Column, Entry, Page, Table
from compressor.report.tables import (
    check_table,
    environment_words,
    facts,
    limit_table,
    missing_reasons,
    model_table,
    pass_notes,
    pass_table,
)
from compressor.report.verdict import (
    failures,
    gist,
    headline,
    main_artifact,
    remarks,
    unknowns,
)
from compressor.run.verdicts.verdicts import Verdict

MARKS: Mapping[Verdict, str] = {"passed": "✅", "failed": "❌", "unknown": "⚠️"}
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!$@])")


def markdown_report(report: Mapping[str, Any]) -> str:
    """Render a report for a pull request.

    The verdict and one table are seen; the rest is folded up.
    """
    sections = {
        "limits": _section("Limits", limit_table(report)),
        "passes": _passes(report),
        "checks": _section("Checks", check_table(report)),
        "environment": text(f"Measured on {environment_words(report)}."),
    }
    shown = {title: section for title, section in sections.items() if section}
    # Move the verdicts of the last column in front of the names.
    content = model_table(report)
    rows = []
    for name, *rest, verdict in content.rows:
        assert isinstance(name, Cell)
        assert isinstance(verdict, Cell)
        rows.append([Cell(name.text, code=name.code, tag=name.tag, verdict=verdict.verdict), *rest])
    blocks = [
        _verdict(report),
        table(Table(content.columns[:-1], rows)),
        f"{', '.join(facts(report))}.",
        listed(text(reason) for reason in missing_reasons(report)),
        f"<details>\n<summary>{', '.join(shown).capitalize()}</summary>",
        *shown.values(),
        "</details>",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def markdown_page(page: Page) -> str:
    """Render what a terminal shows."""
    blocks: list[str] = []
    for block in page:
        if isinstance(block, Table):
            blocks.append(table(block))
            continue
        words = " ".join(_cell(part) for part in block.parts)
        follows = block.bullet and bool(blocks) and blocks[-1].startswith("- ")
        item = f"- {words}" if block.bullet else words
        if follows:
            blocks[-1] += f"\n{item}"
        elif item:
            blocks.append(item)
    return "\n\n".join(blocks) + "\n"


def table(content: Table) -> str:
    """Lay out a table, without the columns that are for HTML only."""
    content = content.narrow
    rule = ["---:" if column.kind == "number" else "---" for column in content.columns]
    rows = [[_heading(column) for column in content.columns], rule]
    rows += [[_cell(entry) for entry in row] for row in content.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def listed(items: Iterable[str]) -> str:
    """Lay out a list of Markdown items; empty without items."""
    return "\n".join(f"- {item}" for item in items)


def text(value: str) -> str:
    """Escape Markdown markup in a text, and join its lines."""
    return _SPECIAL.sub(r"\\\1", printable(" ".join(value.split())))


def code(value: str) -> str:
    """Set a name as code, whatever characters are in it."""
    flat = printable(" ".join(value.split())) or " "
    longest = max((len(run) for run in re.findall("`+", flat)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {flat} {fence}" if longest else f"{fence}{flat}{fence}"


def _verdict(report: Mapping[str, Any]) -> str:
    mark = MARKS[report["verdict"]]
    blocks = [f"# {text(report['name'])}", f"**{mark} {text(headline(report))}**"]
    open_points = (*failures(report), *unknowns(report))
    blocks.append(listed(f"{code(name)}: {text(what)}" for name, what in open_points))
    artifact = main_artifact(report)
    if artifact is not None:
        blocks.append(f"{code(artifact['path'])}: {text(gist(report))}.")
        blocks += [f"Note: {text(words)}." for words in remarks(report)]
    words = next_words(report)
    blocks.append(f"Next: {text(words)}." if words else "")
    if diff := (report.get("advice") or {}).get("diff"):
        longest = max((len(run) for run in re.findall("`+", "".join(diff))), default=0)
        fence = "`" * max(3, longest + 1)
        blocks.append("\n".join((f"{fence}diff", *map(printable, diff), fence)))
    return "\n\n".join(block for block in blocks if block)


def _passes(report: Mapping[str, Any]) -> str:
    section = _section("Passes", pass_table(report))
    notes = listed(
        f"{code(entry['pass'])}: {text(note)}"
        for entry in report["passes"]
        for note in pass_notes(entry)
    )
    return f"{section}\n\n{notes}" if notes else section


def _section(title: str, content: Table) -> str:
    return f"## {title}\n\n{table(content)}" if content.rows else ""


def _heading(column: Column) -> str:
    heading = _in_table(column.heading) if column.code else text(column.heading)
    return f"{heading} ({column.note})" if column.note else heading


def _cell(entry: Entry) -> str:
    if isinstance(entry, str):
        return text(entry)
    words = _in_table(entry.text) if entry.code else text(entry.text)
    if entry.verdict:
        words = f"{MARKS[entry.verdict]} {words}".rstrip()
    words += f" {text(entry.tag)}" if entry.tag else ""
    return f"{words} ({text(entry.note)})" if entry.note else words


def _in_table(name: str) -> str:
    """Set a name as code inside a table, where a bar would end the cell."""
    return code(name).replace("|", "\\|")
