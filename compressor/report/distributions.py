"""How weights and inputs of the worst layers are distributed, and the ranges chosen for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compressor.report import formats
from compressor.report.verdict import Report


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
