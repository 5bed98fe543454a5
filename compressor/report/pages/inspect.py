"""Pages of ``compress inspect`` and ``compress unpack``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compressor.report import formats
from compressor.report.terminal import label, plain_table

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from compressor.lab.inspect.contents import (
        Contents,
        EngineContents,
        GraphFacts,
        ModelContents,
        RunContents,
    )
    from compressor.types.exporter import UnpackedFile


_STYLES = {"changed": "bold red", "missing": "bold red"}


def contents_table(contents: Contents) -> Group:
    """Return what an inspection found, in full."""
    from compressor.lab.inspect.contents import EngineContents, RunContents

    if isinstance(contents, EngineContents):
        return engine_page(contents)
    return _run(contents) if isinstance(contents, RunContents) else _model(contents)


def _model(contents: ModelContents) -> Group:
    from rich.console import Group
    from rich.text import Text

    sizes = [f"{name} {formats.size(size)}" for name, size in contents.files.items()]
    lines: list[RenderableType] = [
        Text(f"{contents.kind} {contents.path}", style="bold"),
        Text(f"files: {', '.join(sizes)}"),
    ]
    if contents.graph is not None:
        lines += [Text(line) for line in _graph(contents.graph)]
    if contents.quantization:
        lines.append(Text(f"quantization: {contents.quantization}"))
    lines += [Text(), _tensors(contents), Text(), Text(_total(contents), style="bold")]
    lines += [Text(f"- {note}", style="red") for note in contents.notes]
    return Group(*lines)


def _graph(graph: GraphFacts) -> list[str]:
    lines = [
        f"opset: {_pairs(graph.opsets)}",
        f"inputs: {', '.join(str(i) for i in graph.inputs) or 'none'}",
        f"outputs: {', '.join(str(o) for o in graph.outputs) or 'none'}",
        f"operators: {_pairs(graph.operators) or 'none'}",
    ]
    if graph.producer:
        lines.append(f"written by: {graph.producer}")
    if graph.metadata:
        lines.append(f"metadata: {', '.join(f'{k}={v}' for k, v in graph.metadata.items())}")
    return lines


def _pairs(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _tensors(contents: ModelContents) -> Table:
    from rich.text import Text

    coded = any(row.quantization for row in contents.tensors)
    graph = contents.graph is not None
    table = plain_table()
    for heading in ("tensor", "shape", "dtype"):
        table.add_column(heading, overflow="fold")
    for heading in ("size", "zeros", *(["MACs"] if graph else [])):
        table.add_column(heading, justify="right", overflow="fold")
    if coded:
        table.add_column("quantization", overflow="fold")
    stored = any(row.storage for row in contents.tensors)
    if stored:
        table.add_column("stored as", overflow="fold")
    for row in contents.tensors:
        cells = [row.name, formats.shape(row.shape), row.dtype, formats.size(row.bytes)]
        cells.append(formats.NOTHING if row.zeros is None else formats.percent(row.zeros))
        if graph:
            cells.append(formats.NOTHING if row.macs is None else formats.short_count(row.macs))
        if coded:
            cells.append(row.quantization)
        if stored:
            cells.append(row.storage)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _total(contents: ModelContents) -> str:
    parts = [
        formats.plural(len(contents.tensors), "tensor"),
        formats.plural(contents.parameters, "parameter"),
    ]
    if contents.zeros is not None:
        parts[-1] += f" ({formats.percent(contents.zeros)} zeros)"
    if contents.graph is not None:
        parts.append(f"{formats.short_count(contents.graph.macs)} MACs")
    sizes = [f"{dtype} {formats.size(size)}" for dtype, size in contents.bytes_by_dtype.items()]
    parts.append(f"{formats.size(contents.bytes)} ({', '.join(sizes)})")
    return "Total: " + ", ".join(parts)


def _run(contents: RunContents) -> Group:
    from rich.console import Group
    from rich.text import Text

    from compressor.report.terminal import result_table

    versions = ", ".join(f"{name} {version}" for name, version in contents.versions.items())
    parts: list[RenderableType] = [
        Text(f"run {contents.name} in {contents.path}", style="bold"),
        Text(f"seed {contents.seed}; {versions}"),
        Text(),
    ]
    if contents.report is None:
        parts.append(Text("report.json is not what the run wrote; it is not shown", style="red"))
    else:
        parts.append(result_table(contents.report))
    table = plain_table()
    table.add_column("file", overflow="fold")
    table.add_column("size", justify="right", overflow="fold")
    table.add_column("since the run", overflow="fold")
    for file in contents.files:
        size = formats.NOTHING if file.bytes is None else formats.size(file.bytes)
        table.add_row(Text(file.name), size, Text(file.state, style=_STYLES.get(file.state, "")))
    return Group(*parts, Text(), table)


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
    lines += [Text(), _layers(manifest), Text(), label(_engine_total(manifest), "bold")]
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


def _engine_total(manifest: Mapping[str, Any]) -> str:
    counted = Counter(row["precision"] for row in manifest["layers"] if row["precision"])
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(counted.items()))
    total = f"Total: {formats.plural(len(manifest['layers']), 'layer')} ({kinds})"
    meant = [row for row in manifest["quantized"] if row["meant"]]
    if meant:
        kept = sum(row["meant"] == row["computed"] for row in meant)
        total += f", {kept} of {len(meant)} quantized layers computed with codes"
    return total


def unpacked_table(files: Sequence[UnpackedFile]) -> Table:
    """Return the files with their sizes and hashes."""
    table = plain_table()
    table.add_column("file", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("sha256", overflow="fold")
    for file in files:
        table.add_row(label(file.name), formats.size(file.bytes), file.sha256)
    return table
