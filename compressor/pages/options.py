"""The pages of ``compress passes`` and ``compress exporters``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compressor.report.terminal import plain_table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from compressor.spec.describe import Description, Entry, Option

_INDENT = "  "


def overview_table(entries: Sequence[Entry]) -> Table:
    """Return the list of what there is."""
    from rich.text import Text

    needs = any(entry.needs for entry in entries)
    table = plain_table()
    for heading in ("name", "what it does", *(["needs"] if needs else [])):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        summary = Text(entry.problem, style="red") if entry.problem else Text(entry.summary)
        cells = [Text(entry.name), summary]
        table.add_row(*cells, *([Text(", ".join(entry.needs))] if needs else []))
    return table


def description_table(description: Description) -> Group:
    """Return the page of one pass or exporter."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Text | Table] = [
        Text(description.name, style="bold"),
        Text(),
        Text(description.documentation.replace("``", "")),
    ]
    if description.needs:
        parts += [Text(), Text(f"Needs: {', '.join(description.needs)}")]
    if description.source:
        parts += [Text(), Text(f"Source: {description.source}")]
    parts += [Text(), _options(description.options) if description.options else Text("No options.")]
    return Group(*parts)


def _options(options: Sequence[Option]) -> Table:
    table = plain_table()
    for heading in ("option", "type", "default", "description"):
        table.add_column(heading, overflow="fold")
    _add(table, options, "")
    return table


def _add(table: Table, options: Sequence[Option], indent: str) -> None:
    from rich.text import Text

    for option in options:
        default = "required" if option.required else option.default or ""
        cells = (indent + option.key, option.type, default, option.description)
        table.add_row(*(Text(cell) for cell in cells))
        _add(table, option.options, indent + _INDENT)
