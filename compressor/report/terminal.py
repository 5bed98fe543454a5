"""Pages on a terminal: coloured and folded there, plain and of one width anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from compressor.errors import printable
from compressor.report.next_step import advice_line, next_step, tune_command
from compressor.report.page import GAP, Cell, Entry, Line, Page, Style, Table, bullets, line
from compressor.report.tables import missing_reasons, model_table
from compressor.report.verdict import (
    Report,
    failures,
    gist,
    headline,
    main_artifact,
    remarks,
    unknowns,
)
from compressor.run.verdicts.verdicts import Verdict

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

_UNBOUNDED = 10_000  # wider than any row, so that nothing is cut or folded
_STYLES: Mapping[Style, str] = {
    "": "",
    "strong": "bold",
    "faint": "dim",
    "good": "green",
    "bad": "bold red",
    "open": "yellow",
}

VERDICT_STYLES: Mapping[Verdict, Style] = {"passed": "good", "failed": "bad", "unknown": "open"}


def show(page: Page, stream: TextIO) -> None:
    """Print in colour on a terminal, and as plain text into a file or pipe."""
    from rich.console import Console

    if stream.isatty():
        Console(file=stream, highlight=False, force_jupyter=False).print(_rendered(page))
    else:
        stream.write(plain_text(page))


def plain_text(page: Page) -> str:
    """Return a page without colours: the same text on every terminal and machine."""
    from io import StringIO

    from rich.console import Console

    console = Console(
        file=StringIO(),
        width=_UNBOUNDED,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        highlight=False,
        emoji=False,
        markup=False,
    )
    with console.capture() as captured:
        console.print(_rendered(page))
    return "".join(f"{text.rstrip()}\n" for text in captured.get().splitlines())


def run_page(report: Report, folder: str | None = None, spec: str | None = None) -> Page:
    """Return what ``compress run`` prints at its end.

    Args:
        folder: the run's output folder, whose report it names.
        spec: the file of its spec, if there is one.
    """
    verdict = [line(headline(report), VERDICT_STYLES[report["verdict"]])]
    verdict += bullets((f"{artifact}: {what}" for artifact, what in failures(report)), "bad")
    verdict += bullets((f"{artifact}: {what}" for artifact, what in unknowns(report)), "open")
    artifact = main_artifact(report)
    if artifact is not None:
        verdict.append(line(f"{artifact['path']}: {gist(report)}"))
        verdict += [line(f"Note: {words}", "open") for words in remarks(report)]
    if folder is not None:
        step = next_step(report, folder)
        suggested = (report.get("advice") or {}).get("suggested")
        advised = f" ({advice_line(report)})" if suggested and "compress explain" in step else ""
        verdict += [line(f"Next: {step}{advised}")] if step else []
        search = "" if spec is None else tune_command(report, spec)
        verdict += [line(f"Or find a better recipe: {search}")] if search else []
        verdict.append(line(f"Report: {folder}/report.html"))
    return [model_table(report), *bullets(missing_reasons(report)), GAP, *verdict]


def reason_line(report: Report, folder: str) -> str:
    """Return in one line why a run did not pass, and what to do next."""
    artifact, what = [*failures(report), *unknowns(report)][0]
    return f"{headline(report)}: {artifact}: {what}. Next: {next_step(report, folder)}"


def _rendered(page: Page) -> Group:
    from rich.console import Group

    return Group(*(_table(b) if isinstance(b, Table) else _line(b) for b in page))


def _line(content: Line) -> Text:
    from rich.text import Text

    bullet = Cell("- ", style=_style(content.parts[0])) if content.bullet else Cell()
    return Text().join([_text(part) for part in (bullet, *content.parts)])


def _table(content: Table) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable

    content = content.narrow
    headed = any(column.heading for column in content.columns)
    table = RichTable(
        box=box.SIMPLE_HEAD if headed else None,
        pad_edge=False,
        header_style="bold",
        show_edge=False,
        show_header=headed,
    )
    for number, column in enumerate(content.columns):
        cells = [row[number] for row in content.rows]
        table.add_column(
            _text(column.brief or column.heading),
            justify="right" if column.kind == "number" else "left",
            overflow="fold",
            no_wrap=any(isinstance(cell, Cell) and cell.code for cell in cells),
        )
    for row in content.rows:
        table.add_row(*(_text(entry) for entry in row))
    return table


def _style(entry: Entry) -> Style:
    return "" if isinstance(entry, str) else entry.style


def _text(entry: Entry) -> Text:
    """Return text that may come from a model file: control characters are shown, not obeyed."""
    from rich.text import Text

    if isinstance(entry, str):
        return Text(printable(entry))
    words, style = entry.text, entry.style
    if entry.verdict:
        words, style = entry.verdict, VERDICT_STYLES[entry.verdict]
    text = Text(printable(words), style=_STYLES[style])
    if entry.tag:
        text.append(f" {printable(entry.tag)}", style=_STYLES["faint"])
    return text
