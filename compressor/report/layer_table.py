"""One table of all layers: what each became and where the signal was lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from compressor.report import formats
from compressor.report.tables import was_trained
from compressor.report.verdict import Report

_Entry: TypeAlias = Mapping[str, Any]

_MOST_ROWS = 800
_LONGEST_DETAIL = 120
_BASES = {
    "outputs": "the noise in the model's output if this layer alone is compressed",
    "layers": "the noise in the layer's output if it alone is compressed",
    "weights": "the error of the layer's weight, relative to the weight",
}

Number: TypeAlias = tuple[str, str]  # what is shown, and what it is sorted by; empty sorts last
_NONE: Number = (formats.NOTHING, "")


@dataclass(frozen=True)
class LayerLine:
    """One layer after all passes.

    Attributes:
        changed: its weight is not what it was in the float model, apart from folded constants.
        shape: its stored shape, sorted by the number of weights.
        numbers: percent of zeros; bytes in the float model and now; signal to noise of its weight
            in the last pass that changed it, and of its output after the last pass; percent of
            the noise of the pass :attr:`LayerTable.shared_by`.
        weakest: no layer's output lost more.
    """

    name: str
    scheme: str
    changed: bool
    shape: Number
    numbers: tuple[Number, ...]
    details: str
    weakest: bool


@dataclass(frozen=True)
class LayerTable:
    """The table.

    Attributes:
        left_out: number of layers that are only in ``report.json``.
        last: the last pass, after which outputs were compared.
        shared_by: the pass whose noise is shared out; empty where no pass says.
        trained: outputs differ from the float model's on purpose.
    """

    lines: tuple[LayerLine, ...]
    left_out: int = 0
    last: str = ""
    shared_by: str = ""
    shared_words: str = ""
    trained: bool = False

    @property
    def schemes(self) -> list[tuple[str, int]]:
        """Each scheme and how many layers have it, by name."""
        return sorted(Counter(line.scheme for line in self.lines).items())


def layer_table(report: Report) -> LayerTable:
    """Join the passes' layers by name; of very many layers, keep those that lost most."""
    passes = report["passes"]
    if not passes:
        return LayerTable(())
    by_pass = [{layer["name"]: layer for layer in entry["layers"]} for entry in passes]
    names = list(by_pass[-1])
    kept = set(sorted(names, key=lambda name: _loss(by_pass[-1][name]))[:_MOST_ROWS])
    weakest = passes[-1]["weakest"]["name"] if passes[-1]["weakest"] else None
    shared = next((entry for entry in reversed(passes) if entry.get("attribution")), None)
    parts: Mapping[str, float | None] = {}
    if shared is not None:
        parts = {row["name"]: row["noise_share"] for row in shared["attribution"]["layers"]}
    lines = []
    for name in (n for n in names if n in kept):
        both = zip(passes, by_pass, strict=True)
        history = [(str(p["pass"]), layers[name]) for p, layers in both if name in layers]
        lines.append(_line(history, parts.get(name), name == weakest))
    return LayerTable(
        lines=tuple(lines),
        left_out=len(names) - len(lines),
        last=passes[-1]["pass"],
        shared_by="" if shared is None else shared["pass"],
        shared_words="" if shared is None else _shared_words(shared),
        trained=was_trained(report, passes[-1]),
    )


def _shared_words(entry: _Entry) -> str:
    """Return what the shares of a pass's noise are shares of."""
    attribution = entry["attribution"]
    what = _BASES.get(attribution["basis"], "what attribution in report.json says of the layer")
    words = f"Noise share: {what}, in percent of all that {entry['pass']} adds."
    if attribution.get("shared_inputs"):
        rest = formats.percent(attribution["shared_inputs"], 1)
        words += f" {rest} lies in values that stay rounded whichever layer is skipped."
    if attribution.get("reason"):
        words += f" Not known: {attribution['reason']}."
    return words


def _line(history: Sequence[tuple[str, _Entry]], share: float | None, weakest: bool) -> LayerLine:
    layers = [layer for _, layer in history]
    last = layers[-1]
    losses = [x["weight_sqnr_db"] for x in layers if x["weight_sqnr_db"] is not None]
    before, after = last.get("bytes_before"), last.get("bytes")
    return LayerLine(
        name=str(last["name"]),
        scheme=str(last["scheme"]),
        changed=bool(losses) or last["scheme"] != layers[0]["scheme"] or _smaller(before, after),
        shape=_shape(last.get("shape") or ()),
        numbers=(
            _percent(last["sparsity"]),
            _bytes(before),
            _bytes(after),
            _decibels(losses[-1] if losses else None),
            _decibels(last["sqnr_db"]),
            _percent(share),
        ),
        details=_details(history),
        weakest=weakest,
    )


def _smaller(before: int | None, after: int | None) -> bool:
    """Return whether a layer shrank or is new; a batch-norm folded into it makes it grow."""
    return after is not None and (before is None or after < before)


def _shape(dimensions: Sequence[int]) -> Number:
    return (formats.shape(dimensions), str(prod(dimensions))) if dimensions else _NONE


def _bytes(value: int | None) -> Number:
    return _NONE if value is None else (formats.size(value), str(value))


def _percent(value: float | None) -> Number:
    return _NONE if value is None else (formats.percent(value, 1), f"{value:.4f}")


def _decibels(value: float | None) -> Number:
    if value is None:
        return _NONE
    return formats.decibel(value).removesuffix(" dB"), f"{value:.4f}"


def _details(history: Sequence[tuple[str, _Entry]]) -> str:
    facts: dict[str, Any] = {}
    for _, layer in history:
        facts.update(layer["details"])
    earlier = [(name, x["sqnr_db"]) for name, x in history[:-1] if x["sqnr_db"] is not None]
    parts = [f"output {formats.decibel(sqnr)} after {name}" for name, sqnr in earlier]
    for name, value in facts.items():
        if isinstance(value, float):
            text = formats.number(value)
        elif isinstance(value, str):
            text = value
        elif isinstance(value, list):
            text = ", ".join(str(item) for item in value)
        else:
            text = json.dumps(value, ensure_ascii=False)
        parts.append(f"{name} {text}")
    joined = "; ".join(parts)
    return joined if len(joined) <= _LONGEST_DETAIL else f"{joined[:_LONGEST_DETAIL]}…"


def _loss(layer: Mapping[str, Any]) -> float:
    value = layer["sqnr_db"]
    if value is None:  # of a model that cannot be run, weights alone are compared
        value = layer["weight_sqnr_db"]
    return float("inf") if value is None else float(value)


@dataclass(frozen=True)
class Distribution:
    """One histogram.

    Attributes:
        counts: its content in ``report.json``.
    """

    title: str
    caption: str
    counts: Mapping[str, Any]


@dataclass(frozen=True)
class LayerDistributions:
    """The histograms of one layer.

    Attributes:
        shown: its weight and its input, where they were counted.
    """

    name: str
    scheme: str
    sqnr: str
    shown: tuple[Distribution, ...]


@dataclass(frozen=True)
class Distributions:
    """The histograms of one pass."""

    by: str
    layers: tuple[LayerDistributions, ...]


def distributions(report: Report) -> Distributions:
    """Return the histograms of the last pass that has some; none where no pass has."""
    for entry in reversed(report["passes"]):
        if entry.get("histograms"):
            rows = {row["name"]: row for row in entry["layers"]}
            counted = [item for item in entry["histograms"] if item["name"] in rows]
            layers = (_layer(item, rows[item["name"]]) for item in counted)
            return Distributions(entry["pass"], tuple(layer for layer in layers if layer.shown))
    return Distributions("", ())


def _layer(item: Mapping[str, Any], row: Mapping[str, Any]) -> LayerDistributions:
    shown = []
    if item["weight"] is not None:
        whole = "/tensor" in row["scheme"]
        words = _words(item["weight"], "range" if whole else "together its ranges span")
        shown.append(Distribution("Weight", words, item["weight"]))
    if item["input"] is not None:
        title = f"Input, {formats.plural(item['input']['samples'], 'sample')}"
        shown.append(Distribution(title, _input_words(item["input"]), item["input"]))
    sqnr = "" if row["sqnr_db"] is None else formats.decibel(row["sqnr_db"])
    return LayerDistributions(item["name"], row["scheme"], sqnr, tuple(shown))


def _input_words(entry: Mapping[str, Any]) -> str:
    words = _words(entry, "range")
    if entry["outside"] is None:
        return words
    outside = entry["outside"]
    if outside == 0:
        return f"{words}; none cut off"
    return f"{words}; {formats.number(float(f'{outside:.2g}'), 2)} % cut off"


def _words(entry: Mapping[str, Any], label: str) -> str:
    values = f"values {_span(entry['low'], entry['high'])}"
    if entry["range"] is None:
        return f"{values}; no range: {entry['range_reason']}"
    return f"{values}; {label} {_span(*entry['range'])}"


def _span(low: float, high: float) -> str:
    return f"{formats.number(low, 3)} to {formats.number(high, 3)}"


@dataclass(frozen=True)
class Training:
    """The losses of one training.

    Attributes:
        caption: how many steps; of very many, not all losses are kept.
        losses: pairs of step and loss, at least two.
    """

    by: str
    caption: str
    losses: Sequence[Sequence[float]]


def trainings(report: Report) -> list[Training]:
    """Return the trainings that have losses to draw, in the order of the passes."""
    shown = []
    for entry in report["passes"]:
        content = entry.get("training")
        if content and len(content["losses"]) > 1:
            caption = formats.plural(content["steps"], "step")
            shown.append(Training(entry["pass"], caption, content["losses"]))
    return shown
