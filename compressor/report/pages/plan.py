"""A plan for people and for programs."""

from __future__ import annotations

from typing import Any

from compressor.report import formats
from compressor.report.page import (
    GAP,
    Block,
    Cell,
    Entry,
    Line,
    Page,
    Table,
    bullets,
    left,
    line,
    right,
)
from compressor.report.terminal import plain_text
from compressor.run.plan import LayerRow, PassPlan, Plan

_KEPT = ("keep", "-")


def plan_page(plan: Plan) -> Page:
    """Return what ``compress plan`` prints."""
    costs = "" if plan.macs is None else f"{formats.short_count(plan.macs)} MACs, "
    size = f": {formats.count(plan.parameters)} parameters, {costs}{formats.size(plan.bytes)}"
    page: list[Block] = [Line((Cell(plan.spec.name, style="strong"), size))]
    if plan.rows:
        page += [GAP, _layers(plan)]
    if plan.passes:
        page += [GAP, _passes(plan)]
    notes = [f"{step.name}: {note}" for step in plan.passes for note in step.notes]
    if notes:
        page += [GAP, line("Notes", "strong"), *bullets(notes, "")]
    page += [GAP, _exports(plan), GAP]
    page += [line(f"Warning: {warning}", "open") for warning in plan.warnings]
    return [*page, line(f"Predicted peak memory: {formats.size(plan.peak_memory)}")]


def plan_text(plan: Plan) -> str:
    """Return the plan as plain text, the same on every machine."""
    return plain_text(plan_page(plan))


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as a JSON document."""
    return {
        "schema": 1,
        "name": plan.spec.name,
        "model": {
            "inputs": [
                {"name": i.name, "shape": list(i.shape), "dtype": i.dtype}
                for i in plan.model.carrier.inputs
            ],
            "parameters": plan.parameters,
            "macs": plan.macs,
            "bytes": plan.bytes,
        },
        "metric": None if plan.metric is None else plan.metric.name,
        "passes": [_pass_json(step) for step in plan.passes],
        "layers": [_layer_json(plan, row) for row in plan.rows],
        "exports": [
            {
                "format": e.format,
                "bytes": e.bytes,
                "at_most": e.at_most,
                "size_ratio": _ratio(e.bytes, plan.bytes),
            }
            for e in plan.exports
        ],
        "peak_memory": plan.peak_memory,
        "warnings": list(plan.warnings),
    }


def _pass_json(step: PassPlan) -> dict[str, Any]:
    return {
        "pass": step.name,
        "touched": sum(layer.touched for layer in step.layers),
        "layers": len(step.layers),
        "statistics": len(step.requests),
        "bytes": step.bytes or None,
        "notes": list(step.notes),
    }


def _layer_json(plan: Plan, row: LayerRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "kind": row.kind,
        "shape": list(row.shape),
        "actions": [
            {"pass": step.name, "action": None if action == "-" else action}
            for step, action in zip(plan.passes, row.actions, strict=True)
        ],
        "reasons": list(row.reasons),
        "bytes_before": row.bytes_before,
        "bytes_after": row.bytes_after,
    }


def _layers(plan: Plan) -> Table:
    names = [step.name for step in plan.passes]
    columns = [*left("layer", "kind", "shape", *names), *right("before", "after"), *left("why")]
    rows: list[list[Entry]] = [
        [
            row.name,
            row.kind,
            formats.shape(row.shape),
            *(Cell(a, style="faint" if a in _KEPT else "") for a in row.actions),
            formats.size(row.bytes_before),
            formats.size(row.bytes_after),
            "; ".join(row.reasons),
        ]
        for row in plan.rows
    ]
    return Table(columns, rows)


def _passes(plan: Plan) -> Table:
    rows = [
        [
            step.name,
            f"{sum(layer.touched for layer in step.layers)} of {len(step.layers)}",
            str(len(step.requests)) if step.requests else formats.NOTHING,
            formats.size(step.bytes) if step.bytes else formats.NOTHING,
        ]
        for step in plan.passes
    ]
    return Table([*left("pass"), *right("layers touched", "statistics", "bytes after")], rows)


def _exports(plan: Plan) -> Table:
    rows = []
    for export in plan.exports:
        share = _ratio(export.bytes, plan.bytes)
        ratio = formats.NOTHING if share is None else formats.ratio(share)
        size = ("at most " if export.at_most else "") + formats.size(export.bytes)
        rows.append([export.format, size, ratio])
    return Table([*left("export"), *right("predicted size", "ratio")], rows)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
