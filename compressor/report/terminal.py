"""Print tables: coloured and folded on a terminal, plain and of one width anywhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from compressor.report.rows import Figure, ModelRow, missing_reasons, model_rows
from compressor.report.verdict import Report, failures, gist, headline, main_artifact, metric_name

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text


_UNBOUNDED = 10_000  # wider than any row, so that nothing is cut or folded


def show(renderable: RenderableType, stream: TextIO) -> None:
    """Print on a terminal as it likes it, and into a file or pipe as plain text."""
    from rich.console import Console

    if stream.isatty():
        Console(file=stream, highlight=False).print(renderable)
    else:
        stream.write(plain_text(renderable))


def plain_text(renderable: RenderableType) -> str:
    """Render without colours; the same text whatever the terminal or environment is."""
    from io import StringIO

    from rich.console import Console

    console = Console(
        file=StringIO(),
        width=_UNBOUNDED,
        color_system=None,
        force_terminal=False,
        highlight=False,
        emoji=False,
        markup=False,
    )
    with console.capture() as captured:
        console.print(renderable)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def plain_table() -> Table:
    """An empty table with a rule under its header and nothing else."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)


def label(text: str, style: str = "") -> Text:
    """Text that may come from a model file: control characters are shown, not obeyed."""
    from rich.text import Text

    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return Text(shown, style=style)


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
