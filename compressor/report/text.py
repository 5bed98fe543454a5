"""The report for a terminal: one table, what failed, and where the whole report is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.report.rows import Figure, ModelRow, missing_reasons, model_rows
from compressor.report.terminal import label, plain_table
from compressor.report.verdict import Report, failures, gist, headline, main_artifact, metric_name

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_GOOD, _BAD, _FAINT = "green", "bold red", "dim"


def result_table(report: Report, where: str | None = None) -> Group:
    """Return what ``compress run`` prints at its end.

    Args:
        report: the content of ``report.json``.
        where: path of the report to point to.
    """
    from rich.console import Group
    from rich.text import Text

    lines = [label(f"- {reason}", _FAINT) for reason in missing_reasons(report)]
    verdict = [label(headline(report), _GOOD if report["ok"] else _BAD)]
    verdict += [label(f"- {artifact}: {what}", _BAD) for artifact, what in failures(report)]
    artifact = main_artifact(report)
    if artifact is not None:
        verdict.append(label(f"{artifact['path']}: {gist(report)}"))
    if where is not None:
        verdict.append(label(f"Report: {where}"))
    return Group(_table(report), *lines, Text(), *verdict)


def _table(report: Report) -> Table:
    table = plain_table()
    table.add_column("model", no_wrap=True)
    for heading in (
        metric_name(report),
        "drop",
        "size",
        "ratio",
        "latency p50",
        "ratio",
    ):
        table.add_column(label(heading), justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for row in model_rows(report):
        table.add_row(*_cells(row))
    return table


def _cells(row: ModelRow) -> list[Text]:
    figures = (row.metric, row.drop, row.bytes, row.size_ratio, row.latency, row.latency_ratio)
    verdict = label("")
    if row.ok is not None:
        verdict = label("passed", _GOOD) if row.ok else label("failed", _BAD)
    name = label(row.name)
    if row.format and not row.name.endswith(f".{row.format}"):
        name.append_text(label(f" {row.format}", _FAINT))
    return [name, *(_figure(figure) for figure in figures), verdict]


def _figure(figure: Figure) -> Text:
    return label(figure.text, _FAINT if figure.reason else "")
