"""The page of ``compress inspect`` about a TensorRT engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compressor.report import formats
from compressor.report.terminal import label, plain_table

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from compressor.inspection.contents import EngineContents


def engine_page(contents: EngineContents) -> Group:
    """Return what a manifest says of its engine, layers in full."""
    from rich.console import Group
    from rich.text import Text

    manifest = contents.manifest
    sizes = [f"{name} {formats.size(size)}" for name, size in contents.files.items()]
    versions = ", ".join(f"{name} {value}" for name, value in manifest["versions"].items())
    targets = manifest.get("compute_capabilities")
    lines: list[RenderableType] = [
        label(f"TensorRT engine {contents.path}", "bold"),
        label(f"files: {', '.join(sizes)}"),
        label(f"built by: {manifest.get('builder')} ({versions})"),
        label(f"compute capabilities: {', '.join(targets) if targets else 'not named'}"),
        label(f"inputs: {', '.join(manifest.get('inputs', ())) or 'none'}"),
        label(f"outputs: {', '.join(manifest.get('outputs', ())) or 'none'}"),
    ]
    lines += [label(f"profile of {_profile(n, p)}") for n, p in manifest["profiles"].items()]
    lines += [Text(), _layers(manifest), Text(), label(_total(manifest), "bold")]
    if not contents.intact:
        lines.append(label("- the engine is not the one that this manifest is about", "red"))
    return Group(*lines)


def _profile(name: str, profile: Mapping[str, Any]) -> str:
    shapes = [f"{word} {formats.shape(profile[word])}" for word in ("min", "opt", "max")]
    return f"{name}: {', '.join(shapes)}"


def _layers(manifest: Mapping[str, Any]) -> Table:
    table = plain_table()
    for heading in ("layer", "type", "precision", "reads", "constants", "gives"):
        table.add_column(heading, overflow="fold")
    for row in manifest["layers"]:
        cells = [row["name"], row["type"], row["precision"] or formats.NOTHING]
        cells += [", ".join(row[key]) for key in ("inputs", "constants", "outputs")]
        table.add_row(*(label(cell) for cell in cells))
    return table


def _total(manifest: Mapping[str, Any]) -> str:
    counted = Counter(row["precision"] for row in manifest["layers"] if row["precision"])
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(counted.items()))
    total = f"Total: {formats.plural(len(manifest['layers']), 'layer')} ({kinds})"
    meant = [row for row in manifest["quantized"] if row["meant"]]
    if meant:
        kept = sum(row["meant"] == row["computed"] for row in meant)
        total += f", {kept} of {len(meant)} quantized layers computed with codes"
    return total
