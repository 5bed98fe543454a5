"""The pages of ``compress compare`` and ``compress gate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.lab.compare.texts import change_lines, compared_rows, heading, remarks, trend_rows
from compressor.report.terminal import label, plain_table

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from compressor.lab.compare.compare import Comparison
    from compressor.lab.compare.gate import Check, GateResult
    from compressor.lab.compare.trend import Trend

_GOOD, _BAD, _OPEN, _FAINT = "green", "bold red", "yellow", "dim"


def comparison_page(comparison: Comparison, trend: Trend | None = None) -> Group:
    """Return two models side by side, with what is to be said of their numbers."""
    from rich.console import Group

    return Group(*_comparison(comparison), *(_trend(trend) if trend else []))


def gate_page(result: GateResult, trend: Trend | None = None) -> Group:
    """Return the comparison and what the gate decided."""
    from rich.console import Group
    from rich.text import Text

    verdict = label("passed", _GOOD) if result.ok else label("failed", _BAD)
    return Group(
        *_comparison(result.comparison),
        *(_trend(trend) if trend else []),
        Text(),
        *(_check(check) for check in result.checks),
        Text("gate: ").append_text(verdict),
    )


def _comparison(comparison: Comparison) -> list[RenderableType]:
    table = plain_table()
    table.add_column("")
    for side in (comparison.base, comparison.candidate):
        table.add_column(label(heading(side)), justify="right", overflow="fold")
    table.add_column("change", justify="right")
    table.add_column("95 % interval", justify="right")
    for row in compared_rows(comparison):
        cells = (row.name, row.base, row.candidate, row.change, row.interval)
        table.add_row(*(label(cell) for cell in cells))
    return [table, *(label(f"- {line}", _FAINT) for line in remarks(comparison))]


def _trend(trend: Trend) -> list[RenderableType]:
    from rich.text import Text

    table: Table = plain_table()
    for heading_ in ("run", trend.metric, "95 % interval", "size", "latency p50"):
        table.add_column(label(heading_), justify="left" if heading_ == "run" else "right")
    for cells in trend_rows(trend):
        table.add_row(*(label(cell) for cell in cells))
    return [Text(), table, *(label(f"- {line}", _FAINT) for line in change_lines(trend))]


def _check(check: Check) -> RenderableType:
    style = _BAD if not check.ok else _OPEN if check.status == "undecided" else _GOOD
    return (
        label(f"{check.name}: ").append_text(label(check.status, style)).append(f"; {check.text}")
    )
