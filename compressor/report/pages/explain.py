"""The page of ``compress explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.report import formats
from compressor.report.terminal import label, plain_table

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    from compressor.lab.explain.explanation import Explanation, Gain, LayerCost

_FAINT = "dim"
_MEASURED = "leave-one-out"


def explanation_page(explanation: Explanation) -> Group:
    """Return the table of layers and the lines to paste."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [label(_heading(explanation), "bold"), Text()]
    if explanation.layers:
        parts += [_layers(explanation), Text()]
    parts += [label(f"- not looked at: {reason}", _FAINT) for reason in explanation.left_out]
    parts += [label(f"- {note}", _FAINT) for note in explanation.notes]
    if not explanation.suggested:
        parts += [Text(), label("Nothing to suggest: no layer stands out.")]
        return Group(*parts)
    for index, lines in explanation.spec_lines.items():
        name = explanation.passes[index]
        parts += [Text(), label(f"In front of the rules of passes.{index} ({name}):", "bold")]
        parts += [label(line) for line in lines]
    parts.append(Text())
    if explanation.predicted is not None:
        parts.append(label(f"Together, predicted: {_sum(explanation, explanation.predicted)}"))
    if explanation.measured is not None:
        parts.append(label(f"Together, measured: {_sum(explanation, explanation.measured)}"))
    return Group(*parts)


def _heading(explanation: Explanation) -> str:
    parts = [f"{explanation.name} after all passes: {formats.size(explanation.bytes)}"]
    if explanation.metric is not None:
        parts.append(f"{explanation.metric['name']} {formats.metric(explanation.metric)}")
    if explanation.sqnr_db is not None:
        parts.append(f"output {formats.decibel(explanation.sqnr_db)}")
    if explanation.data:
        parts.append(f"measured on the {explanation.data} data")
    return ", ".join(parts)


def _layers(explanation: Explanation) -> Table:
    measured = explanation.method == _MEASURED
    table = plain_table()
    for heading in ("layer", "pass", "scheme"):
        table.add_column(heading, overflow="fold")
    table.add_column("alone", justify="right", overflow="fold")
    table.add_column("change", overflow="fold")
    headings = ["costs", "output SQNR", "of the noise"]
    headings += ["metric", "95 %"] if measured else []
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    if measured:
        table.add_column("", overflow="fold")
    for cost in explanation.layers:
        table.add_row(*_cells(explanation, cost, measured))
    return table


def _cells(explanation: Explanation, cost: LayerCost, measured: bool) -> list[Text]:
    gain = cost.gain
    cells = [
        cost.change.layer,
        cost.pass_name,
        cost.scheme,
        formats.NOTHING if cost.own_sqnr_db is None else formats.decibel(cost.own_sqnr_db),
        cost.change.text,
        _more(gain.bytes),
        _decibels(gain),
        formats.NOTHING if gain.noise_share is None else formats.percent(gain.noise_share, 1),
    ]
    if measured:
        cells += [_change(explanation, gain.metric), _interval(explanation, gain), _verdict(gain)]
    return [label(cell) for cell in cells]


def _more(amount: int) -> str:
    return f"+{formats.size(amount)}" if amount >= 0 else f"−{formats.size(-amount)}"


def _decibels(gain: Gain) -> str:
    if gain.sqnr_db is None:
        return formats.NOTHING
    return _signed(formats.decibel(gain.sqnr_db), gain.sqnr_db)


def _change(explanation: Explanation, value: float | None) -> str:
    if value is None:
        return formats.NOTHING
    text = formats.metric_change(value, share=formats.is_share(explanation.metric))
    return _signed(text, value)


def _interval(explanation: Explanation, gain: Gain) -> str:
    if gain.ci95 is None:
        return formats.NOTHING
    share = formats.is_share(explanation.metric)
    low, high = (
        formats.metric_change(bound, share=share).removesuffix(" points") for bound in gain.ci95
    )
    return f"{low} to {high}"


def _verdict(gain: Gain) -> str:
    if gain.ci95 is None:
        return ""
    if gain.ci95[1] < 0:
        return "worse"
    return "better" if gain.certain else "within noise"


def _signed(text: str, value: float) -> str:
    return f"+{text}" if value > 0 else text


def _sum(explanation: Explanation, gain: Gain) -> str:
    parts = [f"{_more(gain.bytes)} (to {formats.size(explanation.bytes + gain.bytes)})"]
    if gain.sqnr_db is not None:
        parts.append(f"output SQNR {_decibels(gain)}")
    if gain.metric is not None:
        text = f"metric {_change(explanation, gain.metric)}"
        if gain.ci95 is not None:
            text += f" ({_interval(explanation, gain)}, {_verdict(gain)})"
        parts.append(text)
    elif explanation.metric is not None:
        measured = explanation.method == _MEASURED
        parts.append("no gain of the metric beyond chance" if measured else "metric not predicted")
    return ", ".join(parts)
