"""One table of all layers: what each became and where the signal was lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from compressor.report import formats
from compressor.report.verdict import Report

_Entry: TypeAlias = Mapping[str, Any]

_MOST_ROWS = 800
_LONGEST_DETAIL = 120
_BASES = {
    "outputs": "the noise in the model's output if this layer alone is compressed",
    "layers": "the noise in the layer's output if it alone is compressed",
    "weights": "the error of the layer's weight, relative to the weight",
}


@dataclass(frozen=True)
class Cell:
    """A number in the table.

    Attributes:
        text: what is shown.
        value: what it is sorted by; empty sorts last.
    """

    text: str
    value: str


_NONE = Cell(formats.NOTHING, "")


@dataclass(frozen=True)
class LayerLine:
    """One layer after all passes.

    Attributes:
        name: the layer.
        shape: its stored shape, sorted by the number of weights.
        scheme: how its weight is represented.
        changed: its weight is not what it was in the float model, apart from folded constants.
        sparsity: percent of weights that are zero.
        before: bytes of its tensors in the float model.
        after: bytes of its tensors now.
        weight_sqnr: signal to noise of its weight in the last pass that changed it.
        sqnr: signal to noise of its output after the last pass.
        share: percent of the noise that the pass :attr:`LayerTable.shared_by` made.
        details: further facts.
        weakest: no layer's output lost more.
    """

    name: str
    shape: Cell
    scheme: str
    changed: bool
    sparsity: Cell
    before: Cell
    after: Cell
    weight_sqnr: Cell
    sqnr: Cell
    share: Cell
    details: str
    weakest: bool


@dataclass(frozen=True)
class LayerTable:
    """The table.

    Attributes:
        lines: the layers in the model's order.
        left_out: number of layers that are only in ``report.json``.
        last: the last pass, after which outputs were compared.
        shared_by: the pass whose noise is shared out; empty where no pass says.
        shared_words: what that noise is.
    """

    lines: tuple[LayerLine, ...]
    left_out: int = 0
    last: str = ""
    shared_by: str = ""
    shared_words: str = ""

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
        history = [(str(entry["pass"]), own[name]) for entry, own in both if name in own]
        lines.append(_line(history, parts.get(name), name == weakest))
    return LayerTable(
        lines=tuple(lines),
        left_out=len(names) - len(lines),
        last=passes[-1]["pass"],
        shared_by="" if shared is None else shared["pass"],
        shared_words="" if shared is None else _shared_words(shared),
    )


def _shared_words(entry: _Entry) -> str:
    """Say what the shares of a pass's noise are shares of."""
    found = entry["attribution"]
    what = _BASES.get(found["basis"], "what attribution in report.json says of the layer")
    words = f"Noise share: {what}, in percent of all that {entry['pass']} adds."
    if found.get("shared_inputs"):
        rest = formats.percent(found["shared_inputs"], 1)
        words += f" {rest} is the noise of inputs that several layers read."
    if found.get("reason"):
        words += f" Not known: {found['reason']}."
    return words


def _line(history: Sequence[tuple[str, _Entry]], share: float | None, weakest: bool) -> LayerLine:
    layers = [layer for _, layer in history]
    last = layers[-1]
    losses = [x["weight_sqnr_db"] for x in layers if x["weight_sqnr_db"] is not None]
    before, after = last.get("bytes_before"), last.get("bytes")
    return LayerLine(
        name=str(last["name"]),
        shape=_shape(last.get("shape") or ()),
        scheme=str(last["scheme"]),
        changed=bool(losses) or last["scheme"] != layers[0]["scheme"] or _smaller(before, after),
        sparsity=_percent(last["sparsity"]),
        before=_bytes(before),
        after=_bytes(after),
        weight_sqnr=_decibels(losses[-1] if losses else None),
        sqnr=_decibels(last["sqnr_db"]),
        share=_percent(share),
        details=_details(history),
        weakest=weakest,
    )


def _smaller(before: int | None, after: int | None) -> bool:
    """Tell whether a layer shrank, or is new; a batch-norm folded into it makes it grow."""
    return after is not None and (before is None or after < before)


def _shape(dimensions: Sequence[int]) -> Cell:
    if not dimensions:
        return _NONE
    return Cell(formats.shape(dimensions), str(prod(int(d) for d in dimensions)))


def _bytes(value: int | None) -> Cell:
    return _NONE if value is None else Cell(formats.size(value), str(value))


def _details(history: Sequence[tuple[str, _Entry]]) -> str:
    """Join what the passes say of a layer, and its output's SQNR after all but the last."""
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


def _percent(value: float | None) -> Cell:
    if value is None:
        return _NONE
    return Cell(formats.percent(value, 1), f"{value:.4f}")


def _decibels(value: float | None) -> Cell:
    if value is None:
        return _NONE
    return Cell(formats.decibel(value).removesuffix(" dB"), f"{value:.4f}")


def _loss(layer: Mapping[str, Any]) -> float:
    value = layer["sqnr_db"]
    if value is None:  # of a model that cannot be run, weights alone are compared
        value = layer["weight_sqnr_db"]
    return float("inf") if value is None else float(value)


@dataclass(frozen=True)
class Distribution:
    """One histogram.

    Attributes:
        title: what is counted.
        caption: extent and range in words.
        counts: its content in ``report.json``.
    """

    title: str
    caption: str
    counts: Mapping[str, Any]


@dataclass(frozen=True)
class LayerDistributions:
    """The histograms of one layer.

    Attributes:
        name: the layer.
        scheme: how its weight is represented.
        sqnr: of its output.
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
            known = [item for item in entry["histograms"] if item["name"] in rows]
            found = (_layer(item, rows[item["name"]]) for item in known)
            return Distributions(entry["pass"], tuple(layer for layer in found if layer.shown))
    return Distributions("", ())


def _layer(item: Mapping[str, Any], row: Mapping[str, Any]) -> LayerDistributions:
    shown = []
    if item["weight"] is not None:
        words = _weight_words(item["weight"], row["scheme"])
        shown.append(Distribution("Weight", words, item["weight"]))
    if item["input"] is not None:
        title = f"Input, {formats.plural(item['input']['samples'], 'sample')}"
        shown.append(Distribution(title, _input_words(item["input"]), item["input"]))
    sqnr = "" if row["sqnr_db"] is None else formats.decibel(row["sqnr_db"])
    return LayerDistributions(item["name"], row["scheme"], sqnr, tuple(shown))


def _weight_words(entry: Mapping[str, Any], scheme: str) -> str:
    whole = "/tensor" in scheme
    return _words(entry, "range" if whole else "together its ranges span")


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
        by: the pass.
        caption: how many steps; of very many, not all losses are kept.
        losses: pairs of step and loss, at least two.
    """

    by: str
    caption: str
    losses: Sequence[Sequence[float]]


def trainings(report: Report) -> list[Training]:
    """Return the trainings of which there are losses to draw, in the order of the passes."""
    found = []
    for entry in report["passes"]:
        content = entry.get("training")
        if content and len(content["losses"]) > 1:
            caption = formats.plural(content["steps"], "step")
            found.append(Training(entry["pass"], caption, content["losses"]))
    return found
