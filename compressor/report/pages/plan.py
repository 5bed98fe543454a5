"""A plan for people and for programs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise, takewhile
from textwrap import wrap
from typing import Any

from compressor.report import formats
from compressor.report.page import (
    GAP,
    Block,
    Cell,
    Entry,
    Line,
    Page,
    Style,
    Table,
    bullets,
    left,
    line,
    right,
)
from compressor.run.layer_rows import LayerRow
from compressor.run.plan import PassPlan, Plan

_KEPT = ("keep", "-")
_BETWEEN = 3  # characters between two columns
_WORD = re.compile(r"[^\s'\"(),;]+")
_NAME = re.compile(r"/|.*[^\W\d].*\.\w|.*_")
"""What words that name parts of a model look like: ``/conv``, ``layer1.0.bn1``, ``Conv_3``."""

NARROW = 80
"""Columns that a page has at least."""


def plan_page(plan: Plan, *, every_layer: bool = False, width: int = NARROW) -> Page:
    """Return what ``compress plan`` prints.

    Args:
        every_layer: each layer has a row of its own, however wide, where otherwise layers of one
            kind to which the same happens share one.
        width: columns that there are for those.
    """
    costs = "" if plan.macs is None else f"{formats.short_count(plan.macs)} MACs, "
    size = f": {formats.count(plan.parameters)} parameters, {costs}{formats.size(plan.bytes)}"
    page: list[Block] = [Line((Cell(plan.spec.name, style="strong"), size))]
    if plan.rows:
        page += [GAP, _layers(plan) if every_layer else _groups(plan, width)]
    if plan.passes:
        page += [GAP, _passes(plan)]
    prepared = _prepared(plan)
    if prepared:
        roles = {t: [r for r, text in prepared.items() if text == t] for t in prepared.values()}
        lines = [f"{', '.join(names)}: {text}" for text, names in roles.items()]
        page += [GAP, line("Data", "strong"), *bullets(lines, "")]
    notes = [f"{step.name}: {note}" for step in plan.passes for note in step.notes]
    if notes:
        page += [GAP, line("Notes", "strong"), *bullets(notes, "")]
    page += [GAP, _exports(plan), GAP]
    page += [line(f"Warning: {warning}", "open") for warning in plan.warnings]
    return [*page, line(f"Predicted peak memory: {formats.size(plan.peak_memory)}")]


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
        "prepared": _prepared(plan),
        "metric": None if plan.metric is None else plan.metric.name,
        "estimate": _guessed(plan),
        "passes": [_pass_json(step) for step in plan.passes],
        "layers": [_layer_json(plan, row) for row in plan.rows],
        "exports": [
            {
                "format": e.format,
                "bytes": e.bytes,
                "at_most": e.at_most,
                "estimate": e.estimate,
                "float_bytes": e.float_bytes,
                "size_ratio": e.size_ratio,
            }
            for e in plan.exports
        ],
        "peak_memory": plan.peak_memory,
        "warnings": list(plan.warnings),
    }


def _prepared(plan: Plan) -> dict[str, str]:
    """Return what is done to samples by role, where it is anything."""
    texts = {role: data.preparation for role, data in plan.data.items()}
    return {role: text for role, text in texts.items() if text}


def _pass_json(step: PassPlan) -> dict[str, Any]:
    return {
        "pass": step.name,
        "touched": sum(layer.touched for layer in step.layers),
        "layers": len(step.layers),
        "statistics": len(step.requests),
        "bytes": step.bytes or None,
        "estimate": step.estimate,
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
        "reasons": _reasons(plan, row),
        "bytes_before": row.bytes_before,
        "bytes_after": row.bytes_after,
    }


def _layers(plan: Plan) -> Table:
    names = [step.name for step in plan.passes]
    sizes = right("before", _after(plan))
    columns = [*left("layer", "kind", "shape", *names), *sizes, *left("why")]
    rows: list[list[Entry]] = [
        [
            row.name,
            row.kind,
            formats.shape(row.shape),
            *(Cell(a, style="faint" if a in _KEPT else "") for a in row.actions),
            formats.size(row.bytes_before),
            formats.size(row.bytes_after),
            "; ".join(_reasons(plan, row)),
        ]
        for row in plan.rows
    ]
    return Table(columns, rows)


def _guessed(plan: Plan) -> bool:
    return any(step.estimate for step in plan.passes)


def _after(plan: Plan) -> str:
    return "after (about)" if _guessed(plan) else "after"


def _size(size: int, estimate: bool) -> str:
    return ("about " if estimate else "") + formats.size(size)


def _reasons(plan: Plan, row: LayerRow) -> list[str]:
    """Return why something happens to a layer, each reason with its pass."""
    passes = zip(plan.passes, row.reasons, strict=True)
    return [f"{step.name}: {reason}" for step, reason in passes if reason]


def _groups(plan: Plan, width: int) -> Table:
    """Return the layers by kind and by what happens to them, which stands below their names."""
    groups: dict[tuple[str, ...], list[LayerRow]] = {}
    for row in plan.rows:
        alike = (_nameless(text) for text in _steps(plan, row))
        groups.setdefault((row.kind, *alike), []).append(row)
    counted = [
        [
            rows[0].kind,
            str(len(rows)),
            formats.size(sum(row.bytes_before for row in rows)),
            formats.size(sum(row.bytes_after for row in rows)),
        ]
        for rows in groups.values()
    ]
    columns = [*left("layers", "kind"), *right("count", "before", _after(plan))]
    texts = zip(*counted, strict=True)
    taken = (max(map(len, (c.heading, *t))) for c, t in zip(columns[1:], texts, strict=True))
    room = width - sum(size + _BETWEEN for size in taken)
    lines: list[list[Entry]] = []
    for rows, facts in zip(groups.values(), counted, strict=True):
        lines.append([_shortened(_common_name(rows, plan.rows), room), *facts])
        for texts_of_step in zip(*(_steps(plan, row) for row in rows), strict=True):
            first = texts_of_step[0]
            text = first if len({*texts_of_step}) == 1 else _nameless(first)
            style: Style = "faint" if f"{text} ".partition(": ")[2].startswith("keep ") else ""
            parts = wrap(text, room, initial_indent="  ", subsequent_indent="    ")
            lines += [[Cell(part, style=style), *[""] * len(facts)] for part in parts]
    return Table(columns, lines)


def _steps(plan: Plan, row: LayerRow) -> list[str]:
    """Return what each pass that looks at a layer does to it, and why."""
    return [
        f"{step.name}: {action}" + (f" ({reason})" if reason else "")
        for step, action, reason in zip(plan.passes, row.actions, row.reasons, strict=True)
        if action != "-"
    ]


def _nameless(text: str) -> str:
    """Return a text without the names in it that tell layers of one kind apart."""
    return _WORD.sub(lambda word: "…" if _NAME.match(word[0]) else word[0], text)


def _common_name(rows: Sequence[LayerRow], every: Sequence[LayerRow]) -> str:
    """Return how layers are called together: by a pattern for rules, if one fits them alone."""
    names, first = [row.name for row in rows], rows[0].name
    if len(names) == 1:
        return first
    parts = [name.split(".") for name in names]
    if len({len(part) for part in parts}) == 1:
        pattern = ".".join(_wildcard(part) for part in zip(*parts, strict=True))
        if pattern.strip("*.") and [r.name for r in every if fnmatchcase(r.name, pattern)] == names:
            return pattern
    grouped = {*names}
    places = [place for place, row in enumerate(every) if row.name in grouped]
    if all(after == before + 1 for before, after in pairwise(places)):
        return f"{first} … {names[-1]}"
    return f"{first} and {len(names) - 1} more"


def _wildcard(words: Iterable[str]) -> str:
    """Return what words have in common at both ends, with a wildcard between."""
    distinct = list(dict.fromkeys(words))
    if len(distinct) == 1:
        return distinct[0]
    start = _same_start(distinct)
    end = _same_start([word[len(start) :][::-1] for word in distinct])[::-1]
    return f"{start}*{end}"


def _same_start(words: Sequence[str]) -> str:
    columns = zip(*words, strict=False)
    return "".join(letters[0] for letters in takewhile(lambda c: len({*c}) == 1, columns))


def _shortened(text: str, room: int) -> str:
    """Return a text without its middle, if it does not fit otherwise."""
    if len(text) <= room:
        return text
    end = (room - 1) // 2
    return f"{text[: room - 1 - end]}…{text[-end:]}"


def _passes(plan: Plan) -> Table:
    rows = [
        [
            step.name,
            f"{sum(layer.touched for layer in step.layers)} of {len(step.layers)}",
            str(len(step.requests)) if step.requests else formats.NOTHING,
            _size(step.bytes, step.estimate) if step.bytes else formats.NOTHING,
        ]
        for step in plan.passes
    ]
    return Table([*left("pass"), *right("layers touched", "statistics", "bytes after")], rows)


def _exports(plan: Plan) -> Table:
    rows = []
    for export in plan.exports:
        share = export.size_ratio
        ratio = formats.NOTHING if share is None else formats.ratio(share)
        size = ("at most " if export.at_most else "") + _size(export.bytes, export.estimate)
        rows.append([export.format, size, ratio])
    return Table([*left("export"), *right("predicted size", "ratio")], rows)
