"""One table of all layers: what each became and where the signal was lost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compressor.report import formats
from compressor.report.verdict import Report

_MOST_ROWS = 1500
_MOST_PASSES = 6
_LONGEST_DETAIL = 120


@dataclass(frozen=True)
class Cell:
    """A number in the table.

    Attributes:
        text: what is shown.
        value: what it is sorted by; empty sorts last.
    """

    text: str
    value: str


@dataclass(frozen=True)
class LayerLine:
    """One layer after all passes.

    Attributes:
        name: the layer.
        shape: its stored shape; empty where the report does not say.
        elements: number of weights, to sort shapes by.
        scheme: how its weight is represented.
        sparsity: percent of weights that are zero.
        weight_sqnr: signal to noise of its weight in the last pass that changed it.
        output_sqnr: signal to noise of its output after each pass.
        details: further facts.
        weakest: no layer's output lost more.
    """

    name: str
    shape: str
    elements: str
    scheme: str
    sparsity: Cell
    weight_sqnr: Cell
    output_sqnr: tuple[Cell, ...]
    details: str
    weakest: bool


@dataclass(frozen=True)
class LayerTable:
    """The table.

    Attributes:
        passes: the passes that have a column.
        lines: the layers in the model's order.
        left_out: number of layers that are only in ``report.json``.
    """

    passes: tuple[str, ...]
    lines: tuple[LayerLine, ...]
    left_out: int

    @property
    def has_shapes(self) -> bool:
        """The report says what shapes the layers have."""
        return any(line.shape for line in self.lines)

    @property
    def has_details(self) -> bool:
        """Some layer has further facts."""
        return any(line.details for line in self.lines)


def layer_table(report: Report) -> LayerTable:
    """Join the passes' layers by name; of very many layers, keep those that lost most."""
    passes = report["passes"]
    if not passes:
        return LayerTable((), (), 0)
    by_pass = [{layer["name"]: layer for layer in entry["layers"]} for entry in passes]
    names = list(by_pass[-1])
    kept = set(sorted(names, key=lambda name: _loss(by_pass[-1][name]))[:_MOST_ROWS])
    weakest = passes[-1]["weakest"]["name"] if passes[-1]["weakest"] else None
    lines = [_line(name, by_pass, name == weakest) for name in names if name in kept]
    shown = tuple(entry["pass"] for entry in passes[-_MOST_PASSES:])
    return LayerTable(shown, tuple(lines), len(names) - len(lines))


def _line(
    name: str, by_pass: Sequence[Mapping[str, Mapping[str, Any]]], weakest: bool
) -> LayerLine:
    history = [layers[name] for layers in by_pass if name in layers]
    last = history[-1]
    weight = next(
        (h["weight_sqnr_db"] for h in reversed(history) if h["weight_sqnr_db"] is not None), None
    )
    shape = last.get("shape") or ()
    elements = 1
    for dimension in shape:
        elements *= int(dimension)
    return LayerLine(
        name=name,
        shape=formats.shape(shape) if shape else "",
        elements=str(elements) if shape else "",
        scheme=str(last["scheme"]),
        sparsity=_percent(last["sparsity"]),
        weight_sqnr=_decibels(weight),
        output_sqnr=tuple(
            _decibels(layers[name]["sqnr_db"]) if name in layers else _decibels(None)
            for layers in by_pass[-_MOST_PASSES:]
        ),
        details=_details(history),
        weakest=weakest,
    )


def _details(history: Sequence[Mapping[str, Any]]) -> str:
    facts: dict[str, Any] = {}
    for layer in history:
        facts.update(layer["details"])
    parts = []
    for name, value in facts.items():
        if isinstance(value, float):
            text = formats.number(value)
        elif isinstance(value, str):
            text = value
        else:
            text = json.dumps(value, ensure_ascii=False)
        parts.append(f"{name} {text}")
    joined = ", ".join(parts)
    return joined if len(joined) <= _LONGEST_DETAIL else f"{joined[:_LONGEST_DETAIL]}…"


def _percent(value: float | None) -> Cell:
    if value is None:
        return Cell(formats.NOTHING, "")
    return Cell(formats.percent(value, 1), f"{value:.4f}")


def _decibels(value: float | None) -> Cell:
    if value is None:
        return Cell(formats.NOTHING, "")
    return Cell(formats.decibel(value).removesuffix(" dB"), f"{value:.4f}")


def _loss(layer: Mapping[str, Any]) -> float:
    value = layer["sqnr_db"]
    if value is None:  # of a model that cannot be run, weights alone are compared
        value = layer["weight_sqnr_db"]
    return float("inf") if value is None else float(value)
