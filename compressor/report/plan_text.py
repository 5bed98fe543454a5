"""A plan for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compressor.report import formats
from compressor.report.terminal import label, plain_table, plain_text

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from compressor.run.plan import LayerRow, PassPlan, Plan

_KEEP = ("keep", "-")


def plan_table(plan: Plan) -> Group:
    """Return what ``compress plan`` prints."""
    from rich.console import Group
    from rich.text import Text

    blocks: list[Text | Table] = [_header(plan)]
    if plan.rows:
        blocks += [Text(), _layers(plan)]
    if plan.passes:
        blocks += [Text(), _passes(plan)]
    notes = [label(f"- {step.name}: {note}") for step in plan.passes for note in step.notes]
    if notes:
        blocks += [Text(), Text("Notes", style="bold"), *notes]
    blocks += [Text(), _exports(plan), Text()]
    blocks += [label(f"Warning: {warning}", "yellow") for warning in plan.warnings]
    blocks.append(Text(f"Predicted peak memory: {formats.size(plan.peak_memory)}"))
    return Group(*blocks)


def plan_text(plan: Plan) -> str:
    """Return the plan as plain text, the same on every machine."""
    return plain_text(plan_table(plan))


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


def _header(plan: Plan) -> Text:
    text = label(plan.spec.name, "bold")
    costs = "" if plan.macs is None else f"{formats.short_count(plan.macs)} MACs, "
    text.append(
        f": {formats.count(plan.parameters)} parameters, {costs}{formats.size(plan.bytes)}",
        style="not bold",
    )
    return text


def _layers(plan: Plan) -> Table:
    table = plain_table()
    for heading in ("layer", "kind", "shape", *(step.name for step in plan.passes)):
        table.add_column(label(heading), overflow="fold")
    for heading in ("before", "after"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("why", overflow="fold")
    for row in plan.rows:
        table.add_row(
            label(row.name),
            row.kind,
            formats.shape(row.shape),
            *(label(a, "dim" if a in _KEEP else "") for a in row.actions),
            formats.size(row.bytes_before),
            formats.size(row.bytes_after),
            label("; ".join(row.reasons)),
        )
    return table


def _passes(plan: Plan) -> Table:
    table = plain_table()
    table.add_column("pass", overflow="fold")
    for heading in ("layers touched", "statistics", "bytes after"):
        table.add_column(heading, justify="right", overflow="fold")
    for step in plan.passes:
        touched = sum(layer.touched for layer in step.layers)
        table.add_row(
            label(step.name),
            f"{touched} of {len(step.layers)}",
            str(len(step.requests)) if step.requests else formats.NOTHING,
            formats.size(step.bytes) if step.bytes else formats.NOTHING,
        )
    return table


def _exports(plan: Plan) -> Table:
    table = plain_table()
    table.add_column("export", overflow="fold")
    for heading in ("predicted size", "ratio"):
        table.add_column(heading, justify="right", overflow="fold")
    for export in plan.exports:
        share = _ratio(export.bytes, plan.bytes)
        table.add_row(
            label(export.format),
            ("at most " if export.at_most else "") + formats.size(export.bytes),
            formats.NOTHING if share is None else formats.ratio(share),
        )
    return table


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
