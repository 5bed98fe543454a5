"""The page of ``compress explain``."""

from __future__ import annotations

from pathlib import Path

from compressor.errors import argument
from compressor.lab.explain.explanation import Explanation, Gain, LayerCost
from compressor.report import formats
from compressor.report.page import GAP, Block, Page, Table, bullets, left, line, right

_MEASURED = "leave-one-out"


def explanation_page(explanation: Explanation, written: Path | None) -> Page:
    """Return the table of layers and the lines to paste.

    Args:
        written: the file that the changed spec was written to, if it was.
    """
    parts = [f"{explanation.name} after all passes: {formats.size(explanation.bytes)}"]
    if explanation.metric is not None:
        parts.append(f"{explanation.metric['name']} {formats.metric(explanation.metric)}")
    if explanation.sqnr_db is not None:
        parts.append(f"output {formats.decibel(explanation.sqnr_db)}")
    if explanation.data:
        parts.append(f"measured on the {explanation.data} data")
    page: list[Block] = [line(", ".join(parts), "strong"), GAP]
    if explanation.layers:
        page += [cost_table(explanation), GAP]
    page += bullets(f"not looked at: {reason}" for reason in explanation.left_out)
    page += bullets(explanation.notes)
    if not explanation.suggested:
        return [*page, GAP, line("Nothing to suggest: no rule for a layer stands out.")]
    for index, rules in explanation.spec_lines.items():
        name = explanation.passes[index]
        page += [GAP, line(f"In front of the rules of passes.{index} ({name}):", "strong")]
        page += map(line, rules)
    if explanation.options:
        page += [GAP, line("Call compress quantize again, with these options added:", "strong")]
        page += map(line, explanation.options)
    page.append(GAP)
    if explanation.doubt:
        page.append(line(f"What that would gain cannot be predicted: {explanation.doubt}.", "open"))
    predicted = None if explanation.doubt else explanation.predicted
    for word, gain in (("predicted", predicted), ("measured", explanation.measured)):
        if gain is not None:
            page.append(line(f"Together, {word}: {_sum(explanation, gain)}"))
    if written is not None:
        page.append(line(f"Written: {written}. Next: compress run {argument(written)}", "good"))
        page.append(line("It replaces the results of this run; --set output=DIR keeps both."))
    return page


def cost_table(explanation: Explanation, most: int | None = None) -> Table:
    """Return what each layer costs, and what a rule for it would gain.

    Args:
        most: how many layers are shown, the first ones; all by default.
    """
    layers = explanation.layers[:most]
    columns = [
        *left("layer", "pass", "scheme"),
        *right("alone"),
        *left("change"),
        *right("costs", "output SQNR", "of the noise", "effect", "metric", "95 %"),
        *left(""),
    ]
    content = Table(columns, [_cells(explanation, cost) for cost in layers])
    known = any(cost.gain.metric_share is not None for cost in layers)
    return content.picked([*[True] * 8, known, *[explanation.method == _MEASURED] * 3])


def _cells(explanation: Explanation, cost: LayerCost) -> list[str]:
    gain = cost.gain
    return [
        cost.change.layer,
        cost.pass_name,
        cost.scheme,
        formats.NOTHING if cost.own_sqnr_db is None else formats.decibel(cost.own_sqnr_db),
        cost.change.text,
        _more(gain.bytes),
        _decibels(gain),
        _share(gain.noise_share),
        _share(gain.metric_share),
        _change(explanation, gain.metric),
        _interval(explanation, gain),
        _verdict(gain),
    ]


def _share(value: float | None) -> str:
    return formats.NOTHING if value is None else formats.percent(value, 1)


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


def _signed(text: str, value: float) -> str:
    return f"+{text}" if value > 0 else text


def _interval(explanation: Explanation, gain: Gain) -> str:
    if gain.ci95 is None:
        return formats.NOTHING
    return formats.metric_change_interval(gain.ci95, share=formats.is_share(explanation.metric))


def _verdict(gain: Gain) -> str:
    if gain.ci95 is None:
        return ""
    if gain.ci95[1] < 0:
        return "worse"
    return "better" if gain.certain else "within noise"


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
